"""An expert is an ordinary run: with several workers, resumed, and never in another's directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from isles.experts.jobs import ExpertJob, JobProgress, state, train
from isles.experts.planning import opened
from isles.training.config.sections import Config
from isles.training.records.rundir import RunLock
from tests.experts.small import asked, made, write_domains
from tests.training.runs import tiny, write_text

FEWEST = ["hdee.variants=['m-ho-i-ho']", "hdee.baselines=[]", "hdee.steps=[1, 2, 3]", "hdee.seed_steps=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def job(config: Config, name: str = "one") -> ExpertJob:
    return ExpertJob(name=name, config=config, role="expert", domains=("text",))


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_with_data_parallel_are_one_worker_with_the_whole_batch(
    text: Path, tmp_path: Path, workers: int
) -> None:
    alone = tiny(text, "model.dtype=float64", f"data.batch_size={2 * workers}", method="none", workers=1)
    together = tiny(text, "model.dtype=float64", "data.batch_size=2", method="ddp", workers=workers)
    train(job(alone, "alone"), tmp_path, JobProgress())
    summary = train(job(together, "together"), tmp_path, JobProgress())
    one, other = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("alone", "together"))
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) <= 1e-12 * max(1.0, float(tensor.abs().max()))
    assert summary["bytes_sent_per_worker"] > 0  # inside the expert
    assert summary["bytes_to_other_experts"] == 0
    assert summary["flops"] and summary["tokens"] == job(together).tokens


def test_a_run_cut_off_before_its_first_checkpoint_begins_again(text: Path, tmp_path: Path) -> None:
    config = tiny(text, method="none", workers=1)
    fresh = train(job(config), tmp_path / "fresh", JobProgress())
    out = tmp_path / "cut" / "one"
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"step": 2, "worker": 0, "loss": 9.9}\n')
    (out / "config.toml").write_text("[run]\nsteps = 6\n")
    assert train(job(config), tmp_path / "cut", JobProgress())["sha256"] == fresh["sha256"]


@pytest.mark.parametrize(("method", "workers"), [("none", 1), ("diloco", 2)])
def test_a_run_that_stopped_goes_on_to_the_same_weights(method: str, workers: int, text: Path, tmp_path: Path) -> None:
    config = tiny(text, "run.checkpoint_every=4", method=method, workers=workers)
    whole = train(job(config), tmp_path, JobProgress())
    assert (whole["bytes_sent_per_worker"] > 0) == (workers > 1) and whole["bytes_to_other_experts"] == 0
    for name in ("summary.json", "model.safetensors", "expert.json"):
        (tmp_path / "one" / name).unlink()
    assert state(job(config), tmp_path) == "stopped at step 4"
    begun = []

    class Told(JobProgress):
        def line(self, name: str, line: dict[str, object]) -> None:
            begun.append(line["step"])

    assert train(job(config), tmp_path, Told())["sha256"] == whole["sha256"]
    assert begun == [6] * workers and state(job(config), tmp_path) == "done"


def test_a_run_that_goes_on_is_left_alone_and_another_one_is_refused(text: Path, tmp_path: Path) -> None:
    config = tiny(text, method="none", workers=1)
    (tmp_path / "one").mkdir()
    with RunLock(tmp_path / "one"), pytest.raises(ValueError, match="in use by another run"):
        train(job(config), tmp_path, JobProgress())
    train(job(config), tmp_path, JobProgress())
    weights = tmp_path / "one" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")  # half of a directory was copied
    assert state(job(config), tmp_path) == "without model.safetensors"
    with pytest.raises(ValueError, match=r"no model.safetensors beside summary.json; copy the whole directory"):
        train(job(config), tmp_path, JobProgress())
    other = replace(config, run=replace(config.run, steps=7))
    with pytest.raises(ValueError, match="holds a run of other settings"):
        train(job(other), tmp_path, JobProgress())


def test_a_text_that_has_changed_is_noticed(tmp_path: Path) -> None:
    """OUT belongs to its texts as to its settings, from the moment that both are known to be well."""
    config, out = write_domains(tmp_path / "texts"), tmp_path / "out"
    system = opened(asked("hdee", config), out)
    assert not out.exists()
    text = tmp_path / "texts" / "easy.txt"
    before = text.read_text()
    text.write_text("")
    with pytest.raises(ValueError, match="domain 'easy'"):
        system.train(JobProgress())
    assert not out.exists()
    text.write_text(before)
    with pytest.raises(ValueError, match="--job bogus"):
        opened(asked("hdee", config), out).train(JobProgress(), only=["bogus"])
    assert not out.exists()
    made("hdee", config, out, *FEWEST)
    text.write_text(before.replace(" ", "  ", 1))
    for only in ((), ("seed-0/easy-f24-t2-r1",)):
        with pytest.raises(ValueError, match=r"domain 'easy': .* holds another text than .*out was made with"):
            opened(asked("hdee", config, *FEWEST), out).train(JobProgress(), only=only)
    with pytest.raises(ValueError, match="holds another text"):
        opened(asked("hdee", config, *FEWEST), out).evaluate(JobProgress())
    opened(asked("hdee", config, *FEWEST), out).train(JobProgress(), only=("seed-0/medium-f24-t2-r1",))

"""Runs whose model lies in stages, from CONFIG to summary: both backends alike, gone on with, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isles.report import write_report
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.covers import share
from tests.training.runs import TINY, Told, metrics, run, tiny, write_text
from tests.training.runs import lines_of as all_lines

REAL = "world.backend=distributed"
STAGES = ["model.layers=2", "pipeline.stages=2", "pipeline.microbatches=2", "run.validate_every=4"]
UNTIED = "model.tie_embeddings=false"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("method", share(["diloco", "noloco", "ddp"], turn=2, of=3))  # of others see test_recut.py
def test_a_run_in_stages_ends_with_the_model_of_the_unsplit_run(text: Path, tmp_path: Path, method: str) -> None:
    more = ["model.layers=2", UNTIED, "inner.max_norm=0"]
    by_microbatch = ["data.batch_size=1", "inner.accumulation=2"]
    run(tiny(text, *more, *by_microbatch, method=method, workers=2, steps=9), tmp_path / "whole")
    run(tiny(text, *more, *STAGES, method=method, workers=4, steps=9), tmp_path / "split")
    whole, split = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "split"))
    assert two["stages"] == 2 and 0 < two["pipeline_bubble"] < 1 and "stages" not in one
    assert two["tokens"] == one["tokens"] and two["parameters"] == one["parameters"]
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-6)
    assert two["val_loss_replicas"] == pytest.approx(one["val_loss_replicas"], abs=1e-6)
    assert two["replica_std"] == pytest.approx(one["replica_std"], rel=1e-4, abs=1e-9)


def test_the_report_draws_every_task_of_the_last_step(text: Path, tmp_path: Path) -> None:
    more = [*STAGES, "pipeline.routing=random", "model.tie_embeddings=true"]
    run(tiny(text, *more, method="noloco", workers=4, steps=7), tmp_path / "run")
    check_drawn(tmp_path / "run", 7)


def check_drawn(out: Path, step: int) -> None:
    """The report draws every task of the last step."""
    tasks = [line for line in all_lines(out / "timeline.jsonl") if "microbatch" in line]
    assert {line["step"] for line in tasks} == {step}
    for worker in range(4):
        own = sorted((line for line in tasks if line["worker"] == worker), key=lambda line: line["start"])
        kinds = sorted(line["kind"] for line in own)
        assert kinds == ["backward"] * 2 + ["forward"] * 2 + (["loss"] * 2 if worker % 2 == 0 else [])
        assert all(one["end"] <= other["start"] for one, other in itertools.pairwise(own))
    page = write_report(out).read_text()
    drawn = page[page.index("One step through the stages") :]
    assert len(re.findall(r"<title>(?:forward|loss|backward) of microbatch", drawn)) == len(tasks) == 20
    assert "0: stage 0" in drawn and "3: stage 1" in drawn


ADAPTS = ["replicas.rank=4", "replicas.window=2", "replicas.start_compress=1", "replicas.min_compression_rate=0"]
GO_ON = {
    "diloco": [],
    "noloco": ["pipeline.routing=random"],
    "delayed": ["model.tie_embeddings=true", "pipeline.in_flight=1f1b"],
    "eager": ["pipeline.recompute=true"],
    "dilocox": [*ADAPTS, "world.inner=2"],
    "ddp": ["world.virtual.step_jitter=0.3"],
}


@pytest.mark.parametrize(
    ("method", "stops"),
    [pytest.param(name, range(1, 7), marks=pytest.mark.long) for name in GO_ON],
)
def test_a_run_in_stages_goes_on_with_the_same_bits(
    text: Path, tmp_path: Path, method: str, stops: tuple[int, ...]
) -> None:
    """From after step k, in a round of 3 steps and between two: the model, every line with its bytes and virtual
    seconds, and the summary of the run that never stopped.
    """
    more = [*STAGES, *GO_ON[method], "run.checkpoint_every=1", "run.keep_checkpoints=0", "run.log_every=1"]
    config = tiny(text, *more, method=method, workers=8 if method == "dilocox" else 4, steps=8)
    whole = tmp_path / "whole"
    summary = run(config, whole)
    for stop in stops:
        copy = tmp_path / f"from-{stop}"
        shutil.copytree(whole, copy)
        (copy / "summary.json").unlink()
        (copy / "model.safetensors").unlink()
        told = Told()
        again = launch(config, copy, told.lines.append, told.notices.append, resume=stop)
        assert min(line["step"] for line in told.lines) == stop + 1
        assert sorted(map(str, metrics(copy))) == sorted(map(str, metrics(whole)))
        assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        hosts = ("wall_seconds", "train_seconds")
        assert {key: again[key] for key in again if key not in hosts} == {
            key: summary[key] for key in summary if key not in hosts
        }


def test_islands_inside_a_stage_train_on_the_islands_batch(text: Path, tmp_path: Path) -> None:
    """2 replicas of 2 stages of 2 data-parallel workers: the same text and means as without stages. Beside headers of
    32 bytes a round a worker sends 1/4 of what an unsplit replica would, its weights in float32 in each of two rounds.
    """
    more = ["model.layers=2", UNTIED, "inner.max_norm=0", "world.inner=2"]
    run(tiny(text, *more, method="diloco", workers=4, steps=6), tmp_path / "whole")
    summary = run(tiny(text, *more, *STAGES, method="diloco", workers=8, steps=6), tmp_path / "split")
    assert 4 * (summary["channels"]["outer"]["bytes_sent"] - 2 * 32) == 2 * 4 * summary["parameters"]
    whole, split = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert max(float((whole[name] - split[name]).abs().max()) for name in whole) < 5e-6


@pytest.mark.parametrize(
    ("words", "workers", "line"),
    [
        (["pipeline.stages=3"], 3, "the model has 2 blocks, so choose 1 to 2"),
        (["pipeline.stages=2"], 3, "choose a multiple of 2 as world.workers"),
        (["pipeline.stages=2", "pipeline.microbatches=3"], 4, "does not divide a replica's batch of 2"),
        (["pipeline.routing=random"], 4, "acts on several stages only"),
        (["pipeline.stages=2", "pipeline.in_flight=0"], 4, "must hold at least 1 forward"),
        (["pipeline.stages=2", "pipeline.in_flight=some"], 4, "in_flight"),
        (["pipeline.stages=2", "pipeline.cut=[1, 1]"], 4, "begin at 1 blocks after the first"),
        (["pipeline.stages=2", "pipeline.cut=[2]"], 4, "rising numbers of blocks between 1 and 1"),
        (["pipeline.stages=2", "inner.accumulation=2"], 4, "inner.accumulation = 2 does not go with pipeline.stages"),
        (["pipeline.stages=2", "world.inner=2", "world.inside=fsdp"], 4, 'gathers a whole model; choose "ddp"'),
        (["pipeline.stages=2", "pipeline.loss_at=last", "model.tie_embeddings=true"], 4, 'choose "origin"'),
        (["pipeline.stages=2", "replicas.on_peer_failure=solo"], 4, 'choose "raise"'),
        (["pipeline.stages=2", "model.autocast=fp16", "model.device=auto"], 4, 'choose "bf16"'),
        (["pipeline.stages=2", "memory.method=checkpoint"], 4, 'set pipeline.loss_at = "last"'),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    text: Path, tmp_path: Path, words: list[str], workers: int, line: str
) -> None:
    with pytest.raises(ValueError, match=line.replace("(", r"\(")) as refusal:
        pipeline = [] if any("microbatches" in word for word in words) else ["pipeline.microbatches=2"]
        if not any("stages" in word for word in words):
            pipeline = []
        config = tiny(text, "model.layers=2", *pipeline, *words, workers=workers, steps=4)
        run(config, tmp_path / "run")
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()


def test_a_model_of_ones_own_without_blocks_is_refused(text: Path, tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("model.")]
    words += [f"data.path={text}", "model.factory=tests.training.own_models:build", "model.context=16"]
    config = read_config(
        None, {"world.workers": 4, "run.steps": 4}, [*words, "pipeline.stages=2", "pipeline.microbatches=2"]
    )
    with pytest.raises(ValueError, match=r"give it `blocks` \(an nn.ModuleList\), `enter") as refusal:
        run(config, tmp_path / "run")
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("method", "line"), [("ist", "without stages"), ("fsdp", "without stages")])
def test_methods_that_need_the_whole_model_are_refused(text: Path, tmp_path: Path, method: str, line: str) -> None:
    backend = [REAL] if method == "fsdp" else []
    with pytest.raises(ValueError, match=line):
        run(tiny(text, *STAGES, *backend, method=method, workers=4, steps=4), tmp_path / "run")


def test_the_section_is_written_and_read_back(text: Path) -> None:
    config = read_config(None, {"world.workers": 4}, ["pipeline.stages=2", "pipeline.routing=random"])
    assert config.pipeline.stages == 2 and config.replicas_in_all == 2

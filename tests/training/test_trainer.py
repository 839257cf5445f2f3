"""Whole small runs: the same bits on every backend, and files that say what happened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from isles.comm.errors import Diverged, WorkerFailed
from isles.comm.mesh import Mesh
from isles.comm.virtual.cluster import run_virtual
from isles.data import load_corpus
from isles.models import build
from isles.models.sizes import parameters as count_parameters
from isles.plan.run_plan import plan_run
from isles.training.config.inner import lr_factor
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.trainer import Trainer
from isles.training.worker import train_worker, trainer_of
from tests.training.runs import (
    APART,
    BATCH,
    COMPOSED,
    CONTEXT,
    DIVIDED,
    LATE,
    ON_VIRTUAL,
    POISONED,
    SPOILED,
    Told,
    metrics,
    run,
    tiny,
    without_clocks,
    write_text,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def test_each_worker_makes_its_gpu_the_current_one(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here, so no model comes to lie on one."""
    taken: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    errors = run_virtual(train_worker, 3, args=(tiny(text, workers=3),), return_errors=True)
    assert [str(device) for device in taken] == ["cuda:0", "cuda:1", "cuda:0"]
    assert all("CUDA" in str(error) for error in errors)


def losses(config: Config) -> list[list[float]]:
    """Loss of every step by worker; the configuration has run.log_every = 1."""
    by_worker: list[list[float]] = [[] for _ in range(config.world.workers)]

    def on_event(line: Any) -> None:
        if "loss" in line:
            by_worker[line["worker"]].append(line["loss"])

    run_virtual(train_worker, config.world.workers, args=(config,), on_event=on_event)
    return by_worker


def with_one(config: Config, look: Any) -> Any:
    """look(trainer) for the trainer of the only worker."""
    return run_virtual(lambda world: look(trainer_of(config, world)), 1)[0]


def refused(config: Config, out: Path) -> str:
    """The one line with which a run is refused; it leaves nothing that keeps one from trying again."""
    told = Told()
    with pytest.raises(ValueError) as caught:
        run(config, out, told)
    assert not told.lines and not out.exists()
    line = str(caught.value)
    assert line and "\n" not in line
    return line


# ---------------------------------------------------------------------------------------------------------------------
# The same on every backend


def test_a_run_repeats_itself_and_the_seed_changes_it(text: Path, tmp_path: Path) -> None:
    same = [run(tiny(text), tmp_path / name) for name in "ab"]
    other = run(tiny(text, "run.seed=1"), tmp_path / "c")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert without_clocks({**same[0], "wall_seconds": 0}) == without_clocks({**same[1], "wall_seconds": 0})
    assert same[0]["virtual_seconds"] == same[1]["virtual_seconds"]
    assert files[0] == files[1] != files[2]
    assert other["val_loss"] != same[0]["val_loss"]


# ---------------------------------------------------------------------------------------------------------------------
# What the run directory says

SUMMARY = {
    *("isles_version", "method", "backend", "workers", "steps", "tokens", "parameters", "seed", "corpus_sha256"),
    *("val_loss", "val_loss_replicas", "replica_std"),
    *("bytes_sent_per_worker", "bytes_received_per_worker", "ddp_bytes_per_worker"),
    *("compute_seconds", "blocked_seconds", "compute_utilisation", "wall_seconds", "virtual_seconds"),
}
LINE = {
    "step": int,
    "worker": int,
    "loss": float,
    "lr": float,
    "tokens": int,
    "bytes_sent": int,
    "bytes_received": int,
    "blocked_seconds": float,
    "compute_seconds": float,
    "clock_seconds": float,
}
GROWING = ["step", "tokens", "bytes_sent", "bytes_received", "blocked_seconds", "compute_seconds", "clock_seconds"]


def cases() -> Iterator[Any]:
    """Every third method with three workers, some with one; the others are long."""
    for number, name in enumerate(name for name in ON_VIRTUAL if name not in COMPOSED):
        yield pytest.param(name, 3, marks=() if number % 3 == 0 else pytest.mark.long)
        yield pytest.param(name, 1, marks=() if name in ("none", "ddp", "noloco") else pytest.mark.long)


@pytest.mark.parametrize(("name", "workers"), list(cases()))
def test_the_files_of_a_run_agree_with_each_other(text: Path, tmp_path: Path, name: str, workers: int) -> None:
    """summary.json and metrics.jsonl keep design section 4's contract and the arithmetic between their fields."""
    steps = 6  # ends with a round, so `finish` sends nothing
    config = tiny(text, "run.validate_every=4", method=name, workers=workers, steps=steps)
    out, told = tmp_path / "run", Told()
    summary = run(config, out, told)
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary.keys() >= SUMMARY
    assert sorted(path.name for path in out.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
        "timeline.jsonl",
    ]
    assert read_config(str(out / "config.toml"), {}, []) == config

    lines = metrics(out)
    assert lines == [{key: value for key, value in line.items() if value is not None} for line in told.lines]
    for worker in range(workers):
        own = [line for line in lines if line["worker"] == worker]
        assert [line["step"] for line in own] == [2, 4, 6]
        for line in own:
            assert all(type(line[key]) is kind for key, kind in LINE.items()), line
            assert math.isfinite(line["loss"])
            assert line["tokens"] == line["step"] * BATCH * CONTEXT
            assert line["lr"] == pytest.approx(0.01 * lr_factor(line["step"], steps, config.inner), rel=1e-12)
        for key in GROWING:
            assert [line[key] for line in own] == sorted(line[key] for line in own), key
        assert [line["step"] for line in own if "val_loss" in line] == [4]
    last = lines[-workers:]
    assert {line["worker"] for line in last} == set(range(workers))

    assert (summary["method"], summary["backend"], summary["workers"]) == (name, "virtual", workers)
    assert (summary["steps"], summary["seed"]) == (steps, 0)
    assert summary["tokens"] == sum(line["tokens"] for line in last) == steps * BATCH * CONTEXT * workers
    assert summary["parameters"] == count_parameters(config.model.shape())
    in_flight = workers > 1 and name in LATE  # after the last step
    for key in ("bytes_sent", "bytes_received"):
        counted, in_lines = summary[f"{key}_per_worker"], sum(line[key] for line in last) / workers
        assert counted > in_lines if in_flight else counted == in_lines
    assert summary["bytes_sent_per_worker"] == pytest.approx(summary["bytes_received_per_worker"])
    share, peers = 2 * (workers - 1) / workers, workers - 1
    assert summary["ddp_bytes_per_worker"] == pytest.approx(
        steps * (share * 4 * summary["parameters"] + 32 * peers), rel=1e-12
    )
    assert summary["compute_seconds"] == pytest.approx(steps * config.world.virtual.step_seconds, rel=1e-9)
    ended = max(line["clock_seconds"] for line in last)
    if name == "noloco" or in_flight:  # `finish` waits for the anchors sent ahead for a round that does not come
        assert summary["virtual_seconds"] >= ended
    else:
        assert summary["virtual_seconds"] == pytest.approx(ended, rel=1e-9)
    busy = summary["compute_seconds"] + summary["blocked_seconds"]
    assert summary["compute_utilisation"] == pytest.approx(summary["compute_seconds"] / busy)
    assert summary["virtual_seconds"] >= summary["compute_seconds"] + summary["blocked_seconds"] - 1e-9
    assert summary["wall_seconds"] > 0
    assert summary["corpus_sha256"] == load_corpus(config.data).sha256
    if workers > 1 and name in DIVIDED:  # what all hold agrees; a subnet is not the one model
        assert summary["replica_std"] < 1e-7 and summary["val_loss"] != summary["val_loss_replicas"]
    elif workers == 1 or name not in APART:
        assert summary["replica_std"] < 1e-7  # the mean of three equal numbers is rounded
        assert summary["val_loss"] == pytest.approx(summary["val_loss_replicas"], rel=1e-6)
    else:
        assert summary["replica_std"] > 1e-5


def test_data_parallel_sends_what_is_said_it_would(text: Path, tmp_path: Path) -> None:
    """ddp_bytes_per_worker is exact: ddp's own bytes beyond what every method sends at the start."""
    alone = run(tiny(text, method="none", workers=3), tmp_path / "none")
    ddp = run(tiny(text, method="ddp", workers=3), tmp_path / "ddp")
    assert ddp["bytes_sent_per_worker"] - alone["bytes_sent_per_worker"] == pytest.approx(ddp["ddp_bytes_per_worker"])
    assert alone["ddp_bytes_per_worker"] == ddp["ddp_bytes_per_worker"]


def test_what_finish_sends_and_waits_for_is_counted(text: Path, tmp_path: Path) -> None:
    """A run that ends between two rounds: the last, shorter one adds bytes and blocked time, and no computation."""
    config = tiny(text, method="diloco", workers=2, steps=5)
    summary = run(config, tmp_path / "run")
    lines = metrics(tmp_path / "run")[-2:]
    assert summary["bytes_sent_per_worker"] - sum(line["bytes_sent"] for line in lines) / 2 == (
        4 * summary["parameters"] + 32
    )
    assert summary["compute_seconds"] == pytest.approx(5 * config.world.virtual.step_seconds, rel=1e-9)
    assert summary["blocked_seconds"] > sum(line["blocked_seconds"] for line in lines) / 2
    assert summary["replica_std"] == 0


def validation_loss_by_hand(config: Config, weights: Path) -> float:
    """Mean cross-entropy of evenly spaced windows of the validation text, from the saved file alone."""
    model = build(config.model, seed=99)
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert not unexpected and len(missing) <= 1  # a tied head is saved once
    tokens = torch.tensor(load_corpus(config.data).validation.tokens.astype("int64"))
    windows = (len(tokens) - 1) // CONTEXT
    count = min(config.data.validation_sequences, windows)
    rows = [CONTEXT * (i * windows // count) for i in range(count)]
    with torch.no_grad():
        each = [F.cross_entropy(model(tokens[None, r : r + CONTEXT + 1]).logits[0].double(), tokens[r + 1 : r + 17])
                for r in rows]  # fmt: skip
    return float(torch.stack(each).mean())


@pytest.mark.parametrize("name", ["ddp", "noloco"])
def test_the_saved_model_has_the_validation_loss_of_the_summary(text: Path, tmp_path: Path, name: str) -> None:
    config = tiny(text, method=name, workers=2, steps=5)
    summary = run(config, tmp_path / "run")
    by_hand = validation_loss_by_hand(config, tmp_path / "run" / "model.safetensors")
    assert summary["val_loss"] == pytest.approx(by_hand, abs=1e-5)


def test_validation_during_the_run_leaves_the_run_alone(text: Path) -> None:
    """Judging the anchors and putting the live weights back changes no bit of what follows."""
    often = tiny(text, "run.log_every=1", "run.validate_every=1", workers=2, steps=7)
    never = tiny(text, "run.log_every=1", "run.validate_every=0", workers=2, steps=7)
    assert losses(often) == losses(never)


# ---------------------------------------------------------------------------------------------------------------------
# What a step does


def test_a_run_learns(text: Path, tmp_path: Path) -> None:
    """No NaN, and the text's few words are learnt: far below the 5.55 nats of a uniform guess."""
    config = tiny(text, "inner.lr=0.03", "data.batch_size=4", method="localsgd", steps=60)
    summary = run(config, tmp_path / "run")
    assert summary["val_loss"] < 3.0
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path / "run"))


@pytest.mark.parametrize(("name", "workers"), [("none", 1), ("ddp", 2), ("noloco", 2)])
def test_accumulation_is_a_larger_batch(text: Path, tmp_path: Path, name: str, workers: int) -> None:
    """accumulation = 2 with batch b is batch 2b up to rounding, and sends as much."""
    twice = tiny(text, "inner.accumulation=2", "run.log_every=1", method=name, workers=workers)
    large = tiny(text, f"data.batch_size={2 * BATCH}", "run.log_every=1", method=name, workers=workers)
    for one, other in zip(losses(twice), losses(large), strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    first, second = run(twice, tmp_path / "twice"), run(large, tmp_path / "large")
    for key in ("tokens", "bytes_sent_per_worker", "compute_seconds"):
        assert first[key] == pytest.approx(second[key]), key


def test_one_worker_reads_what_many_read(text: Path) -> None:
    """ddp with two workers is one worker with their batches together, and a global batch says the same."""
    two = losses(tiny(text, "run.log_every=1", method="ddp", workers=2))
    shared = losses(
        tiny(text, "run.log_every=1", "data.batch_mode=global", f"data.batch_size={2 * BATCH}", method="ddp", workers=2)
    )
    (one,) = losses(tiny(text, "run.log_every=1", f"data.batch_size={2 * BATCH}", method="none", workers=1))
    assert shared == two
    assert [sum(pair) / 2 for pair in zip(*two, strict=True)] == pytest.approx(one, rel=1e-4)


def test_a_global_batch_counts_its_tokens_once(text: Path, tmp_path: Path) -> None:
    summary = run(tiny(text, "data.batch_mode=global", "data.batch_size=6", workers=3), tmp_path / "run")
    assert summary["tokens"] == 6 * 6 * CONTEXT


def test_the_optimizer_gets_the_rate_that_the_metrics_say(text: Path) -> None:
    def look(trainer: Trainer) -> list[float]:
        rates = []
        step = trainer.optimizer.inner.step
        trainer.optimizer.inner.step = lambda *a: (rates.append(trainer.optimizer.param_groups[0]["lr"]), step(*a))
        reported = []
        for _ in range(6):
            trainer.step()
            reported.append(trainer.metrics().lr)
        assert rates == pytest.approx(reported, rel=1e-12)
        return rates

    rates = with_one(tiny(text, method="none", workers=1), look)
    assert rates[:2] == pytest.approx([0.005, 0.01])  # warm-up of two steps to 0.01
    assert rates[-1] == pytest.approx(0.001)


@pytest.mark.parametrize("max_norm", [0.0, 1e-3])
def test_the_gradient_is_clipped_where_asked(text: Path, max_norm: float) -> None:
    def look(trainer: Trainer) -> float:
        norms = []
        step = trainer.optimizer.inner.step

        def watched(*arguments: Any) -> Any:
            norms.append(float(torch.cat([p.grad.flatten() for p in trainer.optimizer.parameters]).norm()))
            return step(*arguments)

        trainer.optimizer.inner.step = watched
        trainer.step()
        return norms[0]

    norm = with_one(tiny(text, f"inner.max_norm={max_norm}", method="none", workers=1), look)
    assert norm == pytest.approx(max_norm, rel=1e-4) if max_norm else norm > 0.01


def test_autocast_trains_in_bf16_on_float32_weights(text: Path, tmp_path: Path) -> None:
    plain = losses(tiny(text, "run.log_every=1", workers=2))
    config = tiny(text, "run.log_every=1", "model.autocast=bf16", workers=2)
    mixed = losses(config)
    assert mixed != plain
    assert mixed[0] == pytest.approx(plain[0], rel=0.02)
    run(config, tmp_path / "run")
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "run" / "model.safetensors").values())


@pytest.mark.parametrize("name", ["demo", "ddp"])
def test_autocast_in_fp16_scales_the_loss(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On the CPU, which Isles refuses: it learns, though the first scale of 65,536 may overflow; `demo` asks the others
    in each step, and a dry run knows of these bytes.
    """
    monkeypatch.setattr("isles.models.factory._refuse_fp16_on_cpu", lambda *_: None)
    config = tiny(text, "model.autocast=fp16", "model.device=auto", method=name)
    summary = run(config, tmp_path / "run")
    assert summary["val_loss"] < math.log(256)
    sent = plan_run(config).bytes_sent
    unsent = sum(sent) - 2 * summary["bytes_sent_per_worker"]
    assert unsent == 0 or (name == "demo" and unsent > 0), "a step that overflows sends no momentum"
    plain = plan_run(tiny(text, method=name)).bytes_sent
    assert [own - other for own, other in zip(sent, plain, strict=True)] == [6 * 8 if name == "demo" else 0] * 2


def test_by_file_gives_each_worker_its_own_documents(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(8):
        (folder / f"{index}.txt").write_text(chr(ord("a") + index) * 600)

    def letters(config: Config) -> list[set[str]]:
        def look(world: Mesh) -> set[str]:
            loader = trainer_of(config, world).text
            return {chr(token) for _ in range(30) for token in next(loader).flatten().tolist()} - {"\n"}

        return run_virtual(look, config.world.workers)

    apart = letters(tiny(folder, "data.split=by_file", "data.validation_fraction=0", workers=3))
    assert not (apart[0] & apart[1]) and not (apart[1] & apart[2]) and set.union(*apart) == set("abcdefgh")
    assert any(a & b for a, b in [letters(tiny(folder, "data.validation_fraction=0", workers=2))])
    summary = run(tiny(folder, "data.split=by_file", workers=3), tmp_path / "run")
    assert math.isfinite(summary["val_loss"])


def test_without_validation_text_the_run_still_ends_well(text: Path, tmp_path: Path) -> None:
    """Said at the start, not after the last step."""
    told = Told()
    summary = run(tiny(text, "data.validation_fraction=0", "run.validate_every=2"), tmp_path / "run", told)
    assert summary["val_loss"] is None and summary["val_loss_replicas"] is None
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert any("no validation loss" in notice for notice in told.notices)


def test_notices_are_told_once(text: Path, tmp_path: Path) -> None:
    """What the method warns of, and a warm-up that outlasts the run, reach the user as notices, not as warnings."""
    told = Told()
    config = tiny(text, "inner.warmup_steps=100", "replicas.gamma=1.9", workers=3)
    run(config, tmp_path / "run", told)
    for words in ("inner.warmup_steps = 100", "gamma = 1.9", "outer_momentum = 0.5 wants"):
        assert len([notice for notice in told.notices if words in notice]) == 1, told.notices


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what it leaves


def test_a_run_that_cannot_mean_what_it_says_is_refused_at_its_start(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "x"
    assert "sync_every <= 2" in refused(tiny(text, steps=2), out)
    assert "group_size = 3" in refused(tiny(text, "replicas.group_size=3"), out)
    assert "does not divide by 2 workers" in refused(tiny(text, "data.batch_mode=global", "data.batch_size=3"), out)
    assert "context + 1 = 5001" in refused(tiny(text, "model.context=5000"), out)
    assert "model.vocab = 100" in refused(tiny(text, "model.vocab=100"), out)
    assert "1 documents among 2 workers" in refused(tiny(text, "data.split=by_file"), out)
    assert "does not exist" in refused(tiny(tmp_path / "nosuch.txt"), out)
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "holds no text" in refused(tiny(empty), out)
    run(tiny(text), out)  # and the same directory serves the run that is right


def test_a_directory_in_use_is_not_touched(text: Path, tmp_path: Path) -> None:
    config = tiny(text)
    out = tmp_path / "run"
    run(config, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match="holds a run already"):
        run(config, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    own = tmp_path / "mine"
    own.mkdir()
    (own / "config.toml").write_text("# my own notes")
    with pytest.raises(ValueError, match=r"config\.toml"):
        run(config, own)
    assert (own / "config.toml").read_text() == "# my own notes"


def test_a_failed_start_leaves_a_users_folder_as_it_was(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    with pytest.raises(ValueError):
        run(tiny(text, steps=2), out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    (out / "metrics.jsonl").touch()  # what a launcher that was killed at its start leaves
    assert run(tiny(text), out)["steps"] == 6
    assert (out / "notes.txt").read_text() == "keep"


def test_a_directory_that_cannot_be_made(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/isles")):
        with pytest.raises(ValueError, match=r"--out .* cannot be written to"):
            run(tiny(text), out)


def test_a_run_that_breaks_off_keeps_what_it_wrote(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first line of metrics the directory is a run, complete or not; nothing says it is complete."""
    step = Trainer.step

    def until_4(self: Trainer) -> None:
        if self.optimizer.steps == 4:
            raise RuntimeError("the roof fell in")
        step(self)

    monkeypatch.setattr(Trainer, "step", until_4)
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="roof"):
        run(tiny(text), out)
    assert sorted(path.name for path in out.iterdir()) == ["config.toml", "metrics.jsonl"]
    assert {line["step"] for line in metrics(out)} == {2, 4}
    with pytest.raises(ValueError, match="holds a run already"):
        run(tiny(text), out)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_no_number_stops_the_run(text: Path, tmp_path: Path, log_every: int) -> None:
    """One line names the worker and the step, before anybody was sent what came of it; no checkpoint holds it."""
    config = tiny(text, f"run.log_every={log_every}", "run.checkpoint_every=2", method=POISONED, workers=3, steps=9)
    with pytest.raises(WorkerFailed) as caught:
        run(config, tmp_path / "run")
    line = str(caught.value)
    assert line.startswith("worker 1 failed: its loss is nan at inner step 4: lower inner.lr (now 0.01)")
    assert "\n" not in line and not (tmp_path / "run" / "failure.txt").exists()
    assert Checkpoints(tmp_path / "run").steps() == [2]
    assert all(line["loss"] is not None for line in metrics(tmp_path / "run"))


def test_the_end_of_a_run_is_proven(text: Path, tmp_path: Path) -> None:
    """Weights that differ in one entry are told by worker and name, and no model is written."""
    with pytest.raises(Diverged, match=r"worker 1 diverged at step 4: .* differ where all must be equal"):
        run(tiny(text, "replicas.sync_every=2", method=SPOILED, workers=3, steps=4), tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.safetensors"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_line_has_the_norm_before_clipping_and_tokens_by_its_clock(workers: int, tmp_path: Path) -> None:
    """Of an island: the norm of its workers' mean gradient, by torch's own function. A batch takes 0.1 virtual seconds,
    to which the island adds its exchange.
    """
    text, settings = (
        write_text(tmp_path / "text.txt"),
        ("inner.max_norm=0.01", "run.log_every=1", "replicas.sync_every=1"),
    )
    one = tiny(text, method="none", workers=workers)
    island = tiny(text, *settings, f"world.inner={workers}", method="diloco", workers=workers, steps=1)

    def gradients(world: Mesh) -> list[torch.Tensor]:
        trainer = trainer_of(one, world)
        trainer.model_step.run(trainer._batches())
        return [own.grad for own in trainer.model.parameters() if own.grad is not None]

    mean = [torch.stack(each).mean(0) for each in zip(*run_virtual(gradients, workers), strict=True)]
    norm, speed = float(torch.nn.utils.get_total_norm(mean)), BATCH * CONTEXT / 0.1
    run(island, tmp_path / "run")
    for line in metrics(tmp_path / "run"):
        assert line["gradient_norm"] == pytest.approx(norm, rel=1e-5) and norm > 0.1
        assert line["tokens_per_second"] == (pytest.approx(speed) if workers == 1 else pytest.approx(speed, rel=0.2))

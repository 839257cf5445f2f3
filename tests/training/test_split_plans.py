"""`isles plan splits` against the virtual clock: splits of a small decoder's workers, trained for real."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command

from isles.cli import app
from isles.data import load_corpus
from isles.models.config import ModelConfig
from isles.plan.question import PlanQuestion, decoder_of
from isles.plan.splits import SplitsQuestion, WorkerSplit, plan_split, plan_splits, splits
from isles.running.virtual import VirtualWorkers
from isles.training.config.reading import read_config
from isles.training.worker import train_worker
from tests.training.runs import write_text

CONTEXT, SEQUENCES, STEP = 32, 4, 0.1  # a worker's share of a step
H = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name, rate in (("slow", "4Mbit/s"), ("fast", "100Mbit/s")):
        (folder / f"{name}.toml").write_text(f'bandwidth = "{rate}"\nlatency = "20ms"\n')
    write_text(folder / "text.txt", 20_000)
    return folder


def clock(
    folder: Path, net: str, split: WorkerSplit, method: str, routing: str, tied: bool
) -> tuple[float, float, float]:
    """In percent of the time: computing, waiting for microbatches of other stages, and for their norms."""
    workers = split.replicas * split.stages * split.inner
    rounds = 12 if (net, method) == ("slow", "noloco") else 3  # its anchors, on their way at the end, are waited for
    flags = {"replicas.method": method, "world.workers": workers, "run.steps": H * rounds}
    flags |= {"world.backend": "virtual", "world.virtual.links": str(folder / f"{net}.toml")}
    more = ["model.d_model=64", "model.layers=4", "model.heads=2", "model.ffn=256", f"model.context={CONTEXT}"]
    more += [f"model.tie_embeddings={str(tied).lower()}", f"replicas.sync_every={H}", "data.validation_fraction=0"]
    more += [
        f"data.path={folder / 'text.txt'}",
        f"world.virtual.step_seconds={STEP * split.stages}",
        "inner.warmup_steps=2",
    ]
    more += [f"data.batch_size={SEQUENCES * split.stages}", f"world.inner={split.inner}"]
    if split.stages > 1:
        more += [f"pipeline.stages={split.stages}", "pipeline.microbatches=4", f"pipeline.routing={routing}"]
        more += [f"pipeline.together={str(split.inner > 1).lower()}"]
    if split.inner > 1:
        more += [f"world.virtual.inner_links={folder / 'fast.toml'}"]
    config = read_config(None, flags, more)
    results = VirtualWorkers(train_worker, workers, config, (config, None, None, load_corpus(config.data))).join()
    keys = ("compute_seconds", "blocked_seconds")
    computing, blocked = (sum(result[key] for result in results) for key in keys)
    waited, norms = (
        sum(result["channels"].get(channel, {}).get("blocked_seconds", 0.0) for result in results)
        for channel in ("pipeline", "inner")
    )
    total = (computing + blocked) / 100
    return computing / total, waited / total, norms / total


def asked(folder: Path, net: str, workers: int, method: str, routing: str, tied: bool, inner: bool) -> SplitsQuestion:
    own = ModelConfig(d_model=64, layers=4, heads=2, ffn=256, context=CONTEXT, tie_embeddings=tied)
    question = PlanQuestion(
        model=own,
        step_seconds=STEP,
        workers=workers,
        network=str(folder / f"{net}.toml"),
        tokens=1e6,
        step_tokens=workers * SEQUENCES * CONTEXT,
    )
    near = str(folder / "fast.toml") if inner else None
    return SplitsQuestion(
        question=question, routing=routing, method=method, replicas={"sync_every": H}, near=near, boundary={}
    )


def large(workers: int, network: str = "200Mbit/s, 30ms") -> SplitsQuestion:
    question = PlanQuestion(
        model=decoder_of(1e9, 16),
        step_seconds=2.0,
        workers=workers,
        network=network,
        tokens=1e10,
        step_tokens=workers * 65536.0,
    )
    return SplitsQuestion(question=question, replicas={"sync_every": 100}, boundary={})


@pytest.mark.parametrize(("replicas", "stages"), [pytest.param(8, 4, marks=pytest.mark.long), (32, 1)])
def test_a_large_fleet_is_played_in_part(replicas: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the time of all of it, played message by message."""
    asked, split = large(32), WorkerSplit(replicas=replicas, stages=stages, inner=1)
    part = plan_split(asked, split)
    for key, most in (("_WORKERS", 64), ("_MESSAGES", 200_000)):
        monkeypatch.setattr(f"isles.plan.splits.{key}", most)
    whole = plan_split(asked, split)
    assert part.bubble == pytest.approx(whole.bubble, rel=0.001)
    assert part.waiting == pytest.approx(whole.waiting, rel=0.01)
    assert part.stage_bytes == pytest.approx(whole.stage_bytes) and part.memory == whole.memory
    assert part.outer_bytes == pytest.approx(whole.outer_bytes)


def test_a_network_that_names_all_workers_is_split(tmp_path: Path) -> None:
    """Two workers behind each line have at least half of it, and not all."""
    split = WorkerSplit(replicas=4, stages=2, inner=1)
    own, shared, half = (
        plan_split(large(8, network), split).step
        for network in ("200Mbit/s, 30ms", own_network(tmp_path, 8), "100Mbit/s, 30ms")
    )
    assert own < shared < half


def own_network(folder: Path, workers: int) -> str:
    """A file that names every worker's line."""
    lines = ", ".join(str(rank // 2) for rank in range(workers))
    path = folder / "shared.toml"
    path.write_text(f'bandwidth = "200Mbit/s"\nlatency = "30ms"\nuplinks = [{lines}]\n')
    return str(path)


CELLS = [
    (net, WorkerSplit(replicas=replicas, stages=stages, inner=inner), method, routing, tied)
    for net, replicas, stages, inner, method, routing, tied in (
        ("slow", 2, 2, 1, "diloco", "fixed", False),
        ("fast", 2, 2, 1, "noloco", "random", True),
        ("fast", 1, 4, 1, "diloco", "fixed", False),
        ("fast", 2, 2, 2, "diloco", "fixed", False),
        ("fast", 4, 1, 1, "diloco", "fixed", False),
        ("slow", 4, 1, 1, "noloco", "fixed", True),
        ("slow", 2, 2, 1, "noloco", "fixed", True),
        ("slow", 2, 2, 1, "noloco", "random", False),
        ("fast", 2, 2, 1, "diloco", "fixed", True),
        ("slow", 1, 2, 1, "diloco", "fixed", False),
        ("slow", 1, 4, 1, "diloco", "fixed", True),
        ("fast", 1, 3, 1, "diloco", "fixed", False),
        ("fast", 4, 2, 1, "diloco", "random", False),
        ("slow", 4, 2, 1, "noloco", "fixed", False),
        ("fast", 2, 4, 1, "diloco", "fixed", True),
        ("slow", 2, 4, 1, "diloco", "random", False),
        ("slow", 2, 2, 2, "diloco", "fixed", True),
        ("fast", 1, 2, 2, "diloco", "fixed", False),
        ("fast", 4, 1, 2, "diloco", "fixed", False),
        ("fast", 2, 3, 1, "noloco", "random", False),
    )
]
QUICK = 1


@pytest.mark.parametrize(
    ("net", "split", "method", "routing", "tied"),
    [pytest.param(*cell, marks=[] if number < QUICK else pytest.mark.long) for number, cell in enumerate(CELLS)],
)
def test_a_split_is_planned_as_the_virtual_clock_shows_it(
    folder: Path, net: str, split: WorkerSplit, method: str, routing: str, tied: bool
) -> None:
    """The shares of the time, to 5 points; the run's end is not in the plan, which is of the long run."""
    workers = split.replicas * split.stages * split.inner
    said = plan_split(asked(folder, net, workers, method, routing, tied, inner=split.inner > 1), split)
    computing, bubble, norms = clock(folder, net, split, method, routing, tied)
    assert 100 * said.computing / said.step == pytest.approx(computing, abs=5)
    assert bubble - 5 <= 100 * said.bubble / said.step <= bubble + norms + 5  # who asks for a norm waits for stages


def test_splits_fill_the_workers() -> None:
    assert splits(4, 8, None) == [
        WorkerSplit(replicas=4, stages=1, inner=1),
        WorkerSplit(replicas=2, stages=1, inner=2),
        WorkerSplit(replicas=1, stages=1, inner=4),
        WorkerSplit(replicas=2, stages=2, inner=1),
        WorkerSplit(replicas=1, stages=2, inner=2),
        WorkerSplit(replicas=1, stages=4, inner=1),
    ]
    with pytest.raises(ValueError, match="--stages 3: 4 workers and 8 layers make no such replicas"):
        splits(4, 8, [3])


def test_stages_divide_what_replicas_send_and_hold(folder: Path) -> None:
    job = asked(folder, "fast", 8, "diloco", "fixed", False, inner=False)
    one, two = (plan_split(job, WorkerSplit(replicas=4, stages=stages, inner=2 // stages)) for stages in (1, 2))
    assert one.outer_bytes == two.outer_bytes > 0
    found = plan_splits(job, splits(8, 4, None))
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert all(one.computing == pytest.approx(STEP) for one in found)
    assert all(one.step == pytest.approx(one.computing + one.bubble + one.waiting) for one in found)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `isles plan splits` prints of 10M parameters and 4 workers, 500 ms a step."""
    numbers = ["10M, 4 layers", "--gpu", "0.5s", "--workers", "4", "--tokens", "1M", "--step-tokens", "8k"]
    get_command(app).main(["plan", "splits", *numbers, *words], standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--links", "100Mbit/s, 0ms"]
    more = ["--method", "diloco, sync_every = 10", "--routing", "random", "--microbatches", "2", "--json"]
    rows = json.loads(plan(capsys, *line, *more, "--stages", "1,2"))["rows"]
    assert {(row["stages"], row["replicas"]) for row in rows} >= {(2, 2), (1, 4)}
    out = plan(capsys, *line, "--stages", "2", "--boundary", "dct:0.9, codec = fp16")
    assert "2 x 2 x 1" in out and "between stages dct:0.9 in fp16." in out


def test_a_boundary_is_planned_in_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 workers in a row, 8,000 tokens a step: K numbers there and back with ids of a byte and losses; turning
    beside. Nothing comes home, for the head is not the embedding.
    """
    width, rows = 384, []  # in heads of 64
    for boundary in ("none", "subspace:8", "subspace:8, update_every = 10"):
        told = plan(capsys, "--links", "20Mbit/s, 0ms", "--stages", "4", "--boundary", boundary, "--json")
        rows += json.loads(told)["rows"]
    key, ids, losses = "bytes_to_stages_per_worker_per_step", 3 / 4 * 8000, 64
    assert rows[0][key] == pytest.approx(3 / 4 * 8000 * 2 * width * 4 + ids, abs=losses)
    assert rows[1][key] == pytest.approx(3 / 4 * 8000 * 2 * 8 * 4 + ids, abs=losses)
    assert rows[2][key] == pytest.approx(rows[1][key] + 3 * 8 * width * 8 / 4 / 10)
    assert rows[1]["step_seconds"] < rows[2]["step_seconds"] < rows[0]["step_seconds"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--stages", "2", "--boundary", "topk:4"], 'kind = "topk:4" is not known'),
        (["--stages", "2", "--boundary", "subspace:9999"], "choose at most 384"),
        (["--stages", "2", "--boundary", "dct:0.9, update_every = 5"], "update_every = 5"),
        (["--boundary", "dct:0.9, int8"], "write kind, key = value"),
        (["--stages", "two"], 'write "auto"'),
        (["--stages", "2", "--routing", "ring"], "--routing"),
        (["--routing", "swarm"], "isles train CONFIG.toml --dry-run"),
        (["--routing", "ravnest"], "isles plan clusters NODES.toml"),
        (["--stages", "2", "--method", "dpp"], "did you mean 'ddp'"),
        (["--microbatches", "0"], "--microbatches 0: choose 1 or more"),
    ],
)
def test_bad_input_is_a_line(capsys: pytest.CaptureFixture[str], more: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        plan(capsys, "--links", "100Mbit/s, 0ms", *more)
    assert "\n" not in str(refusal.value)


def test_bytes_between_stages_hang_on_the_tokens() -> None:
    with pytest.raises(ValueError, match="missing: --tokens and --step-tokens"):
        replace(large(8), question=replace(large(8).question, tokens=None, step_tokens=None))

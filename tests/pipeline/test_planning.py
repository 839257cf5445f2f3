"""`isles plan --stages` against the virtual clock: splits of a small decoder's workers, trained for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from isles.cli import app
from isles.data import load_corpus
from isles.models.sizes import matrices, parameters
from isles.network.links import Links
from isles.network.named import links
from isles.network.planner.job import Job
from isles.pipeline.planning import StagesJob, WorkerSplit, plan_splits, planned, splits
from isles.training.config.reading import read_config
from isles.training.running.virtual import VirtualWorkers
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
    flags |= {"world.backend": "virtual", "world.links": str(folder / f"{net}.toml")}
    more = ["model.d_model=64", "model.layers=4", "model.heads=2", "model.ffn=256", f"model.context={CONTEXT}"]
    more += [f"model.tie_embeddings={str(tied).lower()}", f"replicas.sync_every={H}", "data.validation_fraction=0"]
    more += [f"data.path={folder / 'text.txt'}", f"world.step_seconds={STEP * split.stages}", "inner.warmup_steps=2"]
    more += [f"data.batch_size={SEQUENCES * split.stages}", f"world.inner={split.inner}"]
    if split.stages > 1:
        more += [f"pipeline.stages={split.stages}", "pipeline.microbatches=4", f"pipeline.routing={routing}"]
        more += [f"pipeline.together={str(split.inner > 1).lower()}"]
    if split.inner > 1:
        more += [f"world.inner_links={folder / 'fast.toml'}"]
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


def asked(folder: Path, net: str, workers: int, method: str, routing: str, tied: bool, inner: bool) -> StagesJob:
    from isles.models import ModelConfig

    own = ModelConfig(d_model=64, layers=4, heads=2, ffn=256, context=CONTEXT, tie_embeddings=tied)
    job = Job(
        parameters=parameters(own.shape()),
        layers=4,
        step_seconds=STEP,
        workers=workers,
        links=links(str(folder / f"{net}.toml")),
        tokens=1e6,
        step_tokens=workers * SEQUENCES * CONTEXT,
        matrices=matrices(own.shape()),
    )
    near = links(str(folder / "fast.toml")) if inner else None
    return StagesJob(job=job, routing=routing, method=method, every=H, near=near)  # type: ignore[arg-type]


def large(workers: int, **network: Any) -> StagesJob:
    lines = Links(**({"bandwidth": 2e8, "latency": 0.03} | network))
    numbers = {"parameters": 1e9, "layers": 16, "step_seconds": 2.0, "tokens": 1e10, "step_tokens": workers * 65536.0}
    return StagesJob(job=Job(workers=workers, links=lines, **numbers))


@pytest.mark.parametrize(("replicas", "stages"), [(8, 4), (32, 1)])
def test_a_large_fleet_is_played_in_part(replicas: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the time of all of it."""
    asked, split = large(32), WorkerSplit(replicas=replicas, stages=stages, inner=1)
    part = planned(asked, split)
    for key, most in (("_WORKERS", 64), ("MESSAGES", 64_000)):
        monkeypatch.setattr(f"isles.pipeline.planning.{key}", most)
    whole = planned(asked, split)
    assert part.bubble == pytest.approx(whole.bubble, rel=0.001) and part.waiting == pytest.approx(
        whole.waiting, rel=0.01
    )
    assert (part.stage_bytes, part.outer_bytes, part.memory) == (whole.stage_bytes, whole.outer_bytes, whole.memory)


def test_a_network_that_names_all_workers_is_split() -> None:
    """Two workers behind each line: as if each had half of it."""
    split = WorkerSplit(replicas=4, stages=2, inner=1)
    shared = planned(large(8, uplinks=[0, 0, 1, 1, 2, 2, 3, 3]), split)
    assert shared.step == pytest.approx(planned(large(8, bandwidth=1e8), split).step, rel=0.2)


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
    said = planned(asked(folder, net, workers, method, routing, tied, inner=split.inner > 1), split)
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
    one, two = (planned(job, WorkerSplit(replicas=4, stages=stages, inner=2 // stages)) for stages in (1, 2))
    assert one.outer_bytes == two.outer_bytes > 0
    found = plan_splits(job, splits(8, 4, None))
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert all(one.computing == pytest.approx(STEP) for one in found)
    assert all(one.step == pytest.approx(one.computing + one.bubble + one.waiting) for one in found)


def plan(**options: object) -> None:
    """`isles plan` with these options, in this process; a flag is True."""
    words = ["plan"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    get_command(app).main(words, standalone_mode=False)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"params": "10M", "layers": 4, "step_time": "0.5", "workers": 4, "bandwidth": "100Mbit/s"}
    text = {"tokens": "1M", "step_tokens": "8k", "sync_every": 10}
    plan(**numbers, **text, stages="1,2,4", routing="random", microbatches=2, json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["stages"], row["replicas"]) for row in rows} >= {(2, 2), (4, 1), (1, 4)}
    plan(**numbers, **text, stages="2", boundary="dct:0.9", boundary_codec="fp16")
    out = capsys.readouterr().out
    assert "2 x 2 x 1" in out and "between stages dct:0.9 in fp16." in out


def test_a_boundary_is_planned_in_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 workers in a row, 8,000 tokens a step: K numbers there and back with ids and losses; turning beside."""
    numbers = {"params": "10M", "layers": 4, "step_time": "0.5", "workers": 4, "bandwidth": "20Mbit/s"}
    text = {"tokens": "1M", "step_tokens": "8k", "stages": "4", "json": True}
    width = round((10e6 / 4 / 16) ** 0.5)
    rows = []
    for more in ({}, {"boundary": "subspace:8"}, {"boundary": "subspace:8", "subspace_update": 10}):
        plan(**numbers, **text, **more)
        rows += json.loads(capsys.readouterr().out)["rows"]
    key, beside = "bytes_to_stages_per_worker_per_step", 3 / 4 * (8000 * 4 + 4 * 4)
    assert rows[0][key] == pytest.approx(3 / 4 * 8000 * 2 * width * 4 + beside)
    assert rows[1][key] == pytest.approx(3 / 4 * 8000 * 2 * 8 * 4 + beside)
    assert rows[2][key] == pytest.approx(rows[1][key] + 3 * 8 * width * 8 / 4 / 10)
    assert rows[1]["step_seconds"] < rows[2]["step_seconds"] < rows[0]["step_seconds"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"boundary": "dct:0.9"}, "--boundary: of replicas in stages; give --stages too"),
        ({"stages": "2", "boundary": "topk:4"}, 'boundary = "topk:4" is not known'),
        ({"stages": "2", "boundary": "subspace:9999", "tokens": "1M", "step_tokens": "8k"}, "choose at most 395"),
        ({"stages": "2", "boundary": "dct:0.9", "subspace_update": 5}, "only a subspace is turned"),
        ({"routing": "random"}, "--routing: of replicas in stages; give --stages too"),
        ({"stages": "two"}, 'write "auto"'),
        ({"stages": "2"}, "give --tokens and --step-tokens too"),
        ({"stages": "2", "routing": "ring", "tokens": "1M", "step_tokens": "8k"}, "--routing"),
        ({"stages": "2", "method": "ddp", "tokens": "1M", "step_tokens": "8k"}, "choose one of"),
        ({"stages": "2", "targets": "90"}, "leave out --targets"),
    ],
)
def test_bad_input_is_a_line(more: dict[str, str], says: str) -> None:
    numbers = {"params": "10M", "layers": 4, "step_time": "0.5", "workers": 4, "bandwidth": "100Mbit/s"}
    with pytest.raises(ValueError, match=says) as refusal:
        plan(**numbers, **more)
    assert "\n" not in str(refusal.value)

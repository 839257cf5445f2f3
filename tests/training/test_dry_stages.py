"""Dry runs of replicas cut into stages, against the runs themselves: bytes, memory, waiting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isles.network.links import links
from isles.plan.record import RunPlan
from isles.plan.replicas import replayed, staged_steps
from isles.plan.run_plan import plan_run
from isles.plan.sketch import clips_model, sketch_run
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from tests.training.runs import counted, tiny, write_text

STAGES = ["model.layers=4", "data.batch_size=4", "data.validation_fraction=0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "net.toml").write_text('bandwidth = "2Mbit/s"\nlatency = "25ms"\n')
    return write_text(folder / "text.txt")


def of(text: Path, *more: str, method: str = "noloco", workers: int = 4, steps: int = 4, stages: int = 2) -> Config:
    links = f"world.virtual.links={text.parent / 'net.toml'}"
    return tiny(text, *STAGES, links, f"pipeline.stages={stages}", *more, method=method, workers=workers, steps=steps)


def check(config: Config, within: float) -> RunPlan:
    """Bytes are equal, worker by worker; the shares of computing and of the bubble are so near, in points."""
    planned, results = plan_run(config), counted(config)
    assert planned.bytes_sent == tuple(result["bytes_sent"] for result in results)
    assert planned.time is not None
    assert planned.time.utilisation is not None and planned.time.bubble is not None
    keys = ("compute_seconds", "blocked_seconds")
    computing, blocked = (sum(result[key] for result in results) for key in keys)
    waited = sum(result["channels"]["pipeline"]["blocked_seconds"] for result in results)
    total = computing + blocked
    assert 100 * planned.time.utilisation == pytest.approx(100 * computing / total, abs=within)
    norms = sum(result["channels"].get("inner", {}).get("blocked_seconds", 0.0) for result in results)
    least, most = 100 * waited / total - within, 100 * (waited + norms * clips_model(config)) / total + within
    assert least <= 100 * planned.time.bubble <= most  # who asks for a norm waits for stages, and then for answers
    assert planned.time.step == pytest.approx(total / config.run.steps / config.world.workers, rel=within / 50)
    return planned


@pytest.mark.parametrize("clip", ["model", "stage"])
def test_the_bubble_of_one_microbatch_is_half_of_the_time(text: Path, clip: str) -> None:
    """One of two stages computes at any time, whether the other one waits for a microbatch or for the norm."""
    links = 'world.virtual.links="1000000Gbit/s, 0ms"'
    more = [UNTIED, "pipeline.microbatches=1", f"pipeline.clip={clip}", "pipeline.together=false", links]
    planned = plan_run(of(text, *more, method="none", workers=2, steps=200))
    assert planned.time is not None
    assert planned.time.utilisation == pytest.approx(0.5, abs=0.002)
    assert planned.time.bubble == pytest.approx(0.5, abs=0.002)


TIED, UNTIED = "model.tie_embeddings=true", "model.tie_embeddings=false"


@pytest.mark.parametrize(
    ("method", "stages", "workers", "more"),
    [
        ("noloco", 2, 4, [TIED]),
        ("diloco", 2, 4, [UNTIED, "inner.max_norm=0"]),
        ("eager", 2, 4, ["pipeline.routing=random", "pipeline.together=false"]),
        ("diloco", 2, 4, [UNTIED, "pipeline.boundary.kind=subspace:4", "pipeline.boundary.update_every=2"]),
        pytest.param(
            "noloco",
            3,
            12,
            [
                "world.inner=2",
                UNTIED,
                "model.layers=3",
                "pipeline.boundary.kind=subspace:9",
                "pipeline.boundary.update_every=2",
            ],
            marks=pytest.mark.long,
        ),
        pytest.param("diloco", 2, 8, ["world.inner=2", UNTIED], marks=pytest.mark.long),
        pytest.param("ddp", 2, 4, ["pipeline.recompute=true"], marks=pytest.mark.long),
        pytest.param("none", 4, 4, ["pipeline.in_flight=1f1b"], marks=pytest.mark.long),
        pytest.param("noloco", 4, 8, ["pipeline.routing=random", UNTIED], marks=pytest.mark.long),
        pytest.param("localsgd", 4, 8, ["pipeline.clip=stage"], marks=pytest.mark.long),
        pytest.param("streaming-diloco", 2, 4, [UNTIED], marks=pytest.mark.long),
        pytest.param("dilocox", 2, 4, [], marks=pytest.mark.long),
        pytest.param("delayed", 2, 8, ["world.inner=2", "pipeline.routing=random"], marks=pytest.mark.long),
    ],
)
def test_it_is_what_the_virtual_clock_shows(
    text: Path, method: str, stages: int, workers: int, more: list[str]
) -> None:
    check(of(text, *more, method=method, workers=workers, stages=stages), within=1.0)


@pytest.mark.parametrize("inner", [1, 2])
def test_what_a_method_holds_is_divided_by_the_stages(text: Path, inner: int) -> None:
    """Anchors, momenta and residuals to the byte; with workers that share a stage by those too."""
    more = [UNTIED, "replicas.codec=int8", "replicas.error_feedback=local", f"world.inner={inner}"]
    whole = plan_run(of(text, "pipeline.stages=1", UNTIED, *more[1:3], method="diloco", workers=2))
    split = plan_run(of(text, *more, method="diloco", workers=4 * inner))
    kept = {held.what: held.nbytes for held in whole.fullest.memory.held}
    for what in ("anchor", "momentum", "error feedback"):
        parts = [held.nbytes for stage in split.workers for held in stage.memory.held if held.what == what]
        assert len(parts) == 2 and inner * sum(parts) == kept[what]
    assert sum(stage.parameters for stage in split.workers) == whole.parameters
    assert split.is_staged and not whole.is_staged


def test_the_memory_table_knows_stages() -> None:
    from isles.plan.run_plan import footprints

    whole = {one.method: one for one in footprints(2)}
    halves = {one.method: one for one in footprints(2, stages=2)}
    assert whole.keys() - halves.keys() == {"ist", "fsdp"}
    assert halves["localsgd"].end == whole["localsgd"].end / 2
    assert halves["diloco"].always == pytest.approx(whole["diloco"].always / 2, rel=0.01)  # scratch is not divided


@pytest.mark.long
def test_the_papers_large_model_in_stages_is_planned() -> None:
    """6.8 billion parameters, 16 replicas of 4 stages: too many messages to play each of the steps."""
    flags = {"replicas.method": "noloco", "world.workers": 64, "world.backend": "virtual"}
    more = ["pipeline.stages=4", "pipeline.routing=random", "data.batch_size=8", "replicas.sync_every=50"]
    planned = plan_run(read_config(None, flags, ["model.size=noloco-large", "run.steps=1000", *more]))
    assert planned.time is not None and planned.time.bubble is not None
    assert 0 < planned.time.bubble < 1
    assert sum(stage.parameters for stage in planned.workers) == planned.parameters > 6.8e9


@pytest.mark.parametrize(("method", "more"), [("noloco", []), ("diloco", ["pipeline.routing=random"])])
def test_a_long_run_is_played_in_part(text: Path, method: str, more: list[str]) -> None:
    """Most steps of a round stand for a few of them: to the same share, nearly."""
    config = of(text, *more, "replicas.sync_every=40", method=method, steps=200)
    whole = plan_run(config).time
    sketch = sketch_run(config)
    part = replayed(sketch, links(config.world.virtual.links), staged_steps(sketch), most=1000)
    assert whole is not None and part is not None and whole.utilisation is not None
    assert part.share == pytest.approx(whole.utilisation, abs=0.01)
    assert part.for_stages / (part.computing + part.waiting) == pytest.approx(whole.bubble, abs=0.01)


def test_words(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isles.cli.plan_printer import show

    show(of(text, steps=30), probe=False, as_json=False)
    words = capsys.readouterr().out
    for said in ("= 2 replicas x 2 stages", "forwards in flight", "the bubble", "to other stages"):
        assert said in words, words
    show(of(text, steps=30), probe=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["workers"][1]["blocks"]

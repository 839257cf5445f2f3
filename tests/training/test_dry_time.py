"""The share of the time spent computing, as `isles train --dry-run` says it, on the virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.comm.virtual.cluster import run_virtual
from isles.network.links import links
from isles.plan.replicas import replayed as replayed_run
from isles.plan.run_plan import plan_run
from isles.plan.sketch import sketch_run
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.worker import train_worker
from tests.covers import cover, share
from tests.training.runs import ON_VIRTUAL, write_text

SETTINGS = {
    "fedavg": [],
    "diloco-int8": ["replicas.codec=int8"],
    "streaming-diloco": ["replicas.codec=fp4"],
    "eager": ["replicas.codec=fp4"],
    "dilocox": ["replicas.window=0"],
    "dilocox-adapts": [],
    "noloco-single": ["replicas.exchange=single_vector"],
    "noloco-late-anchors": ["replicas.prefetch_phi=false"],
    "noloco-int8": ["replicas.codec=int8", "replicas.anchor_codec=int8"],
    "ddp-buckets": ["replicas.bucket_megabytes=0.1"],
    "ddp-low-rank": ["replicas.codec=powersgd:4", "replicas.error_feedback=local"],
    "streaming-late": ["replicas.overlap_steps=2"],
    "postlocal-sgd": ["replicas.every_step_until=2"],
    "dct-dp": ["replicas.threshold_interval=1"],
}
METHODS = {
    **{name: name for name in ON_VIRTUAL},
    "diloco-int8": "diloco",
    "dilocox-adapts": "dilocox",
    "noloco-single": "noloco",
    "noloco-late-anchors": "noloco",
    "noloco-int8": "noloco",
    "ddp-buckets": "ddp",
    "ddp-low-rank": "ddp",
    "streaming-late": "streaming-diloco",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "net.toml").write_text('bandwidth = "2Mbit/s"\nlatency = "25ms"\n')
    return write_text(folder / "text.txt")


def of(
    text: Path, case: str, *more: str, workers: int = 3, steps: int = 7, net: str = "", size: str = "0.12M"
) -> Config:
    flags = {"replicas.method": METHODS[case], "world.workers": workers, "run.steps": steps, "model.size": size}
    flags |= {"world.backend": "virtual", "world.virtual.links": net or str(text.parent / "net.toml")}
    every = ["replicas.sync_every=3"] if METHODS[case] not in ("none", "ddp", "dct-dp", "demo", "sparta") else []
    small = ["data.batch_size=1", "data.validation_fraction=0", "model.context=8", f"data.path={text}"]
    return read_config(None, flags, [*every, *SETTINGS.get(case, []), *small, *more])


def shares(config: Config) -> tuple[float, float]:
    """In percent: what the dry run says, and what the virtual clock shows."""
    time = plan_run(config).time
    said = 1.0 if time is None else time.utilisation
    assert said is not None
    return 100 * said, shown(config)


def shown(config: Config) -> float:
    """In percent: what the virtual clock shows."""
    world = config.world
    results = run_virtual(
        train_worker,
        world.workers,
        args=(config,),
        links=config.network,
        inner=config.island,
        inner_links=world.virtual.inner_links,
        step_seconds=world.virtual.step_seconds,
        speeds=world.factors,
        seed=config.run.seed,
    )
    computing, blocked = (sum(result[key] for result in results) for key in ("compute_seconds", "blocked_seconds"))
    return 100 * computing / (computing + blocked)


@pytest.mark.parametrize("case", share(METHODS, 0, 8, ("ddp", "streaming-diloco", "noloco", "demo")))
def test_computing_is_that_of_the_virtual_clock(text: Path, case: str) -> None:
    """On lines without jitter; with a last, shorter round."""
    said, seen = shares(of(text, case))
    assert said == pytest.approx(seen, abs=4.0 if case == "dilocox-adapts" else 0.1)  # its bytes depend on the numbers


@pytest.mark.long
def test_stale_thresholds_send_about_as_much(text: Path) -> None:
    """Twice as much at first, less than planned later."""
    more = ["replicas.threshold_interval=1000", "data.batch_size=4", "model.context=32"]
    said, seen = shares(of(text, "dct-dp", *more, steps=60))
    assert said == pytest.approx(seen, abs=4.0)


@pytest.mark.parametrize(
    ("case", "more"),
    cover(
        ["diloco", "eager", "noloco", "streaming-diloco", "dilocox"],
        ("world.inner=2", "world.virtual.step_factors=[1.0, 1.5]"),
        each=1,
    ),
)
def test_islands_and_uneven_workers_too(text: Path, case: str, more: str) -> None:
    said, seen = shares(of(text, case, more, workers=4))
    assert said == pytest.approx(seen, abs=0.25)


def test_accumulated_batches_leave_in_the_last_backward_pass(text: Path) -> None:
    said, seen = shares(of(text, "ddp-buckets", "inner.accumulation=3", steps=4))
    assert said == pytest.approx(seen, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("case", ["ddp", "diloco", "streaming-diloco", "noloco", "eager"])
@pytest.mark.parametrize("net", ["lan", "home-fibre", "home-cable", "worldwide"])
@pytest.mark.parametrize("size", ["0.12M", "0.53M", "2M"])
def test_presets_with_jitter(text: Path, case: str, net: str, size: str) -> None:
    said, seen = shares(of(text, case, net=net, size=size, steps=60))
    assert said == pytest.approx(seen, abs=0.5)


@pytest.mark.parametrize("case", ["ddp", "noloco"])
def test_a_long_run_is_played_in_part(text: Path, case: str) -> None:
    """To the share of all of it, nearly."""
    config = of(text, case, steps=200)
    whole = plan_run(config).time
    part = replayed_run(sketch_run(config), links(config.world.virtual.links), most=400)
    assert whole is not None and part is not None and whole.utilisation is not None
    assert part.share == pytest.approx(whole.utilisation, abs=0.01)

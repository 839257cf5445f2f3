"""`isles train --dry-run`: the share of the time spent computing, against the virtual clock."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from isles.comm.virtual.run import run_virtual
from isles.network.planner.replay import replay_run
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.dry_run import dry_run
from isles.training.trainer import train_worker
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
    "streaming-late": ["replicas.overlap_steps=5"],
    "postlocal-sgd": ["replicas.every_step_until=7"],
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
NUMBERS_DECIDE = ("dct-dp", "dilocox-adapts")  # what is sent hangs on them


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "net.toml").write_text('bandwidth = "2Mbit/s"\nlatency = "25ms"\n')
    return write_text(folder / "text.txt")


def of(
    text: Path, case: str, *more: str, workers: int = 4, steps: int = 47, net: str = "", size: str = "0.13M"
) -> Config:
    flags = {"replicas.method": METHODS[case], "world.workers": workers, "run.steps": steps, "model.size": size}
    flags |= {"world.backend": "virtual", "world.links": net or str(text.parent / "net.toml")}
    every = ["replicas.sync_every=10"] if METHODS[case] not in ("none", "ddp", "dct-dp", "demo", "sparta") else []
    small = ["data.batch_size=1", "data.validation_fraction=0", "model.context=8", f"data.path={text}"]
    return read_config(None, flags, [*every, *SETTINGS.get(case, []), *small, *more])


def shares(config: Config) -> tuple[float, float]:
    """In percent: what the dry run says, and what the virtual clock shows."""
    transfers = dry_run(config).transfers
    said = 1.0 if transfers is None else transfers.utilisation
    assert said is not None
    world = config.world
    results = run_virtual(
        train_worker,
        world.workers,
        args=(config,),
        links=world.links,
        inner=world.inner,
        inner_links=world.inner_links,
        step_seconds=world.step_seconds,
        speeds=world.factors,
        seed=config.run.seed,
    )
    computing, blocked = (sum(result[key] for result in results) for key in ("compute_seconds", "blocked_seconds"))
    return 100 * said, 100 * computing / (computing + blocked)


@pytest.mark.parametrize("case", METHODS)
def test_computing_is_that_of_the_virtual_clock(text: Path, case: str) -> None:
    """On lines without jitter; with a last, shorter round."""
    said, shown = shares(of(text, case, steps=27))
    assert said == pytest.approx(shown, abs=4.0 if case in NUMBERS_DECIDE else 0.1)


@pytest.mark.parametrize("case", ["diloco", "eager", "noloco"])
@pytest.mark.parametrize("more", ["world.inner=2", "world.step_factors=[1.0, 1.5]"])
def test_islands_and_uneven_workers_too(text: Path, case: str, more: str) -> None:
    said, shown = shares(of(text, case, more, steps=27))
    assert said == pytest.approx(shown, abs=0.5)


def test_accumulated_batches_leave_in_the_last_backward_pass(text: Path) -> None:
    said, shown = shares(of(text, "ddp-buckets", "inner.accumulation=3", steps=6))
    assert said == pytest.approx(shown, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("case", ["ddp", "diloco", "streaming-diloco", "noloco", "eager"])
@pytest.mark.parametrize("net", ["lan", "home-fibre", "home-cable", "worldwide"])
@pytest.mark.parametrize("size", ["0.13M", "0.5M", "2M"])
def test_presets_with_jitter(text: Path, case: str, net: str, size: str) -> None:
    said, shown = shares(of(text, case, net=net, size=size, steps=60))
    assert said == pytest.approx(shown, abs=0.5)


@pytest.mark.parametrize("case", ["ddp", "noloco"])
def test_a_long_run_is_played_in_part(text: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the share of all of it, nearly."""
    config = of(text, case, steps=200)
    whole = dry_run(config).transfers
    monkeypatch.setattr("isles.training.dry_time.replay_run", partial(replay_run, messages=400))
    part = dry_run(config).transfers
    assert whole is not None and part is not None and whole.utilisation is not None
    assert part.utilisation == pytest.approx(whole.utilisation, abs=0.01)

"""`isles train --dry-run`: the share of the time spent computing, against the virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.dry_run import plan
from isles.training.running.run import on_virtual
from isles.training.trainer import train_worker
from tests.training.runs import ON_VIRTUAL, write_text

H = 10
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
    transfers = plan(config).transfers
    said = 1.0 if transfers is None else transfers.utilisation
    assert said is not None
    results = on_virtual(train_worker, config.world.workers, config, (config,), lambda event: None)
    computing, blocked = (sum(result[key] for result in results) for key in ("compute_seconds", "blocked_seconds"))
    return 100 * said, 100 * computing / (computing + blocked)


@pytest.mark.parametrize("case", METHODS)
def test_computing_is_that_of_the_virtual_clock(text: Path, case: str) -> None:
    said, shown = shares(of(text, case))
    assert said == pytest.approx(shown, abs=4.0 if case in NUMBERS_DECIDE else 0.1)

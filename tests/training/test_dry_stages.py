"""Dry runs of replicas cut into stages, against the runs themselves: bytes, memory, waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.comm.mesh import Mesh
from isles.comm.virtual.run import run_virtual
from isles.data import load_corpus
from isles.training.config.sections import Config
from isles.training.dry_run import DryRun, dry_run
from isles.training.running.virtual import VirtualWorkers
from isles.training.trainer import Trainer, train_worker
from tests.training.runs import tiny, write_text

STAGES = ["model.layers=4", "data.batch_size=4", "data.validation_fraction=0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "net.toml").write_text('bandwidth = "2Mbit/s"\nlatency = "25ms"\n')
    return write_text(folder / "text.txt")


def of(text: Path, *more: str, method: str = "noloco", workers: int = 4, steps: int = 7, stages: int = 2) -> Config:
    links = f"world.links={text.parent / 'net.toml'}"
    return tiny(
        text, *STAGES, links, f"pipeline.stages={stages}", *more, method=method, workers=workers, steps=steps
    )


def ran(config: Config) -> list[dict[str, Any]]:
    """What each worker counts on the virtual clock."""
    args = (config, None, None, load_corpus(config.data))
    return VirtualWorkers(train_worker, config.world.workers, config, args).join()


def check(config: Config, within: float) -> DryRun:
    """Bytes are equal, worker by worker; the shares of computing and of the bubble are so near, in points."""
    planned, results = dry_run(config), ran(config)
    assert planned.bytes_sent == tuple(result["bytes_sent"] for result in results)
    assert planned.transfers is not None
    assert planned.transfers.utilisation is not None and planned.transfers.bubble is not None
    keys = ("compute_seconds", "blocked_seconds", "pipeline_seconds")
    computing, blocked, waited = (sum(result[key] for result in results) for key in keys)
    total = computing + blocked
    assert 100 * planned.transfers.utilisation == pytest.approx(100 * computing / total, abs=within)
    assert 100 * planned.transfers.bubble == pytest.approx(100 * waited / total, abs=within)
    assert planned.transfers.step == pytest.approx(total / config.run.steps / config.world.workers, rel=within / 50)
    return planned


TIED, UNTIED = "model.tie_embeddings=true", "model.tie_embeddings=false"


@pytest.mark.parametrize(
    ("method", "stages", "workers", "more"),
    [
        ("noloco", 2, 4, [TIED]),
        ("diloco", 2, 4, [UNTIED, "inner.max_norm=0"]),
        ("eager", 2, 4, ["pipeline.routing=random", "pipeline.together=false"]),
        ("diloco", 2, 8, ["world.inner=2", UNTIED]),
        ("ddp", 2, 4, ["pipeline.recompute=true"]),
        ("none", 4, 4, ["pipeline.in_flight=1f1b"]),
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

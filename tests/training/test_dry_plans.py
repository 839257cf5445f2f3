"""Dry runs by a plan of paths, against the runs themselves: bytes, forwards kept, seconds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.data import load_corpus
from isles.network.routing.problem import Costs, Problem, replay_paths
from isles.network.routing.search import blind
from isles.training.config.sections import Config
from isles.training.dry_run import DryRun, dry_run
from isles.training.running.virtual import VirtualWorkers
from isles.training.trainer import train_worker
from tests.network.routing.instances import drawn
from tests.training.runs import tiny, write_text
from tests.training.test_partial import words, write_plan

RESTS = Costs(rest=0.05, rest_at_origin=0.02)
QUIET = ["data.validation_fraction=0", "run.log_every=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return tmp_path


def of(folder: Path, problem: Problem, seed: int, *more: str, steps: int = 3, **given: Any) -> tuple[Config, float]:
    """A run by a plan of drawn legal paths, and the seconds that the plan says."""
    made = write_plan(folder, problem, blind(problem, seed))
    asked = {"method": "ddp", "workers": problem.nodes, **given}
    config = tiny(folder / "text.txt", *words(folder, made), *QUIET, *more, steps=steps, **asked)
    return config, made.step_seconds


def ran(config: Config) -> list[dict[str, Any]]:
    """What each worker counts on the virtual clock."""
    args = (config, None, None, load_corpus(config.data))
    return VirtualWorkers(train_worker, config.world.workers, config, args).join()


def check(config: Config) -> DryRun:
    """Bytes of every worker, and seconds of all steps, exchanges included."""
    planned, results = dry_run(config), ran(config)
    assert planned.bytes_sent == tuple(result["bytes_sent"] for result in results)
    took = sum(result["compute_seconds"] + result["blocked_seconds"] for result in results)
    waited = sum(result["channels"].get("pipeline", {"blocked_seconds": 0.0})["blocked_seconds"] for result in results)
    found = planned.transfers
    print(planned.step_seconds, found, took / config.run.steps / len(results), waited / took)
    assert found is not None and found.bubble is not None
    assert found.step == pytest.approx(took / config.run.steps / len(results), rel=1e-9)
    assert found.bubble == pytest.approx(waited / took, abs=1e-9)
    return planned


@pytest.mark.parametrize(
    ("seed", "method", "more"),
    [
        (3, "ddp", ["pipeline.clip=stage"]),
        (4, "ddp", []),
        (5, "localsgd", ["replicas.sync_every=2", "pipeline.boundary=dct:0.75", "pipeline.codec=int8"]),
        (6, "noloco", ["replicas.sync_every=2", "world.trust_ratio=1e9"]),
    ],
)
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 3, 2)])
def test_it_is_what_the_virtual_clock_shows(
    folder: Path, sizes: tuple[int, ...], seed: int, method: str, more: list[str]
) -> None:
    problem = drawn(seed, sizes, costs=RESTS if seed % 2 else None, waves=1 + seed % 2, path_length=2)
    config, said = of(folder, problem, seed, *more, method=method)
    planned = check(config)
    assert planned.step_seconds == pytest.approx(said, abs=1e-9)

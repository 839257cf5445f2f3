"""Plans of memory for the stages of a pipeline: the bits of the run without one, within what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isles.memory.costs import ACTIVATIONS, Placement
from isles.memory.plan import MemoryPlan
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.memory import in_use
from isles.training.memory import plans as planning
from tests.memory.loops import plan_of

TIERS = ("host", "optimizer", "device")
PLANS = {
    "host": lambda index: Placement("host", "recompute"),
    "optimizer": lambda index: Placement("optimizer", "keep"),
    "swap": lambda index: Placement("device", "swap"),
    "mixed": lambda index: Placement(TIERS[index % 3], ACTIVATIONS[(index + 1) % 3]),  # type: ignore[arg-type]
}


def _config(stages: int, routing: str, *words: str, workers: int = 0, backend: str = "virtual") -> Any:
    small = [
        "model.d_model=64",
        f"model.layers={2 * stages + 1}",
        "model.context=32",
        "model.tie_embeddings=false",
        "data.batch_size=16",
        "data.validation_sequences=2",
        f"world.backend={backend}",
        f"world.workers={workers or 2 * stages}",
        "run.steps=3",
        "run.log_every=1",
        f"pipeline.stages={stages}",
        "pipeline.microbatches=4",
        f"pipeline.routing={routing}",
        "pipeline.loss_at=last",
        "replicas.sync_every=2",
    ]
    return read_config(None, {"replicas.method": "diloco"}, [*small, *words])


def _left(config: Any, out: Path) -> tuple[bytes, dict[str, Any], list[Any]]:
    launch(config, out, lambda line: None, lambda notice: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = sorted((line["step"], line["loss"]) for line in lines if "loss" in line)
    return (out / "model.safetensors").read_bytes(), json.loads((out / "summary.json").read_text()), losses


def _cases() -> list[Any]:
    every = [(stages, routing, plan) for stages in (2, 3) for routing in ("fixed", "random") for plan in PLANS]
    return every


@pytest.mark.long
@pytest.mark.parametrize(("stages", "routing", "plan"), _cases())
def test_stages_keep_their_bits(
    stages: int, routing: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(config: Any, made: Any, here: Any, **_: Any) -> MemoryPlan:
        placements = [PLANS[plan](index) for index in range(len(made.units))]
        return plan_of(made, placements, accumulation=config.pipeline.microbatches)

    monkeypatch.setattr(planning, "planned", chosen)
    planning._PREPARED.clear()
    wanted = _left(_config(stages, routing), tmp_path / "plain")
    peaks: list[tuple[int, int]] = []
    real = in_use.PlannedMemory.record

    def told(self: in_use.PlannedMemory, seconds: float) -> Any:
        assert self.managed is not None
        peaks.append((self._measured_peak(), self.managed.plan.peak))
        return real(self, seconds)

    monkeypatch.setattr(in_use.PlannedMemory, "record", told)
    got = _left(_config(stages, routing, "memory.method=auto", "memory.machine=RTX 3060"), tmp_path / "planned")
    assert got[2] == wanted[2]
    assert got[0] == wanted[0]
    for key in ("val_loss", "replica_std", "bytes_sent_per_worker"):
        assert got[1][key] == wanted[1][key]
    planning._PREPARED.clear()
    assert peaks
    for measured, planned in peaks:
        print(f"{measured / planned:.3f}", end=" ")
        assert measured <= planned


@pytest.mark.long
def test_stages_keep_their_bits_between_processes(tmp_path: Path) -> None:
    words = ["memory.method=auto", "memory.machine=RTX 3060", "memory.device_budget=4MB", "memory.emulate=true"]
    wanted = _left(_config(2, "fixed", backend="distributed", workers=2), tmp_path / "plain")
    got = _left(_config(2, "fixed", *words, backend="distributed", workers=2), tmp_path / "planned")
    assert got[0] == wanted[0]
    assert got[2] == wanted[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["pipeline.recompute=true"],
            r"pipeline\.recompute = true does not go with a plan of memory and pipeline\.stages > 1: "
            "the plan says what is recomputed",
        ),
        (["pipeline.loss_at=origin"], r'computed at the origin, beside its stage: set pipeline\.loss_at = "last"'),
        (
            ["memory.update=early", "inner.max_norm=0"],
            r'memory\.update = "early" does not go .*: it is for whole models',
        ),
        (["memory.device_budget=100kB"], "the least that works"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    config = _config(2, "fixed", "memory.method=auto", "memory.machine=RTX 3060", *words)
    with pytest.raises(ValueError, match=told) as caught:
        launch(config, tmp_path / "run", lambda line: None, lambda notice: None)
    assert "\n" not in str(caught.value)

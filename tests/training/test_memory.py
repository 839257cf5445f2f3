"""A plan of memory under every method, and under a whole run: the bits of the run without it."""

from __future__ import annotations

import json
import random
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.virtual.cluster import VirtualTransport
from isles.memory.costs import ACTIVATIONS, TIERS, Placement
from isles.memory.engines.base import Inline, ThreadEngine
from isles.memory.optimizer import Managed
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from isles.replicas import METHODS, method
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from tests.gloo import run_gloo
from tests.memory.loops import DECODER, SHAPE, UNITS, adamw, plan_of, profiled

PLANS = {
    "host": (Placement("host", "recompute"),) * UNITS,
    "optimizer": (Placement("optimizer", "keep"),) * UNITS,
    "device": (Placement("device", "swap"),) * UNITS,
    "mixed": tuple(
        Placement(tier, one)
        for tier, one in (("device", "swap"), ("optimizer", "swap"), ("host", "recompute"), ("host", "keep"))
    ),
}
SHORT = {"sync_every": 3, "bucket_megabytes": 0.1}
BRIEF = ("ddp",)  # others under whole runs: see test_same_bits.py
COMPOSED = [name for name in METHODS if name not in ("ist", "fsdp")]


def _settings(name: str) -> dict[str, Any]:
    """Rounds short enough for several to be in a short run."""
    known = method(name).Config.__dataclass_fields__
    return {key: value for key, value in SHORT.items() if key in known}


@dataclass(frozen=True)
class Pause:
    """Where a run stops, and the plan under which it goes on; None: without one."""

    after: int
    plan: str | None


class _Part:
    """A worker's model and optimizer, under a plan or not; without clipping where updates are early."""

    def __init__(self, world: Any, name: str, plan: str | None, accumulation: int, update: str = "exact") -> None:
        kind = method(name)
        self.model, self.managed = Decoder(SHAPE), None
        self.inner: torch.optim.Optimizer = (
            adamw(self.model) if kind.usual_inner == "adamw" else torch.optim.SGD(self.model.parameters(), lr=1e-2)
        )
        if plan is not None:
            made = profiled(DECODER, "none")
            chosen = plan_of(made, PLANS[plan], accumulation=accumulation, update=update)
            engine = Inline() if isinstance(world.world.transport, VirtualTransport) else ThreadEngine()
            self.managed = Managed(
                chosen, self.model, self.inner, profile=made, machine=MACHINES["H100"], engine=engine
            )
        taken = self.managed or self.inner
        max_norm = 1.0 if update == "exact" else None
        self.optimizer = kind(self.model, taken, world.outer, kind.Config(**_settings(name)), max_norm=max_norm)
        self.optimizer.batches = accumulation
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: 1 / (1 + done))

    def close(self) -> None:
        if self.managed is not None:
            self.managed.close()

    def handed_to(self, other: _Part) -> _Part:
        """The other one, which goes on from here."""
        saved = deepcopy([self.optimizer.state_dict(), self.optimizer.weights(), self.schedule.state_dict()])
        self.close()
        other.optimizer.load_weights(saved[1])
        other.optimizer.load_state_dict(saved[0])
        other.schedule.load_state_dict(saved[2])
        return other


def _worker(
    world: Any,
    name: str,
    plan: str | None,
    accumulation: int,
    steps: int = 7,
    pause: Pause | None = None,
    update: str = "exact",
) -> tuple[Any, ...]:
    part = _Part(world, name, plan, accumulation, update)
    losses = []
    for step in range(steps):
        if pause is not None and step == pause.after:
            part = part.handed_to(_Part(world, name, pause.plan, accumulation, update))
        for index in range(accumulation):
            with part.optimizer.no_sync() if index + 1 < accumulation else nullcontext():
                number = 1000 * world.rank + step * accumulation + index
                loss = part.model(DECODER.batch(number)).loss / accumulation
                loss.backward()
                losses.append(loss.item())
        part.optimizer.step()
        part.optimizer.zero_grad()
        part.schedule.step()
        if step == 4:
            with part.optimizer.evaluation_weights() as judged, torch.no_grad():
                losses.append(judged(DECODER.batch(99)).loss.item())
    part.optimizer.finish()
    part.optimizer.catch_up()
    parameters = list(part.model.parameters())
    weights = [parameter.detach().clone() for parameter in parameters]
    state = [v.clone() for p in parameters for v in part.inner.state[p].values() if isinstance(v, Tensor)]
    sent = world.world.traffic.total("bytes_sent")
    part.close()
    return losses, weights, state, sent


def _is_same(got: Sequence[tuple[Any, ...]], wanted: Sequence[tuple[Any, ...]]) -> None:
    for one, plain in zip(got, wanted, strict=True):
        assert one[0] == plain[0]
        for own, theirs in ((one[1], plain[1]), (one[2], plain[2])):
            assert len(own) == len(theirs)
            assert all(map(torch.equal, own, theirs))
        assert one[3] == plain[3]


def _cases() -> list[Any]:
    """In `make test` some methods under one plan each; all of them take minutes."""
    cases, rng = [], random.Random(0)
    for name in COMPOSED:
        first = rng.choice(list(PLANS)), rng.choice([1, 2])
        for plan in PLANS:
            for accumulation in (1, 2):
                short = name in BRIEF and (plan, accumulation) == first
                cases.append(pytest.param(name, plan, accumulation, marks=[] if short else [pytest.mark.long]))
    return cases


def _virtual(*args: Any) -> list[tuple[Any, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return isles.run_virtual(lambda world: _worker(world, *args), workers=2)


@pytest.mark.parametrize(("name", "plan", "accumulation"), _cases())
def test_every_method_keeps_its_bits(name: str, plan: str, accumulation: int) -> None:
    _is_same(_virtual(name, plan, accumulation), _virtual(name, None, accumulation))


@pytest.mark.parametrize("then", [None, "mixed"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in COMPOSED])
def test_every_method_goes_on_from_a_checkpoint(name: str, then: str | None) -> None:
    """Under another plan, or under none: against a run that was stopped and went on without plans."""
    wanted = _virtual(name, None, 1, 7, Pause(3, None))
    _is_same(_virtual(name, "host" if then else "optimizer", 1, 7, Pause(3, then)), wanted)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "plan", [one if one == "mixed" else pytest.param(one, marks=pytest.mark.long) for one in PLANS]
)
def test_ddp_hands_buckets_on_as_they_come(plan: str, accumulation: int) -> None:
    """KARMA's phased exchange: the bits of plain ddp."""
    wanted, got = (_virtual("ddp", one, accumulation, 5, Pause(3, one), "early") for one in (None, plan))
    _is_same(got, wanted)


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco"])
def test_methods_keep_their_bits_between_processes(name: str, plan: str, accumulation: int) -> None:
    wanted, got = (run_gloo(_worker, args=(name, one, accumulation)) for one in (None, plan))
    _is_same(got, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def _config(*words: str, workers: int = 2, backend: str = "virtual", steps: int = 6) -> Config:
    small = [
        "model.d_model=64",
        "model.layers=4",
        "model.context=32",
        "data.batch_size=2",
        "data.validation_sequences=2",
        f"world.backend={backend}",
        f"run.steps={steps}",
        f"world.workers={workers}",
        "run.log_every=2",
        "replicas.sync_every=2",
    ]
    return read_config(None, {"replicas.method": "diloco"}, [*small, *words])


def _launch(config: Config, out: Path) -> None:
    launch(config, out, lambda line: None, lambda notice: None)


def _left(out: Path) -> tuple[bytes, dict[str, Any], list[tuple[int, float]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    losses = sorted((line["step"], line["loss"]) for line in lines if "loss" in line)  # processes write in any order
    return (out / "model.safetensors").read_bytes(), summary, losses


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("virtual", ["memory.method=auto", "memory.machine=RTX 3060", "memory.device_budget=2MB"]),
        pytest.param(
            "virtual",
            ["memory.method=autohete", "memory.machine=RTX 3060", "memory.device_budget=2MB"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "distributed",
            ["memory.method=auto", "memory.emulate=true", "memory.machine=RTX 3060", "memory.device_budget=2MB"],
            marks=pytest.mark.long,
        ),
        pytest.param("distributed", ["memory.method=checkpoint"], marks=pytest.mark.long),
    ],
)
def test_a_run_keeps_its_bits(backend: str, words: list[str], tmp_path: Path) -> None:
    _launch(_config(backend=backend, steps=4), tmp_path / "plain")
    _launch(_config(*words, backend=backend, steps=4), tmp_path / "planned")
    plain, planned = _left(tmp_path / "plain"), _left(tmp_path / "planned")
    assert planned[0] == plain[0]
    assert planned[2] == plain[2]
    for key in ("val_loss", "val_loss_replicas", "replica_std", "bytes_sent_per_worker"):
        assert planned[1][key] == plain[1][key]
    told = planned[1]["memory"]
    assert "memory" not in plain[1]
    assert 0.9 * told["planned_peak_bytes"] <= told["measured_peak_bytes"] <= told["planned_peak_bytes"]
    assert told["planned_step_seconds"] > 0
    if backend == "virtual":  # a named machine's plan is the virtual clock's step
        assert told["measured_step_seconds"] == pytest.approx(told["planned_step_seconds"], rel=1e-6)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memory ")]


def test_a_run_with_blocks_on_disk_keeps_its_bits(tmp_path: Path) -> None:
    """To its end, where their weights are written as those of any model."""
    words = ["memory.method=auto", "memory.machine=laptop-16", "memory.device_budget=3.7MB", f"memory.disk={tmp_path}"]
    _launch(_config(steps=2), tmp_path / "plain")
    _launch(_config(*words, steps=2), tmp_path / "planned")
    plain, planned = _left(tmp_path / "plain"), _left(tmp_path / "planned")
    assert planned[0] == plain[0]
    assert planned[2] == plain[2]
    assert "F" in planned[1]["memory"]["plan"]
    assert planned[1]["memory"]["measured_peak_bytes"] <= planned[1]["memory"]["planned_peak_bytes"]
    assert not list(tmp_path.glob("isles-*"))


def test_places_and_activations_are_all_tried() -> None:
    tried = {one for plan in PLANS.values() for one in plan}
    assert {one.tier for one in tried} == set(TIERS) - {"disk", "file"}
    assert {one.activations for one in tried} == set(ACTIVATIONS)


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_ddp_hands_buckets_on_between_processes(plan: str) -> None:
    wanted, got = (run_gloo(_worker, args=("ddp", one, 2, 5, None, "early")) for one in (None, plan))
    _is_same(got, wanted)

"""A plan of memory under every method, and under a whole run: the bits of the run without it."""

from __future__ import annotations

import json
import random
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.memory.costs import ACTIVATIONS, PLACES, Placement
from isles.memory.engines.inline import Inline
from isles.memory.managed import manage
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from isles.replicas import METHODS, method
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.running.run import launch
from tests.memory.loops import DECODER, SHAPE, UNITS, adamw, plan_of, profiled

PLANS = {
    "host": (Placement("host", "recompute"),) * UNITS,
    "optimizer": (Placement("optimizer", "keep"),) * UNITS,
    "device": (Placement("device", "swap"),) * UNITS,
    "mixed": tuple(
        Placement(place, one)
        for place, one in (("device", "swap"), ("optimizer", "swap"), ("host", "recompute"), ("host", "keep"))
    ),
}
SHORT = {"sync_every": 3, "bucket_megabytes": 0.1}
BRIEF = ("ddp", "diloco", "noloco", "streaming-diloco", "demo")
COMPOSED = [name for name in METHODS if name not in ("ist", "fsdp")]


def _settings(name: str) -> dict[str, Any]:
    """Rounds short enough for several to be in a short run."""
    known = method(name).Config.__dataclass_fields__
    return {key: value for key, value in SHORT.items() if key in known}


def _worker(world: Any, name: str, plan: str | None, accumulation: int, steps: int = 7) -> tuple[Any, ...]:
    kind = method(name)
    model = Decoder(SHAPE)
    inner: torch.optim.Optimizer = (
        adamw(model) if kind.usual_inner == "adamw" else torch.optim.SGD(model.parameters(), lr=1e-2)
    )
    managed = None
    if plan is not None:
        made = profiled(DECODER, "none")
        chosen = plan_of(made, PLANS[plan], accumulation=accumulation)
        managed = manage(chosen, model, inner, profile=made, machine=MACHINES["H100"], engine=Inline())
    optimizer = kind(model, managed or inner, world.outer, kind.Config(**_settings(name)), max_norm=1.0)
    optimizer.batches = accumulation
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    losses = []
    for step in range(steps):
        for index in range(accumulation):
            with optimizer.no_sync() if index + 1 < accumulation else nullcontext():
                number = 1000 * world.rank + step * accumulation + index
                loss = model(DECODER.batch(number)).loss / accumulation
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 4:
            with optimizer.evaluation_weights() as judged, torch.no_grad():
                losses.append(judged(DECODER.batch(99)).loss.item())
    optimizer.finish()
    optimizer.catch_up()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    state = [v.clone() for p in model.parameters() for v in inner.state[p].values() if isinstance(v, Tensor)]
    sent = world.world.traffic.total("bytes_sent")
    if managed is not None:
        managed.close()
    return losses, weights, state, sent


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


@pytest.mark.parametrize(("name", "plan", "accumulation"), _cases())
def test_every_method_keeps_its_bits(name: str, plan: str, accumulation: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, got = (
            isles.run_virtual(lambda world, one=one: _worker(world, name, one, accumulation), workers=2)
            for one in (None, plan)
        )
    for plain, planned in zip(wanted, got, strict=True):
        assert planned[0] == plain[0]
        assert all(map(torch.equal, planned[1], plain[1]))
        assert len(planned[2]) == len(plain[2])
        assert all(map(torch.equal, planned[2], plain[2]))
        assert planned[3] == plain[3]


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


def _left(out: Path) -> tuple[bytes, dict[str, Any], list[float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return (out / "model.safetensors").read_bytes(), summary, [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("virtual", ["memory.method=auto", "memory.machine=RTX 3060", "memory.device_budget=2MB"]),
        ("virtual", ["memory.method=autohete", "memory.machine=RTX 3060", "memory.device_budget=2MB"]),
        pytest.param(
            "distributed",
            ["memory.method=auto", "memory.emulate=true", "memory.machine=RTX 3060", "memory.device_budget=2MB"],
            marks=pytest.mark.long,
        ),
        pytest.param("distributed", ["memory.method=checkpoint"], marks=pytest.mark.long),
    ],
)
def test_a_run_keeps_its_bits(backend: str, words: list[str], tmp_path: Path) -> None:
    _launch(_config(backend=backend), tmp_path / "plain")
    _launch(_config(*words, backend=backend), tmp_path / "planned")
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["memory.device_budget=12GiB"], "memory.device_budget = '12GiB' is of a plan: set memory.method"),
        (["memory.method=auto", 'memory.device_budget="12"'], "memory.device_budget = '12': write its unit too"),
        (["memory.method=auto", "memory.device_budget=0GiB"], "memory.device_budget = '0GiB': choose memory above 0"),
        (
            ["memory.method=auto", "memory.machine=H100", "memory.device_budget=1TiB"],
            "is more than the 74.5GiB of H100",
        ),
        (["memory.method=auto", "memory.machine=H1000"], "memory.machine: unknown machine 'H1000'"),
        (["memory.method=autoo"], "memory.method"),
        (["memory.metod=auto"], "unknown key 'memory.metod'"),
        (["memory.method=auto", "memory.machine=H100", "memory.update=early"], "set inner.max_norm = 0"),
        (["memory.method=auto", "memory.machine=H100", "memory.device_budget=100kB"], "the least that works"),
        (["memory.method=auto", "memory.plan=none.json"], "memory.plan = 'none.json': cannot be read"),
        (["memory.method=auto", "model.compile=true"], "leave out compile"),
        (["memory.method=auto", "world.backend=distributed", "memory.machine=H100"], "set memory.emulate = true"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        _launch(_config(*words), tmp_path / "run")
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["ist", "fsdp"])
def test_methods_that_hold_parameters_by_themselves_are_refused(name: str, tmp_path: Path) -> None:
    config = read_config(None, {"replicas.method": name, "memory.method": "auto"}, ["memory.machine=H100"])
    with pytest.raises(ValueError, match=rf"memory\.method: {name} changes or shards the parameters"):
        _launch(config, tmp_path / "run")


def test_places_and_activations_are_all_tried() -> None:
    tried = {one for plan in PLANS.values() for one in plan}
    assert {one.place for one in tried} == set(PLACES) - {"disk", "file"}
    assert {one.activations for one in tried} == set(ACTIVATIONS)

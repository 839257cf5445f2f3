"""Data parallel under a plan of memory: when gradients are delivered, and what is measured."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import isles
from isles.memory.costs import Placement
from isles.memory.engines.base import Inline
from isles.memory.optimizer import Managed
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from isles.replicas.replica import Plain
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.memory.loops import DECODER, SHAPE, UNITS, adamw, plan_of, profiled
from tests.training.test_memory import PLANS, _Part, _worker

PLANS.setdefault("kept", (Placement("host", "keep"),) * UNITS)


def _ddp(plan: str | None) -> list[tuple[Any, ...]]:
    return isles.run_virtual(lambda world: _worker(world, "ddp", plan, 2, 2), workers=2)


class _LateGradients(Inline):
    """What goes down arrives at the next wait: as late as it may. A lane that does its work at once, as that of the
    virtual backend, has delivered all before `no_sync` ends, and no mutant of `no_sync` can show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], None]] = []

    def submit(self, lane: Any, urgency: Any, seconds: float, work: Any, done: Any) -> None:
        now = partial(super().submit, lane, urgency, seconds, work, done)
        self.late.append(now) if lane == "down" else now()

    def wait_for(self, event: Any, what: str) -> None:
        late, self.late = self.late, []
        for run in late:
            run()
        assert event.happened, what


def test_gradients_delivered_after_no_sync_travel_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The house's DDP sends a bucket again that a later backward pass has changed, so such a mutant keeps the bits; but
    it is told, and it shows in the bytes, which a plan must not change.
    """
    wanted = _ddp(None)
    monkeypatch.setattr("tests.training.test_memory.Inline", _LateGradients)
    assert [one[3] for one in _ddp("kept")] == [one[3] for one in wanted]

    @contextmanager
    def late(self: Plain) -> Iterator[None]:
        yield  # without self.gradients()

    monkeypatch.setattr(Plain, "no_sync", late)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = _ddp("kept")
    assert any("travel again" in str(one.message) for one in told)
    for plain, mutant in zip(wanted, got, strict=True):
        assert all(map(torch.equal, mutant[1], plain[1]))
        assert mutant[3] > plain[3]  # what test_every_method_keeps_its_bits asserts to be equal


def test_updates_begin_while_later_buckets_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time: how many buckets had not come yet when each unit's update began."""
    travelling: list[int] = []
    real = Managed._begin_update

    def noted(self: Managed, unit: int) -> None:
        buckets = there[id(self)].buckets
        travelling.append(sum(one.transfer is None or not one.transfer.done() for one in buckets))
        real(self, unit)

    monkeypatch.setattr(Managed, "_begin_update", noted)
    there: dict[int, Any] = {}

    def worker(world: Any) -> None:
        part = _Part(world, "ddp", "kept", 1, "early")
        there[id(part.managed)] = part.optimizer
        for step in range(2):
            part.model(DECODER.batch(step)).loss.backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    isles.run_virtual(worker, workers=2, links="10Mbit/s, 1ms", step_seconds=1.0)
    assert len(travelling) == 2 * 2 * UNITS
    assert sum(count > 0 for count in travelling) >= len(travelling) // 2


@pytest.mark.parametrize(("options", "what"), [({"error_feedback": "local"}, "error feedback"), ({}, "max_norm")])
def test_what_needs_all_buckets_is_refused(options: dict[str, Any], what: str) -> None:
    def worker(world: Any) -> None:
        model, made = Decoder(SHAPE), profiled(DECODER, "none")
        plan = plan_of(made, PLANS["kept"], update="early")
        machine = MACHINES["H100"]
        with Managed(plan, model, adamw(model), profile=made, machine=machine, engine=Inline()) as managed:
            isles.DDP(model, managed, world.outer, max_norm=None if options else 1.0, **options)

    with pytest.raises(ValueError, match=f"{what} needs all of them first: leave {what} out, or update exactly"):
        isles.run_virtual(worker, workers=2)


def test_what_cannot_be_taken_back_is_said() -> None:
    def worker(world: Any) -> None:
        part = _Part(world, "ddp", "kept", 1, "early")
        part.model(DECODER.batch(0)).loss.backward()
        part.managed.gradients()
        with pytest.raises(RuntimeError, match="updates by these gradients have begun"):
            part.optimizer.zero_grad()
        part.optimizer.step()
        part.model(DECODER.batch(0)).loss.backward()
        part.model(DECODER.batch(1)).loss.backward()

    with pytest.raises(ValueError, match=r"a second backward pass before step.*no_sync"):
        isles.run_virtual(worker, workers=1)


SMALL = [
    "model.d_model=64",
    "model.layers=4",
    "model.context=32",
    "data.batch_size=2",
    "world.backend=virtual",
    "world.workers=2",
    "run.steps=3",
    "replicas.bucket_megabytes=0.1",
]


def _run(out: Path, *words: str, memory: str = "none") -> dict[str, Any]:
    config = read_config(None, {"replicas.method": "ddp", "memory.method": memory}, [*SMALL, *words])
    launch(config, out, lambda line: None, lambda notice: None)
    return json.loads((out / "summary.json").read_text())


def test_what_ddp_holds_on_the_host_is_not_the_device_s(tmp_path: Path) -> None:
    told = _run(tmp_path, "memory.machine=RTX 3060", memory="auto")["memory"]
    assert 0.9 * told["planned_peak_bytes"] <= told["measured_peak_bytes"] <= told["planned_peak_bytes"]


def test_early_updates_with_error_feedback_are_refused(tmp_path: Path) -> None:
    words = ("inner.max_norm=0", "memory.update=early", "memory.machine=RTX 3060", "memory.device_budget=2MB")
    with pytest.raises(ValueError, match=r'replicas\.error_feedback = "local" does not go .* set it to "none"'):
        _run(tmp_path / "none", *words, "replicas.error_feedback=local", memory="auto")

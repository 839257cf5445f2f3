"""Mutants of the executor, kept: without what it takes care of, bits are lost. Each was a bug once, and silent.

Gradients that are delivered after `no_sync()` ended: `tests/training/test_memory_ddp.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.base.wrapping import Wrapping
from isles.memory.costs import Placement, least_peak
from isles.memory.engines.base import Inline, ThreadEngine
from isles.memory.flow import Slots
from isles.memory.optimizer import Managed
from isles.memory.parameters import DeviceCopy
from tests.memory.loops import DECODER, UNITS, train
from tests.memory.managing import HOST, OPTIMIZER, managed_decoder, one_step


def _keeps_bits(placements: tuple[Placement, ...], accumulation: int = 1, **settings: Any) -> bool:
    wanted = train(DECODER, accumulation=accumulation, steps=3, max_norm=None)
    got = train(DECODER, placements, accumulation=accumulation, steps=3, max_norm=None, **settings)
    return got.same(wanted)


def test_updates_need_gradients_that_zero_grad_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _keeps_bits(OPTIMIZER, engine=_Held())

    def reachable(self: Managed, index: int, settings: Any) -> None:
        part, device_copy = self._parts[index], self.runner.device_copy[index]
        updated, refreshed = self.engine.event(), self.engine.event()
        self.runner.flow.updated[index], self.runner.flow.refreshed[index] = updated, refreshed

        def done() -> None:
            updated.fire()
            device_copy.refresh()
            refreshed.fire()

        self.runner.submit("host", (index,), 0.0, partial(part.step, settings), done)  # by whatever .grad is then

    monkeypatch.setattr(Managed, "_queue", reachable)
    monkeypatch.setattr(Managed, "zero_grad", Wrapping.zero_grad)
    with pytest.raises((AssertionError, KeyError)):  # no state was ever made, or it is of fewer updates
        assert _keeps_bits(OPTIMIZER, engine=_Held())


class _Held(Inline):
    """What one lane does happens when somebody waits for it: as late as it may."""

    def __init__(self, held: str = "host") -> None:
        super().__init__()
        self.held, self.late = held, list[partial[None]]()

    def submit(self, lane: Any, urgency: Any, seconds: float, work: Any, done: Any) -> None:
        if lane != self.held:
            super().submit(lane, urgency, seconds, work, done)
            return
        self.late.append(partial(super().submit, lane, urgency, seconds, work, done))

    def wait_for(self, event: Any, what: str) -> None:
        self.late.sort(key=lambda one: one.args[1])
        while self.late and not event.happened:
            self.late.pop(0)()
        assert event.happened, what


def test_updates_may_be_as_late_as_the_next_use() -> None:
    for placements in (OPTIMIZER, HOST):
        assert _keeps_bits(placements, engine=_Held())


@pytest.mark.parametrize("tier", ["disk", "file"])
def test_writes_may_be_as_late_as_the_next_use(tier: Any, tmp_path: Path) -> None:
    """Of states, by the next update; of weights, by the next pass."""
    assert _keeps_bits((Placement(tier, "keep"),) * UNITS, engine=_Held("write"), disk=str(tmp_path))


def test_readers_need_to_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(engine: Any) -> list[torch.Tensor]:
        model, managed = managed_decoder(OPTIMIZER, engine)
        one_step(model, managed)
        return [tensor.clone() for tensor in model.state_dict().values()]

    wanted = weights(Inline())
    assert all(map(torch.equal, weights(_Held()), wanted))
    monkeypatch.setattr(Managed, "catch_up", lambda self: None)
    assert not all(map(torch.equal, weights(_Held()), wanted))


@pytest.mark.parametrize("engine", [Inline, ThreadEngine])
def test_slots_are_filled_and_emptied_in_turn(engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    turns: dict[int, list[str]] = {}
    for name in ("fill", "empty"):
        real = getattr(DeviceCopy, name)

        def noted(self: DeviceCopy, name: str = name, real: Any = real) -> None:
            turns.setdefault(id(self), []).append(name)
            real(self)

        monkeypatch.setattr(DeviceCopy, name, noted)
    for accumulation in (1, 2):
        assert _keeps_bits(HOST, accumulation, engine=engine())
    assert len(turns) >= UNITS
    for turn in turns.values():
        assert turn == ["empty", *["fill", "empty"] * (len(turn) // 2)]


def test_slots_are_filled_again_when_the_last_use_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is given back holds nothing but NaN here, where a device's would be another block's."""

    def given_back(self: DeviceCopy) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.device)):
            for parameter in self.device:
                parameter.fill_(float("nan"))

    monkeypatch.setattr(DeviceCopy, "empty", given_back)
    room = lambda *asked: 2 * least_peak(*asked)  # noqa: E731  # so much that slots are granted long before their use
    monkeypatch.setattr("tests.memory.loops.least_peak", room)
    assert _keeps_bits(HOST, engine=Inline())
    real = Slots._granted

    def at_once(self: Slots, *args: Any) -> None:
        uses, self._uses = self._uses, {}  # as if no use were under way
        real(self, *args)
        self._uses = uses | self._uses

    monkeypatch.setattr(Slots, "_granted", at_once)
    assert not _keeps_bits(HOST, engine=Inline())

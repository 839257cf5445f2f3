"""What goes wrong around a plan is one clear error, soon; and what the executor takes care of is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from isles.memory.costs import Placement
from isles.memory.engines.base import LaneFailed
from isles.memory.engines.inline import Inline
from isles.memory.engines.paced import Paced
from isles.memory.managed import Managed, manage
from isles.memory.parameters import Brought
from isles.memory.plan import PlanMismatch
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from isles.wrapping import Wrapping
from tests.memory.loops import DECODER, SHAPE, UNITS, Task, adamw, plan_of, profiled, train

HOST = (Placement("host", "swap"),) * UNITS
OPTIMIZER = (Placement("optimizer", "keep"),) * UNITS


def _managed(placements: tuple[Placement, ...] = HOST, engine: Any = None) -> tuple[Decoder, Managed]:
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    plan = plan_of(made, placements)
    return model, manage(plan, model, adamw(model), profile=made, machine=MACHINES["H100"], engine=engine)


def _step(model: Decoder, managed: Managed, number: int = 0) -> None:
    model(DECODER.batch(number)).loss.backward()
    managed.step()
    managed.zero_grad()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memory ")]


@pytest.mark.parametrize("name", ["fill", "take_gradients", "refresh"])
def test_an_error_on_a_lane_reaches_the_computation_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, managed = _managed(OPTIMIZER if name == "refresh" else HOST, Paced())
    broken = MemoryError("the host is full")

    def fail(*_: Any) -> None:
        raise broken

    if name == "take_gradients":
        monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    else:
        monkeypatch.setattr(Brought, name, fail)
    start = time.perf_counter()
    with pytest.raises((LaneFailed, MemoryError)) as caught:
        with managed:
            for number in range(2):
                _step(model, managed, number)
            managed.catch_up()
    assert "the host is full" in str(caught.value)
    assert broken in (caught.value, caught.value.__cause__)
    assert time.perf_counter() - start < 20  # on a loaded machine; the wait itself is woken at once
    assert not _threads()


@pytest.mark.parametrize("how", ["close", "exception", "interrupt"])
def test_no_thread_outlives_the_run(how: str) -> None:
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    plan = plan_of(made, HOST)
    for _ in range(20):
        managed = manage(plan, model, adamw(model), profile=made, machine=MACHINES["H100"], engine=Paced())
        if how == "close":
            _step(model, managed)
            managed.close()
        else:
            error = RuntimeError("in backward") if how == "exception" else KeyboardInterrupt()
            with pytest.raises(type(error)), managed:
                loss = model(DECODER.batch(0)).loss
                loss.register_hook(partial(_raise, error))
                loss.backward()
        assert not _threads()
        assert model(DECODER.batch(0)).loss.isfinite()  # the model has its own forward again


def _raise(error: BaseException, _: Any) -> None:
    raise error


def test_threads_end_with_an_optimizer_that_nobody_closed() -> None:
    model, managed = _managed(engine=Paced())
    _step(model, managed)
    managed.catch_up()
    managed._finalizer()
    assert not _threads()


@pytest.mark.parametrize("engine", [Inline, Paced])
def test_a_forward_pass_without_its_backward_pass_is_said(engine: Callable[[], Any]) -> None:
    model, managed = _managed(engine=engine())
    with pytest.raises(RuntimeError, match="a forward pass was not followed by its backward pass"), managed:
        model(DECODER.batch(0))
        model(DECODER.batch(1))


def test_a_backward_pass_that_runs_twice_is_said() -> None:
    model, managed = _managed((Placement("device", "keep"),) * UNITS, Inline())
    with pytest.raises(RuntimeError, match=r"the backward pass of blocks\.3 ran twice"), managed:
        loss = model(DECODER.batch(0)).loss
        loss.backward(retain_graph=True)
        loss.backward()


def test_forward_passes_without_gradients_may_come_at_any_time() -> None:
    model, managed = _managed(engine=Paced())
    plain = Decoder(SHAPE)
    with managed, torch.no_grad():
        assert torch.equal(model(DECODER.batch(0)).loss, plain(DECODER.batch(0)).loss)
    model, managed = _managed(OPTIMIZER, Paced())
    with managed:
        _step(model, managed)
        with torch.no_grad():
            first = model(DECODER.batch(1)).loss
        assert torch.equal(first, model(DECODER.batch(1)).loss)
        model.zero_grad(set_to_none=True)


def test_a_step_that_is_given_up_leaves_nothing() -> None:
    wanted = train(DECODER, steps=2)
    model, managed = _managed(engine=Paced())
    inner = managed.inner
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda done: 1.0 / (1 + done))
    with managed:
        model(DECODER.batch(7)).loss.backward()
        managed.zero_grad()  # the batch was broken
        for step in range(2):
            model(DECODER.batch(step)).loss.backward()
            managed.gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            managed.step()
            managed.zero_grad()
            schedule.step()
    assert all(map(torch.equal, model.parameters(), wanted.weights))


def test_whoever_reads_the_model_past_the_optimizer_waits() -> None:
    wanted = train(DECODER, steps=1, max_norm=None)
    model, managed = _managed(OPTIMIZER, Paced(pace=True))
    with managed:
        _step(model, managed)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(weights[name], own) for name, own in zip(names, wanted.weights, strict=True))


def test_weights_that_are_loaded_past_the_optimizer_are_used() -> None:
    other = Decoder(SHAPE, seed=7)
    model, managed = _managed(OPTIMIZER, Paced())
    with managed:
        _step(model, managed)
        model.load_state_dict(other.state_dict())
        assert model(DECODER.batch(0)).loss.item() == other(DECODER.batch(0)).loss.item()


def test_early_updates_with_settings_that_change_too_late_are_said() -> None:
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    plan = plan_of(made, HOST, update="early")
    managed = manage(plan, model, adamw(model), profile=made, machine=MACHINES["H100"], engine=Inline())
    with pytest.raises(RuntimeError, match="was changed between the backward pass and step"), managed:
        model(DECODER.batch(0)).loss.backward()
        managed.gradients()
        managed.param_groups[0]["lr"] = 0.5
        managed.step()


def test_a_plan_of_something_else_is_refused() -> None:
    made = profiled(DECODER, "none")
    plan = plan_of(made, HOST)
    bf16, wide = profiled(DECODER, "bf16"), Task(DECODER.make, lambda number: DECODER.batch(number)[:1])
    for other, what in ((bf16, "batch"), (profiled(wide, "none"), "batch")):
        with pytest.raises(PlanMismatch, match=rf"memory\.plan was made for another {what}"):
            plan.check(other)
    smaller = Task(lambda: Decoder(type(SHAPE)(**{**SHAPE.__dict__, "ffn": 128})), DECODER.batch)
    with pytest.raises(PlanMismatch, match="for another model: make a plan for this model"):
        plan.check(profiled(smaller, "none"))


# ---------------------------------------------------------------------------------------------------------------------
# Without what the executor takes care of, bits or memory are lost: each of these was a bug once


def _keeps_bits(placements: tuple[Placement, ...], accumulation: int = 1, **settings: Any) -> bool:
    wanted = train(DECODER, accumulation=accumulation, steps=3, max_norm=None)
    got = train(DECODER, placements, accumulation=accumulation, steps=3, max_norm=None, **settings)
    return got.same(wanted)


def test_updates_need_gradients_that_zero_grad_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _keeps_bits(OPTIMIZER, engine=_Held())

    def reachable(self: Managed, index: int, settings: Any) -> None:
        part, brought = self._parts[index], self.runner.brought[index]
        updated, refreshed = self.engine.event(), self.engine.event()
        self.runner.updated[index], self.runner.refreshed[index] = updated, refreshed

        def done() -> None:
            updated.fire()
            brought.refresh()
            refreshed.fire()

        self.runner.submit("host", (index,), 0.0, partial(part.step, settings), done)  # by whatever .grad is then

    monkeypatch.setattr(Managed, "_queue", reachable)
    monkeypatch.setattr(Managed, "zero_grad", Wrapping.zero_grad)
    with pytest.raises((AssertionError, KeyError)):  # no state was ever made, or it is of fewer updates
        assert _keeps_bits(OPTIMIZER, engine=_Held())


class _Held(Inline):
    """Updates run at the next wait: as late as they may."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], None]] = []

    def submit(self, lane: Any, urgency: Any, seconds: float, work: Any, done: Any) -> None:
        if lane != "host":
            super().submit(lane, urgency, seconds, work, done)
            return
        self.late.append(partial(super().submit, lane, urgency, seconds, work, done))

    def wait_for(self, event: Any, what: str) -> None:
        late, self.late = sorted(self.late, key=lambda one: one.args[1]), []
        for run in late:
            run()
        assert event.happened, what


def test_updates_may_be_as_late_as_the_next_use() -> None:
    for placements in (OPTIMIZER, HOST):
        assert _keeps_bits(placements, engine=_Held())


def test_readers_need_to_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(engine: Any) -> list[torch.Tensor]:
        model, managed = _managed(OPTIMIZER, engine)
        _step(model, managed)
        return [tensor.clone() for tensor in model.state_dict().values()]

    wanted = weights(Inline())
    assert all(map(torch.equal, weights(_Held()), wanted))
    monkeypatch.setattr(Managed, "catch_up", lambda self: None)
    assert not all(map(torch.equal, weights(_Held()), wanted))


@pytest.mark.parametrize("engine", [Inline, Paced])
def test_slots_are_filled_and_emptied_in_turn(engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    turns: dict[int, list[str]] = {}
    for name in ("fill", "empty"):
        real = getattr(Brought, name)

        def noted(self: Brought, name: str = name, real: Any = real) -> None:
            turns.setdefault(id(self), []).append(name)
            real(self)

        monkeypatch.setattr(Brought, name, noted)
    for accumulation in (1, 2):
        assert _keeps_bits(HOST, accumulation, engine=engine())
    assert len(turns) >= UNITS
    for turn in turns.values():
        assert turn == ["empty", *["fill", "empty"] * (len(turn) // 2)]

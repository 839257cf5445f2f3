"""What goes wrong around a plan is one clear error, soon."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isles
from isles.memory.activations import Swapped
from isles.memory.costs import Placement
from isles.memory.engines.base import Engine, Inline, LaneFailed, ThreadEngine
from isles.memory.optimizer import Managed
from isles.memory.parameters import DeviceCopy
from isles.memory.plan import PlanMismatch
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from isles.training.config.reading import read_config
from isles.training.step import Whole
from isles.training.worker import train_worker
from tests.memory.loops import DECODER, SHAPE, UNITS, Task, adamw, plan_of, profiled, train
from tests.memory.managing import HOST, OPTIMIZER, managed_decoder, one_step


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memory ")]


_BREAKS = {
    "up": (DeviceCopy, "fill", HOST),
    "up, after an update": (DeviceCopy, "refresh", OPTIMIZER),
    "up, activations": (Swapped, "to_device", HOST),
    "down": (Swapped, "to_host", HOST),
    "host": (torch.optim.AdamW, "step", HOST),
}


@pytest.mark.parametrize("lane", _BREAKS)
def test_an_error_on_a_lane_reaches_the_computation_within_a_second(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, failed = MemoryError("the host is full"), [0.0]
    kind, name, plan = _BREAKS[lane]

    def fail(*_: Any) -> None:
        failed[0] = time.perf_counter()
        raise broken

    late = []
    for _ in range(3):  # on a loaded machine a thread may not be served for a second
        model, managed = managed_decoder(plan, ThreadEngine())
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, fail)
            with pytest.raises((LaneFailed, MemoryError)) as caught, managed:
                for number in range(2):
                    one_step(model, managed, number)
                managed.catch_up()
        late.append(time.perf_counter() - failed[0])
        assert "the host is full" in str(caught.value)
        assert broken in (caught.value, caught.value.__cause__)
        assert not _threads()
        if late[-1] < 1:
            break
    assert min(late) < 1


@pytest.mark.parametrize("how", ["close", "exception", "interrupt"])
def test_no_thread_outlives_the_run(how: str) -> None:
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    plan = plan_of(made, HOST)
    for _ in range(20):
        managed = Managed(plan, model, adamw(model), profile=made, machine=MACHINES["H100"], engine=ThreadEngine())
        if how == "close":
            one_step(model, managed)
            managed.close()
        else:
            with pytest.raises(RuntimeError if how == "exception" else KeyboardInterrupt), managed:
                loss = model(DECODER.batch(0)).loss
                loss.register_hook(_raise if how == "exception" else _interrupt)
                loss.backward()
        assert not _threads()
        assert model(DECODER.batch(0)).loss.isfinite()  # the model has its own forward again
        assert model.state_dict()  # and nobody who reads it waits for updates that will not come


def _raise(_: Any) -> None:
    raise RuntimeError("in backward")


def _interrupt(_: Any) -> None:
    signal.raise_signal(signal.SIGINT)  # as Ctrl-C
    time.sleep(0)


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_no_thread_outlives_a_run_of_the_trainer(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["world.workers=1", "model.d_model=64", "model.layers=4", "model.context=32", "data.batch_size=2"]
    moved = ["memory.method=auto", "memory.machine=RTX 3060", "memory.device_budget=2MB", "memory.emulate=true"]
    config = read_config(None, {"replicas.method": "none", "world.backend": "distributed"}, [*small, *moved])
    real, passes = Whole._backward, list[int]()

    def breaks(self: Whole, tokens: torch.Tensor, *share: Any) -> torch.Tensor:
        passes.append(1)
        if len(passes) < 3:
            return real(self, tokens, *share)
        assert _threads()
        loss = self._model(tokens).loss
        loss.register_hook(_raise if how == "error" else _interrupt)
        loss.backward()
        raise AssertionError("it does not come so far")

    monkeypatch.setattr(Whole, "_backward", breaks)
    with pytest.raises(RuntimeError if how == "error" else KeyboardInterrupt):
        train_worker(isles.init(), config)
    assert not _threads()


def test_an_idle_lane_ends_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isles.memory.engines.base.IDLE", 0.05)
    engine, done = ThreadEngine(), [threading.Event(), threading.Event()]
    for number, event in enumerate(done):
        engine.submit("host", (number,), 0.0, lambda: None, event.set)
        assert event.wait(30)
        deadline = time.monotonic() + 30
        while _threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _threads()
    engine.close()


def test_nobody_waits_for_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = torch.optim.AdamW.step

    def slow(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait(30)
        real(*args)

    model, managed = managed_decoder(HOST, ThreadEngine())
    monkeypatch.setattr(torch.optim.AdamW, "step", slow)
    with pytest.raises(KeyboardInterrupt), managed:
        one_step(model, managed)
        assert begun.wait(30)
        threading.Timer(0.1, go_on.set).start()
        raise KeyboardInterrupt
    assert not _threads()
    with pytest.raises(RuntimeError, match=r"the update of blocks\.\d will not arrive: the run .* was abandoned"):
        managed.state_dict()
    assert model.state_dict()


def test_every_wait_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that never does what it should: the computation says so, and goes no further."""
    monkeypatch.setattr("isles.memory.engines.base.DEADLINE", 0.2)
    model, managed = managed_decoder(HOST, _Deaf())
    with pytest.raises(TimeoutError, match=r"memory: memory for forward of blocks\.0 did not come within"), managed:
        one_step(model, managed)


class _Deaf(Engine):
    def submit(self, *_: Any) -> None:
        pass


def test_threads_end_with_an_optimizer_that_nobody_closed() -> None:
    model, managed = managed_decoder(engine=ThreadEngine())
    one_step(model, managed)
    managed.catch_up()
    managed._finalizer()
    assert not _threads()


@pytest.mark.parametrize("engine", [Inline, ThreadEngine])
def test_a_forward_pass_without_its_backward_pass_is_said(engine: Callable[[], Any]) -> None:
    model, managed = managed_decoder(engine=engine())
    with pytest.raises(RuntimeError, match="a forward pass was not followed by its backward pass"), managed:
        model(DECODER.batch(0))
        model(DECODER.batch(1))


@pytest.mark.parametrize(
    ("placements", "engine"),
    [((Placement("device", "keep"),) * UNITS, Inline), (OPTIMIZER, ThreadEngine), (HOST, ThreadEngine)],
)
def test_a_backward_pass_that_runs_twice_is_said(placements: tuple[Placement, ...], engine: Callable[[], Any]) -> None:
    model, managed = managed_decoder(placements, engine())
    with pytest.raises(RuntimeError, match=r"the backward pass of blocks\.3 ran twice"), managed:
        loss = model(DECODER.batch(0)).loss
        loss.backward(retain_graph=True)
        loss.backward()


def test_forward_passes_without_gradients_may_come_at_any_time() -> None:
    model, managed = managed_decoder(engine=ThreadEngine())
    plain = Decoder(SHAPE)
    with managed, torch.no_grad():
        assert torch.equal(model(DECODER.batch(0)).loss, plain(DECODER.batch(0)).loss)
    model, managed = managed_decoder(OPTIMIZER, ThreadEngine())
    with managed:
        one_step(model, managed)
        with torch.no_grad():
            first = model(DECODER.batch(1)).loss
        assert torch.equal(first, model(DECODER.batch(1)).loss)
        model.zero_grad(set_to_none=True)


def test_a_step_that_is_given_up_leaves_nothing() -> None:
    wanted = train(DECODER, steps=2)
    model, managed = managed_decoder(engine=ThreadEngine())
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
    model, managed = managed_decoder(OPTIMIZER, ThreadEngine(pace=True))
    with managed:
        one_step(model, managed)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(weights[name], own) for name, own in zip(names, wanted.weights, strict=True))


def test_weights_that_are_loaded_past_the_optimizer_are_used() -> None:
    other = Decoder(SHAPE, seed=7)
    model, managed = managed_decoder(OPTIMIZER, ThreadEngine())
    with managed:
        one_step(model, managed)
        model.load_state_dict(other.state_dict())
        assert model(DECODER.batch(0)).loss.item() == other(DECODER.batch(0)).loss.item()


def test_early_updates_with_settings_that_change_too_late_are_said() -> None:
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    plan = plan_of(made, HOST, update="early")
    managed = Managed(plan, model, adamw(model), profile=made, machine=MACHINES["H100"], engine=Inline())
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

"""Checkpoints: a run goes on from any step with the same bits, and refuses what is not its own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import isles
from isles.comm.mesh import Mesh
from tests.covers import share
from tests.gloo import run_gloo
from tests.replicas.workers import (
    LINKS,
    RUNS,
    Net,
    adamw,
    bits,
    checkpointed,
    learned,
    load,
    save,
    sgd,
    train_step,
    weights,
    wrap,
)

STEPS = 16
CORE = ["diloco", "noloco"]  # saved after every step, the rest amid a round
JITTERY = isles.Links(bandwidth=2e6, latency=0.15, jitter=0.7)  # latency of more than a step: prefetch is in flight


def run(workers: int, name: str, *args: Any) -> list[Any]:
    speeds = [1.0 + 0.3 * rank for rank in range(workers)]
    return isles.run_virtual(
        checkpointed, workers, links=JITTERY, compute_jitter=0.3, speeds=speeds, args=(name, STEPS, *args)
    )


@cache
def without(name: str, workers: int) -> list[Any]:
    return run(workers, name)


@pytest.mark.parametrize("name", share(RUNS, 1, 16, CORE))
def test_any_step_can_be_saved_and_resumed(name: str) -> None:
    """Oracle: the run that took the checkpoint and went on: later losses, clocks, bytes and weights to the bit, on a
    fresh cluster with jitter. And the run that never stopped: the same losses and weights; the same clocks and bytes
    too where nothing was in flight, for which a checkpoint waits.
    """
    check_saved_after(name, 3, (2, 3, 4, 6, 11) if name in CORE else (4,))


def test_two_pairs_can_be_saved_and_resumed() -> None:
    check_saved_after("noloco", 4, (3, 4, 5))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in RUNS if name not in CORE])
def test_any_step_of_any_method_can_be_saved(name: str) -> None:
    """The same after every step of the other methods."""
    check_saved_after(name, 3, range(1, 13))


def check_saved_after(name: str, workers: int, steps: Iterable[int]) -> None:
    plain = without(name, workers)
    for save_at in steps:
        went_on = run(workers, name, save_at)
        restored = run(workers, name, None, [result["file"] for result in went_on])
        nothing_in_flight = not any(result["waited"] for result in went_on)
        for rank in range(workers):
            assert went_on[rank]["log"][save_at:] == restored[rank]["log"], f"worker {rank} from step {save_at}"
            assert learned(went_on[rank]["log"]) == learned(plain[rank]["log"])
            if nothing_in_flight:
                assert went_on[rank]["log"] == plain[rank]["log"]


def test_a_checkpoint_waits_for_prefetched_anchors() -> None:
    """The wait is charged: the latency is longer than a step, so right after a round anchors are under way."""
    waited = [result["waited"] for result in run(4, "noloco", 3)]
    assert max(waited) > 0.05
    assert all(wait == 0 for wait in (result["waited"] for result in run(4, "noloco, no prefetch", 3)))
    assert all(wait == 0 for wait in (result["waited"] for result in run(4, "diloco", 3)))


def test_state_survives_two_restores() -> None:
    """A checkpoint of a restored run is as good as one of the first."""
    first = run(3, "noloco", 4)
    second = run(3, "noloco", 9, [result["file"] for result in first])
    third = run(3, "noloco", None, [result["file"] for result in second])
    for rank in range(3):
        assert third[rank]["log"] == second[rank]["log"][9 - 4 :]


def test_state_is_a_copy() -> None:
    """Training on does not change a state that was taken before."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "noloco", Net())
        for step in range(1, 5):
            train_step(optimizer, world.rank, step)
        state = optimizer.state_dict()
        fragment = state["outer"]["fragments"][0]
        saved = {"anchor": fragment["anchor"].clone(), "ahead": fragment["ahead"]["buffer"].clone()}
        saved |= {"momentum": fragment["vectors"]["momentum"].clone()}
        sent = state["traffic"]["outer"]["bytes_sent"]
        for step in range(5, 11):
            train_step(optimizer, world.rank, step)
        assert torch.equal(fragment["anchor"], saved["anchor"])
        assert torch.equal(fragment["ahead"]["buffer"], saved["ahead"])
        assert torch.equal(fragment["vectors"]["momentum"], saved["momentum"])
        assert state["traffic"]["outer"]["bytes_sent"] == sent
        assert state["steps"] == 4

    isles.run_virtual(worker, 2, links=LINKS)


class Other(nn.Module):
    """The same number of parameter tensors as `Net`, of other shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])


@pytest.mark.parametrize("name", ["none", "ddp", "localsgd", "diloco", "noloco"])
def test_foreign_states_are_refused(name: str) -> None:
    """Another method, another setting, another model: one clear line, and nothing is half loaded."""

    def worker(world: Mesh) -> None:
        saved = wrap(world, name, Net())
        for step in range(1, 5):
            train_step(saved, world.rank, step)
        state = saved.state_dict()

        other = "diloco" if name != "diloco" else "noloco"
        with pytest.raises(ValueError, match=f"the state is of {type(saved).__name__}, this is "):
            wrap(world, other, Net()).load_state_dict(state)

        changed = {
            "ddp": {"codec": "fp16"},
            "localsgd": {"sync_every": 4},
            "diloco": {"outer_lr": 0.5},
            "noloco": {"gamma": 0.25},
        }.get(name)
        if changed is not None:
            (key, value), *_ = changed.items()
            with pytest.raises(ValueError, match=f"{key} = {value!r}, but the state was saved with .*: set it back"):
                wrap(world, name, Net(), **changed).load_state_dict(state)

        for shapes in ([(5, 11), (11,), (11, 7)], [(3,), (4,), (5,)], [(3,)]):
            optimizer = wrap(world, name, Other(*shapes))
            before = weights(optimizer.model)
            with pytest.raises(ValueError, match="other parameter shapes: load it into its own model"):
                optimizer.load_state_dict(state)
            assert optimizer.steps == 0 and not optimizer.state
            assert torch.equal(before, weights(optimizer.model))

    isles.run_virtual(worker, 2, links=LINKS)


def test_inner_settings_come_back() -> None:
    """Learning rates, momenta and step counters of the inner optimizer are part of the state."""

    def worker(world: Mesh) -> None:
        first = wrap(world, "diloco", Net(), adamw)
        schedule = torch.optim.lr_scheduler.StepLR(first, step_size=2, gamma=0.5)
        for step in range(1, 6):
            train_step(first, world.rank, step)
            schedule.step()
        state, model = first.state_dict(), {k: v.clone() for k, v in first.model.state_dict().items()}
        second = wrap(world, "diloco", Net(), adamw)
        second.model.load_state_dict(model)
        second.load_state_dict(state)
        assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] == 0.005
        assert second.steps == 5
        for mine, theirs in zip(second.state.values(), first.state.values(), strict=True):
            assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and mine["step"] == theirs["step"]
        assert train_step(second, 0, 6) == train_step(first, 0, 6)

    isles.run_virtual(worker, 1, links=LINKS)


def test_a_failed_prefetch_stays_failed_after_a_checkpoint() -> None:
    """on_peer_failure = solo: anchors whose partner was late are not taken for arrived ones by a restored run."""
    deadlines = isles.Deadlines(outer=2.0)

    def worker(world: Mesh, files: list[Any] | None) -> Any:
        model = Net(seed=world.rank)
        optimizer = wrap(world, "noloco", model, sgd, on_peer_failure="solo", seed=3)
        saved = None
        if files is not None:
            model.load_state_dict(files[world.rank][1])
            optimizer.load_state_dict(files[world.rank][0])
        while optimizer.steps < 12:
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if optimizer.steps == 4 and files is None:
                saved = (optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()})
        return saved, world.transport.now(), weights(model)

    def both(files: list[Any] | None) -> list[Any]:
        return isles.run_virtual(
            worker, 4, links=LINKS, args=(files,), speeds=[1, 6, 1, 1], step_seconds=0.3, deadlines=deadlines
        )

    first = both(None)
    failed = [saved["outer"]["fragments"][0]["ahead"]["failed"] for (saved, _), _, _ in first]
    assert any(failed)
    for (_, clock, ended), (_, clock_again, ended_again) in zip(
        first, both([saved for saved, _, _ in first]), strict=True
    ):
        assert clock == clock_again and torch.equal(ended, ended_again)


def test_a_run_may_be_taken_back_while_something_is_in_flight() -> None:
    """Loading an earlier state into an optimizer whose round is under way: the run from there again, to the bit; what
    error feedback was about to do for that round is forgotten.
    """

    def worker(world: Mesh) -> None:
        options = {"fragments": "whole", "error_feedback": "local", "feedback_decay": 0.5}
        optimizer = wrap(world, "streaming-diloco", Net(), sgd, **options)
        logs: list[list[float]] = []
        for steps in (range(1, 13), range(9, 13)):
            logs.append([])
            for step in steps:
                logs[-1].append(train_step(optimizer, world.rank, step))
                if step == 8 and len(logs) == 1:
                    saved, weights_then = optimizer.state_dict(), weights(optimizer.model)
            if len(logs) == 1:
                assert optimizer.flights  # type: ignore[attr-defined]  # sent at 12, lands at 13
                torch.nn.utils.vector_to_parameters(weights_then, optimizer.model.parameters())
                optimizer.load_state_dict(saved)
        assert logs[1] == logs[0][8:]

    isles.run_virtual(worker, 2, links=LINKS)


def taken_back(world: Mesh, name: str) -> tuple[list[Any], list[Any]]:
    """What steps 5 to 10 came to, and then once more from the state after step 4, in the same run."""
    optimizer = wrap(world, name, Net(seed=world.rank))
    logs: list[list[Any]] = []
    for first in (1, 5):
        log = []
        for step in range(first, 11):
            log.append((train_step(optimizer, world.rank, step), bits(weights(optimizer.model))))
            if step == 4 and first == 1:
                file = save(optimizer)
        logs.append(log)
        if first == 1:
            load(optimizer, file)
    return logs[0][4:], logs[1]


BACK = ["ddp", "diloco", "noloco", "streaming-diloco", "dilocox", "demo"]


@pytest.mark.parametrize("name", BACK)
def test_a_run_may_be_taken_back(name: str) -> None:
    """On a virtual clock, which goes on meanwhile."""
    for before, again in isles.run_virtual(taken_back, 3, links=LINKS, args=(name,)):
        assert before == again


@pytest.mark.long
def test_a_run_of_processes_may_be_taken_back() -> None:
    for before, again in run_gloo(taken_back, 3, args=("noloco",)):
        assert before == again


def test_the_start_is_a_checkpoint_too() -> None:
    """A state taken before the first step: the run from it is the run."""

    def worker(world: Mesh, states: list[Any] | None) -> Any:
        optimizer = wrap(world, "noloco", Net(seed=world.rank if states is None else 9))
        state = optimizer.state_dict(), {k: v.clone() for k, v in optimizer.model.state_dict().items()}
        if states is not None:
            optimizer.model.load_state_dict(states[world.rank][1])
            optimizer.load_state_dict(states[world.rank][0])
        log = [train_step(optimizer, world.rank, step) for step in range(1, 8)]
        return state, (log, world.transport.now())

    first = isles.run_virtual(worker, 3, links=LINKS, args=(None,))
    again = isles.run_virtual(worker, 3, links=LINKS, args=([state for state, _ in first],))
    assert [log for _, log in again] == [log for _, log in first]


@pytest.mark.parametrize("name", ["localsgd", "diloco", "noloco"])
@pytest.mark.parametrize("steps", [3, 4])
def test_a_restored_run_may_end_at_once(name: str, steps: int) -> None:
    """`finish` right after a restore: no second round for steps that were exchanged, one for those that were not. The
    anchor's hash is there for the next header.
    """

    def worker(world: Mesh, states: list[Any] | None) -> Any:
        model = Net(seed=world.rank)
        optimizer = wrap(world, name, model)
        state = None
        if states is None:
            for step in range(1, steps + 1):
                train_step(optimizer, world.rank, step)
            state = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
        else:
            model.load_state_dict(states[world.rank][1])
            optimizer.load_state_dict(states[world.rank][0])
        fragment = optimizer.fragments[0]  # type: ignore[attr-defined]
        digest = fragment.digest
        optimizer.finish()
        return state, (digest, fragment.rounds, weights(model).tolist(), world.transport.now())

    first = isles.run_virtual(worker, 3, links=LINKS, args=(None,))
    again = isles.run_virtual(worker, 3, links=LINKS, args=([state for state, _ in first],))
    assert [ended for _, ended in again] == [ended for _, ended in first]
    assert first[0][1][1] == -(-steps // 3) and bool(first[0][1][0]) == (name != "noloco")

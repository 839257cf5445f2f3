"""Workers that come and go between rounds: 1 to 3 are of members 0 to 3, 4 to 6 without member 2, then all are back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.call import Ledger
from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.comm.roster import FixedRoster, Roster
from isles.membership.late_shares import Deliveries
from isles.membership.messages import Delivered, Done, View
from isles.membership.requests import DecisionLog
from isles.membership.round_commit import RoundDecision
from isles.replicas.flat import copied
from isles.replicas.loop.fragment import Exchange, InFlight
from isles.replicas.loop.outer import donor_state
from tests.covers import share
from tests.replicas.changing import ChangingRoster
from tests.replicas.workers import LINKS, RUNS, Net, adamw, bits, sgd, train_step, weights

EVERYONE, WITHOUT_2 = (0, 1, 2, 3), (0, 1, 3)
VIEWS = [View(0, 1, EVERYONE), View(1, 4, WITHOUT_2), View(2, 7, EVERYONE)]
DEADLINES = isles.Deadlines(outer=20, control=20, eval=20)
FOLLOW = [name for name, (method, _) in RUNS.items() if isles.method(method).follows_roster]
NOLOCO = [name for name in RUNS if name.startswith(("noloco", "streaming-noloco"))]


def made(world: Mesh, name: str, views: list[View], **options: Any) -> tuple[Any, ChangingRoster]:
    roster, model = ChangingRoster(world.world, views), Net(seed=world.rank)
    method, defaults = RUNS[name]
    return isles.method(method)(model, adamw(model), roster, **{**defaults, **options}), roster


def run(worker: Any, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, 4, links=LINKS, args=args, deadlines=DEADLINES)


@pytest.mark.parametrize("name", NOLOCO)
def test_noloco_goes_on_through_all_views(name: str) -> None:
    """Seat 2 does rounds 4 to 6 alone and then meets the others again; nobody misses anybody."""

    def worker(world: Mesh) -> Any:
        optimizer, roster = made(world, name, VIEWS)
        while min(fragment.rounds for fragment in optimizer.fragments) < 9:
            train_step(optimizer, world.rank, optimizer.steps + 1)
        optimizer.finish()
        met = [[roster.group(r).ranks[p] for p in optimizer.members(r)] for r in range(1, 10)]
        return met, roster.log, optimizer.replica_std()

    results = run(worker)
    for rank, (met, log, spread) in enumerate(results):
        assert not log and 0 < spread < 0.1
        assert all(rank in together for together in met)
        assert all(results[other][0][turn] == met[turn] for turn in range(9) for other in met[turn])
    assert results[2][0][3:6] == [[2]] * 3
    assert [len(together) for together in results[2][0][6:]] == [len(results[2][0][0])] * 3


@pytest.mark.parametrize("options", [{}, {"codec": "int8", "error_feedback": "local"}, {"codec": "powersgd:1"}])
def test_diloco_goes_on_with_a_donors_state(options: dict[str, Any]) -> None:
    """Member 2 comes back with a fresh ledger and what member 0 gave it: the anchors are equal to the bit from then on.
    Without the gift its first message tells.
    """
    gift: dict[str, Any] = {}

    def worker(world: Mesh, adopts: bool) -> Any:
        optimizer, roster = made(world, "diloco", VIEWS, **options)
        beside = replace(world.world, ranks=(0, 2), view=99) if world.rank in (0, 2) else None
        while optimizer.steps < 27:
            if adopts and beside is not None and world.rank == 2 and optimizer.steps == 9:
                roster.world = replace(roster.world, ledger=Ledger())
                beside.barrier()
                for fragment in gift["outer"]["fragments"]:
                    fragment["residual"] = None if fragment["residual"] is None else fragment["residual"] * 0
                optimizer.steps = 18
                optimizer.model.load_state_dict(gift["model"])
                optimizer.load_outer_state({**gift["outer"], "roster": roster.state_dict()})
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if adopts and beside is not None and world.rank == 0 and optimizer.steps == 18:
                model = {name: tensor.clone() for name, tensor in optimizer.model.state_dict().items()}
                gift.update(outer=copied(optimizer.outer_state()), model=model)
                beside.barrier()
        optimizer.finish()
        optimizer.replica_std()  # a call without a round, which the fresh ledger numbers like the others'
        return bits(optimizer.fragments[0].anchor), bits(weights(optimizer.consolidate()))

    assert len(set(run(worker, True))) == 1
    with pytest.raises(isles.Diverged, match=r"worker \d diverged at step 21: anchor hash"):
        run(worker, False)


@pytest.mark.parametrize("name", share(FOLLOW, 0, 6, ("diloco", "noloco")))
def test_a_planned_leave(name: str) -> None:
    """Seat 2 stays until each of its fragments has done the last round that it is in, then finishes by itself."""

    def worker(world: Mesh) -> Any:
        optimizer, roster = made(world, name, VIEWS[:2])
        for step in range(1, 22):
            train_step(optimizer, world.rank, step)
            if world.rank == 2 and min(fragment.rounds for fragment in optimizer.fragments) == 3:
                break
        optimizer.finish()
        if world.rank == 2:
            return None
        optimizer.replica_std()
        return roster.log, bits(weights(optimizer.consolidate()))

    results = run(worker)
    assert results[0] == results[1] == results[3] and results[0][0] == []


def test_who_is_in_another_view_is_noticed_at_the_first_message() -> None:
    """Seat 3 hears of view 1 two rounds late. Whoever meets it goes on alone at once, where a deadline is 20 s."""

    def worker(world: Mesh) -> Any:
        views = [VIEWS[0], View(1, 6 if world.rank == 3 else 4, WITHOUT_2)]
        optimizer, roster = made(world, "noloco", views, on_peer_failure="solo")
        for step in range(1, 25):
            if world.rank == 2 and step == 10:
                break
            train_step(optimizer, world.rank, step)
        else:
            optimizer.finish()
        return roster.log, world.transport.now()

    results = run(worker)
    assert (3, "Elsewhere") in results[0][0] + results[1][0]
    assert all(kind == "Elsewhere" for log, _ in results[:2] for _, kind in log)
    assert max(clock for _, clock in results) < 3.0


def test_other_methods_want_the_same_workers_all_along() -> None:
    def worker(world: Mesh) -> None:
        with pytest.raises(ValueError, match="DDP needs the same workers from beginning to end"):
            made(world, "ddp", VIEWS)
        model = Net()
        isles.DDP(model, adamw(model), FixedRoster(world.outer))

    run(worker)


def test_both_are_rosters() -> None:
    def worker(world: Mesh) -> bool:
        return all(isinstance(r, Roster) for r in (FixedRoster(world.outer), ChangingRoster(world.world, VIEWS)))

    assert run(worker) == [True] * 4


def test_a_state_is_sent_without_waiting_for_the_next_rounds_partner() -> None:
    """Whoever takes it may be that partner, which begins its round once it has it."""

    def worker(world: Mesh) -> Any:
        optimizer, _ = made(world, "noloco", [View(0, 1, EVERYONE)])
        while optimizer.fragments[0].rounds < 1:
            train_step(optimizer, world.rank, optimizer.steps + 1)
        ahead, began = optimizer.fragments[0].ahead, world.world.transport.now()
        state = donor_state(optimizer)
        waited = world.world.transport.now() - began
        return (
            state["outer"]["fragments"][0]["ahead"],
            waited,
            ahead is not None and optimizer.fragments[0].ahead is ahead,
        )

    assert run(worker) == [(None, 0.0, True)] * 4


def test_an_answer_counts_as_had_once_all_of_it_is_there() -> None:
    """Not with the outer gradient alone, where the anchor does not come: others would count on its work."""

    class Failing:
        def wait(self) -> Any:
            raise PeerLost(1)

    def worker(world: Mesh) -> Any:
        optimizer, roster = made(world, "noloco", [View(0, 1, EVERYONE)], on_peer_failure="solo")
        accepted = list[int]()

        def may_apply(round: int, members: Sequence[int], *, whole: bool) -> bool:
            accepted.extend([round] * whole)
            return whole

        roster.may_apply = may_apply  # type: ignore[method-assign]
        fragment = optimizer.fragments[0]
        for number, lost in enumerate((False, True), start=1):
            flight = InFlight(
                fragment,
                3,
                Exchange(fragment.anchor.clone(), None, round=number, members=(0, 1)),
                Exchange(fragment.anchor.clone(), Failing() if lost else None, round=number, members=(0, 1)),  # type: ignore[arg-type]
            )
            optimizer.round_exchange.receive(flight, optimizer._snapshot)
        return accepted

    assert run(worker) == [[1]] * 4


class Line:
    """A lighthouse to which both have delivered, 6 inner steps and 2. What comes of the exchange lands."""

    is_over, has_answers = False, True
    state = SimpleNamespace(view_of=lambda round: None)

    def __init__(self, member: int) -> None:
        self.member, self.decisions = member, DecisionLog()

    def ask(self, message: Delivered) -> RoundDecision:
        return RoundDecision(message.round, "retry", 1, (0, 1), steps=(6, 2))

    def say(self, message: Done | Delivered) -> None:
        if isinstance(message, Done):
            self.decisions.hear(RoundDecision(message.round, "land", 1, (0, 1), steps=(6, 2)))


def test_a_quorums_mean_is_one_by_inner_steps() -> None:
    """anchor <- anchor - (3 Delta_0 + Delta_1) / 4, where worker 0 has four steps more that were in no mean yet."""

    def worker(world: Mesh) -> tuple[Tensor, Tensor, Tensor]:
        roster, model = ChangingRoster(world.world, [View(0, 1, (0, 1))]), Net()
        roster.deliveries = Deliveries(Line(world.rank), world.world)  # type: ignore[attr-defined, arg-type]
        options = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "on_late": "quorum", "quorum": 1.0}
        optimizer: Any = isles.DiLoCo(model, sgd(model), roster, **options)  # type: ignore[arg-type]
        fragment, before = optimizer.fragments[0], optimizer.fragments[0].anchor.clone()
        optimizer.round_exchange._work = 0 if world.rank else 4
        for step in (1, 2):
            train_step(optimizer, world.rank, step)
        live = fragment.flat.read(fragment.flat.new())
        optimizer.round_exchange.progress(blocks=True)
        return before, before - live, fragment.anchor.clone()

    (before, delta, one), (_, other_delta, other) = isles.run_virtual(worker, 2, deadlines=DEADLINES)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, before - (3 * delta + other_delta) / 4, rtol=0, atol=1e-7)

"""The account of the data through joins, deaths, pauses, cut lines, leaves and outages of the lighthouse."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from isles.data.order import _SPARE, rows
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.data_ledger import DataLedger, fresh_before, range_batches
from isles.membership.messages import Beat, Done, Load, PeerReport, Refusal, SampleRange, View
from isles.membership.round_commit import RoundDecision
from tests.membership.test_membership import answer, entries, founded, promise, replies, settled_member, told
from tests.membership.world import World


def churned(*, agrees: bool, founders: int, most: int, events: int, seed: int) -> World:
    world = World(founders=founders, agrees=agrees, seed=seed)
    draw = random.Random(seed)
    world.run(12.0)
    counted: Collection[int] = ()
    for _ in range(events):
        world.run(world.now + draw.uniform(0.3, 1.6))
        awake = [node for node in world.living() if node.state is not None and not node.frozen and not node.cut]
        if world.lighthouse is not None:
            counted = world.lighthouse.members()  # others train on for a moment with what nobody else has
        settled = [node for node in awake if node.training and not node.leaving and node.member in counted]
        kind = draw.choices(["join", "kill", "leave", "pause", "cut", "outage"], [8, 5, 2, 2, 2, 1])[0]
        if kind == "join" and len(world.living()) >= most:
            kind = "kill"
        if kind == "join":
            world.join()
        elif kind == "outage":
            if world.lighthouse is not None:
                world.crash(draw.uniform(0.5, 8.0))
        elif len(settled) > 2:  # the last ones with the state stay
            victim = draw.choice(
                awake if len(settled) > 3 else [node for node in awake if node not in settled] or settled
            )
            if kind == "kill":
                world.kill(victim)
            elif kind == "leave" and victim.training:
                world.leave(victim)
            elif kind == "pause":
                world.pause(victim, draw.uniform(0.5, 9.0))
            elif kind == "cut":
                world.cut(victim, draw.uniform(0.5, 9.0))
    world.run(world.now + 30.0)
    world.end_after(6)
    world.run(world.now + 60.0)
    return world


def owed_positions(world: World) -> list[int]:
    """The rows of every debt at the end."""
    lighthouse = world.lighthouse
    assert lighthouse is not None
    views = lighthouse.ledger.views
    return [
        int(rows(*batch, batch_size=1)[0])
        for sample_range in lighthouse.backlog()
        for batch in range_batches(views[sample_range.view], sample_range)
    ]


def check(world: World) -> None:
    """Everybody ended, the last view is the living, and every cell of the data is accounted for."""
    lighthouse = world.lighthouse
    assert lighthouse is not None and lighthouse.view is not None
    living = world.living()
    assert all(not node.training and node.exchange is None for node in living), "a worker is stuck"
    assert {node.member for node in living} == set(lighthouse.view.members)
    assert len({tuple(node.landed) for node in living}) == 1  # an all-reduce method: all landed the same

    covering = [view for view in lighthouse.ledger.views.values() if view.since <= world.final]
    view = max(covering, key=lambda view: view.number)
    end = view.start + fresh_before(view, world.final + 1)
    held = Counter(position for position, _ in world.held() if position < _SPARE)
    backlog = Counter(owed_positions(world))
    assert held.keys() | backlog.keys() == set(range(end))  # none never, and none beyond the last cell
    assert max(backlog.values(), default=1) == 1
    twice = sum(held.values()) - len(held) + len(held.keys() & backlog.keys())
    assert twice <= world.counts["lost"] * world.rules.sync_every  # at most a cell a loss


@pytest.mark.parametrize("agrees", [False, True], ids=["pairs", "all-reduce"])
@pytest.mark.parametrize("seed", [1, 2])
def test_hundred_events_lose_nothing(agrees: bool, seed: int) -> None:
    world = churned(agrees=agrees, founders=3, most=8, events=100, seed=seed)
    check(world)
    assert min(world.counts[what] for what in ("deaths", "absences", "outages", "back")) > 0


@pytest.mark.long(cases=0)
@pytest.mark.parametrize("agrees", [False, True], ids=["pairs", "all-reduce"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_thousand_events_lose_nothing(agrees: bool, seed: int) -> None:
    check(churned(agrees=agrees, founders=16, most=64, events=1000, seed=seed))


def test_the_same_seed_is_the_same_world() -> None:
    one, two = (churned(agrees=False, founders=3, most=8, events=40, seed=5) for _ in range(2))
    assert one.reads == two.reads and one.journal == two.journal


def test_of_many_witnesses_those_who_have_most_are_remembered() -> None:
    """One has the work of three rounds, and then many others have that of the first."""
    ledger = DataLedger()
    ledger.open(View(0, 1, tuple(range(20)), (2,) * 20), [])
    ledger.begun(0, 3, (), {})
    ledger.begun(1, 3, (), {0: 3})
    for member in range(2, 20):
        ledger.begun(member, 3, (), {0: 1})
    ledger.forgo(0)
    assert ledger.next(4, range(1, 20))[1] == ()
    assert ledger.next(4, range(2, 20))[1] == (SampleRange(0, 0, 2, 4),)


def test_who_begins_again_is_no_witness_of_what_it_had_before() -> None:
    """Seats 1 and 2 have round 1 of member 0, which dies; 1 begins again, and then 2 dies, too."""
    ledger = DataLedger()
    ledger.open(View(0, 1, (0, 1, 2), (2, 2, 2)), [])
    ledger.begun(0, 1, (), {})
    for member in (1, 2):
        ledger.begun(member, 1, (), {0: 1})
    ledger.forgo(0)
    ledger.forgo(1)
    start, backlog = ledger.next(4, (2,))
    assert backlog == (SampleRange(0, 0, 2, 4), SampleRange(0, 1, 0, 6))
    ledger.open(View(1, 4, (1, 2), (2, 2), start, backlog), (2,))
    ledger.forgo(2)
    assert SampleRange(0, 0, 0, 2) in ledger.next(7, (1,))[1]


def test_who_began_again_has_not_what_all_others_have_of_it() -> None:
    """Seat 0 begins again in view 2 with a state without its own round 1, which 1 has, and 2 from there."""
    ledger = DataLedger()
    ledger.open(View(0, 1, (0, 1, 2), (2, 2, 2)), [])
    ledger.begun(0, 1, (), {})
    ledger.begun(1, 1, (), {0: 1})
    ledger.forgo(0)
    ledger.open(View(1, 4, (1, 2), (2, 2), *ledger.next(4, (1, 2))), (1, 2))
    ledger.begun(2, 4, (), {1: 4})
    ledger.open(View(2, 7, (0, 1, 2), (2, 2, 2), *ledger.next(7, (1, 2))), (1, 2))
    ledger.forgo(1)
    ledger.forgo(2)
    assert SampleRange(0, 0, 0, 2) in ledger.next(10, (0,))[1]


def test_what_a_seat_said_of_its_rounds_outside_says_nothing_of_those_in_a_view() -> None:
    """Seat 1 was in round 9 by itself; in round 5, its second in view 1, it has told of none."""
    ledger = DataLedger()
    ledger.open(View(0, 1, (0,), (2,)), [])
    ledger.begun(1, 9, (), {})
    ledger.open(View(1, 4, (0, 1), (2, 2), *ledger.next(4, (0,))), (0,))
    ledger.begun(0, 6, (), {1: 5})
    ledger.forgo(1)
    assert ledger.next(7, (0,))[1] == (SampleRange(1, 1, 0, 6),)


def test_rounds_out_of_turn_that_were_never_told_are_owed_although_others_have_those_of_then() -> None:
    """Seat 2 is in round 4 before the lighthouse hears of it again, and is called: that it read nothing in round 3 it
    tells no more. Seat 0 has its work up to round 3.
    """
    run, journal = founded(3)
    member = settled_member(2, (0, 1, 2))
    assert [member.start_round(round) is not None for round in (2, 3, 4)] == [True, False, False]
    orders = run.beat(0.0, 0, Beat(4, 0, 0, seen=((2, 3),))) + run.disconnected(1.0, 2) + run.reconnected(2.0, 2)
    assert run.workers[2].call == 1
    member.answered(member.beat(), answer(call=1))
    member.loaded(Load(1, 1), 4)
    orders += run.beat(3.0, 2, member.beat())
    assert run.workers[2].state == "ready"
    orders += promise(run, 0, 1)
    assert run.view is not None and (run.view.since, run.view.members) == (7, (0, 1))
    assert run.view.backlog == (SampleRange(0, 2, 16, 5 * 16),)  # rounds 2 to 6: it told of the first
    assert RoundsCoordinator(run.rules, journal + entries(orders)).backlog() == run.backlog()


def test_who_is_left_out_while_it_leaves_is_gone() -> None:
    """It cannot land round 1, and would never come to the end of the view that it was to stay for."""
    run, journal = founded(3, agrees=True)
    orders = run.leave(0.0, 2)
    orders += [order for member in (0, 1) for order in run.report_peer(0.0, member, PeerReport(1, 0, 2, "late"))]
    orders += [order for member in (0, 1) for order in run.done(0.0, member, Done(1, 1, 6))]
    assert [decision.outcome for _, decision in told(orders, RoundDecision)] == ["retry", "retry", "land", "land"]
    assert run.workers[2].state == "left" and run.members() == (0, 1)
    assert isinstance(replies(run.beat(1.0, 2, Beat(1, 0, 0)))[0], Refusal)
    orders += promise(run, 0, 1)
    assert run.view is not None and run.view.backlog == (SampleRange(0, 2, 0, 3 * 16),)  # rounds 1 to 3
    assert RoundsCoordinator(run.rules, journal + entries(orders)).members() == (0, 1)


class Forgetful(DataLedger):
    """A mutant: debts of the dead are struck off."""

    def forgo(self, member: int) -> None:
        pass


class Lavish(DataLedger):
    """A mutant: whatever a dead worker read is owed again, seen or not."""

    def landed(self, round: int, members: Collection[int]) -> None:
        pass


@pytest.mark.parametrize(("mutant", "agrees"), [(Forgetful, False), (Forgetful, True), (Lavish, True)])
def test_an_account_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch, mutant: type, agrees: bool) -> None:
    monkeypatch.setattr("isles.membership.coordinator_state.DataLedger", mutant)
    with pytest.raises(AssertionError):
        check(churned(agrees=agrees, founders=3, most=8, events=60, seed=1))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_where_those_alone_are_left_who_wait_for_their_first_round(seed: int) -> None:
    """Pairs. They go on from their copies, which are older than what the others had of each other when they died."""
    world = World(founders=3, agrees=False, seed=seed)
    world.run(12.0)
    for _ in range(5):
        world.join()
        world.run(world.now + (8.0 if len(world.nodes) < 8 else 1.5))
    trained = [node for node in world.living() if node.training]
    (waiting,) = [node for node in world.living() if not node.training]
    assert waiting.state is not None and waiting.state.ready == 0
    had = waiting.work
    for node in trained:
        world.kill(node)
    world.run(world.now + 20.0)
    assert waiting.training and waiting.work & had == had and waiting.state.call == 0
    world.final = waiting.state.round + 4
    world.run(world.now + 40.0)
    lighthouse = world.lighthouse
    assert lighthouse is not None and lighthouse.view is not None and lighthouse.view.members == (waiting.member,)
    end = lighthouse.view.start + fresh_before(lighthouse.view, world.final + 1)
    held = {position for position, _ in world.held() if position < _SPARE}
    assert held | set(owed_positions(world)) == set(range(end))

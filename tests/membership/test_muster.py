"""Who is of a swarm, as its lighthouse knows it: beginnings, comers, halves, and what is left of it in the journal."""

from __future__ import annotations

from typing import Any

import pytest

from isles.membership.effects import Append, Reply
from isles.membership.messages import (
    ANY,
    Admitted,
    JoinSwarm,
    Leave,
    Over,
    Refusal,
    Rejoin,
    RequestWork,
    StartSwarm,
    StatesSaved,
    SwarmBeat,
    Wait,
)
from isles.membership.swarm_coordinator import AGAIN, SwarmCoordinator, SwarmRules

RUN = 7


class World:
    """A muster, and what it has journalled."""

    def __init__(self, *peers: int, most: int = 10, members: int = 100) -> None:
        self.rules = SwarmRules(peers=peers, most=most, members=members, last=50)
        self.journal: list[dict[str, Any]] = []
        self.coordinator = SwarmCoordinator(self.rules)
        self.now = 0.0

    def answer(self, orders: Any) -> Any:
        self.journal += [order.entry for order in orders if isinstance(order, Append)]
        return next((order.message for order in orders if isinstance(order, Reply)), None)

    def join(self) -> Any:
        return self.answer(self.coordinator.join(self.now, "text"))

    def ask(self, member: int, stage: int = ANY, run: int = RUN) -> Any:
        return self.answer(self.coordinator.hear(self.now, member, RequestWork(stage, run)))

    def beat(self, member: int, step: int, stages: dict[int, int], epoch: int = 1) -> Any:
        said = SwarmBeat(epoch, step, tuple(stages), tuple(stages.values()), 0.1, 1.0, 4, 0.2, ())
        return self.answer(self.coordinator.hear(self.now, member, said))

    def gone(self, *members: int) -> None:
        for member in members:
            self.answer(self.coordinator.disconnected(self.now, member))

    def again(self, until: float = 0.0) -> None:
        """The lighthouse is lit again."""
        self.coordinator = SwarmCoordinator(self.rules, self.journal, until)


def begun(*peers: int, more: int = 0) -> World:
    world = World(*peers)
    for member in range(sum(peers) + more):
        assert world.join() == Admitted(member)
    for member in range(sum(peers)):
        world.ask(member)
    return world


def test_it_begins_once_every_stage_has_its_peers() -> None:
    world = World(1, 2)
    for _ in range(3):
        world.join()
    assert world.ask(0, 1) == Wait("waiting: stage 0 for 1 peer, stage 1 for 1 peer")
    assert world.ask(1, 1) == Wait("waiting: stage 0 for 1 peer")
    assert world.ask(2) == StartSwarm(1, 0, (0, 1, 2), (1, 1, 0))
    assert world.ask(0, 1) == StartSwarm(1, 0, (0, 1, 2), (1, 1, 0)), "an answer may be lost: it asks again"


def test_wishes_are_kept_at_the_start() -> None:
    world = World(1, 1)
    for member in range(3):
        world.join()
        told = world.ask(member, 0)
    assert told == Wait("waiting: stage 1 for 1 peer")


def test_who_comes_later_is_sent_to_those_at_work() -> None:
    world = begun(1, 1, more=1)
    assert world.ask(2) == JoinSwarm(1, (0, 1))
    whole = {0: 0, 1: 1, 2: 1}
    assert world.beat(2, 3, whole) == world.beat(0, 3, whole) == world.beat(1, 3, whole) == StatesSaved(0)
    assert world.coordinator.members == {0: 0, 1: 1}, "nobody but itself says where it is"
    assert world.beat(2, 3, whole) == StatesSaved(0)
    world.join()
    assert world.ask(3) == JoinSwarm(1, (0, 1, 2))
    world.gone(1)
    assert world.ask(3) == JoinSwarm(1, (0, 2))


def test_of_two_halves_the_one_that_is_heard_first_goes_on() -> None:
    world = begun(2, 2)
    whole, here, there = {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 2: 1}, {1: 0, 3: 1}
    for member in whole:
        world.beat(member, 5, whole)
    assert world.beat(0, 6, here) == world.beat(1, 6, there) == world.beat(2, 6, here) == StatesSaved(0)
    assert world.coordinator.members == {0: 0, 1: 0, 2: 1}, "two of three have gone on without 3, at a later step"
    assert isinstance(world.beat(3, 6, there), Rejoin)
    assert world.beat(0, 7, here) == world.beat(2, 7, here) == StatesSaved(0)
    assert world.coordinator.members == here
    assert isinstance(world.beat(1, 8, there), Rejoin) and isinstance(world.beat(3, 9, there), Rejoin)
    world.again()
    assert isinstance(world.beat(1, 9, there), Rejoin), "and after a restart"


def test_a_swarm_that_has_nobody_left_begins_again_from_what_is_kept() -> None:
    world = begun(1, 1)
    world.beat(0, 30, {0: 0, 1: 1})
    world.answer(world.coordinator.keep(world.now, 20))
    world.answer(world.coordinator.keep(world.now, 10))  # which came late
    assert world.beat(0, 30, {0: 0, 1: 1}) == StatesSaved(20)
    world.gone(0, 1)
    for _ in (2, 3):
        world.join()
    assert isinstance(world.ask(2), Wait)
    assert world.ask(3) == StartSwarm(2, 20, (2, 3), (0, 1))
    assert isinstance(world.beat(0, 31, {0: 0, 1: 1}), Rejoin), "the one that was lost is back too late"


def test_it_begins_again_with_fewer_after_a_while() -> None:
    world = begun(2, 2)
    world.gone(0, 1, 2, 3)
    for member in (4, 5):
        world.join()
        assert isinstance(world.ask(member), Wait)
    world.now += AGAIN + 0.1
    assert world.ask(4) == StartSwarm(2, 0, (4, 5), (0, 1))


@pytest.mark.parametrize("is_back", [True, False])
def test_after_a_restart_who_was_there_is_given_a_while(is_back: bool) -> None:
    world = begun(1, 1)
    world.beat(0, 9, {0: 0, 1: 1})
    world.again(until=8.0)
    world.join()
    assert isinstance(world.ask(2), Wait), "the swarm may be at work, or gone: nobody is sent to it"
    world.now = 3.0
    if is_back:
        for member in (0, 1):
            world.answer(world.coordinator.reconnected(world.now, member))
    world.now = 9.0
    world.answer(world.coordinator.tick(world.now))
    assert world.coordinator.alive() == ([0, 1] if is_back else [])
    if is_back:
        for member in (1, 0):
            assert world.beat(member, 12, {0: 0, 1: 1}) == StatesSaved(0)
        assert world.coordinator.step == 12
    assert isinstance(world.ask(2), JoinSwarm if is_back else Wait)


def test_a_muster_from_its_journal_is_the_same() -> None:
    world = begun(1, 2, more=1)
    for member in (0, 1, 3, 0, 3):
        world.beat(member, 4, {0: 0, 1: 1, 3: 1})
    assert world.coordinator.members == {0: 0, 1: 1, 3: 1}
    world.answer(world.coordinator.hear(0.0, 2, Leave()))
    world.answer(world.coordinator.keep(world.now, 3))
    world.gone(1)
    before = world.coordinator
    world.again()
    after = world.coordinator
    assert (after.members, after.epoch, after.step, after.saved) == (before.members, before.epoch, 4, 3)
    assert {s: (p.connected, p.left) for s, p in after.peers.items()} == {
        s: (p.connected, p.left) for s, p in before.peers.items()
    }


def test_the_end_is_told_to_all() -> None:
    world = begun(1, 1, more=1)
    world.answer(world.coordinator.end(0.0))
    assert world.beat(0, 50, {0: 0, 1: 1}) == world.ask(2) == Over()


def test_what_cannot_be_is_refused() -> None:
    world = begun(1, 1, more=1)
    assert "0 to 1" in world.ask(2, 2).reason and isinstance(world.ask(2, 2), Refusal)
    assert "configuration or its cut points" in world.ask(2, run=RUN + 1).reason
    assert isinstance(world.ask(9), Rejoin)
    for stages in ({0: 0}, {0: 0, 1: 2}, {0: 0, 1: -1}, {1: 1, 77: 0}):
        with pytest.raises(ValueError, match="an impossible swarm"):
            world.beat(1, 5, stages)
    assert world.coordinator.hear(0.0, 0, "something else") is None


def test_seats_are_bounded_and_never_used_twice() -> None:
    world = World(1, 1, most=3, members=5)
    for member in range(3):
        assert world.join() == Admitted(member)
    assert "most workers, 3" in world.join().reason
    world.gone(0, 1, 2)
    assert [world.join(), world.join()] == [Admitted(3), Admitted(4)]
    assert "has issued its 5 member ids" in world.join().reason


@pytest.mark.parametrize("count", [3, 4, 7])
def test_a_peer_speaks_for_itself_alone(count: int) -> None:
    """One that lies: that it is alone, at the last step; that all serve its stage; that others come which are not."""
    world = begun(1, count - 1, more=2)
    whole = {member: int(member > 0) for member in range(count)}
    for step in range(1, 6):
        for member in range(1, count):
            for lie in ({0: 0}, dict.fromkeys(whole, 0), {**whole, count: 1}):
                assert isinstance(world.beat(0, 50, lie), StatesSaved)
            assert world.beat(member, step, whole) == StatesSaved(0)
            assert world.coordinator.members == whole and world.coordinator.step in (step, step - 1)


def test_who_is_gone_is_none_of_the_swarm_once_most_have_gone_on_without_it() -> None:
    """But who is back while the others still work with it is."""
    world = begun(1, 2)
    whole = {0: 0, 1: 1, 2: 1}
    for member in whole:
        world.beat(member, 4, whole)
    world.gone(2)
    assert world.beat(0, 5, whole) == StatesSaved(0) and world.coordinator.members == whole
    world.answer(world.coordinator.reconnected(0.0, 2))
    assert world.beat(2, 5, whole) == StatesSaved(0)
    world.gone(2)
    for member in (0, 1):
        world.beat(member, 6, {0: 0, 1: 1})
    assert world.coordinator.members == {0: 0, 1: 1}


def test_seats_that_nobody_works_with_are_none_of_the_swarm() -> None:
    """However many there are, and whatever they say of each other and of those at work."""
    world = begun(1, 2, more=5)
    whole, strangers = {0: 0, 1: 1, 2: 1}, dict.fromkeys(range(3, 8), 0)
    for step in range(1, 6):
        for member in whole:
            assert world.beat(member, step, whole) == StatesSaved(0)
        for member in strangers:
            for lie in (strangers, strangers | whole, strangers | {1: 0}):
                world.beat(member, 50, lie)
        assert world.coordinator.members == whole and world.coordinator.step == step
    assert world.ask(7) == JoinSwarm(1, (0, 1, 2))


@pytest.mark.parametrize(
    "more",
    [
        {"step": -1},
        {"step": 51},
        {"step": 1 << 61},
        {"seconds": -1.0},
        {"queue": 1e300},
        {"counted": -1},
        {"since": -5.0},
        {"counted": 1 << 61},
        {"coordinates": (0, 0, 1 << 61, 1)},
        {"coordinates": (0, -1, 1, 1)},
    ],
)
def test_numbers_that_no_peer_has_are_refused(more: dict[str, Any]) -> None:
    world = begun(1, 1)
    good = {"epoch": 1, "step": 3, "members": (0, 1), "stages": (0, 1), "seconds": 0.1, "queue": 1.0, "counted": 4}
    good |= {"since": 0.2, "coordinates": ()}
    assert world.answer(world.coordinator.hear(0.0, 0, SwarmBeat(**good))) == StatesSaved(0)
    with pytest.raises(ValueError, match="an impossible swarm"):
        world.coordinator.hear(0.0, 0, SwarmBeat(**good | more))
    assert world.coordinator.peers[0].serving == SwarmBeat(**good)


def test_an_address_that_was_shut_out_three_times_may_send_no_more() -> None:
    """Its members come again as new ones; also after a restart. Others, and the lighthouse's own machine, may join."""
    world = World(1)

    def join(coordinator: SwarmCoordinator, address: str) -> Any:
        return world.answer(coordinator.join(world.now, "text", (), address))

    for number in range(3):
        assert isinstance(join(world.coordinator, "10.0.0.3"), Admitted)
        assert isinstance(world.ask(number), StartSwarm)
        world.answer(world.coordinator.dissolve(world.now, number, "a false model"))
        assert isinstance(said := world.ask(number), Rejoin) and "a false model" in said.reason
    for coordinator in (world.coordinator, SwarmCoordinator(world.rules, [*world.journal])):
        refusal = join(coordinator, "10.0.0.3")
        assert refusal == Refusal("3 members from this address were shut out of the run")
        assert isinstance(join(coordinator, "10.0.0.4"), Admitted) and isinstance(join(coordinator, ""), Admitted)


def test_steps_a_second_are_those_between_two_beats() -> None:
    """Four steps that ended four seconds apart by the beats' own word: one a second."""
    world = World(1)
    world.join()
    world.ask(0)
    for world.now, step in ((10.0, 3), (14.0, 7)):
        world.beat(0, step, {0: 0})
    (row,) = world.coordinator.now(15.0, []).members
    assert row.rate == pytest.approx(1.0) and row.exchanged == 7 and row.ago == pytest.approx(1.2)

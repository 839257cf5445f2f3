"""Rounds for whose mean a quorum is enough: when they close, among whom, and what becomes of who is late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Append, Notify, Reply, Rules
from isles.membership.late_shares import Delivery
from isles.membership.messages import Ack, Beat, BeatReply, Delivered, Done, SampleRange
from isles.membership.requests import DecisionLog
from isles.membership.round_commit import NOTHING, Ballot, Graces, RoundDecision
from tests.membership.interleavings import start, walk


def test_all_who_live_are_waited_for_no_longer_than_their_grace() -> None:
    ballot = Ballot(3, ((0, 1, 2, 3),), quorum=0.5).add_share(0, 5).add_share(2, 3).add_share(1, 5)
    assert ballot.decide({0, 1, 2, 3}) is None
    assert ballot.decide({0, 1, 2}) == RoundDecision(3, "retry", 1, (0, 1, 2), steps=(5, 5, 3))  # the fourth is dead
    closed = Ballot(3, ((0, 1, 2, 3),), quorum=0.8, is_closing=True).add_share(0, 5).add_share(1, 5).add_share(2, 5)
    assert closed.decide({0, 1, 2, 3}) is None  # a grace that is over does not make a quorum
    decision = closed.add_share(3, 1).decide({0, 1, 2, 3})
    assert decision == RoundDecision(3, "retry", 1, (0, 1, 2, 3), steps=(5, 5, 5, 1))


def test_a_retry_keeps_the_weights_of_those_who_are_left() -> None:
    ballot = Ballot(3, ((0, 1, 2),), quorum=0.6).add_share(0, 5).add_share(1, 4).add_share(2, 3)
    decision = ballot.decide({0, 1, 2})
    assert decision is not None
    ballot = ballot.decided(decision).add_answer(1, 0, 7)
    again = ballot.decide({0, 2})
    assert again == RoundDecision(3, "retry", 2, (0, 2), steps=(5, 3))
    landed = ballot.decided(again).add_answer(2, 0, 9).add_answer(2, 2, 9).decide({0, 2})
    assert landed == RoundDecision(3, "land", 2, (0, 2), steps=(5, 3))
    assert ballot.add_share(1, 4) == ballot.add_share(1, 9) == ballot  # it is closed


def test_a_share_weighs_by_its_inner_steps() -> None:
    """30 and 10: the factors 3/2 and 1/2 make the plain mean of two shares one by steps."""
    decision = RoundDecision(7, "retry", 1, (3, 5), steps=(30, 10))
    factors = []
    for member, steps in zip(decision.members, decision.steps, strict=True):
        line: Any = SimpleNamespace(
            member=member, decisions=DecisionLog(), ask=lambda message: decision, say=print, is_over=False
        )
        delivery = Delivery(line, 7, steps, seconds=0.0, now=0.0)
        assert delivery.look(0.0) == "exchanging"
        factors.append(delivery.factor)
    assert factors == [1.5, 0.5]


def test_a_grace_never_reaches_into_the_next_exchange() -> None:
    graces = Graces()
    graces.delivered(100.0, 1, 40.0)
    graces.delivered(104.0, 1, 40.0)
    assert graces.next == 140.0  # nobody waits for a quorum longer than the first one can
    graces.enough(104.0, 1)
    graces.enough(105.0, 1)
    assert graces.next == 114.0 and graces.over(113.9) == set() and graces.over(114.0) == {1}
    graces.exchanging(112.0, 1)
    graces.exchanging(114.0, 1)  # again, for somebody died
    graces.landed(142.0, 1)  # exchanges take 28 of the 40 seconds
    graces.delivered(144.0, 2, 40.0)
    graces.enough(145.0, 2)
    assert graces.next == pytest.approx(144.0 + 40.0 - 1.25 * 28.0)
    graces.delivered(141.0, 3, 0.0)  # of unknown pace: nothing follows from it
    assert graces.over(1e9) == {2}


class Toy:
    """A lighthouse and what it says. journal: its records."""

    def __init__(self, founders: int, **rules: Any) -> None:
        self.rules = Rules(founders=founders, sync_every=4, agrees=True, quorum=0.5, **rules)
        self.membership, self.journal = RoundsCoordinator(self.rules), list[Any]()
        self.told: dict[int, list[RoundDecision]] = {}
        for member in range(founders):
            self.do(self.membership.join(0.0, "toy"))
            self.do(self.membership.reconnected(0.0, member))
            self.do(self.membership.beat(0.0, member, Beat(ready=0)))

    def do(self, orders: list[Any]) -> Any:
        reply = None
        for order in orders:
            if isinstance(order, Append):
                self.journal.append(order.entry)
            elif isinstance(order, Notify) and isinstance(order.message, RoundDecision):
                self.told.setdefault(order.member, []).append(order.message)
            elif isinstance(order, Reply):
                reply = order.message
        return reply

    def begin(self, now: float, *members: int, round: int) -> None:
        for member in members:
            assert isinstance(self.do(self.membership.beat(now, member, Beat(round=round, ready=0))), BeatReply)

    def deliver(self, now: float, member: int, round: int, steps: int = 4, seconds: float = 8.0) -> Any:
        return self.do(self.membership.deliver(now, member, Delivered(round, steps, seconds)))

    def done(self, now: float, member: int, round: int, attempt: int, digest: int = 5) -> Any:
        return self.do(self.membership.done(now, member, Done(round, attempt, digest)))


def test_who_is_late_keeps_its_seat_and_delivers_into_the_next_round() -> None:
    toy = Toy(4, last=9)
    toy.begin(1.0, 0, 1, 2, 3, round=1)
    assert [toy.deliver(9.0, member, 1) for member in (0, 1)] == [None, None]
    toy.do(toy.membership.tick(10.9))
    assert toy.told == {}
    toy.do(toy.membership.tick(11.0))  # a quarter of eight seconds
    assert toy.told[0] == [RoundDecision(1, "retry", 1, (0, 1), 0, (4, 4))] and 3 not in toy.told
    late = toy.deliver(11.5, 3, 1)
    assert late.members == (0, 1) and late.outcome == "retry"
    toy.done(12.0, 0, 1, 1)
    landed = toy.done(12.1, 1, 1, 1)
    assert landed.outcome == "land" and toy.deliver(12.2, 3, 1) == landed
    assert toy.membership.workers[3].state == "in" and toy.membership.workers[3].call == 0
    assert toy.deliver(12.3, 3, 2, steps=4) is None  # at once, into the next one
    again = RoundsCoordinator(toy.rules, toy.journal, until=20.0)  # a restarted lighthouse knows what has landed
    assert again.ballots.has_landed(1) and again.workers[3].call == 0


def test_one_that_is_far_ahead_does_not_make_the_others_late() -> None:
    """The grace begins with the quorum: a newcomer delivers long before anybody else."""
    toy = Toy(4, last=9)
    toy.begin(1.0, 0, 1, 2, 3, round=1)
    toy.deliver(3.0, 0, 1)
    for member, now in ((1, 8.0), (2, 8.5)):
        toy.do(toy.membership.tick(now))
        toy.deliver(now, member, 1)
    assert toy.membership.ballots.graces.next == 10.0 and toy.told == {}
    toy.deliver(9.5, 3, 1)
    assert toy.told[3] == [RoundDecision(1, "retry", 1, (0, 1, 2, 3), 0, (4, 4, 4, 4))]


def test_the_last_round_waits_for_all() -> None:
    toy = Toy(2, last=1)
    toy.begin(1.0, 0, 1, round=1)
    toy.deliver(9.0, 0, 1)
    toy.do(toy.membership.tick(1e6))
    assert toy.told == {}
    assert toy.deliver(1e6, 1, 1).members == (0, 1)


def test_who_failed_in_the_exchange_is_asked_again_and_who_died_is_left_out() -> None:
    toy = Toy(3)
    toy.begin(1.0, 0, 1, 2, round=1)
    for member in range(3):
        toy.deliver(9.0, member, 1, steps=member + 2)
    toy.done(9.5, 0, 1, 1, NOTHING)
    toy.do(toy.membership.disconnected(9.6, 2))
    assert toy.told[1][-1] == RoundDecision(1, "retry", 2, (0, 1), 0, (2, 3))


def test_a_word_about_a_round_decides_none_without_shares() -> None:
    """Said before anybody has delivered, by one that is lost then. Without steps nobody knows what a share counts."""
    toy = Toy(3)
    toy.begin(1.0, 0, 1, 2, round=1)
    toy.done(1.0, 2, 1, 0, NOTHING)
    toy.do(toy.membership.disconnected(2.0, 2))
    assert toy.told == {}
    toy.deliver(9.0, 0, 1)
    toy.deliver(9.0, 1, 1)
    assert toy.told[0] == [RoundDecision(1, "retry", 1, (0, 1), 0, (4, 4))]


def test_who_has_the_state_of_one_that_was_late_has_not_all_of_its_work() -> None:
    """Member 0 is late for round 1; a joiner with its state says that it has its work so far. Then member 0 is lost."""
    toy = Toy(3, last=90)
    toy.begin(1.0, 0, 1, 2, round=1)
    for member in (1, 2):
        toy.deliver(9.0, member, 1)
    toy.do(toy.membership.tick(20.0))
    for member in (1, 2):
        toy.done(20.0, member, 1, 1)
    toy.do(toy.membership.join(21.0, "toy"))
    toy.do(toy.membership.beat(21.0, 3, Beat(ready=0, seen=((0, 1),))))
    for member in range(3):
        toy.do(toy.membership.ack(21.5, member, Ack(1, True, Beat(round=1, ready=0))))
    toy.do(toy.membership.disconnected(22.0, 0))
    assert SampleRange(0, 0, 0, 4) in toy.membership.backlog()


def test_every_interleaving_of_a_quorum() -> None:
    """Three members of whom two are enough, one death, a crash: who has landed has landed the same, and nobody who
    lives waits for ever; who was late knows whose mean to fetch.
    """
    found = walk(start(3, deaths=1, crashes=1, quorum=0.6), most=12_000)
    assert found.wrong == () and found.late > 10


@pytest.mark.long
def test_every_interleaving_of_a_quorum_to_its_end() -> None:
    found = walk(start(3, deaths=1, crashes=1, quorum=0.6), most=2_000_000)
    print(found.states, found.ends, found.late)
    assert found.wrong == () and found.ends > 100

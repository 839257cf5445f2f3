"""A member that beats, and whose training stands still: it is left out, and nobody else is."""

from __future__ import annotations

import pytest

from isles.membership.coordinator import RoundsCoordinator, Stalls
from isles.membership.effects import Append, Rules, Worker
from isles.membership.messages import Beat
from tests.membership.test_membership import READY, promise

EVERY = 4  # inner steps, of half a second each: a round usually takes 2 s


class Watched:
    """Members at work, each a round in 2 s; `still`: by member, the round in which it stands still. named: (when,
    member, event) of those who were left out.
    """

    def __init__(self, members: int, *, agrees: bool = False, last: int = 1000, steps: float = 0.5) -> None:
        rules = Rules(founders=members, sync_every=EVERY, agrees=agrees, last=last, waits=20.0, evaluates=100.0)
        self.run, self.members, self.steps, self.last = RoundsCoordinator(rules), range(members), steps, last
        self.now, self.still = 0.0, dict[int, int]()
        self.named: list[tuple[float, int, str]] = []
        for member in self.members:
            self.run.join(0.0, "a worker")
            self.run.beat(0.0, member, READY)

    def until(self, seconds: float) -> None:
        """Four looks a second; all beat each second."""
        while self.now < seconds:
            self.now += 0.25
            for member in self.members if self.now % 1 == 0 else ():
                begun = min(1 + int(self.now / (EVERY * self.steps)), self.last)
                known = -1 if self.run.view is None else self.run.view.number
                self.run.beat(
                    self.now, member, Beat(min(begun, self.still.get(member, begun)), 0, known, (), (), self.steps)
                )
            self.look(self.now)
            if self.run.proposal is not None:
                promise(self.run, *self.run._voters_of_view())

    def look(self, at: float) -> None:
        orders = self.run.tick(at)
        found = [order.entry for order in orders if isinstance(order, Append) and "still" in order.entry]
        self.named += [(at, entry["member"], entry["event"]) for entry in found]


def test_who_stands_still_is_left_out_and_the_others_go_on() -> None:
    """Round 5 begins at 8 s; the others are in round 6 from 10 s on. A minute is more than ten rounds of 2 s; it may
    have waited 20 s for another member's part: 90 s.
    """
    world = Watched(3)
    world.still[2] = 5
    world.until(100.0)
    ((when, member, event),) = world.named
    assert (member, event) == (2, "call") and 90.0 < when < 92.0
    assert world.run.members() == (0, 1) and world.run.view is not None and world.run.view.members == (0, 1)
    before = world.run.workers[2].state
    world.run.beat(world.now, 2, Beat(5, 0, 0))  # its beats are no sign of more
    assert before == world.run.workers[2].state == "outside"


def test_ten_times_its_usual_time_where_that_is_longer() -> None:
    """Rounds of 20 s: 200 s and 20 s, from the moment on that the others are in the next one (20 s)."""
    world = Watched(2, steps=5.0)
    world.still[1] = 1
    world.until(130.0)
    assert world.named == []  # 60 s and 20 s are over
    world.until(325.0)
    assert [(member, 320.0 < when < 323.0) for when, member, _ in world.named] == [
        (1, True)
    ]  # in its first round: 100 s


@pytest.mark.parametrize("still", [0, 1])
def test_who_may_be_validating_has_longer(still: int) -> None:
    """The first of the view validates: 100 s instead of 20."""
    world = Watched(2)
    world.still[still] = 5
    world.until(200.0)
    assert [member for _, member, _ in world.named] == [still]
    assert (169.0 if still == 0 else 89.0) < world.named[0][0] < (173.0 if still == 0 else 93.0)


def test_who_never_says_that_it_has_finished_holds_the_end_no_longer() -> None:
    """All are in the last round, 10, from 18 s on; the others say at 30 s that they have done it."""
    world = Watched(3, last=10)
    world.until(30.0)
    world.run.finished |= {0, 1}
    world.until(180.0)
    assert world.named == []
    world.until(195.0)
    assert [member for _, member, _ in world.named] == [2] and world.run.members() == (0, 1)


def test_one_that_leaves_and_stands_still_is_gone() -> None:
    world = Watched(3)
    world.run.leave(0.0, 2)
    world.still[2] = 5
    world.until(100.0)
    assert [(member, event) for _, member, event in world.named] == [(2, "lost")]
    assert world.run.workers[2].state == "left"


@pytest.mark.parametrize("agrees", [False, True])
def test_where_all_stand_still_nobody_is_left_out(agrees: bool) -> None:
    """Who waits for the one that stands still is not told from it; where all land one mean that ends with its word."""
    world = Watched(3, agrees=agrees)
    world.still = dict.fromkeys(range(3), 5)
    world.until(900.0)
    assert world.named == [] and world.run.members() == (0, 1, 2)


def test_a_lighthouse_that_stood_still_itself_leaves_nobody_out() -> None:
    """It wakes after ten minutes, and hears the beats of the first one first."""
    world = Watched(3)
    world.until(20.0)
    world.run.beat(620.0, 0, Beat(300, 0, 0, (), (), 0.5))
    for look in range(8):
        world.look(620.0 + look / 4)
    assert world.named == []


def test_one_s_own_word_of_its_pace_is_taken_for_ten_times_the_others() -> None:
    """It says that a round takes it three years: it counts as one of 20 s, ten times 2 s, so 220 s are enough."""
    world = Watched(3)
    world.until(20.0)
    world.run.beat(20.0, 2, Beat(11, 0, 0, (), (), 1e8))
    world.still[2], world.steps = 11, 0.5
    world.run.workers[2].seconds = 1e8
    until, world.members = world.until, range(2)  # it does not say anything else any more
    until(300.0)
    assert [(member, 240.0 < when < 246.0) for when, member, _ in world.named] == [(2, True)]


def test_a_round_that_waits_for_a_newcomer_stalls_nobody_else() -> None:
    """Members 0 to 2 wait in round 205 for 3, who was to come in then; the next view, with 4, begins in round 208."""
    members = [Worker(member, state="in", entered=1, round=205, seconds=0.5) for member in range(3)]
    members += [Worker(3, state="in", entered=205), Worker(4, state="in", entered=208)]
    rules, stalls = Rules(founders=3, sync_every=EVERY, agrees=True, last=1000, waits=20.0, evaluates=100.0), Stalls()
    found = [stalls.look(at, rules, members, 0, 1000, ()) for at in range(200)]
    assert {member for one in found for member in one} == {3}
    assert not any(found[:160]) and found[170]  # a minute, and what it may take to load a state

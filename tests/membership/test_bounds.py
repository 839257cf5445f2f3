"""What hostile addresses cannot do, whatever their members say: the table "What one member can do" of
docs/guarantees.md, row by row, and the bound for f hostile addresses of n.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Effect, Rules
from isles.membership.messages import Ack, Beat, Delivered, Done, Load, PeerReport, Rejoin, StartSwarm, Wait
from isles.membership.round_commit import NOTHING, RoundDecision
from tests.membership.hostile import Liar
from tests.membership.test_membership import told
from tests.membership.test_muster import World as Swarm


class Run:
    """A run of honest addresses with a member each, and of hostile ones with `seats` members each, all in round 1."""

    def __init__(self, honest: int, hostile: int = 1, seats: int = 3, **rules: object) -> None:
        count = honest + hostile * seats
        self.run = RoundsCoordinator(Rules(founders=count, sync_every=4, last=1000, **rules))  # type: ignore[arg-type]
        self.honest, self.hostile = [*range(honest)], [*range(honest, count)]
        self.now, self.round = 0.0, 1
        for member in range(count):
            seat = member - honest
            self.run.join(0.0, "text", (), f"honest {member}" if seat < 0 else f"hostile {seat % max(hostile, 1)}")
        for member in range(count):
            self.run.hear(0.0, member, Beat(ready=0))
        self.begin(1)

    def begin(self, round: int, *members: int) -> list[Effect]:
        """Members, the honest ones if none is named, begin a round; whoever is to load another state has it at once."""
        found = list[Effect]()
        for member in members or self.honest:
            worker = self.run.workers[member]
            found += self.run.hear(self.now, member, Beat(round * (worker.state != "outside"), worker.call, 0)) or []
        return found

    def promise(self, *members: int, promised: bool = True) -> None:
        for member in members or self.honest:
            if self.run.proposal is not None and self.run.workers[member].state in ("in", "leaving"):
                worker, number = self.run.workers[member], self.run.proposal.number
                self.run.hear(self.now, member, Ack(number, promised, Beat(worker.round, worker.call, 0)))

    def ticks(self, seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            self.now += 0.25
            self.run.tick(self.now)

    def joins(self) -> int:
        """One more honest member, ready."""
        member = len(self.run.workers)
        self.run.join(self.now, "text", (), f"honest {member}")
        self.run.hear(self.now, member, Beat(ready=0))
        return member

    def shut_out(self) -> list[int]:
        return [member for member in self.honest if self.run.workers[member].state == "banned"]


def test_members_behind_one_address_have_one_vote_together() -> None:
    """Nine of them beside three honest members, each in every round: none of their words of honest ones counts."""
    world = Run(3, seats=9, agrees=True)
    assert world.run.workers.votes(world.honest + world.hostile) == 4
    for round in range(1, 6):
        world.begin(round, *world.honest, *world.hostile)
        for by in world.hostile:
            for whom in world.honest:
                for charge in ("refused", "late"):
                    effects = world.run.hear(0.0, by, PeerReport(round, 0, whom, charge))  # type: ignore[arg-type]
                    assert all({0, 1, 2} <= {*one.members} for _, one in told(effects or [], RoundDecision))
    assert world.shut_out() == []


def test_most_answers_are_counted_by_address() -> None:
    """Six behind one address say 9, three honest ones 7: the round goes on with 7."""
    world = Run(3, seats=6, agrees=True)
    for attempt in range(3):
        found = list[Effect]()
        for member in [*world.hostile, *world.honest]:
            found += world.run.hear(0.0, member, Done(1, attempt, 7 if member in world.honest else 9)) or []
    assert told(found, RoundDecision)[-1][1].members == (0, 1, 2)


def test_six_behind_one_address_send_nobody_for_another_state() -> None:
    world = Run(3, seats=6)
    world.begin(40, *world.hostile)
    world.begin(2)
    assert [world.run.workers[one].call for one in world.honest] == [0, 0, 0] and world.run.newest_round == 2


def test_an_answer_said_too_early_counts_nobody_who_was_left_out_since() -> None:
    """The hostile member answers round 2 before round 1 lands without member 2."""
    world = Run(3, seats=1, agrees=True)
    world.run.hear(0.0, 3, Done(2, 0, 7))
    world.run.disconnected(0.0, 2)
    for round in (1, 2):
        world.begin(round, 0, 1, 3)
        said = [Done(round, attempt, 7) for attempt in (0, 1)]
        effects = [effect for done in said for one in (0, 1, 3) for effect in world.run.hear(0.0, one, done) or []]
        (landed,) = {decision for _, decision in told(effects, RoundDecision) if decision.outcome == "land"}
        assert (landed.round, landed.attempt, landed.members) == (round, int(round == 1), (0, 1, 3))


@pytest.mark.parametrize(("rules", "newest"), [({"agrees": True}, 1), ({"agrees": True, "quorum": 0.5}, 4), ({}, 4)])
def test_who_claims_a_later_round_makes_no_joiner_miss_one(rules: dict[str, object], newest: int) -> None:
    """Members of one mean wait for a joiner in its first round, so it must not begin with a later one."""
    world = Run(3, seats=1, **rules)
    world.begin(4, 3)
    assert world.run.newest_round == newest


@pytest.mark.parametrize("honest", [1, 2, 3])
def test_who_claims_the_last_round_stops_no_view(honest: int) -> None:
    """Beside one, two or three honest members; the view that a joiner waits for begins three rounds ahead."""
    world = Run(honest, seats=1)
    world.begin(1000, *world.hostile)
    world.begin(5)
    comes = world.joins()
    for _ in range(5):
        world.promise(*world.hostile, promised=False)
        world.promise()
    assert world.run.view is not None and (comes in world.run.view.members, world.run.view.since) == (True, 8)
    assert world.run.workers[world.hostile[0]].state == "outside"  # it is to load a state again


@pytest.mark.parametrize("says", ["nothing", "no"])
def test_who_never_promises_stops_no_view(says: str) -> None:
    """Without an answer for 15 s it is not waited for; three proposals fail by its word at most, and then it counts no
    more.
    """
    world, refused = Run(3, seats=1), 0
    comes = world.joins()
    assert world.run.proposal is not None
    for round in range(2, 40):
        world.begin(round)
        world.promise()
        if says == "no" and world.run.proposal is not None:
            world.begin(round + 4, *world.hostile)  # as far as it is believed
            refused += 1
            world.promise(*world.hostile, promised=False)
        if says == "nothing":
            world.ticks(1.0)
        if world.run.view is not None and comes in world.run.view.members:
            break
    assert round <= (17 if says == "nothing" else 10), (round, refused)
    assert all(world.run.workers[one].call == 0 for one in world.honest)


def test_the_lighthouse_that_was_suspended_takes_nobody_s_answer_for_missing() -> None:
    world = Run(3, seats=1)
    world.ticks(1.0)
    world.joins()
    world.now += 3600.0
    world.run.tick(world.now)
    assert world.run.workers[world.hostile[0]].state == "in"
    world.promise(*world.honest, *world.hostile)
    assert world.run.view is not None and len(world.run.view.members) == 5


@pytest.mark.parametrize("ahead", [0, 1])
def test_of_two_that_are_far_apart_the_one_that_joined_later_loads_a_state(ahead: int) -> None:
    """As after an outage of the lighthouse, while each went on alone."""
    world = Run(2, hostile=0)
    world.begin(50, ahead)
    effects = world.begin(11, 1 - ahead)
    assert {*told(effects, Load)} == {
        (1, Load(1, 0, 0.0, "half of the members are more than 4 rounds apart from it"))
    } and world.run.workers[0].call == 0
    assert world.run.newest_round == (50 if ahead == 0 else 11)


def test_who_is_far_ahead_and_leaves_has_left() -> None:
    """It is asked for no other state, with which it would be in the next view again."""
    world = Run(2, hostile=0)
    world.run.leave(0.0, 1)
    world.begin(50, 1)
    assert told(world.begin(11, 0), Load) == [] and world.run.workers[1].state == "left"


def test_accusations_of_rounds_that_few_have_begun_count_nothing() -> None:
    """Three of five that agree may ban one; not before the rounds have passed."""
    world = Run(5, hostile=0)
    for round in (1, 2, 3):
        world.begin(round, 2, 3)  # two of five say that they are in it
        for by in (2, 3):
            world.run.hear(0.0, by, PeerReport(round, 0, 0, "refused"))
            world.run.hear(0.0, by, PeerReport(round, 0, 1, "refused"))
    assert not any(len(rounds) > 1 for rounds in world.run.ballots.ban_scores._rounds.values())


def test_words_about_a_round_to_come_do_not_fix_who_is_in_it() -> None:
    """A view begins with round 4, about which a hostile member has spoken before; then all four land it."""
    world = Run(2, seats=1, agrees=True)
    comes = world.joins()
    world.run.hear(0.0, 2, Done(4, 0, 7))
    world.run.hear(0.0, 2, PeerReport(4, 0, 0, "late"))
    world.promise(*world.honest, *world.hostile)
    assert world.run.view is not None and world.run.view.since == 4
    for round in (2, 3, 4):
        world.begin(round, 0, 1, 2)
    world.begin(4, comes)
    found = [effect for member in (0, 1, 2, comes) for effect in world.run.hear(0.0, member, Done(4, 0, 7)) or []]
    assert told(found, RoundDecision)[0][1] == RoundDecision(4, "land", 0, (0, 1, 2, comes), view=1)


def test_no_round_is_decided_that_a_pending_view_may_begin_with() -> None:
    """The view from round 4 on has a joiner, and not member 0, which spoke of that round and was lost; member 2 has not
    promised it yet. Whoever decided now would do so among the members of the former view.
    """
    world = Run(3, hostile=0, agrees=True)
    comes = world.joins()
    world.run.leave(0.0, 0)
    world.promise(0, 1)
    for round in (2, 3, 4):
        world.begin(round)
    world.run.hear(0.0, 0, Done(4, 0, NOTHING))
    assert told(world.run.disconnected(0.0, 0), RoundDecision) == []
    world.promise(2)
    world.begin(4, comes)
    found = [effect for member in (1, 2, comes) for effect in world.run.hear(0.0, member, Done(4, 0, 7)) or []]
    assert told(found, RoundDecision)[0][1] == RoundDecision(4, "land", 0, (1, 2, comes), view=2)


# Swarms


def swarm(*addresses: str) -> Swarm:
    """A swarm of one stage with a peer at each address."""
    world = Swarm(len(addresses))
    for address in addresses:
        world.answer(world.coordinator.join(0.0, "text", (), address))
    for member in range(len(addresses)):
        world.ask(member)
    return world


def test_two_peers_behind_one_address_evict_nobody() -> None:
    """Two honest peers and three of one address, all at work; these say that they go on without the others."""
    world = swarm("a", "b", "x", "x", "x")
    for member in range(5):
        world.beat(member, 1, dict.fromkeys(range(5), 0))
    for _ in range(3):
        for member in (2, 3, 4):
            world.beat(member, 9, {2: 0, 3: 0, 4: 0})
    assert {0, 1} <= world.coordinator.members.keys() and world.coordinator.step <= 1
    for step in (2, 3):
        for member in (0, 1):
            world.beat(member, step, dict.fromkeys(range(5), 0))
    assert {0, 1} <= world.coordinator.members.keys()


@pytest.mark.parametrize("leaver", [0, 1])
def test_of_two_peers_the_first_one_is_never_evicted(leaver: int) -> None:
    world = swarm("a", "x")
    for member in (0, 1):
        world.beat(member, 1, {0: 0, 1: 0})
    world.beat(leaver, 9, {leaver: 0})
    assert (0 in world.coordinator.members, 1 in world.coordinator.members) == (True, leaver == 1)


def test_the_first_that_asks_does_not_choose_the_configuration() -> None:
    """It asks first, thirty times behind one address, with a configuration of its own."""
    world = Swarm(3, most=40)
    for address in ["x"] * 30 + ["a", "b"]:
        world.answer(world.coordinator.join(0.0, "text", (), address))
    for member in range(2):
        assert isinstance(world.ask(member, run=8), Wait)
    told_first = world.ask(30)
    assert isinstance(told_first, Wait) and "configurations" in told_first.reason
    assert isinstance(world.ask(31), Wait)
    assert "configuration" in world.ask(0, run=8).reason  # two of three votes are for another one
    world.answer(world.coordinator.join(0.0, "text", (), "c"))
    assert world.ask(32).members == (30, 31, 32)
    assert "configuration" in world.ask(5, run=8).reason


def test_a_beat_before_the_swarm_has_begun_begins_none() -> None:
    """Nor one after all of its peers were lost."""
    world = Swarm(1, 1)
    for _ in range(4):
        world.join()
    assert isinstance(world.beat(3, 0, {3: 0}, epoch=0), Rejoin)
    world.ask(0)
    assert isinstance(world.ask(1), StartSwarm)
    world.gone(0, 1)
    assert isinstance(world.beat(3, 0, {3: 0}), Rejoin) and isinstance(world.ask(2), Wait)


# The bound


@pytest.mark.parametrize(
    "rules", [{}, {"agrees": True}, {"agrees": True, "quorum": 0.5}], ids=["pairs", "mean", "quorum"]
)
@pytest.mark.parametrize(("addresses", "hostile"), [(2, 1), (3, 1), (4, 1), (7, 3)])
def test_fewer_hostile_addresses_than_half_shut_out_nobody(
    addresses: int, hostile: int, rules: dict[str, object]
) -> None:
    """Three members each, words of all kinds and planned accusations: rounds land, a joiner gets in, nobody honest is
    banned. Of two addresses, where one is half, nobody is banned either.
    """
    counts = Counter[tuple[str, bool]]()
    for seed in range(2):
        world, draw = Run(addresses - hostile, hostile, **rules), Random(seed)
        liar, victim = Liar(draw), draw.randrange(addresses - hostile)
        for round in range(1, 7):
            world.begin(round)
            for member in world.hostile:
                if world.run.workers[member].here:
                    world.begin(round, member)
                    for word in [
                        PeerReport(round, 0, victim, "refused"),
                        *(liar.word(world.run, member) for _ in range(6)),
                    ]:
                        liar.say(world.now, world.run, member, word)
            for _ in range(40 if rules else 0):
                if land(world, round, "quorum" in rules):
                    break
            else:
                assert not rules, f"seed {seed}, round {round}: no decision"
            world.promise()
            world.ticks(0.5)
        assert world.shut_out() == [], f"seed {seed}"
        counts += liar.said
    taken = sum(number for (_, is_taken), number in counts.items() if is_taken)
    assert 2 * taken >= sum(counts.values())


def land(world: Run, round: int, is_quorum: bool) -> bool:
    """The honest members' part of an attempt; whether the round has landed, for at least one of them."""
    run = world.run
    if is_quorum:
        for member in world.honest:
            run.hear(world.now, member, Delivered(round, 4, 1.0))
        world.ticks(1.0)
    ballot = run.ballots._open.get(round)
    attempts = (run.voters(round),) if ballot is None else ballot.attempts
    late = [member for member in world.hostile if member in attempts[-1]]
    number = len(attempts) - 1
    for member in [one for one in world.honest if one in attempts[-1]]:
        for other in late:  # they give nothing
            run.hear(world.now, member, PeerReport(round, number, other, "late"))
        run.hear(world.now, member, Done(round, number, NOTHING if late else 7))
    return run.ballots.has_landed(round) or not any(one in run.voters(round) for one in world.honest)

"""What a member can do by accusing others: of four one that lies shuts out nobody and takes no round."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from isles.comm.errors import Refused
from isles.membership.client import MembershipClient
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Effect, Reply, Rules
from isles.membership.messages import Beat, Done, PeerReport, Refusal
from isles.membership.round_commit import NOTHING, RoundDecision
from tests.membership.test_membership import READY, founded, promise, told

LIAR = 0


def refuse(
    run: RoundsCoordinator, by: int, whom: int, round: int = 1, attempt: int = 0, judge: int = -1
) -> list[RoundDecision]:
    """`by` says that the share of `whom` cannot be; judge: that this one has told it so. The words that follow."""
    return decisions(run.report_peer(0.0, by, PeerReport(round, attempt, whom, "refused", "NaN", judge)))


def decisions(orders: list[Effect]) -> list[RoundDecision]:
    """Those that are new, each once."""
    return sorted({decision for _, decision in told(orders, RoundDecision)}, key=lambda decision: decision.attempt)


def answers(run: RoundsCoordinator, attempt: int, digests: dict[int, int], round: int = 1) -> list[RoundDecision]:
    """All say what they have of an attempt."""
    return [
        w for member, digest in digests.items() for w in decisions(run.done(0.0, member, Done(round, attempt, digest)))
    ]


def shut(run: RoundsCoordinator) -> list[int]:
    return [member for member, worker in run.workers.items() if worker.state == "banned"]


def test_one_accuser_of_four_takes_no_round() -> None:
    """It accuses all, and says that it has no answer; the others have the same one and land it in the fourth try."""
    run, _ = founded(4, agrees=True)
    for attempt in range(3):
        assert all(refuse(run, LIAR, whom, attempt=attempt) == [] for whom in (1, 2, 3))
        (decision,) = answers(run, attempt, {LIAR: NOTHING, 1: 7, 2: 7, 3: 7})
    assert decision == RoundDecision(1, "retry", 3, (1, 2, 3), view=0)
    (decision,) = answers(run, 3, {1: 8, 2: 8, 3: 8})
    assert decision == RoundDecision(1, "land", 3, (1, 2, 3), view=0)


def test_refused_by_most_is_left_out_of_the_next_attempt() -> None:
    run, _ = founded(4, agrees=True)
    assert refuse(run, 1, LIAR) == refuse(run, 1, LIAR) == []  # twice is one voice
    assert refuse(run, 2, LIAR) == [RoundDecision(1, "retry", 1, (1, 2, 3), view=0)]


@pytest.mark.parametrize("accuser", [0, 1])
def test_of_two_members_the_first_one_goes_on(accuser: int) -> None:
    run, _ = founded(2, agrees=True)
    assert refuse(run, accuser, 1 - accuser) == [RoundDecision(1, "retry", 1, (0,), view=0)]
    assert refuse(run, 1 - accuser, accuser) == []


def test_who_condemns_one_after_the_other_is_left_out_at_the_second() -> None:
    """It reduces a part, and tells all in its place that somebody's share cannot be: they say who told them so."""
    run, _ = founded(4, agrees=True)
    assert refuse(run, 1, 3, judge=LIAR) == []
    assert refuse(run, 2, 3, judge=LIAR) == [RoundDecision(1, "retry", 1, (0, 1, 2), view=0)]
    for condemned, attempt in ((3, 0), (2, 1)):  # who is condemned knows who does it
        assert refuse(run, condemned, LIAR, attempt=attempt) == []
    assert refuse(run, 1, 2, attempt=1, judge=LIAR) == []
    assert refuse(run, LIAR, 2, attempt=1) == [RoundDecision(1, "retry", 2, (1, 2), view=0)]


def test_who_says_what_nobody_told_it_harms_nobody_else() -> None:
    run, _ = founded(4, agrees=True)
    for whom in (2, 3):
        assert refuse(run, LIAR, whom, judge=1) == []
    assert refuse(run, 1, 3) == [RoundDecision(1, "retry", 1, (0, 1, 2), view=0)]


def test_who_alone_has_an_answer_does_not_go_on_alone() -> None:
    """It condemns others to one of them each time, so that nobody else has an answer."""
    run, _ = founded(4, agrees=True)
    for attempt in range(3):
        refuse(run, 1, 2, attempt=attempt, judge=LIAR)
        refuse(run, 2, LIAR, attempt=attempt)
        (decision,) = answers(run, attempt, {LIAR: 9, 1: NOTHING, 2: NOTHING, 3: NOTHING})
    assert decision.outcome == "retry" and len(decision.members) == 3 and decision.members != (LIAR,)


def test_who_accuses_somebody_outside_goes_on() -> None:
    run, _ = founded(3, agrees=True)
    run.done(0.0, 1, Done(1, 0, 7))
    assert decisions(run.disconnected(0.0, 2)) == [RoundDecision(1, "retry", 1, (0, 1), view=0)]
    run.reconnected(0.0, 2)
    assert refuse(run, 1, 2, attempt=1) == [] and answers(run, 1, {0: 8, 1: 8})[-1].outcome == "land"


def test_three_attempts_without_any_answer_are_enough() -> None:
    """Of three one condemns another: neither has a majority, and nobody ever has an answer."""
    run, _ = founded(3, agrees=True)
    for attempt in range(3):
        refuse(run, 1, LIAR, attempt=attempt)
        (decision,) = answers(run, attempt, {0: NOTHING, 1: NOTHING, 2: NOTHING})
    assert decision.outcome == "retry" and decision.members in ((0, 2), (1, 2))


def test_who_says_that_it_is_done_and_gives_nothing_is_late_in_the_second_attempt() -> None:
    run, _ = founded(4, agrees=True)
    for attempt in range(2):
        found = answers(run, attempt, {LIAR: 9})
        for by in (1, 2):
            found += decisions(run.report_peer(0.0, by, PeerReport(1, attempt, LIAR, "late")))
        found += answers(run, attempt, {1: NOTHING, 2: NOTHING, 3: NOTHING})
        assert found[0] == RoundDecision(1, "retry", attempt + 1, (0, 1, 2, 3) if not attempt else (1, 2, 3), view=0)


def test_fresh_seats_shut_out_nobody() -> None:
    """Two that have never trained, 18 words: outside, and in a view that has not begun for them."""
    run, _ = founded(3)
    for member in (3, 4):
        run.join(0.0, "a worker")
        run.beat(0.0, member, READY)
    for _ in range(3):
        for round in (1, 2, 3, 4):
            for by in (3, 4):
                for whom in (0, 1, 2):
                    refuse(run, by, whom, round)
        assert shut(run) == []
        if run.proposal is not None:
            promise(run, *(member for member in (0, 1, 2, 3) if run.workers[member].state == "in"))
    assert run.view is not None and run.view.members == (0, 1, 2, 3, 4)


def begin(run: RoundsCoordinator, round: int) -> None:
    for member in run.members():
        run.beat(0.0, member, Beat(round, 0, 0))


@pytest.mark.parametrize("founders", [3, 4, 7])
def test_who_accuses_many_is_shut_out_itself(founders: int) -> None:
    run, _ = founded(founders)
    for round in range(1, founders + 2):
        begin(run, round)
        refuse(run, LIAR, 1 + (round - 1) % (founders - 1), round)
    assert shut(run) == [LIAR]


@pytest.mark.parametrize(("founders", "liars"), [(3, 1), (4, 1), (5, 2), (7, 3)])
def test_fewer_than_half_shut_out_nobody(founders: int, liars: int) -> None:
    """They accuse one honest member in ever so many rounds."""
    run, _ = founded(founders)
    for round in range(1, 12):
        begin(run, round)
        for liar in range(liars):
            refuse(run, liar, founders - 1, round)
    assert shut(run) == []


def test_what_a_member_was_told_by_another_is_no_refusal_of_its_own() -> None:
    run, _ = founded(4)
    for round in range(1, 9):
        begin(run, round)
        for by in (1, 2):
            refuse(run, by, 3, round, judge=LIAR)
    assert shut(run) == []


def test_three_refused_shares_and_two_accusers_shut_a_seat_out() -> None:
    run, _ = founded(4)
    for round, accuser in ((1, 0), (2, 0), (3, 0), (4, 1)):
        assert run.workers[3].state == "in"
        begin(run, round)
        orders = run.report_peer(
            0.0, accuser, PeerReport(round, 0, 3, "refused", "its share is 40 times as long as usual")
        )
    (refusal,) = [message for _, message in told(orders, Refusal)]
    assert refusal.reason == (
        "shut out: in three rounds or more it and at least half of the other addresses refused each other's shares "
        "(worker 1 says: its share is 40 times as long as usual)"
    )
    assert shut(run) == [3] and run.proposal is not None and run.proposal.members == (0, 1, 2)
    (again,) = run.hear(0.0, 3, Beat(4, 0)) or []
    assert again == Reply(Refusal(f"member 3 is no longer in this run ({refusal.reason}): join again"))


class Line:
    """What a worker in member 2 says to the lighthouse."""

    member = 2

    def __init__(self) -> None:
        self.asked: list[PeerReport] = []

    def ask(self, message: PeerReport) -> None:
        self.asked.append(message)


def test_a_worker_tells_whose_word_it_repeats_and_who_condemns_it() -> None:
    line = Line()
    for peer, by in ((1, -1), (1, 3), (2, 3)):
        MembershipClient.report_peer(line, 5, 0, Refused(peer, "NaN", by))  # type: ignore[arg-type]
    assert [(one.member, one.by) for one in line.asked] == [(1, -1), (1, 3), (3, -1)]


class Siege:
    """A run of `count` members of which `liars` lie at random, in words and in what they send; the others say what the
    two shots of a mean tell them, and come back as soon as they are called to another's state.
    """

    def __init__(self, count: int, liars: int, seed: int) -> None:
        self.random, self.count = Random(seed), count
        self.run = RoundsCoordinator(Rules(founders=count, sync_every=4, agrees=True, last=1000))
        self.liars = {*self.random.sample(range(count), liars)}
        self.honest = {*range(count)} - self.liars
        for _ in range(count):
            self.run.join(0.0, "text")
        for member in range(count):
            self.run.hear(0.0, member, READY)

    def beats(self, round: int) -> None:
        """All begin `round` and promise what is proposed; whoever is outside has another's state at once."""
        run = self.run
        for member, worker in run.workers.items():
            run.hear(0.0, member, Beat(worker.round if worker.state == "outside" else round, worker.call, 0))
        while run.proposal is not None and not set(run._voters_of_view()) <= run._acks:
            promise(run, *run._voters_of_view())

    def lies(self, member: int, round: int, attempt: int) -> None:
        """What a liar says of an attempt."""
        draw = self.random
        for _ in range(draw.randrange(6)):
            charge = draw.choice(["late", "refused", "refused"])
            whom, by = draw.randrange(self.count), draw.choice([-1, -1, *range(self.count)])
            told = PeerReport(max(round + draw.choice([-1, 0, 0, 1]), 1), attempt, whom, charge, "x", by)
            self.run.hear(0.0, member, told)
        self.run.hear(0.0, member, Done(round, attempt, draw.choice([7, NOTHING, 99])))

    def sent(self, members: tuple[int, ...], liar: int) -> dict[int, PeerReport | None]:
        """What the honest ones of an attempt have of what `liar` sends: their accusations, None for an answer."""
        draw, honest = self.random, sorted(self.honest & {*members})
        some = [member for member in honest if draw.random() < draw.choice([0.2, 0.5, 1.0])]
        how = draw.choice(["well", "nothing", "verdict", "garbage"]) if some else "well"
        judge, victim = draw.choice(some or honest), draw.choice(honest)
        late = {one: PeerReport(1, 0, liar if one in some else judge, "late") for one in honest}
        heard = {one: PeerReport(1, 0, victim, "refused", "x", liar) for one in some}
        heard |= {victim: PeerReport(1, 0, liar, "refused")} if victim in some else {}
        told = {one: PeerReport(1, 0, liar, "refused", "x", judge) for one in honest}
        told[judge] = PeerReport(1, 0, liar, "refused")
        return {"well": {}, "nothing": late, "verdict": heard, "garbage": told}[how]

    def attempt(self, round: int, members: tuple[int, ...], attempt: int) -> None:
        found: dict[int, PeerReport | None] = dict.fromkeys(sorted(self.honest & {*members}))
        for liar in sorted(self.liars & {*members}):
            found |= self.sent(members, liar) if found else {}
        for member in self.random.sample(members, len(members)):
            if member in self.liars:
                self.lies(member, round, attempt)
                continue
            if (peer_report := found[member]) is not None:
                self.run.hear(0.0, member, replace(peer_report, round=round, attempt=attempt))
            self.run.hear(0.0, member, Done(round, attempt, 7 if peer_report is None else NOTHING))

    def land(self, round: int) -> int:
        """The attempts that `round` took until it landed."""
        voters, ballots = self.run.voters(round), self.run.ballots
        for attempt in range(40):
            ballot = ballots._open.get(round)
            attempts = (voters,) if ballot is None else ballot.attempts
            self.attempt(round, attempts[-1], len(attempts) - 1)
            if ballots.has_landed(round):
                return attempt + 1
        return 99


@pytest.mark.parametrize(("count", "liars"), [(3, 1), (4, 1), (7, 3)])
def test_whatever_they_say_rounds_land_and_nobody_honest_is_shut_out(count: int, liars: int) -> None:
    """Fewer than half who lie, in ten rounds each of twelve seeds; some of them are shut out themselves."""
    caught = 0
    for seed in range(12):
        siege = Siege(count, liars, seed)
        for round in range(1, 11):
            siege.beats(round)
            assert siege.land(round) < 40, f"seed {seed}, round {round}"
            assert not siege.honest & {*shut(siege.run)}, f"seed {seed}, round {round}"
        caught += len(shut(siege.run))
    assert caught > 4

"""What a member can do by accusing others: of four one that lies shuts out nobody and takes no round."""

from __future__ import annotations

import pytest

from isles.comm.elastic.ballot import NOTHING, Word
from isles.comm.elastic.membership import Membership
from isles.comm.elastic.messages import Accusation, Beat, Done, Refusal
from isles.comm.elastic.orders import Order
from isles.comm.elastic.ruling import accuse
from isles.comm.errors import Refused
from tests.comm.elastic.test_membership import READY, founded, promise, told

LIAR = 0


def refuse(run: Membership, by: int, whom: int, round: int = 1, attempt: int = 0, judge: int = -1) -> list[Word]:
    """`by` says that the share of `whom` cannot be; judge: that this one has told it so. The words that follow."""
    return words(run.accuse(0.0, by, Accusation(round, attempt, whom, "refused", "NaN", judge)))


def words(orders: list[Order]) -> list[Word]:
    """Those that are new, each once."""
    return sorted({word for _, word in told(orders, Word)}, key=lambda word: word.attempt)


def answers(run: Membership, attempt: int, digests: dict[int, int], round: int = 1) -> list[Word]:
    """All say what they have of an attempt."""
    return [w for seat, digest in digests.items() for w in words(run.done(0.0, seat, Done(round, attempt, digest)))]


def shut(run: Membership) -> list[int]:
    return [seat for seat, worker in run.workers.items() if worker.state == "shut"]


def test_one_accuser_of_four_takes_no_round() -> None:
    """It accuses all, and says that it has no answer; the others have the same one and land it in the fourth try."""
    run, _ = founded(4, agrees=True)
    for attempt in range(3):
        assert all(refuse(run, LIAR, whom, attempt=attempt) == [] for whom in (1, 2, 3))
        (word,) = answers(run, attempt, {LIAR: NOTHING, 1: 7, 2: 7, 3: 7})
    assert word == Word(1, "again", 3, (1, 2, 3), view=0)
    (word,) = answers(run, 3, {1: 8, 2: 8, 3: 8})
    assert word == Word(1, "land", 3, (1, 2, 3), view=0)


def test_refused_by_most_is_left_out_of_the_next_attempt() -> None:
    run, _ = founded(4, agrees=True)
    assert refuse(run, 1, LIAR) == refuse(run, 1, LIAR) == []  # twice is one voice
    assert refuse(run, 2, LIAR) == [Word(1, "again", 1, (1, 2, 3), view=0)]


def test_of_two_members_the_first_accuser_goes_on() -> None:
    run, _ = founded(2, agrees=True)
    assert refuse(run, 1, LIAR) == [Word(1, "again", 1, (1,), view=0)]
    assert refuse(run, LIAR, 1) == []


def test_who_condemns_one_after_the_other_is_left_out_at_the_second() -> None:
    """It reduces a part, and tells all in its place that somebody's share cannot be: they say who told them so."""
    run, _ = founded(4, agrees=True)
    assert refuse(run, 1, 3, judge=LIAR) == []
    assert refuse(run, 2, 3, judge=LIAR) == [Word(1, "again", 1, (0, 1, 2), view=0)]
    refuse(run, 2, LIAR, attempt=1)  # who is condemned knows who does it
    assert refuse(run, 1, 2, attempt=1, judge=LIAR) == []
    assert refuse(run, LIAR, 2, attempt=1) == [Word(1, "again", 2, (1, 2), view=0)]


def test_who_says_what_nobody_told_it_harms_nobody_else() -> None:
    run, _ = founded(4, agrees=True)
    for whom in (2, 3):
        assert refuse(run, LIAR, whom, judge=1) == []
    assert refuse(run, 1, 3) == [Word(1, "again", 1, (0, 1, 2), view=0)]


def test_three_attempts_without_any_answer_are_enough() -> None:
    """Of three one condemns another: neither has a majority, and nobody ever has an answer."""
    run, _ = founded(3, agrees=True)
    for attempt in range(3):
        refuse(run, 1, LIAR, attempt=attempt)
        (word,) = answers(run, attempt, {0: NOTHING, 1: NOTHING, 2: NOTHING})
    assert word.verdict == "again" and word.seats in ((0, 2), (1, 2))


def test_who_says_that_it_is_done_and_gives_nothing_is_late_in_the_second_attempt() -> None:
    run, _ = founded(4, agrees=True)
    for attempt in range(2):
        found = answers(run, attempt, {LIAR: 9})
        for by in (1, 2):
            found += words(run.accuse(0.0, by, Accusation(1, attempt, LIAR, "late")))
        found += answers(run, attempt, {1: NOTHING, 2: NOTHING, 3: NOTHING})
        assert found[0] == Word(1, "again", attempt + 1, (0, 1, 2, 3) if not attempt else (1, 2, 3), view=0)


def test_fresh_seats_shut_out_nobody() -> None:
    """Two that have never trained, 18 words: outside, and in a view that has not begun for them."""
    run, _ = founded(3)
    for seat in (3, 4):
        run.join(0.0, "a worker")
        run.beat(0.0, seat, READY)
    for _ in range(3):
        for round in (1, 2, 3, 4):
            for by in (3, 4):
                for whom in (0, 1, 2):
                    refuse(run, by, whom, round)
        assert shut(run) == []
        if run.proposal is not None:
            promise(run, *(seat for seat in (0, 1, 2, 3) if run.workers[seat].state == "in"))
    assert run.view is not None and run.view.seats == (0, 1, 2, 3, 4)


def begin(run: Membership, round: int) -> None:
    for seat in run.members():
        run.beat(0.0, seat, Beat(round, 0, 0))


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
        orders = run.accuse(0.0, accuser, Accusation(round, 0, 3, "refused", "its share is 40 times as long as usual"))
    (refusal,) = [message for _, message in told(orders, Refusal)]
    assert refusal.reason == (
        "shut out: it and most of the others refuse each other's shares (its share is 40 times as long as usual)"
    )
    assert shut(run) == [3] and run.proposal is not None and run.proposal.seats == (0, 1, 2)


class Line:
    """What a worker in seat 2 says to the lighthouse."""

    seat = 2

    def __init__(self) -> None:
        self.asked: list[Accusation] = []

    def ask(self, message: Accusation) -> None:
        self.asked.append(message)


def test_a_worker_tells_whose_word_it_repeats_and_who_condemns_it() -> None:
    line = Line()
    for peer, by in ((1, -1), (1, 3), (2, 3)):
        accuse(line, 5, 0, Refused(peer, "NaN", by))  # type: ignore[arg-type]
    assert [(one.seat, one.by) for one in line.asked] == [(1, -1), (1, 3), (3, -1)]

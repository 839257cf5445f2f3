"""A round of an all-reduce method lands on the lighthouse's word: every interleaving, and what mutants do there."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from isles.membership.round_commit import Ballot, RoundDecision, RoundState
from tests.membership.interleavings import start, walk, wander


def test_two_members_two_deaths_two_crashes_land_the_same_or_wait_for_nobody() -> None:
    found = walk(start(2, deaths=2, crashes=2))
    assert found.wrong == ()
    assert found.states > 5_000 and found.ends > 10  # it did go through deaths and crashes


@pytest.mark.long
def test_three_members_one_death_land_the_same() -> None:
    found = walk(start(3, deaths=1, crashes=0))
    assert found.wrong == ()
    assert found.states > 100_000


def test_two_members_whose_exchanges_fail_land_the_same() -> None:
    """One says NOTHING, whatever else happens to it or the others."""
    found = walk(start(2, deaths=1, crashes=0, failures=1))
    assert found.wrong == () and found.states > 1_000


@pytest.mark.long
def test_three_members_whose_exchanges_fail_land_the_same() -> None:
    found = walk(start(2, deaths=1, crashes=1, failures=1))
    assert found.wrong == () and found.states > 100_000
    found = walk(start(3, deaths=1, crashes=0, failures=1), most=1_000_000)
    assert found.wrong == ()


def schedules(seeds: range) -> set[int]:
    """How many attempts the landed rounds of five members took, over schedules with at most 3 deaths, 2 crashes and 2
    exchanges that fail.
    """
    attempts = set()
    for seed in seeds:
        end = wander(start(5, deaths=3, crashes=2, failures=2), Random(seed))
        landed = {(end.parts[member].attempt, end.parts[member].members) for member in end.living}
        assert len(landed) <= 1, f"seed {seed}"
        assert all(end.parts[member].phase == "landed" for member in end.living), f"seed {seed}"
        attempts.add(len(end.ballot.attempts))
    return attempts


def test_random_schedules_of_five_members() -> None:
    assert schedules(range(60)) >= {1, 2, 3}


@pytest.mark.long
def test_ten_thousand_schedules_of_five_members() -> None:
    assert schedules(range(10_000)) >= {1, 2, 3, 4}


def lands_alone(part: RoundState, attempt: int) -> RoundState:
    return replace(part.answered(attempt), phase="landed")


def forgets_the_word(part: RoundState, attempt: int) -> RoundState:
    """Lands at once where it is an attempt that the lighthouse ordered, as if only the first were in danger."""
    return replace(part.answered(attempt), phase="landed") if attempt else part.answered(attempt)


@pytest.mark.parametrize("mutant", [lands_alone, forgets_the_word])
def test_a_member_that_lands_without_the_word_is_found_out(mutant) -> None:
    assert walk(start(3, deaths=2, crashes=0), answered=mutant, stop_at_first=True).wrong


def test_land_names_the_dead_one_whose_work_all_others_have() -> None:
    ballot = Ballot(4, ((1, 2, 5),)).add_answer(0, 1, 77).add_answer(0, 2, 77)
    assert ballot.decide({1, 2, 5}) is None
    assert ballot.decide({1, 2}) == RoundDecision(4, "land", 0, (1, 2, 5))
    assert ballot.decide({2}) == RoundDecision(4, "land", 0, (1, 2, 5))


def test_a_loss_with_somebody_not_done_is_another_attempt_among_the_living() -> None:
    ballot = Ballot(4, ((1, 2, 5),)).add_answer(0, 1, 77)
    decision = ballot.decide({1, 2})
    assert decision == RoundDecision(4, "retry", 1, (1, 2))
    after = ballot.decided(decision)
    assert after.decide({1, 2}) is None  # what was done in the attempt before does not count
    assert after.add_answer(1, 1, 8).add_answer(1, 2, 8).decide({1, 2}) == RoundDecision(4, "land", 1, (1, 2))


def test_who_is_back_after_the_loss_of_all_others_is_tried_again() -> None:
    """It had been left out of the newest attempt, of which nobody is there any more: else it would wait for ever."""
    ballot = Ballot(4, ((1, 2, 5), (2, 5), (5,)))
    assert ballot.decide(set()) is None
    decision = ballot.decide({1})
    assert decision == RoundDecision(4, "retry", 3, (1,))
    assert RoundState(1, 4, 0, (1, 2, 5)).apply(decision).members == (1,)
    assert ballot.decided(decision).add_answer(3, 1, 7).decide({1}) == RoundDecision(4, "land", 3, (1,))


def test_answers_that_differ_do_not_land() -> None:
    ballot = Ballot(1, ((0, 1),)).add_answer(0, 0, 7).add_answer(0, 1, 8)
    assert ballot.decide({0, 1}) == RoundDecision(1, "retry", 1, (0, 1))


def test_who_is_left_out_learns_it_when_the_others_land() -> None:
    part = RoundState(5, 4, 0, (1, 2, 5)).answered(0)
    assert part.apply(RoundDecision(4, "retry", 1, (1, 2))) == part
    assert part.apply(RoundDecision(4, "land", 1, (1, 2))).phase == "left out"


def test_words_may_come_late_twice_and_from_another_round() -> None:
    part = RoundState(1, 4, 1, (1, 2)).answered(1)
    for old in (
        RoundDecision(4, "retry", 1, (1, 2)),
        RoundDecision(3, "land", 1, (1, 2)),
        RoundDecision(4, "land", 0, (1, 2, 5)),
    ):
        assert part.apply(old) == part
    landed = part.apply(RoundDecision(4, "land", 1, (1, 2)))
    assert landed.phase == "landed" and (landed.attempt, landed.members) == (1, (1, 2))
    assert landed.apply(RoundDecision(4, "retry", 2, (1,))) == landed

"""Rounds for which a quorum is enough, made wrong on purpose: for each fault there is a test that finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.membership.late_shares import Delivery
from isles.membership.round_commit import Ballot, Graces, RoundState
from isles.replicas.loop.round_exchange import QuorumExchange
from tests.membership import test_quorum as rounds
from tests.membership.interleavings import start, walk
from tests.training.elastic import test_late as late


def never(graces: Graces, now: float) -> set[int]:
    """No grace is ever over: the slow one is waited for."""
    return set()


def always(graces: Graces, now: float) -> set[int]:
    """Every grace is over at once."""
    return set(graces._ends)


def anybody(ballot: Ballot, member: int, steps: int) -> Ballot:
    """What comes after the first exchange has begun is counted too, and what comes twice, twice."""
    return replace(ballot, delivered=ballot.delivered | {(member, steps)})


def alike(ballot: Ballot, members: int) -> int:
    """One is enough."""
    return 1


def equally(delivery: Delivery) -> float:
    """A share counts as much as any other, however many steps it took."""
    return 1.0


def on_its_own_judgement(part: RoundState, attempt: int) -> RoundState:
    """Who has the answer lands it, and waits for no word."""
    if part.phase != "exchanging" or attempt != part.attempt:
        return part
    return replace(part, phase="landed")


MUTANTS: list[tuple[type, str, Any, Callable[[], None]]] = [
    (Graces, "over", never, rounds.test_a_grace_never_reaches_into_the_next_exchange),
    (Graces, "over", never, rounds.test_who_is_late_keeps_its_seat_and_delivers_into_the_next_round),
    (Graces, "over", always, rounds.test_who_is_late_keeps_its_seat_and_delivers_into_the_next_round),
    (Ballot, "add_share", anybody, rounds.test_a_retry_keeps_the_weights_of_those_who_are_left),
    (Ballot, "_quorum_of", alike, rounds.test_all_who_live_are_waited_for_no_longer_than_their_grace),
    (Delivery, "factor", property(equally), late.test_shares_count_by_their_inner_steps),
]


@pytest.mark.parametrize(("kind", "name", "mutant", "found_by"), MUTANTS)
def test_a_rule_that_is_wrong_is_found_out(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, mutant: Any, found_by: Callable[[], None]
) -> None:
    found_by()
    monkeypatch.setattr(kind, name, mutant)
    with pytest.raises((AssertionError, KeyError)):
        found_by()


def test_who_lands_without_the_word_lands_another_set_than_the_others() -> None:
    found = walk(start(3, deaths=1, crashes=1, quorum=0.6), answered=on_its_own_judgement, stop_at_first=True)
    assert found.wrong and {part.phase for part in found.wrong[0].parts} >= {"landed"}


@pytest.mark.long
def test_work_that_is_counted_twice_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share that came too late is in the mean of the next round, and once more in that of the one after."""
    landed = QuorumExchange._landed

    def twice(round_exchange: QuorumExchange, delivery: Delivery, *more: Any) -> None:
        landed(round_exchange, delivery, *more)
        round_exchange._work += delivery.steps

    monkeypatch.setattr(QuorumExchange, "_landed", twice)
    with pytest.raises(AssertionError):
        late.test_a_slow_worker_delivers_into_the_next_round_and_delays_nobody(tmp_path)

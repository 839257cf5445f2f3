"""Counts of refusals, rates, signs of life, and questions that come faster than they are answered."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from isles.membership.failure_detector import SILENT, FailureDetector
from isles.membership.messages import read_paths
from isles.membership.p2p.transport import SuspicionReporter
from isles.membership.session import OTHERS, RateLimit, Rejections, network_of, read_rejections
from isles.membership.tls_session import open_session
from tests.membership.sessions import router


def test_what_a_stranger_writes_fills_no_memory() -> None:
    refused = Rejections()
    for number in range(10_000):
        refused.note(number % 3, f"{number} " + "x" * 1000)
    assert len(refused) == 257 and sum(refused.values()) == 10_000
    assert refused[-1, OTHERS] == 10_000 - 256 and all(len(why) <= 100 for _, why in refused)
    assert read_rejections([list(row) for row in refused.rows()]) == refused.rows()


@pytest.mark.parametrize(
    "told",
    [None, 5, "ab", [[1, "x"]], [["1", "x", 2]], [[1, "x" * 101, 2]], [[1, "\x1b", 2]], [[-2, "x", 1]], [[]] * 300],
)
def test_what_is_told_of_refusals_is_looked_at(told: object) -> None:
    with pytest.raises(ValueError, match="an invalid list of"):
        read_rejections(told)


@pytest.mark.parametrize(
    "row",
    [[], [1, "direct", 0.1, 5], [-1, "", 0, 0, 0], [1, "\x1b", 0, 0, 0], [1, "", -1, 0, 0], [1, "", 0, 0.5, 0]],
)
def test_what_is_told_of_paths_is_looked_at(row: list[object]) -> None:
    whole = [1, "direct", 0.1, 5, 6]
    assert read_paths([whole] * 256) == [tuple(whole)] * 256
    for told in (None, [whole, row], [whole] * 257):
        with pytest.raises(ValueError, match="an invalid list of"):
            read_paths(told)


def test_an_address_has_its_turns_and_more_with_time() -> None:
    """Three at once, and one more every two seconds; another address has its own."""
    admissions = RateLimit(3, 6.0)
    assert [admissions.take("a", 100.0) for _ in range(4)] == [0, 0, 0, 2.0]
    assert admissions.take("a", 101.0) == 1.0 and admissions.take("b", 101.0) == 0
    assert admissions.take("a", 102.0) == 0 and admissions.take("a", 102.0) == 2.0
    assert [admissions.take("a", 1e6) for _ in range(4)] == [0, 0, 0, 2.0]  # never more than three
    for number in range(5000):
        admissions.take(str(number), 1e6)
    assert len(admissions._left) <= 4096


def test_a_bucket_counts_bytes() -> None:
    limit = RateLimit(60, 60.0)
    assert [limit.take(1, 0.0, 40), limit.take(1, 0.0, 40), limit.take(1, 20.0, 40)] == [0, 20.0, 0]


def test_addresses_of_one_ipv6_network_are_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2%eth0") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1") and network_of("10.0.0.7") == "10.0.0.7"


def looks(present: FailureDetector, seconds: float, at: float = 0.0) -> list[int]:
    """Who is gone after so many seconds of looks."""
    return [member for look in range(round(4 * seconds) + 1) for member in present.newly_silent(at + look / 4)]


def test_whoever_is_waited_for_in_vain_and_has_not_spoken_is_told_of() -> None:
    """Once a while, to all others; not who has just beaten, nor who is not there. It is not gone."""
    present = FailureDetector()
    for member in (1, 2, 3):
        present.changed(member, True)
    assert looks(present, 1.0) == []
    assert present.to_notify(2) == [] and present.to_notify(9) == []  # a beat may be on its way
    present.heard_from(1)
    assert looks(present, 1.0, at=1.0) == []
    assert present.to_notify(2) == [1, 3] and present.to_notify(2) == [] and present.to_notify(1) == []
    assert looks(present, 1.75, at=2.0) == []
    assert present.to_notify(2) == [1, 3]
    present.heard_from(2)
    assert present.to_notify(2) == []


def test_who_was_there_and_is_gone_is_remembered_until_it_is_back() -> None:
    present = FailureDetector()
    present.changed(2, False)
    assert not present.is_lost(2)  # nobody has seen it
    for there in (True, False):
        present.changed(2, there)
    assert present.is_lost(2) and not present.is_lost(1)
    present.changed(2, True)
    assert not present.is_lost(2)
    for member in range(10, 6000):
        present.changed(member, True)
        present.changed(member, False)
    assert present.is_lost(5999) and not present.is_lost(10) and len(present._lost) <= 4096


def test_whoever_waits_asks_after_a_second_and_not_at_every_glance() -> None:
    asked = list[int]()
    suspects = SuspicionReporter(asked.append)
    for seconds in (0.0, 0.5, 0.9):
        suspects.notify_blocked({1, None}, seconds)
    assert not asked
    for seconds in (1.0, 1.1):
        suspects.notify_blocked({1, None}, seconds)
    suspects.notify_blocked({1, 2}, 1.2)
    assert asked == [1, 2]


def test_who_is_there_and_silent_is_gone_until_it_speaks() -> None:
    present = FailureDetector()
    present.changed(4, True)
    present.joined(5)  # and never comes
    assert looks(present, SILENT) == []
    assert not present.heard_from(4)
    assert looks(present, SILENT, at=SILENT) == [5]
    assert looks(present, 1.0, at=2 * SILENT) == [4]
    assert present.heard_from(4) and not present.heard_from(4)
    present.changed(4, False)
    assert looks(present, 3 * SILENT, at=2 * SILENT + 1) == [] and not present.heard_from(6)


def test_a_lighthouse_that_was_held_up_accuses_nobody() -> None:
    """What came meanwhile it has not looked at yet."""
    present = FailureDetector()
    present.changed(4, True)
    assert looks(present, SILENT / 2) == [] and looks(present, 0.0, at=10 * SILENT) == []
    assert looks(present, SILENT, at=10 * SILENT) == [4]


def test_who_gave_up_a_suspended_lighthouse_is_not_lost_if_it_comes_back() -> None:
    """Its connection breaks at once when the lighthouse goes on; of who stays away 5 s are waited for."""
    present = FailureDetector()
    for member in (4, 5):
        present.changed(member, True)
    assert looks(present, 1.0) == [] and not present.may_return(4, 1.25)
    assert present.may_return(4, 6.0) and present.may_return(5, 6.0) and not present.may_return(6, 6.0)
    present.changed(4, True)
    assert looks(present, 5.0, at=6.0) == [] and looks(present, 0.0, at=11.25) == [5]
    assert present.silence(5) == 7.0  # 1.25 and 5.25 s, and the 0.5 s that a suspension counts for
    assert not present.may_return(4, 11.75)
    assert present.stood == 4.75  # from 1.25 to 6.0


def test_questions_that_come_faster_than_they_are_answered_are_turned_away(tmp_path: Path) -> None:
    """Some megabytes wait for their turn; the rest is told to come later, and all is well again afterwards."""
    with router(tmp_path) as (mine, address, session):
        go, came = threading.Event(), list[int]()

        def answer(query: object) -> None:
            go.wait(20.0)
            came.append(len(query.payload))  # type: ignore[attr-defined]
            query.reply()  # type: ignore[attr-defined]

        session.serve("isles/slow", answer)
        guest = open_session(mine.token, address)
        answers, told = list[tuple[bytes | None, bytes | None]](), threading.Semaphore(0)

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            answers.append((reply, refusal))
            told.release()

        def ask(size: int) -> None:
            guest.ask("isles/slow", bytes(size), answered, seconds=20.0)

        for _ in range(100):  # until it is known who serves
            ask(1)
            if not told.acquire(timeout=0.1):
                break
            assert answers.pop() == (None, None)
        for _ in range(30):
            ask(1 << 20)
        for _ in range(22):
            assert told.acquire(timeout=20.0)
        assert {*answers} == {(None, b"later")} and not came
        go.set()
        for _ in range(30 + 1 - len(answers)):
            assert told.acquire(timeout=20.0)
        assert len(came) == 31 - session.refused[-1, "more messages at once than can be handled"] >= 8
        ask(1 << 20)
        assert told.acquire(timeout=20.0) and answers[-1] == (b"", None)
        guest.close()

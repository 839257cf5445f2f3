"""How often a member may speak: above its rate it is refused and counted, and no honest one is ever above it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from isles.membership.keys import ECHO, HELLO, REPORTS, REQUESTS, signature
from isles.membership.lighthouse import LINE_BYTES, LINES, WORD_BYTES, WORDS
from isles.membership.messages import Beat, Entry, Hello, Reload, decode, encode
from isles.membership.session import RateLimit
from tests.membership.sessions import NOBODYS
from tests.membership.test_lighthouse import ask, lit

SEEN = tuple((0, 1) for _ in range(3000))  # a beat of 12 kB, which is written to the journal


def test_a_member_above_its_rates_is_refused_and_counted(tmp_path: Path) -> None:
    """With rates of five a minute: five are taken, and of the bytes what fits."""
    with lit(tmp_path) as (lighthouse, guest):
        entry = decode(ask(guest, HELLO, encode(Hello("1.0", "abc", guest.name(), NOBODYS)))[0] or b"")
        assert isinstance(entry, Entry)
        word = partial(signature, entry.member, entry.key)
        lighthouse._words = lighthouse._lines = lighthouse._reloads = RateLimit(5, 1e6)
        reports = [ask(guest, REPORTS, b'{"fine": 0}', word) for _ in range(7)]
        assert reports == [(b"", None)] * 5 + [(None, b"never")] * 2
        lighthouse._words, lighthouse._word_bytes = RateLimit(1000), RateLimit(60_000, 1e6)
        before = lighthouse._journal.path.stat().st_size
        beats = [ask(guest, REQUESTS, encode(Beat(ready=0, seen=SEEN)), word)[1] for _ in range(8)]
        assert beats.count(None) in (3, 4) and beats[-1] == b"never"
        assert lighthouse._journal.path.stat().st_size - before < 1.5 * 60_000
        lighthouse._word_bytes, lighthouse._reloads = RateLimit(60_000), RateLimit(2, 1e6)
        assert [ask(guest, REQUESTS, encode(Reload()), word)[1] for _ in range(3)] == [None, None, b"never"]
        assert {why: times for (_, why), times in lighthouse.refused.items()} == {
            "more reports than a member may send in a minute": 2,
            "more requests than a member may send in a minute": beats.count(b"never"),
            "more requests for another state than a member may send in a minute": 1,
        }


def test_an_address_may_measure_its_link_as_often_as_said(tmp_path: Path) -> None:
    """An echo counts as six questions: ten fit into sixty, which are not refilled here."""
    with lit(tmp_path) as (lighthouse, guest):
        hub = lighthouse._session._hub  # type: ignore[attr-defined]
        assert ask(guest, ECHO, bytes(4)) == (b"", None) and hub._open._most == 600
        hub._open = RateLimit(60, 1e6)
        answers = [guest.answer(ECHO, bytes(4), seconds=5.0) for _ in range(12)]
        assert answers == [(b"", None)] * 10 + [(None, b"later")] * 2
        assert lighthouse.refused[-1, "more questions than one address may ask in a minute"] == 2


def test_rounds_of_ten_milliseconds_are_below_every_rate() -> None:
    """A round: a beat, a promise, an answer, an accusation of 300 bytes each; two reports of 1 kB (metrics, record)."""
    rounds = 60 * 100
    assert 4 * rounds < WORDS and 4 * 300 * rounds < WORD_BYTES
    assert 2 * rounds < LINES and 2 * 1024 * rounds < LINE_BYTES

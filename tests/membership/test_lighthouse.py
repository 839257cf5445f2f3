"""The lighthouse among strangers and members that say what they must not, over real sessions."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.keys import CONFIG, HELLO, REPORTS, REQUESTS, MemberKeys, notify_key, signature, split_sequence
from isles.membership.lighthouse import Journal, Lighthouse
from isles.membership.messages import (
    MESSAGES,
    AnnounceAddress,
    Beat,
    BeatReply,
    Entry,
    Hello,
    Lookup,
    Reachability,
    Refusal,
    RoundDecision,
    Silent,
    decode,
    encode,
)
from isles.membership.tls_session import Session, open_session
from tests.membership.sessions import NOBODYS, router

Answer = tuple[bytes | None, bytes | None]


def heard(member: int, event: Any) -> None:
    if event != {"fine": member}:
        raise ValueError("not fine")


@contextmanager
def lit(folder: Path, life: int = 0) -> Iterator[tuple[Lighthouse, Session]]:
    """A lighthouse, and a session of somebody with the token. life: how often it was lit before."""
    with router(folder / str(life)) as (mine, address, session):
        journal = Journal(folder)
        rounds = RoundsCoordinator(Rules(founders=2, sync_every=5), journal.entries)
        keys = MemberKeys(folder)
        lighthouse = Lighthouse(session, rounds, journal, keys, config="[run]\n", version="1.0", on_report=heard)
        lighthouse.open()
        guest = open_session(mine.token, address)
        try:
            yield lighthouse, guest
        finally:
            guest.close()
            lighthouse.close()
            journal.close()


def ask(session: Session, key: str, said: bytes, word: bytes | Callable[[str, bytes], bytes] | None = None) -> Answer:
    """The answer; asked again while nobody takes it yet."""
    attachment = word(key, said) if callable(word) else word
    for _ in range(50):
        done, answers = threading.Event(), list[Answer]()

        def answered(reply: bytes | None, refusal: bytes | None, answers: Any = answers, done: Any = done) -> None:
            answers.append((reply, refusal))
            done.set()

        session.ask(key, said, answered, attachment=attachment, seconds=5.0)
        assert done.wait(10.0)
        if answers[0] != (None, None):
            return answers[0]
        threading.Event().wait(0.05)
    return None, None


def test_it_hears_nobody_before_it_is_open(tmp_path: Path) -> None:
    """Its owner's callbacks ask for it, so it must be there."""
    with router(tmp_path / "0") as (mine, address, session):
        journal, guest = Journal(tmp_path), open_session(mine.token, address)
        rounds = RoundsCoordinator(Rules(founders=2, sync_every=5))
        made = Lighthouse(session, rounds, journal, MemberKeys(tmp_path), config="c", version="1.0", on_report=heard)
        try:
            assert guest.answer(CONFIG, b"", seconds=0.3) == (None, None)
            made.open()
            assert guest.answer(CONFIG, b"", seconds=5.0)[0] == b"c"
        finally:
            guest.close()
            made.close()
            journal.close()


def test_what_is_taken_and_what_is_not(tmp_path: Path) -> None:
    with lit(tmp_path) as (lighthouse, guest):
        assert ask(guest, CONFIG, b"") == (b"[run]\n", None)

        def hello(version: str, corpus: str) -> Any:
            said = Hello(version, corpus, guest.name(), NOBODYS, tuple(map(int, version.split("."))))
            return decode(ask(guest, HELLO, encode(said))[0] or b"")

        now = ".".join(map(str, MESSAGES))
        entry = hello(now, "abc")
        assert isinstance(entry, Entry) and entry.member == 0
        other, text = hello("0.9", "abc"), hello(now, "another")
        assert isinstance(other, Refusal) and other.reason == (
            f"this run is of isles 1.0 (messages {now}), not isles 0.9 (messages 0.9): install that version"
        )
        assert isinstance(text, Refusal) and "data.path" in text.reason
        second = hello(now, "abc")
        word = partial(signature, entry.member, entry.key)
        assert isinstance(decode(ask(guest, REQUESTS, encode(Beat()), word)[0] or b""), BeatReply)
        never = (None, b"never")
        as_another = partial(signature, 1, entry.key)
        forged = [
            None,
            b"",
            as_another,
            partial(signature, 99, "0" * 32),
            b"\xff" * 100,
            word(REPORTS, encode(Beat())),
        ]
        assert all(ask(guest, REQUESTS, encode(Beat()), wrong) == never for wrong in forged)
        junk = [b"", b"{", b"[" * 60_000, b"\0" * 70_000, b'{"kind":"ack"}', encode(RoundDecision(1, "land", 0, (0,)))]
        assert all(ask(guest, REQUESTS, wrong, word) == never for wrong in junk)
        assert ask(guest, HELLO, b"{}") == never
        assert ask(guest, REPORTS, b'{"fine": 0}', word) == (b"", None)
        assert ask(guest, REPORTS, b"x", as_another) == never
        assert ask(guest, REPORTS, b'{"fine": 1}', word) == (b"", None)  # another's: noted as refused
        assert lighthouse.refused[0, "not fine"] == 1
        assert sum(lighthouse.refused.values()) == len(forged) + len(junk) + 5
        # All the while it works: the second member is another one, with a key of its own.
        assert (second.member, second.key == entry.key) == (1, False)


def test_a_seat_outlives_the_lighthouse(tmp_path: Path) -> None:
    with lit(tmp_path) as (_, guest):
        entry = decode(ask(guest, HELLO, encode(Hello("1.0", "abc", guest.name(), NOBODYS)))[0] or b"")
    journal = Journal(tmp_path)
    journal.close()
    assert [one["event"] for one in journal.entries][:1] == ["join"]
    assert MemberKeys(tmp_path).of(entry.member) == entry.key


def test_orders_are_numbered_on_by_a_lighthouse_that_is_lit_again(tmp_path: Path) -> None:
    """Else its workers would take them for old ones."""
    heard, member = list[tuple[int, int]](), 0
    for life in range(3):
        with lit(tmp_path, life) as (lighthouse, guest):
            if life == 0:
                member = decode(ask(guest, HELLO, encode(Hello("1.0", "abc", guest.name(), NOBODYS)))[0] or b"").member
            guest.serve(
                notify_key(member, 0), lambda query, life=life: heard.append((life, split_sequence(query.payload)[0]))
            )
            for _ in range(100):
                lighthouse.notify([member], Silent(5))
                threading.Event().wait(0.02)
                if heard and heard[-1][0] == life:
                    break
    assert sorted({life for life, _ in heard}) == [0, 1, 2]
    numbers = [number for _, number in heard]
    assert numbers == sorted(set(numbers))


def test_a_full_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not on the disk is told to nobody; whoever keeps the run hears of it."""
    with lit(tmp_path) as (lighthouse, guest), monkeypatch.context() as full:

        def commit(journal: Journal) -> None:
            raise OSError(errno.ENOSPC, "no room")

        full.setattr(Journal, "commit", commit)
        guest.ask(HELLO, encode(Hello("1.0", "abc", guest.name(), NOBODYS)), lambda reply, refusal: None, seconds=5.0)
        with pytest.raises(OSError, match="no room"):
            lighthouse.wait(lambda: False, 10.0)


def test_a_report_that_the_disk_did_not_take_is_not_answered(tmp_path: Path) -> None:
    """Its worker keeps it, and sends it to the lighthouse that is started again."""

    def on_report(member: int, event: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with lit(tmp_path) as (lighthouse, guest):
        lighthouse._on_report = on_report
        entry = decode(ask(guest, HELLO, encode(Hello("1.0", "abc", guest.name(), NOBODYS)))[0] or b"")
        proof = signature(entry.member, entry.key, REPORTS, b"{}")
        heard = list[bytes | None]()
        guest.ask(REPORTS, b"{}", lambda reply, refusal: heard.append(reply), attachment=proof, seconds=0.5)
        with pytest.raises(OSError, match="no room"):
            lighthouse.wait(lambda: False, 10.0)
        threading.Event().wait(0.7)
        assert heard in ([], [None])


def test_the_address_of_a_worker_that_goes_during_the_dial_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lit(tmp_path) as (lighthouse, _):
        book, has_gone, answers = lighthouse._address_book, threading.Event(), SimpleQueue[Reachability]()

        async def echo_failure(*_: object) -> str:
            await asyncio.to_thread(has_gone.wait, 5.0)
            return ""

        monkeypatch.setattr("isles.membership.lighthouse.echo_failure", echo_failure)
        book.joined(0, NOBODYS)
        book.try_address(0, AnnounceAddress("10.0.0.9", 1234, "", NOBODYS[0], relays=True), answers.put)
        book.forget(0, 0)
        has_gone.set()
        answers.get(timeout=5.0)
        assert book.find(1, Lookup(0)).port == 0 and book.find(1, Lookup(2)).relay == -1

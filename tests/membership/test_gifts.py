"""Files from one member to another, over real sessions."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from isles.membership.keys import MemberKeys, peer_key, signature
from isles.membership.state_transfer import FetchRequest, StateServer, StateUnavailable, fetch_state, is_written
from isles.membership.tls_session import open_session
from tests.membership.sessions import router


def test_a_file_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    with router(tmp_path) as (mine, address, host):
        guest, told = open_session(mine.token, address), list[str]()
        try:
            state_server = StateServer(host, "3", told.append)
            first = tmp_path / "first"
            first.write_bytes(bytes(range(256)) * 12_000)  # three pieces
            waiting = threading.Timer(0.3, lambda: state_server.publish("state", first, {"round": 5}))
            waiting.start()  # who asks before it is there waits, and the giver is told
            facts = fetch_state(
                guest, FetchRequest(source="3", what="state", most=1 << 30, seconds=20.0), tmp_path / "taken"
            )
            assert facts["round"] == 5 and (tmp_path / "taken").read_bytes() == first.read_bytes()
            with pytest.raises(StateUnavailable, match="more than"):
                fetch_state(guest, FetchRequest(source="3", what="state", most=1000, seconds=20.0), tmp_path / "taken")
            first.write_bytes(b"\1" * first.stat().st_size)  # it is not what was offered any more
            with pytest.raises(StateUnavailable, match="checksum"):
                fetch_state(
                    guest, FetchRequest(source="3", what="state", most=1 << 30, seconds=20.0), tmp_path / "taken"
                )
            waiting = threading.Timer(0.3, lambda: state_server.publish("mean", tmp_path / "no folder" / "mean", {}))
            waiting.start()
            with pytest.raises(StateUnavailable, match="there is none"):  # its disk did not take it
                fetch_state(
                    guest, FetchRequest(source="3", what="mean", most=1 << 30, seconds=20.0), tmp_path / "taken"
                )
            assert len(told) == 1 and "could not be written" in told[0]
            state_server.freeze("state")
            with pytest.raises(StateUnavailable, match="within"):
                fetch_state(
                    guest, FetchRequest(source="3", what="state", most=1 << 30, seconds=1.0), tmp_path / "taken"
                )
            assert state_server.is_requested("state")
            StateServer(host, "4", told.append, comes=lambda what: False)
            with pytest.raises(StateUnavailable, match="there is none"):
                fetch_state(
                    guest, FetchRequest(source="4", what="state", most=1 << 30, seconds=20.0), tmp_path / "taken"
                )
        finally:
            guest.close()


def test_what_never_comes_is_said_at_once(tmp_path: Path) -> None:
    """To who waits when that becomes clear, and to who asks afterwards; for other things one may wait."""
    with router(tmp_path) as (mine, address, host):
        guest, told = open_session(mine.token, address), list[str]()
        try:
            state_server = StateServer(host, "3", told.append)
            changes = {
                "mean-4": lambda: state_server.announce(lambda name: name != "mean-4"),
                "state": lambda: state_server.unpublish("state"),
            }
            for what, change in changes.items():
                threading.Timer(0.3, change).start()
                with pytest.raises(StateUnavailable, match="there is none"):
                    fetch_state(
                        guest, FetchRequest(source="3", what=what, most=1 << 30, seconds=60.0), tmp_path / "taken"
                    )
            with pytest.raises(StateUnavailable, match="there is none"):
                fetch_state(
                    guest, FetchRequest(source="3", what="mean-4", most=1 << 30, seconds=60.0), tmp_path / "taken"
                )
            with pytest.raises(StateUnavailable, match="within"):
                fetch_state(
                    guest, FetchRequest(source="3", what="mean-5", most=1 << 30, seconds=0.5), tmp_path / "taken"
                )
        finally:
            guest.close()


def test_what_was_there_before_is_not_removed(tmp_path: Path) -> None:
    """A giver removes what it wrote itself, the three newest apart; a state that a lighthouse keeps is the keeper's."""

    def write(path: Path) -> None:
        path.write_bytes(b"a state")

    with router(tmp_path) as (_, _, host):
        state_server, dealt_with = StateServer(host, "3", print), threading.Event()
        there, written = ([tmp_path / f"{name}-{round}" for round in range(5)] for name in ("there", "written"))
        for one, other in zip(there, written, strict=True):
            write(one)
            state_server.publish("there", one, {}, is_written)
            state_server.publish("written", other, {}, write)
            state_server.close()  # one after the other
        host.later(dealt_with.set)
        assert dealt_with.wait(20.0)
        assert [path.exists() for path in written] == [False, False, True, True, True]
        state_server.unpublish("written")
        state_server.unpublish("there")
        assert not any(path.exists() for path in written) and all(path.exists() for path in there)


def test_what_was_written_late_does_not_take_a_newer_one_s_place(tmp_path: Path) -> None:
    """Two offers of one name, of which the older one takes longer to write: the newer is given, the older removed."""
    slow, old, new = threading.Event(), tmp_path / "old", tmp_path / "new"

    def slowly(path: Path) -> None:
        assert slow.wait(20.0)
        path.write_bytes(b"old")

    with router(tmp_path) as (mine, address, host):
        state_server, dealt_with = StateServer(host, "3", print), threading.Event()
        guest = open_session(mine.token, address)
        try:
            state_server.publish("state", old, {"round": 1}, slowly)
            state_server.publish("state", new, {"round": 2}, lambda path: path.write_bytes(b"new") and None)
            asked = FetchRequest(source="3", what="state", most=1 << 20, seconds=20.0)
            assert fetch_state(guest, asked, tmp_path / "taken")["round"] == 2
            slow.set()
            state_server.close()
            host.later(dealt_with.set)
            assert dealt_with.wait(20.0)
            assert (
                fetch_state(guest, asked, tmp_path / "taken")["round"] == 2
                and (tmp_path / "taken").read_bytes() == b"new"
            )
            assert new.exists() and not old.exists()
        finally:
            guest.close()


class Known:
    """The guide of the worker in a member, by the lighthouse's keys."""

    def __init__(self, keys: MemberKeys, member: int) -> None:
        self._keys, self._member = keys, member

    def peer_key(self, peer: int) -> bytes:
        return peer_key(self._keys.of(peer), self._member)

    def expected(self, sender: int) -> bytes:
        return peer_key(self._keys.of(self._member), sender)

    def met(self, member: int, *, there: bool, direct: bool) -> None:
        pass


def test_nobody_gives_in_another_s_place(tmp_path: Path) -> None:
    """A member that answers under another member's name gives nothing, neither to a worker nor to the lighthouse."""
    keys, good, bad, path = MemberKeys(tmp_path), tmp_path / "good", tmp_path / "bad", tmp_path / "taken"
    good.write_bytes(b"good" * 500_000)
    bad.write_bytes(b"evil" * 500_000)
    with router(tmp_path) as (mine, address, host):
        ends = [open_session(mine.token, address) for _ in range(3)]
        try:
            thief = StateServer(ends[1], "3", print, peer_keys=Known(keys, 5))
            thief.publish("model", bad, {})
            taker = StateServer(ends[2], "4", print, peer_keys=Known(keys, 4))
            asked = FetchRequest(source="3", what="model", most=1 << 30, seconds=1.0)
            with pytest.raises(StateUnavailable, match="nothing arrived"):
                taker.fetch(asked, path)
            with pytest.raises(StateUnavailable, match="nothing arrived"):
                fetch_state(host, asked, path, peer_key=keys.peer_key)
            assert all(end.refused[-1, "a state in another's name"] for end in (ends[2], host))
            ends[1].close()
            state_server = StateServer(ends[0], "3", print, peer_keys=Known(keys, 3))
            state_server.publish("model", good, {})
            for get in (taker.fetch, partial(fetch_state, host, peer_key=keys.peer_key)):
                assert get(asked, path)["size"] == good.stat().st_size and path.read_bytes() == good.read_bytes()
                path.unlink()
        finally:
            for end in ends:
                end.close()


def test_a_seat_s_word_bears_its_key(tmp_path: Path) -> None:
    keys = MemberKeys(tmp_path)
    assert keys.member(signature(7, keys.of(7), "here", b"so"), "here", b"so") == 7
    assert MemberKeys(tmp_path).of(7) == keys.of(7)  # a lighthouse that is started again knows it
    right = signature(7, keys.of(7), "here", b"so")
    assert keys.member(right, "there", b"so") is keys.member(right, "here", b"else") is None
    as_another = signature(8, keys.of(7), "here", b"so")
    for forged in (as_another, b"7", b"7:", b"", b"0" + right, b"-1:" + right[2:], right + b"x", b"\xff" * 200):
        assert keys.member(forged, "here", b"so") is None

"""Files that members send each other: a joiner's first state, a worker's results, the consolidated model.

    StateServer   publishes a file under a name; a newer one replaces it. A request for a file that is not there yet is
                  answered once it is; `is_requested` tells the server's training loop.
    fetch_state   asks for the file's length, then for its pieces, `WINDOW` at a time; checks length and checksum.

The server's worker trains meanwhile: pieces are read from the disk as they are requested.

Every reply of a member bears a MAC over request and reply by the receiver's peer key (`keys`): anybody with the token
may receive requests, but its replies in the server's place are rejected. At the lighthouse's own addresses nobody else
can answer, so its replies bear no MAC.
"""

from __future__ import annotations

import hmac
import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from isles.base.parsing import OneLine, Unfit, integer, parse_json, table, value_of
from isles.membership.keys import LIGHTHOUSE, PROOF, authenticate, state_key
from isles.membership.session import Condition, ControlSession, Query

STATE, ANCHORS = "state", "anchors"
"""A worker's: all of it, or anchors and outer momenta alone."""
MODEL = "model"
"""What a worker came to; the lighthouse's: the one model."""
COPIES, BESIDE = 16, 1 << 20
"""Of the model's bytes, that a state may have at most; bytes of a file beside its tensors."""


def server_name(member: int, island_rank: int) -> str:
    """The name of the state server of the worker at `island_rank` in the island of `member`."""
    return f"{member}/{island_rank}" if island_rank else str(member)


def saved_name(island_rank: int) -> str:
    """What the lighthouse calls the state of a rank in an island."""
    return f"{STATE}-{island_rank}" if island_rank else STATE


def state_of(stage: int, step: int) -> str:
    """The state of a swarm's stage after a step."""
    return f"stage-{stage}-step-{step}"


PIECE = 1 << 20
WINDOW = 4  # pieces asked for ahead, so that the link is busy during a round trip
MOST_FACTS = 1 << 16
"""The most bytes of a file's facts, and of a request."""
REQUEST = b"isles state "
"""The prefix of a request in its MAC."""
_NUMBERS = {"size": (0, 1 << 62), "number": (0, 1 << 53), "crc32": (0, (1 << 32) - 1), "step": (0, 1 << 53)}
_NUMBERS |= {"parts": (1, 1 << 16), "participants": (1, 1 << 30), "digest": (-1 << 63, (1 << 63) - 1)}
_AGAIN = 0.2  # seconds between looks at whether the source is lost, and between requests that got no answer
TOTAL = 3600.0
"""Seconds that a transfer may take, see `world.elastic.state_deadline`."""
_LEAST = 12_500  # bytes a second that a transfer must reach
_WINDOW = 30.0  # seconds until its rate counts
_TELL = 10.0  # seconds of a transfer until the user is told how long it will take; four times that until the next line
_Answer = tuple[bytes | None, bytes | None]  # a reply, or a refusal


class PeerKeys(Protocol):
    """The keys of pairs of members: `PeerConnections`."""

    def peer_key(self, peer: int) -> bytes | None:
        """The key of messages to `peer` (16 bytes); None while it is not known. May wait for the lighthouse."""

    def expected(self, sender: int) -> bytes:
        """The key of messages from `sender`."""


class NoPeerKeys:
    """All-zero keys, for members of a single program, as in tests."""

    def peer_key(self, peer: int) -> bytes:
        return bytes(16)

    def expected(self, sender: int) -> bytes:
        return bytes(16)


class StateUnavailable(Exception):
    """The file did not arrive; the reason is a line for the user."""


class StateNotFound(StateUnavailable):
    """The server does not have that file, and will not."""


class StateRejected(StateUnavailable):
    """The received state is unusable, and the receiver's former state is lost."""


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """A request for the file that `source` publishes under the name `what`.

    most: bytes that are accepted. seconds: without a piece until the transfer fails. wait: seconds until the file must
    be published; None: `seconds`. after, newest: only a file of a round in (after, newest] is accepted.
    """

    source: str
    what: str
    most: int
    seconds: float
    wait: float | None = None
    after: int = -1
    newest: int = 1 << 53

    @property
    def patience(self) -> float:
        """Seconds until the file must be published."""
        return self.seconds if self.wait is None else self.wait


def member_in(name: str) -> int:
    """The member that publishes as `name`; -1 for the lighthouse."""
    return -1 if name == LIGHTHOUSE else int(name.partition("/")[0])


def fetch_state(
    session: ControlSession,
    asked: FetchRequest,
    path: Path,
    receiver: int = -1,
    peer_key: Callable[[int], bytes | None] = lambda member: bytes(16),
    *,
    lost: Callable[[], bool] = lambda: False,
    changed: Condition | None = None,
    total: float = TOTAL,
    notice: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fetch a file into `path`. Not for callbacks.

    Args:
        receiver: the member that asks; -1: the lighthouse.
        peer_key: as in `PeerKeys`.
        lost: whether to give up, as the source is lost; called when `changed` is notified, and several times a second.
        total: seconds that it may take; less if it is slower than `_LEAST`.
        notice: called with a line for the user if it takes long.

    Returns:
        The facts that were published with it.

    Raises:
        StateUnavailable: it does not arrive, is too long, or differs from what was published.
    """
    look = _AGAIN if session.beats else math.inf
    fetch = _Fetch(session, asked, receiver, peer_key, lost, changed or session.condition(), look)
    facts = fetch.open(asked.patience)
    size, number = facts["size"], facts["number"]
    if size > asked.most:
        raise StateUnavailable(f"it has {size} bytes, more than the {asked.most} that fit this model")
    with path.open("wb") as file:
        checksum = 0
        for piece in fetch.pieces(number, size, asked.seconds, total, notice):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
    if checksum != facts.get("crc32"):
        raise StateUnavailable("it is not what was published: its checksum differs")
    return facts


@dataclass
class _Fetch:
    """One fetch. Answers come in callbacks; the receiver waits for them in its own thread."""

    session: ControlSession
    asked: FetchRequest
    receiver: int
    peer_key: Callable[[int], bytes | None]
    lost: Callable[[], bool]
    changed: Condition
    look: float  # seconds between looks at whether the source is lost
    _mac_key: bytes = b""
    _answers: dict[int, _Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._key, self._source = state_key(self.asked.source), member_in(self.asked.source)

    def open(self, seconds: float) -> dict[str, Any]:
        """Wait until the file is published; its length, number and facts."""
        until, why = self.session.now() + seconds, "the lighthouse does not give its key"
        while self.session.now() < until:
            reply = refusal = None
            if self._has_key():
                why = "it does not answer, or has not published it"
                self._post(-1, 0, min(seconds, 5.0))
                reply, refusal = self._wait(0, min(seconds, 5.0))
            if reply is not None:
                return _facts(reply, range(self.asked.after + 1, self.asked.newest + 1))
            if refusal == b"never":
                raise StateNotFound("there is none")
            if self.lost():
                raise StateUnavailable("its source is lost")
            with self.changed:
                self.changed.wait_for(lambda: False, _AGAIN)
        raise StateUnavailable(f"nothing arrived within {seconds:g} s: {why}")

    def _has_key(self) -> bool:
        """Whether answers of the source can be authenticated."""
        if self._source >= 0 and not self._mac_key:
            self._mac_key = self.peer_key(self._source) or b""
        return self._source < 0 or bool(self._mac_key)

    def pieces(
        self, number: int, size: int, seconds: float, total: float, notice: Callable[[str], None]
    ) -> Iterator[bytes]:
        """The file's bytes, in order."""
        offsets, posted, began, tell = range(0, size, PIECE), 0, self.session.now(), _TELL
        allowed = min(total, seconds + size / _LEAST)
        for index, offset in enumerate(offsets):
            passed = self.session.now() - began
            needs = passed * size / max(offset, 1)
            if passed > allowed or (passed > _WINDOW and needs > 2 * allowed):
                rate = f"{size / 1e6:.1f} MB at {8 * offset / 1e6 / passed:.2g} Mbit/s take {needs:,.0f} s"
                key = f"more than is allowed of {allowed:,.0f} s (world.elastic.state_deadline = {total:g})"
                raise StateUnavailable(f"{rate}, {key}: raise that, or use a faster line")
            if passed > tell:
                tell *= 4
                notice(f"{offset / 1e6:.1f} of {size / 1e6:.1f} MB are here; it takes {needs:,.0f} s in all")
            while posted < min(index + WINDOW, len(offsets)):
                self._post(number, offsets[posted], seconds)
                posted += 1
            piece, refusal = self._wait(offset, seconds)
            if piece is None and refusal is None:  # a reply may be lost: ask again
                self._post(number, offset, seconds)
                piece, _ = self._wait(offset, seconds)
            if piece is None or len(piece) != min(PIECE, size - offset):
                raise StateUnavailable("it broke off")
            yield piece

    def _post(self, number: int, offset: int, seconds: float) -> None:
        fields = {
            "what": self.asked.what,
            "number": number,
            "offset": offset,
            "after": self.asked.after,
            "receiver": self.receiver,
        }
        asked = json.dumps(fields).encode("ascii")

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            with self.changed:
                self._answers[offset] = None if reply is None else self._authentic(asked, reply), refusal
                self.changed.notify_all()

        try:
            self.session.ask(self._key, asked, answered, seconds=seconds)
        except OSError as error:
            raise StateUnavailable(str(error)) from None

    def _authentic(self, asked: bytes, reply: bytes) -> bytes | None:
        """The source's reply without its MAC; None, and counted, for a forged one."""
        if self._source < 0:
            return reply
        mac, data = reply[:PROOF], reply[PROOF:]
        if hmac.compare_digest(mac, authenticate(self._mac_key, REQUEST + asked, data)):
            return data
        self.session.refused.note(-1, "a state in another's name")
        return None

    def _wait(self, offset: int, seconds: float) -> _Answer:
        # A second more than the question's own time-out, which comes as a callback behind others.
        until = self.session.now() + seconds + 1.0
        with self.changed:
            while offset not in self._answers and (left := until - self.session.now()) > 0:
                if self.lost():
                    raise StateUnavailable("its source is lost")
                self.changed.wait_for(lambda: offset in self._answers or self.lost(), min(self.look, left))
            return self._answers.pop(offset, (None, None))


def _facts(answer: bytes, rounds: range) -> dict[str, Any]:
    """Parse the facts of a file of one of `rounds`, and check all numbers. Raises StateUnavailable."""
    try:
        facts = table(parse_json(answer[:MOST_FACTS]), "its facts")
        left_out, whole = table(facts.get("left_out", {}), "left_out"), facts.get("whole", False)
        if not isinstance(whole, bool) or not all(member.isdecimal() and len(member) < 10 for member in left_out):
            raise Unfit("whole is neither true nor false, or left_out names no members")
        facts["left_out"] = {int(member): integer(left_out, member, -1, 1 << 53) for member in left_out}
        bounds = _NUMBERS | {"round": (rounds.start, rounds.stop - 1)}
        for key in facts.keys() & bounds.keys() | {"size", "number", "crc32"}:
            integer(facts, key, *bounds[key])
        return facts
    except ValueError as error:
        raise StateUnavailable(f"its facts are invalid: {error}") from None


_MOST_WAITING = 64  # the newest requests that wait: a receiver asks again, and a stranger must not fill the memory
_CLOSING = 10.0  # seconds to finish writing when a server closes
_RETAINED = 3  # files under one name, so that transfers under way can go on


def is_written(path: Path) -> None:
    """The default `write` of `publish`, for a file that exists already."""


class StateTransfer(Protocol):
    """A worker's published and fetched files, see `StateServer`."""

    def is_requested(self, what: str) -> bool: ...
    def publish(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = ...) -> None: ...
    def freeze(self, what: str) -> None: ...
    def unpublish(self, what: str) -> None: ...
    def announce(self, comes: Callable[[str], bool]) -> None: ...
    def fetch(self, asked: FetchRequest, path: Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Published:
    what: str
    path: Path
    size: int
    facts: dict[str, Any]
    is_own: bool

    def drop(self) -> None:
        """Remove the file if this server wrote it."""
        if self.is_own:
            self.path.unlink(missing_ok=True)


@dataclass
class StateServer:
    """The files that this process publishes as `name` (a member, or `LIGHTHOUSE`).

    notice: called with a line for the user if a file could not be written, or takes long to fetch. lost: whether the
    source of that name is lost, so that nothing is fetched from it any more; changed: notified when that may be so.
    stops: whether to fetch nothing more at all. total: as in `fetch_state`. peer_keys: keys of members. comes: see
    `announce`.
    """

    session: ControlSession
    name: str
    notice: Callable[[str], None]
    comes: Callable[[str], bool] = lambda what: True
    lost: Callable[[str], bool] = lambda name: False
    peer_keys: PeerKeys = field(default_factory=NoPeerKeys)
    changed: Condition | None = None
    total: float = TOTAL
    stops: Callable[[], bool] = lambda: False
    _published: dict[int, _Published] = field(default_factory=dict)  # by number, the newest last
    _open: dict[str, int] = field(default_factory=dict)  # by name: the number that a new receiver gets
    _made: int = 0
    _coming: dict[int, str] = field(default_factory=dict)  # by number: names of files being written
    _ends: dict[int, Callable[[float], None]] = field(default_factory=dict)  # by number: waits for the end of writing
    _waiting: list[tuple[str, int, int, Query]] = field(default_factory=list)  # requests for files not yet published

    def __post_init__(self) -> None:
        self.session.serve(state_key(self.name), self._asked)

    def publish(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        """Publish the file at `path` as `what`. Returns at once. facts: JSON-able, sent with the file's length. write:
        writes the file in the background; the server owns what it wrote, and removes it once `_RETAINED` newer ones
        are there.
        """
        self._made += 1
        number = self._made
        self._coming[number] = what  # before the writer can finish
        end = self.session.aside(partial(self._make, number, what, path, facts, write))
        self._ends[number] = end
        if number not in self._coming:  # `_add` has run meanwhile, and found no entry
            self._ends.pop(number, None)

    def is_requested(self, what: str) -> bool:
        """Whether a request waits for a file that is neither published nor being written."""
        return any(asked == what for asked, *_ in [*self._waiting]) and not self._is_coming(what)

    def announce(self, comes: Callable[[str], bool]) -> None:
        """comes: whether a file of this name may still be published; called in a callback. Requests for other names
        are refused at once.
        """
        self.comes = comes
        self.session.later(self._answer)

    def unpublish(self, what: str) -> None:
        """Remove the files of `what`, and refuse requests that wait for it."""
        self.freeze(what)
        for number in [number for number, coming in [*self._coming.items()] if coming == what]:
            # Then `_add` drops it, once it is written.
            self._coming.pop(number, None)
        for number in [number for number, file in [*self._published.items()] if file.what == what]:
            if (old := self._published.pop(number, None)) is not None:
                old.drop()
        self.session.later(lambda: self._refuse(what))

    def freeze(self, what: str) -> None:
        """Accept no new receivers of `what`, which is too old; transfers under way go on."""
        self._open.pop(what, None)

    def fetch(self, asked: FetchRequest, path: Path) -> dict[str, Any]:
        def lost() -> bool:
            return self.stops() or self.lost(asked.source)

        def notice(line: str) -> None:
            self.notice(f"{'the model' if asked.what == MODEL else 'a state'} of {asked.source}: {line}")

        own, key, ends = member_in(self.name), self.peer_keys.peer_key, {"lost": lost, "changed": self.changed}
        return fetch_state(self.session, asked, path, own, key, **ends, total=self.total, notice=notice)

    def close(self) -> None:
        """Wait until files that are being written are complete."""
        for end in [*self._ends.values()]:
            end(_CLOSING)

    def _make(self, number: int, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Write the file, and compute its length and checksum; in a thread of its own."""
        outcome: _Published | OSError
        try:
            write(path)
            checksum, size = 0, 0
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    checksum, size = zlib.crc32(piece, checksum), size + len(piece)
            outcome = _Published(what, path, size, {**facts, "crc32": checksum}, write is not is_written)
        except OSError as error:
            outcome = error
        self.session.later(lambda: self._add(number, what, outcome))

    def _add(self, number: int, what: str, written: _Published | OSError) -> None:
        """Publish a file that was written, or refuse requests if that failed. In a callback."""
        is_needed = self._coming.pop(number, None) is not None
        self._ends.pop(number, None)
        if isinstance(written, OSError):
            self.notice(
                f"a file that another worker asked for could not be written: {written}; it will ask a third worker"
            )
            self._refuse(what)
            return
        if not is_needed or number < self._open.get(what, -1):  # a newer one was written before it
            self._drop(written)
            return
        self._published[number] = written
        self._open[what] = number
        # Copies: `unpublish` removes entries in the worker's thread.
        for older in [one for one, file in [*self._published.items()] if file.what == what][:-_RETAINED]:
            if (old := self._published.pop(older, None)) is not None:
                self._drop(old)
        self._answer()

    def _drop(self, old: _Published) -> None:
        if all(file.path != old.path for file in [*self._published.values()]):
            old.drop()

    def _asked(self, query: Query) -> None:
        try:
            asked = table(parse_json(query.payload[:MOST_FACTS]), "a request")
            what, offset = value_of(asked, "what", OneLine), integer(asked, "offset", 0, 1 << 62)
            number, after, receiver = (integer(asked, key, -1, 1 << 62) for key in ("number", "after", "receiver"))
        except ValueError:
            self.session.refused.note(-1, "an invalid request for a state")
            query.refuse(b"never")
            return
        if number < 0:
            self._waiting = [*self._waiting, (what, after, receiver, query)][-_MOST_WAITING:]
            self._answer()
            return
        file = self._published.get(number)
        if file is None or file.what != what or offset > file.size:
            query.refuse(b"never")
        else:
            query.reply(partial(self._piece, query.payload, receiver, file.path, offset))

    def _piece(self, asked: bytes, receiver: int, path: Path, offset: int) -> bytes:
        data = b""  # empty if the file was removed: the receiver then asks elsewhere
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(offset)
            data = file.read(PIECE)
        return self._signed(asked, receiver, data)

    def _signed(self, asked: bytes, receiver: int, data: bytes) -> bytes:
        """`data` as the reply to a request of `receiver`, with its MAC."""
        by_member = self.name != LIGHTHOUSE
        return authenticate(self.peer_keys.expected(receiver), REQUEST + asked, data) + data if by_member else data

    def _answer(self) -> None:
        """Answer requests whose file is published now. In a callback."""
        waiting, self._waiting = self._waiting, []
        for what, after, receiver, query in waiting:
            number = self._open.get(what)
            file = None if number is None else self._published.get(number)
            file = None if file is not None and file.facts.get("round", after + 1) <= after else file
            if file is not None:
                facts = {**file.facts, "number": number, "size": file.size}
                query.reply(self._signed(query.payload, receiver, json.dumps(facts).encode("ascii")))
            elif self.comes(what) or self._is_coming(what):
                self._waiting.append((what, after, receiver, query))
            else:
                query.refuse(b"never")

    def _is_coming(self, what: str) -> bool:
        return what in [*self._coming.values()]

    def _refuse(self, what: str) -> None:
        """Refuse all requests that wait for `what`; the receivers then try another member."""
        for *_, query in [one for one in self._waiting if one[0] == what]:
            query.refuse(b"never")
        self._waiting = [one for one in self._waiting if one[0] != what]

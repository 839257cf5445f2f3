"""The lighthouse of an elastic run: drives a `Coordinator` by the messages of a session. No torch.

    request of a member -> coordinator -> effects: an entry of the journal, on disk before any later effect leaves; a
    reply; notifications of members, which may be lost, because replies to later beats repeat them

All of this runs in callbacks of the session, one after the other.

`Journal` is its memory on disk: a line of JSON for everything that must survive it. A crash may leave an incomplete
last line; nothing that depends on it has left the machine, so it is cut off. A damaged line anywhere else is an error,
because later lines would be misread.

`AddressBook` knows where workers can be reached directly: the lighthouse dials each announced address itself. Another
worker may still be unable to reach it; then the two are relayed, like workers that do not listen. The lighthouse
vouches for each worker by the fingerprint of the certificate with which it joined.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from isles.base.durable import sync_folder
from isles.base.parsing import parse_json
from isles.comm.sockets import loop
from isles.comm.sockets.listener import echo_failure
from isles.comm.tcp import is_own
from isles.membership.effects import Append, Coordinator, Effect, Reply
from isles.membership.failure_detector import FailureDetector, IslandLiveness
from isles.membership.keys import (
    ABOUT,
    CONFIG,
    ECHO,
    HELLO,
    PIECE,
    PRESENT_AS_MEMBERS,
    REACH,
    REPORTS,
    REQUESTS,
    UP,
    MemberKeys,
    add_sequence,
    notify_key,
    peer_key,
    signature,
)
from isles.membership.messages import (
    MESSAGES,
    About,
    Admitted,
    AnnounceAddress,
    Entry,
    Finished,
    Hello,
    Later,
    Lookup,
    PeerAddress,
    PeerReport,
    Reachability,
    Refusal,
    Reload,
    Silent,
    decode,
    encode,
    takes,
    version_text,
)
from isles.membership.p2p.relay import RelayCount, new_ticket
from isles.membership.run_log import JOURNAL
from isles.membership.session import ControlSession, Query, RateLimit, network_of

_AT_ONCE = 8  # addresses to dial at the same time: anybody with the token can announce some
_ISLAND_SIZE = 1024  # the most workers of an island, as in `Fingerprints`

WorkerId = tuple[int, int]
"""A member, and a worker's rank in its island."""


class AddressBook:
    """The addresses of workers. keys: of all members. seen(session): the address from which a session is connected, ""
    for an unknown one.

    addresses: from which connected workers are seen.
    """

    def __init__(self, keys: MemberKeys, seen: Callable[[str], str]) -> None:
        self._keys, self._seen = keys, seen
        self._known: dict[WorkerId, tuple[str, int]] = {}  # of connected workers; ("", 0): cannot be dialled
        self._certificates: dict[int, tuple[str, ...]] = {}
        self.addresses: dict[WorkerId, str] = {}
        self._trying = asyncio.Semaphore(_AT_ONCE)
        self._busy: set[WorkerId] = set()
        self._relays: set[WorkerId] = set()  # workers that relay

    def joined(self, member: int, certificates: Sequence[str]) -> None:
        """Note the certificates of a new member, see `Hello`."""
        self._certificates[member] = tuple(certificates)

    def find(self, asker: int, find: Lookup) -> PeerAddress:
        """How a worker of the member `asker` reaches another worker."""
        there = self._known.get((find.member, find.island_rank))
        key = peer_key(self._keys.of(find.member), asker).hex()
        certificates = self._certificates.get(find.member, ()) if there else ()
        address = PeerAddress(find.member, *(there or ("", 0)), certificates, key)
        both = {asker, find.member}
        # Of a copy, because the loop's thread adds relays.
        relays = sorted(
            member for member, island_rank in [*self._relays] if island_rank == find.island_rank and member not in both
        )
        if not relays:
            return address
        relay = relays[sum(both) % len(relays)]
        return replace(address, relay=relay, ticket=new_ticket(self._keys.of(relay).encode("ascii")).hex())

    def forget(self, member: int, island_rank: int) -> None:
        """Forget the address of a worker that has disconnected."""
        self._known.pop((member, island_rank), None)
        self._relays.discard((member, island_rank))
        self.addresses.pop((member, island_rank), None)

    def try_address(self, member: int, announced: AnnounceAddress, answer: Callable[[Reachability], None]) -> None:
        """Dial the announced address of `member` (-1: of a machine that has not joined); `answer` is called with the
        result, in another thread. ValueError for an invalid address, or while another one of this worker is tried.
        """
        is_reached = bool(announced.host or announced.port)
        host, island_rank = announced.host or self._seen(announced.session), (member, announced.island_rank)
        if not 0 <= announced.island_rank < _ISLAND_SIZE or (is_reached and not (host and 0 < announced.port < 65536)):
            raise ValueError("an invalid address")
        if member >= 0 and self._certificates.get(member, ())[announced.island_rank : announced.island_rank + 1] != (
            announced.certificate,
        ):
            raise ValueError("another certificate than that with which it joined")
        if island_rank in self._busy:
            raise ValueError("an address while another one is being tried")
        seen = self._seen(announced.session)
        if member >= 0:
            self._known[island_rank], self.addresses[island_rank] = ("", 0), seen
            self._relays.discard(island_rank)
        if not is_reached:
            answer(Reachability(host, 0, "", seen))
            return
        self._busy.add(island_rank)

        async def attempt() -> None:
            async with self._trying:
                why = await echo_failure(host, announced.port, announced.certificate)
            if not why and island_rank in self._known:  # else it has disconnected meanwhile
                self._known[island_rank] = host, announced.port
                if announced.relays:
                    self._relays.add(island_rank)
            self._busy.discard(island_rank)
            answer(Reachability(host, announced.port, why, seen))

        loop.start(attempt())


class Journal:
    """The file `members.jsonl` in `folder`. entries: what it held when it was opened.

    ValueError if it cannot be read, or a line in the middle is damaged.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JOURNAL
        self.entries, whole = _read(self.path)
        self._file = open(self.path, "ab")  # noqa: SIM115  closed by `close`
        # Before anything is appended, which would make the incomplete line a damaged one in the middle.
        if self._file.tell() != whole:
            self._file.truncate(whole)
        self._committed = True
        sync_folder(folder)  # a new file survives a crash only if its folder's entry is on disk

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; it is on disk after `commit`."""
        self._file.write(json.dumps(entry, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n")
        self._committed = False

    def commit(self) -> None:
        """Return when everything appended is on disk. Does nothing if there is nothing new."""
        if not self._committed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._committed = True

    def close(self) -> None:
        """Commit and close the file. Safe to call twice."""
        if not self._file.closed:
            self.commit()
            self._file.close()


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(entries, bytes up to the end of the last complete line)."""
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); restore the file, or start a new run") from None
    whole = data.rfind(b"\n") + 1
    entries = []
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            entry = parse_json(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: line {number} is damaged; restore the file, or start a new run")
        entries.append(entry)
    return entries, whole


_LOG = logging.getLogger(__name__)
GRACE = 8.0  # seconds for workers to reconnect to a restarted lighthouse
JOINS = 30  # members that may join from one address at once, and as many again each minute
WORDS, WORD_BYTES, RELOADS = 30_000, 8 << 20, 30  # requests of one member; their bytes; those for another state
LINES, LINE_BYTES = 30_000, 16 << 20  # reports of one member, and their bytes
DIALS = 60  # addresses to dial for one address likewise
_TICK = 0.25
_NOTIFY = 5.0  # seconds until a notification is given up
_LONGEST_REPORT = 1 << 20
_NUMBERS_PER_RUN = 1 << 40  # more numbers than a lighthouse uses between two restarts
T = TypeVar("T")


class Lighthouse:
    """From `open` on, calls the `coordinator` with what workers send, and carries out its effects.

    An entry is on disk (`journal`) before anything that follows from it is sent, so a restarted lighthouse never
    contradicts what it has sent before.

    coordinator: built from the entries of `journal`. config: the run's, as TOML. version: of isles, to be shown.
    on_report(member, event): called with a worker's report, parsed from JSON but unchecked; its ValueError refuses the
    report. on_entry: called with each new entry of the journal. island_size: workers of each member, which all get its
    notifications. failure_detector: replaces the one that relies on received messages.

    finished: members that have done the last round. refused: counts rejections by (member or -1, reason). corpus:
    SHA-256 of the first worker's text; None before it has joined.
    """

    def __init__(
        self,
        session: ControlSession,
        coordinator: Coordinator,
        journal: Journal,
        keys: MemberKeys,
        *,
        config: str,
        version: str,
        on_report: Callable[[int, Any], None],
        on_entry: Callable[[Mapping[str, Any]], None] = lambda entry: None,
        island_size: int = 1,
        failure_detector: FailureDetector | None = None,
    ) -> None:
        self.refused = session.refused
        self.finished = coordinator.finished
        self._failed: OSError | None = None
        self._is_closed = False
        self._relay = RelayCount(lambda: session.relayed, journal.entries)
        self.corpus: str | None = None
        self._session, self._journal, self._keys = session, journal, keys
        self._config, self._version, self._on_report = config.encode("utf-8"), version, on_report
        self._on_entry = on_entry
        self._coordinator, self._island_size, self._islands = coordinator, island_size, IslandLiveness()
        if journal.entries:
            journal.append({"event": "restart", "at": round(session.wall(), 3)})
            journal.commit()  # or a lighthouse killed at once would use the same numbers of notifications again
        restarts = sum(entry.get("event") == "restart" for entry in journal.entries) + bool(journal.entries)
        self._sequence = count(restarts * _NUMBERS_PER_RUN)
        self._address_book = AddressBook(keys, session.seen)
        self.machines: dict[int, tuple[str, str, float]] = {}
        """By member, the name of its machine, as it says; the address that it joined from; and when."""
        for entry in journal.entries:
            self._joined(entry)
        self._admissions, self._failure_detector = RateLimit(JOINS), failure_detector or FailureDetector()
        self._words, self._word_bytes, self._reloads = RateLimit(WORDS), RateLimit(WORD_BYTES), RateLimit(RELOADS)
        self._lines, self._line_bytes, self._dials = RateLimit(LINES), RateLimit(LINE_BYTES), RateLimit(DIALS)
        self._lock = session.condition()
        self._end_ticks: Callable[[], None] | None = None

    def open(self) -> None:
        """Begin to hear members: whatever the callbacks need must be there now."""
        session = self._session
        session.serve(CONFIG, lambda query: query.reply(self._config))
        session.serve(HELLO, self._hello)
        session.serve(ABOUT, lambda query: query.reply(encode(self._about())))
        session.serve(ECHO, lambda query: query.reply(partial(bytes, _echoed(query))))
        session.serve(REACH, self._reach)
        session.serve(REQUESTS, self._asked)
        session.serve(REPORTS, self._reported)
        for there in PRESENT_AS_MEMBERS:
            session.watch(there, self._presence)
        session.present(UP)
        if session.beats:
            self._failure_detector.newly_silent(session.now())  # so that it notices if it is suspended before a tick
            self._end_ticks = session.later(self._tick_on, _TICK)

    def act(self, call: Callable[[float], list[Effect]]) -> None:
        """Call the coordinator in a callback, and carry out its effects. Returns at once."""
        self._session.later(lambda: self._carry_out(self._call(lambda _, now: call(now))))

    def look(self, at: Callable[[float], T]) -> T:
        """The result of `at`, called with the time while the coordinator cannot change."""
        with self._lock:
            return at(self._session.now())

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Wait until `over()`, checked after every message, or `seconds` have passed. OSError if the journal could not
        be written: nothing that is not in it was sent, and nothing more will be.
        """
        with self._lock:
            message = self._lock.wait_for(lambda: self._failed is not None or over(), seconds)
            if self._failed is not None:
                raise self._failed
            return message

    def notify(self, members: Sequence[int], message: Any) -> None:
        """Send `message` to each of `members`, without acknowledgement."""
        for member in members:
            self._notify(member, encode(message))

    @property
    def relayed(self) -> int:
        """Bytes that workers have sent to each other through this lighthouse."""
        return self._relay.relayed()

    def close(self) -> None:
        """Stop the timer, and take no more reports. The session stays open: its opener closes it."""
        with self._lock:
            self._is_closed = True
            if self._end_ticks is not None:
                self._end_ticks()

    # In callbacks

    def _hello(self, query: Query) -> None:
        if (hello := self._greeting(query, Hello)) is None:
            return
        why = None
        if not takes(MESSAGES, hello.messages):
            there = version_text(hello.version, hello.messages)
            why = f"this run is of {version_text(self._version, MESSAGES)}, not {there}: install that version"
        elif len(hello.certificates) != self._island_size:
            why = f"each member of this run has {self._island_size} workers, and must show the certificate of each"
        elif self.corpus is not None and hello.corpus != self.corpus:
            why = (
                f"data.path: this machine's text differs (sha256 {hello.corpus[:8]}...) from the run's "
                f"({self.corpus[:8]}...): put the same files there"
            )
        if why is not None:
            self.refused.note(-1, "another version, text or number of workers")
            query.reply(encode(Refusal(why)))
            return
        seen = self._session.seen(hello.session)
        if not seen:
            self._refuse(query, -1, "a session that is not connected")
            return
        wait = self._admissions.take(network_of(seen), self._session.now())
        if wait > 0:
            self.refused.note(-1, "joins too often")
            why = f"{JOINS} workers a minute may join from one address"
            query.reply(encode(Later(round(wait, 1), why)))
            return
        address = "" if is_own(seen) else network_of(seen)
        self._carry_out(
            self._call(lambda m, now: m.join(now, hello.corpus, hello.certificates, address)),
            query,
            machine=hello.machine,
            seen=seen,
        )

    def _joined(self, entry: Mapping[str, Any]) -> None:
        """Note the member of a "join" entry; ignore others."""
        if entry.get("event") == "join":
            self.corpus = str(entry.get("description"))
            about = str(entry.get("machine", "")), str(entry.get("seen", "")), float(entry.get("at", 0.0))
            self.machines[entry["member"]] = about
            self._address_book.joined(entry["member"], entry["certificates"])

    def _about(self) -> About:
        members, newest, last = self._coordinator.about()
        return About(self._version, self._session.wall(), members, newest, last, MESSAGES)

    def _reach(self, query: Query) -> None:
        if (message := self._greeting(query, AnnounceAddress)) is not None:
            self._try_address(-1, message, query)

    def _greeting(self, query: Query, kind: type[T]) -> T | None:
        """The message of a worker that has not joined. None, and a refusal, if it is no `kind`."""
        try:
            return decode(query.payload, {kind.__name__.lower(): kind})
        except ValueError as error:
            self._refuse(query, -1, str(error))
            return None

    def _asked(self, query: Query) -> None:
        member = self._keys.member(query.attachment, REQUESTS, query.payload)
        if member is None:
            self._refuse(query, -1, "a message without the key of its member")
            return
        if self._is_too_often(member, (self._words, 1), (self._word_bytes, len(query.payload))):
            self._refuse(query, member, "more requests than a member may send in a minute")
            return
        try:
            message = decode(query.payload)
        except ValueError as error:
            self._refuse(query, member, str(error))
            return
        is_members_own = not isinstance(
            message, (Lookup, AnnounceAddress, Silent)
        )  # which other workers of an island send too
        if is_members_own and self._failure_detector.heard_from(member):
            self._carry_out(self._call(lambda m, now: m.reconnected(now, member)))
        match message:
            case Reload() if self._is_too_often(member, (self._reloads, 1)):
                self._refuse(query, member, "more requests for another state than a member may send in a minute")
            case Lookup():
                query.reply(encode(self._address_book.find(member, message)))
            case Silent():
                query.reply()
                # others were notified of a lost member; the asker has begun to wait after that
                is_lost = self._failure_detector.is_lost(message.member)
                self.notify([member] if is_lost else self._failure_detector.to_notify(message.member), message)
            case AnnounceAddress():
                self._try_address(member, message, query)
            case Finished():
                with self._lock:
                    self.finished.add(member)
                    self._lock.notify_all()
                query.reply()
            case _:
                self._consult(member, message, query)

    def _consult(self, member: int, message: Any, query: Query) -> None:
        """Answer as the coordinator decides."""
        try:
            effects = self._call(lambda m, now: m.hear(now, member, message))
        except ValueError as error:
            self._refuse(query, member, str(error))
            return
        if effects is None:
            self._refuse(query, member, "a message that no worker sends")
            return
        if isinstance(message, PeerReport) and message.charge == "refused":
            self.refused.note(message.member, "a share that another worker refuses")
        self._carry_out(effects, query)

    def _is_too_often(self, key: Hashable, *costs: tuple[RateLimit, int]) -> bool:
        now = self._session.now()
        return any(limit.take(key, now, amount) > 0 for limit, amount in costs)

    def _try_address(self, member: int, message: AnnounceAddress, query: Query) -> None:
        seen = self._session.seen(message.session)
        if not is_own(seen) and self._is_too_often(network_of(seen), (self._dials, 1)):
            self._refuse(query, member, "more addresses than are dialled for one address in a minute")
            return

        def answer(reached: Reachability) -> None:
            self._session.later(lambda: query.reply(encode(reached)))

        try:
            self._address_book.try_address(member, message, answer)
        except ValueError as error:
            self._refuse(query, member, str(error))

    def _reported(self, query: Query) -> None:
        with self._lock:  # `close` waits for a report that is being written
            if not self._is_closed:  # what is not acknowledged is sent again, to the next lighthouse
                self._take_report(query)

    def _take_report(self, query: Query) -> None:
        payload = query.payload
        member = self._keys.member(query.attachment, REPORTS, payload)
        if member is None or len(payload) > _LONGEST_REPORT:
            self._refuse(query, -1 if member is None else member, "an invalid report")
            return
        if self._is_too_often(member, (self._lines, 1), (self._line_bytes, len(payload))):
            self._refuse(query, member, "more reports than a member may send in a minute")
            return
        try:
            self._on_report(member, parse_json(payload))
        except ValueError as error:
            self.refused.note(member, str(error))
        except OSError as error:
            self._fail(error)
            return  # no answer: the worker keeps the line, and sends it to the restarted lighthouse
        query.reply()
        self._lock.notify_all()

    def _presence(self, key: str, there: bool) -> None:
        """The connection of a worker opened or broke, and perhaps with it that of its member."""
        # The worker's rank in its island, if that is not 0; and the member.
        names = [name for name in key.split("/") if name.isdecimal() and len(name) <= 9]
        island_rank = int(names[0]) if names[1:] else 0
        if len(names) != key.count("/") // 2 or not 0 <= island_rank < self._island_size:
            return
        member = int(names[-1])
        if not there:
            self._address_book.forget(member, island_rank)
        whole = self._islands.changed(member, island_rank, there)
        if whole is False and self._failure_detector.may_return(member, self._session.now()):
            return
        if whole is not None:
            silence = self._failure_detector.silence(member)
            self._failure_detector.changed(member, whole)
            self._carry_out(
                self._call(lambda m, now: m.reconnected(now, member) if whole else m.disconnected(now, member)),
                silence=silence,
            )

    def tick(self) -> None:
        """Time has passed; called several times a second."""
        silent = self._failure_detector.newly_silent(self._session.now())
        self._coordinator.postpone(self._failure_detector.stood)
        self._failure_detector.stood = 0.0
        self._carry_out(self._call(lambda m, now: m.tick(now)))
        for member in silent:
            silence = self._failure_detector.silence(member)
            self._carry_out(self._call(lambda m, now, member=member: m.disconnected(now, member)), silence=silence)
        if (note := self._relay.note(self.relayed)) is not None:
            self._carry_out([Append(note)])

    def _call(self, asked: Callable[[Coordinator, float], T]) -> T:
        with self._lock:
            effects = asked(self._coordinator, self._session.now())
            self._lock.notify_all()
        return effects

    def _carry_out(self, effects: Sequence[Effect], query: Query | None = None, **more: Any) -> None:
        """more: what entries of joins and losses hold besides."""
        if self._failed is not None:
            return
        try:
            self._carry(effects, query, more)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Make `wait` raise: the journal cannot be written, so nothing may be sent from here on."""
        with self._lock:
            self._failed = self._failed or error
            self._lock.notify_all()

    def _carry(self, effects: Sequence[Effect], query: Query | None, more: Mapping[str, Any]) -> None:
        answer, encoded = b"", (None, b"")
        for effect in effects:
            # Not synced here: one sync before the next effect that leaves serves all entries.
            if isinstance(effect, Append):
                beside = more if effect.entry["event"] in ("join", "lost") else {}
                entry = {**effect.entry, **beside, "at": round(self._session.wall(), 3)}
                self._journal.append(entry)
                self._joined(entry)
                self._on_entry(entry)
                if "still" in effect.entry:
                    self.refused.note(effect.entry["member"], f"no new round for {effect.entry['still']} s: left out")
                continue
            self._journal.commit()
            if isinstance(effect, Reply):
                message: Any = effect.message
                if isinstance(message, Admitted):
                    self._failure_detector.joined(message.member)
                    message = Entry(message.member, self._keys.of(message.member))
                answer = encode(message)
            else:
                if effect.message is not encoded[0]:  # encode a view for all members once
                    encoded = effect.message, encode(effect.message)
                self._notify(effect.member, encoded[1])
        self._journal.commit()
        if query is not None:
            query.reply(answer)

    def _notify(self, member: int, message: bytes) -> None:
        key = self._keys.of(member)
        with self._lock:  # notifications must leave in the order of their numbers, or receivers refuse them as replayed
            effect = add_sequence(next(self._sequence), message)
            try:
                for where in (notify_key(member, island_rank) for island_rank in range(self._island_size)):
                    proof = signature(member, key, where, effect)
                    self._session.ask(
                        where, effect, lambda reply, refusal: None, attachment=proof, seconds=_NOTIFY, urgent=True
                    )
            except OSError:
                _LOG.debug("the session is closed")

    def _refuse(self, query: Query, member: int, why: str) -> None:
        self.refused.note(member, why)
        query.refuse(b"never")

    def _tick_on(self) -> None:
        with self._lock:
            self._end_ticks = self._session.later(self._tick_on, _TICK)
        self.tick()


def _echoed(query: Query) -> int:
    """Bytes that an ECHO request asks for."""
    return min(int.from_bytes(query.payload[:4], "big"), PIECE)

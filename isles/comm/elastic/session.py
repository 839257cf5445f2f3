"""The overlay network of elastic worlds behind a few verbs: zenoh, encrypted, relaying for whoever cannot be reached.

    open_session(mode, credentials, ...)     "router": the lighthouse, and a worker that others reach directly.
                                             "client": whoever goes to one of them; what it says to other clients goes
                                             over that one
    ask / answer / serve                     a question and its answer (`answer` waits for it); a chunk of data is a
                                             question, and its receipt the answer
    tell / listen                            to everybody, without an answer
    present / watch                          who is there: told when a process ends, stands still or is cut off

What was learned of zenoh ("the engine" below), each in a trial:

- Replies must not be consolidated, or they wait for routes that are dead.
- A question that nobody serves ends without an answer and without an error.
- Shared memory must be off: it crosses network namespaces.
- What a callback of the engine was given must not be freed in that callback. So callbacks only queue, and a thread of
  ours does the rest.
- A session that is not closed keeps the process from ending.
- A process may not fork after zenoh was imported.
- A link whose other end is silent is given up only once what is being written to it has gone, which takes TCP a quarter
  of an hour. So the kernel is told to give up after a lease, and the engine not to wait for room to write for longer.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from isles.comm.credentials import Credentials
from isles.comm.elastic.guards.refusals import Refusals
from isles.comm.elastic.links.engine import Alarm, IncomingQuery, Mode, settings, size_of
from isles.comm.tcp import endpoint, give_up_after

_LOG = logging.getLogger(__name__)
_QUEUED = 8 << 20  # bytes of questions that wait for the session's thread
_LATE = 1.0  # seconds behind its time until whoever waits for an answer counts it as none
_TIME_IS_OVER = b"Timeout"  # an error in which a question ends that nobody has answered: the engine's, no refusal


def zenoh() -> Any:
    """The engine's module. ValueError with the mend where it is not installed."""
    try:
        import zenoh as engine
    except ImportError as error:
        raise ValueError("workers that come and go need zenoh: pip install '.[elastic]'") from error
    return engine


class Session:
    """An open connection to a run.

    All callbacks run in one thread of the session's own, one after the other, in the order of what came. None of them
    waits for room on a line: what is urgent leaves in a thread of its own, answers in another. Questions that come
    faster than they are answered are turned away, so that they cannot fill the memory.

    refused: counts what those who serve on this session did not take. taken: bytes that were said to this session.
    """

    def __init__(self, session: Any, engine: Any, refused: Refusals, lease: float) -> None:
        self._session, self._engine, self.refused = session, engine, refused
        self.beats = True
        self.taken = 0  # bytes of what was said to this session itself
        self._declared: list[Any] = []
        self._todo: SimpleQueue[tuple[Callable[..., None], Any] | None] = SimpleQueue()
        self._urgent: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._timers: list[tuple[float, int, Alarm]] = []  # the next first; the session's thread's
        self._numbers = count()
        self._closed = False
        self._counting = threading.Lock()
        self._queued = 0  # bytes
        self._crowded: SimpleQueue[Any] = SimpleQueue()
        works = self._serve, self._turn_away, partial(self._send, self._urgent), partial(self._send, self._answers)
        self._threads = [threading.Thread(target=work, name="isles-session", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        self.lines(lambda here, there, begins: give_up_after(here, there, lease) if begins else None)

    # The verbs

    def serve(self, key: str, answer: Callable[[IncomingQuery], None]) -> None:
        """Have `answer` called with every question to `key`."""

        def asked(query: Any) -> None:
            with self._counting:
                self._queued -= size_of(query)
            answer(IncomingQuery(query, self._post))

        def arrived(query: Any) -> None:
            size = size_of(query)
            with self._counting:
                self.taken += sum(0 if part is None else len(part) for part in (query.payload, query.attachment))
                has_room = self._queued + size <= _QUEUED
                self._queued += size if has_room else 0
            if has_room:
                self._todo.put((asked, query))
            else:
                self._crowded.put(query)

        self._declared.append(self._session.declare_queryable(key, arrived))

    def ask(
        self,
        key: str,
        payload: bytes,
        answered: Callable[[bytes | None, bytes | None], None],
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> None:
        """Ask whoever serves `key`. answered(reply, None), answered(None, refusal), or answered(None, None) where no
        answer has come within `seconds`, or nobody is known to take it; called once. What is `urgent` goes before bulk,
        and this returns at once; else it may wait for room on the line. OSError once it is closed.
        """
        once = [answered]

        def settle(outcome: tuple[bytes | None, bytes | None]) -> None:
            if once:
                once.pop()(*outcome)

        def replied(reply: Any) -> None:
            good = reply.ok
            if good is not None:
                with self._counting:
                    self.taken += len(good.payload)
                settle((good.payload.to_bytes(), None))
                return
            refusal = reply.err.payload.to_bytes()
            settle((None, None if refusal == _TIME_IS_OVER else refusal))

        engine = self._engine

        def send() -> None:
            self._session.get(
                key,
                engine.handlers.Callback(
                    lambda reply: self._todo.put((replied, reply)), lambda: self._todo.put((settle, (None, None)))
                ),
                payload=payload,
                attachment=attachment,
                timeout=seconds,
                consolidation=engine.ConsolidationMode.NONE,
                congestion_control=engine.CongestionControl.BLOCK,
                priority=engine.Priority.REAL_TIME if urgent else engine.Priority.DATA,
            )

        def send_or_settle() -> None:
            try:
                send()
            except engine.ZError:
                self._todo.put((settle, (None, None)))

        if self._closed:
            raise OSError("the session is closed")
        if urgent:
            self._urgent.put(send_or_settle)
            return
        try:
            send()
        except engine.ZError as error:
            raise OSError(f"the session is closed ({error})") from None

    def answer(
        self,
        key: str,
        payload: bytes,
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> tuple[bytes | None, bytes | None]:
        """`ask`, and wait for what it would call `answered` with. Not for the session's own thread, which would wait
        for itself.
        """
        done, answers = threading.Event(), list[tuple[bytes | None, bytes | None]]()

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            answers.append((reply, refusal))
            done.set()

        self.ask(key, payload, answered, attachment=attachment, seconds=seconds, urgent=urgent)
        return answers[0] if done.wait(seconds + _LATE) else (None, None)

    def tell(self, key: str, payload: bytes) -> None:
        """Send `payload` to all who listen to `key`; nobody says whether it came."""
        engine = self._engine
        self._session.put(
            key, payload, congestion_control=engine.CongestionControl.BLOCK, priority=engine.Priority.REAL_TIME
        )

    def listen(self, key: str, heard: Callable[[bytes], None]) -> None:
        """Have `heard` called with what is told to `key`."""

        def taken(sample: Any) -> None:
            heard(sample.payload.to_bytes())

        self._declared.append(self._session.declare_subscriber(key, lambda sample: self._todo.put((taken, sample))))

    def present(self, key: str) -> None:
        """Be seen under `key` by those who `watch` it, until the process ends or this session is closed."""
        self._declared.append(self._session.liveliness().declare_token(key))

    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None:
        """Have `changed(key, whether it is present)` called for every key that matches `keys`, first for those that are
        present already, then at each change.
        """
        put = self._engine.SampleKind.PUT

        def seen(sample: Any) -> None:
            changed(str(sample.key_expr), sample.kind == put)

        liveliness = self._session.liveliness()
        self._declared.append(
            liveliness.declare_subscriber(keys, lambda sample: self._todo.put((seen, sample)), history=True)
        )

    def lines(self, changed: Callable[[str, str, bool], None]) -> None:
        """Have `changed(here, there, whether it begins)` called for every line to another session, first for those that
        there are, then at each change: it begins before anything that comes on it is served. here, there: its ends as
        `endpoint` writes them.
        """
        put = self._engine.SampleKind.PUT

        def told(event: Any) -> None:
            changed(endpoint(_ends(event.link.src)), endpoint(_ends(event.link.dst)), event.kind == put)

        listener = self._session.info.declare_link_events_listener
        self._declared.append(listener(lambda event: self._todo.put((told, event)), history=True))

    def later(self, call: Callable[[], None], seconds: float = 0.0) -> Alarm:
        """Have `call` called in the session's thread after `seconds`; 0: behind what has come by now."""
        alarm = Alarm(call)
        if seconds > 0:
            self._todo.put((partial(insort, self._timers), (self.now() + seconds, next(self._numbers), alarm)))
        else:
            self._todo.put((alarm.ring, None))
        return alarm

    def now(self) -> float:
        """Seconds of the clock that `later` counts by."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def condition(self) -> threading.Condition:
        """See `isles.comm.elastic.control.Condition`."""
        return threading.Condition(threading.RLock())

    def aside(self, work: Callable[[], None]) -> threading.Thread:
        """What does `work`, which may take a while, beside all callbacks, once it is started."""
        return threading.Thread(target=work, name="isles-aside", daemon=True)

    def name(self) -> str:
        """The engine's name of this session, which others see."""
        return str(self._session.info.zid())

    def seen(self, name: str) -> str:
        """The address from which the session of that name comes to this router; "" where it does not."""
        return next((_host(link.dst) for link in self._session.info.links() if str(link.zid) == name), "")

    def is_local(self) -> bool:
        """Whether the router of this client is on the same machine."""
        return any(_host(link.src) == _host(link.dst) for link in self._session.info.links())

    def close(self) -> None:
        """Be gone. Safe to call twice; without it the process does not end."""
        if self._closed:
            return
        self._closed = True
        self._session.close()
        for queue in (self._urgent, self._answers, self._todo, self._crowded):
            queue.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(5.0)

    def _turn_away(self) -> None:
        """Refuse questions for which there was no room, unread, and outside the engine's callbacks."""
        while (query := self._crowded.get()) is not None:
            self.refused.note(-1, "more at once than can be looked at")
            with suppress(self._engine.ZError):
                query.reply_err(b"later")
            del query

    def _post(self, answer: Callable[[], None], size: int) -> None:
        """Have an answer of so many bytes leave, behind those of before."""

        def send() -> None:
            try:
                with suppress(self._engine.ZError):
                    answer()
            finally:
                with self._counting:
                    self._queued -= size

        with self._counting:
            self._queued += size
        self._answers.put(send)

    def _send(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (send := queue.get()) is not None:
            try:
                send()
            except Exception:  # what cannot be answered must not end the thread that answers all others
                _LOG.exception("a message could not be sent")
            del send

    def _next(self) -> tuple[Callable[..., None], Any] | None:
        """What is to be called next; waits for it."""
        while True:
            seconds = self._timers[0][0] - self.now() if self._timers else None
            if seconds is not None and seconds <= 0:
                return self._timers.pop(0)[-1].ring, None
            with suppress(Empty):
                return self._todo.get(timeout=seconds)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            call, value = job
            try:
                call(value)
            except Exception:  # a stranger's message must not end the thread that serves all others
                if not self._closed:
                    _LOG.exception("a message could not be dealt with")
            del job, call, value  # what the engine lent is given back here, not in its own thread


def open_session(
    mode: Mode,
    credentials: Credentials,
    *,
    listen: str | None = None,
    connect: str | None = None,
    lease: float = 3.0,
    patience: float = 5.0,
    refused: Refusals | None = None,
) -> Session:
    """Open a session of the run of `credentials`; TLS always, the secret inside it.

    listen: HOST:PORT to be reached at, which needs the run's key; connect: HOST:PORT of a router.
    lease: seconds of silence after which another one counts as gone. patience: seconds to try to connect for.
    refused: where what is not taken is counted, if not by itself.

    ValueError where zenoh is missing, the key is, or the address cannot be had; OSError where nobody lets it in.
    """
    engine = zenoh()
    refuse_number(listen or connect or "")
    if listen is not None and credentials.key is None:
        raise ValueError("to listen for others this machine needs the run's key: join first")
    config = engine.Config()
    for key, value in settings(mode, credentials, listen, connect, lease, patience).items():
        config.insert_json5(key, json.dumps(value))
    try:
        return Session(engine.open(config), engine, Refusals() if refused is None else refused, lease)
    except engine.ZError as error:
        said = " ".join(str(error).split())[:200]
        if listen is not None and "in use" in said:
            raise ValueError(f"{listen}: the port is taken; choose another one") from None
        if listen is not None and "assign requested address" in said:
            raise ValueError(f"{listen}: is no address of this machine; name one that is (--host, --listen)") from None
        raise OSError(f"no session with {connect or listen}: {said}") from None


def refuse_number(place: str) -> None:
    """ValueError for an IPv6 address as a number: the engine's TLS takes it for a name that cannot be."""
    if place.startswith("["):
        raise ValueError(f"{place}: the engine takes no IPv6 address as a number; write a name that stands for it")


def address(host: str, port: int) -> str:
    """HOST:PORT, with brackets where the host has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ends(locator: Any) -> tuple[str, str]:
    """Host and port of the engine's "tls/HOST:PORT"."""
    host, _, port = str(locator).partition("/")[2].rpartition(":")
    return host.strip("[]"), port


def _host(locator: Any) -> str:
    return _ends(locator)[0]

"""A worker's requests to the lighthouse: `LighthouseClient`, which `client` builds on, and `SwarmClient`, for peers of
a swarm; also the rates of the link to the lighthouse, and a run's status, which anybody with the token may ask for.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from typing_extensions import override

from isles.base.errors import printable
from isles.comm.credentials import Token
from isles.comm.errors import PeerLost
from isles.comm.sockets.connection import LinkLost
from isles.comm.sockets.listener import LinkRates, measure_link
from isles.comm.tags import Tag
from isles.membership.keys import ECHO, PIECE, REPORTS, REQUESTS, STATUS, notify_key, signature, split_sequence
from isles.membership.messages import (
    Entry,
    Failed,
    JoinSwarm,
    Lookup,
    News,
    Over,
    Refusal,
    Rejoin,
    RequestWork,
    RunStatus,
    Silent,
    StartSwarm,
    StatesSaved,
    SwarmBeat,
    View,
    Wait,
    decode,
    encode,
)
from isles.membership.round_commit import RoundDecision
from isles.membership.session import ControlSession, Query
from isles.membership.tls_session import Session, open_session

_RETAINED = 4096  # the most buffered lines; then the oldest are dropped, for a lighthouse that is away for long
_REPORT_AGAIN = 0.2  # seconds until a line that was not accepted is sent again
_ENDING = 5.0  # most seconds that `close` waits for the line that is under way


class ReportQueue:
    """Buffers reports. take: sends one, and calls back with whether it was accepted; called for one at a time."""

    def __init__(self, session: ControlSession, take: Callable[[bytes, Callable[[bool], None]], None]) -> None:
        self._session, self._take = session, take
        self._lines: deque[bytes] = deque(maxlen=_RETAINED)
        self._changed = session.condition()
        self._is_busy = self._closed = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Queue one more event, JSON-able."""
        with self._changed:
            self._lines.append(json.dumps(event).encode("utf-8"))
            if not self._is_busy:
                self._hand_over()

    def settle(self, seconds: float) -> None:
        """Wait until all have been accepted, `seconds` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, seconds)

    def close(self) -> None:
        """Stop; reports that are not accepted at once are lost. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._is_busy, _ENDING)

    def _hand_over(self) -> None:
        with self._changed:
            self._is_busy = True
            self._take(self._lines[0], partial(self._taken, self._lines[0]))

    def _taken(self, line: bytes, taken: bool) -> None:
        with self._changed:
            if taken and self._lines[0] is line:  # else it was dropped for newer ones meanwhile
                self._lines.popleft()
            self._is_busy = bool(self._lines) and (taken or not self._closed)
            if self._is_busy:
                self._session.later(self._hand_over, 0.0 if taken else _REPORT_AGAIN)
            self._changed.notify_all()


_LOG = logging.getLogger(__name__)
BEAT = 1.0
"""Seconds between beats."""
PATIENCE = 3.0
"""Seconds to wait for a reply of the lighthouse."""
LONGEST = 4 << 20
"""The most bytes of a message from the lighthouse."""
_LONGEST_LINE = 300  # characters of news
_LATE = 1.0  # seconds that a reply's time-out may be late: it is a callback behind others


class DecisionLog:
    """The newest `RoundDecision` on each round. Callers hold the client's condition."""

    def __init__(self) -> None:
        self._decisions: dict[int, RoundDecision] = {}

    def hear(self, decision: RoundDecision) -> None:
        """Record a decision; an old or repeated one changes nothing."""
        old = self._decisions.get(decision.round)
        if old is None or (old.outcome != "land" and (decision.outcome == "land" or decision.attempt > old.attempt)):
            self._decisions[decision.round] = decision

    def newer(self, round: int, attempt: int) -> RoundDecision | None:
        """The decision on `round` if it is to land, or of a later attempt than `attempt`; else None."""
        decision = self._decisions.get(round)
        return decision if decision is not None and (decision.outcome == "land" or decision.attempt > attempt) else None

    def of(self, round: int) -> RoundDecision | None:
        """The newest decision on `round`."""
        return self._decisions.get(round)

    def forget_before(self, round: int) -> None:
        """Drop the decisions on rounds before `round`."""
        self._decisions = {key: decision for key, decision in self._decisions.items() if key >= round}


class PendingTransfers(Protocol):
    """A worker's transport, as far as notifications cancel its transfers."""

    def give_up(self, member: int, why: str | PeerLost) -> None:
        """End all transfers with `member`; later messages are tried again."""

    def again(self, tag: Tag) -> None:
        """The attempt of `tag` has begun: cancel transfers of earlier attempts of its round."""


class _Notifications:
    """Checks and decodes notifications to one worker of the member of `entry`. Used in session callbacks only."""

    def __init__(self, session: ControlSession, entry: Entry, island_rank: int) -> None:
        self._session, self._entry, self._where = session, entry, notify_key(entry.member, island_rank)
        self._newest = -1

    def take(self, query: Query) -> Any:
        """The message of a notification from the lighthouse, or from another worker of this island. None for a forged
        or replayed one, which is counted, and for an invalid one.
        """
        payload, entry = query.payload, self._entry
        if not hmac.compare_digest(query.attachment, signature(entry.member, entry.key, self._where, payload)):
            return self._refuse(query, "a notification that is not the lighthouse's")
        try:
            number, text = split_sequence(payload)
            message = decode(text, limit=LONGEST)
        except ValueError as error:
            query.reply()
            _LOG.warning("the lighthouse: %s", error)
            return None
        if not isinstance(message, Failed):  # replaying it does no harm
            if number <= self._newest:
                return self._refuse(query, "a replayed notification")
            self._newest = number
        query.reply()
        return message

    def _refuse(self, query: Query, why: str) -> None:
        self._session.refused.note(-1, why)
        query.refuse(b"never")


class LighthouseClient:
    """Sends a worker's messages in the name of the member of `entry`.

    changed: guards what callbacks and the worker's thread share. waited: seconds that this thread has waited here.
    transfers: the transport, once there is one. meets: called with each known view, once it is set. news: called with a
    line for the user about what became of others.
    """

    transfers: PendingTransfers | None = None

    def __init__(self, session: ControlSession, entry: Entry) -> None:
        self.meets: Callable[[View], None] | None = None
        self.news: Callable[[str], None] = lambda line: None
        self.session, self.entry, self.changed, self.waited = session, entry, session.condition(), 0.0
        self._reports = ReportQueue(session, self._hand_in)
        self._closed = False

    def listen(self, heard: Callable[[Any], None], island_rank: int = 0) -> None:
        """Call `heard` with each notification to the worker at `island_rank`, in a session's callback, but for news."""
        notifications = _Notifications(self.session, self.entry, island_rank)

        def take(query: Query) -> None:
            message = notifications.take(query)
            if isinstance(message, News):
                self.news(printable(message.line, _LONGEST_LINE))
            elif message is not None:
                heard(message)

        self.session.serve(notify_key(self.entry.member, island_rank), take)

    def report(self, event: Mapping[str, Any]) -> None:
        """Queue a line of metrics or another event for the lighthouse. Returns at once."""
        self._reports.add(event)

    def reported(self, seconds: float) -> None:
        """Wait until all reports have been accepted, `seconds` at most."""
        self._reports.settle(seconds)

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Wait until `over()`, checked after every change, or for `seconds`; returns its value then."""
        began = self.session.now()
        with self.changed:
            is_over = self.changed.wait_for(over, seconds)
            self.waited += self.session.now() - began
        return is_over

    def ask(self, message: Any, seconds: float = PATIENCE, key: str = REQUESTS) -> Any:
        """The lighthouse's reply; None if there is none in time, or it refuses. Not for callbacks."""
        answers: list[Any] = []

        def answered(answer: Any) -> None:
            with self.changed:
                answers.append(answer)
                self.changed.notify_all()

        self.send(message, answered, seconds, key)
        self.wait(lambda: bool(answers), seconds + _LATE)
        return answers[0] if answers else None

    def send(
        self,
        message: Any,
        answered: Callable[[Any], None] = lambda answer: None,
        seconds: float = PATIENCE,
        key: str = REQUESTS,
    ) -> None:
        """Send a request to `key` without waiting. answered: called with the reply. message: or its encoded bytes."""
        payload = message if isinstance(message, bytes) else encode(message)
        proof = signature(self.entry.member, self.entry.key, key, payload)
        try:
            self.session.ask(
                key, payload, lambda reply, _: answered(_read(reply)), attachment=proof, seconds=seconds, urgent=True
            )
        except OSError:
            _LOG.debug("the session is closed")
            answered(None)

    def connection(self, member: int, *, broken: bool) -> None:
        """The transport reports that a connection with `member` broke or opened."""

    def lost(self, member: int) -> bool:
        """Whether work of `member` is rejected."""
        return False

    def suspect(self, member: int) -> None:
        """Ask the lighthouse whether `member`, for which this worker waits too long, still sends beats."""
        self.send(Silent(member))

    def close(self) -> None:
        """Send nothing more unasked. Safe to call twice."""
        with self.changed:
            self._closed = True
        self._reports.close()

    def _hand_in(self, line: bytes, taken: Callable[[bool], None]) -> None:
        self.send(line, lambda answer: taken(answer is not None), key=REPORTS)


def _read(reply: bytes | None) -> Any:
    """The message of a reply: None for none, True for an empty one."""
    if not reply:
        return None if reply is None else True
    try:
        return decode(reply, limit=LONGEST)
    except ValueError as error:
        _LOG.warning("the lighthouse: %s", error)
        return None


_AGAIN = 0.1  # seconds between looks at whether states are saved
SwarmPart = StartSwarm | JoinSwarm | Wait | Over | Rejoin | Refusal


class SwarmClient(LighthouseClient):
    """The client of the peer in the member of `entry`.

    ended: the lighthouse's message that ended this peer's part in the run. saved, wanted: as in its newest
    `StatesSaved`. is_away: whether it has not replied lately. met: called with a peer whose connection opens, in any
    thread.
    """

    def __init__(self, session: ControlSession, entry: Entry, met: Callable[[int], None] = lambda member: None) -> None:
        super().__init__(session, entry)
        self.member, self._met = entry.member, met
        self.ended: Over | Rejoin | Refusal | None = None
        self.saved = self.wanted = 0
        self.is_away = False
        self._beat: Callable[[], SwarmBeat | None] = lambda: None
        self.listen(lambda message: None)
        session.later(self._beat_on, BEAT)

    def part(self, stage: int, run: int) -> SwarmPart | None:
        """Ask for work, with a wish for `stage`; None if the lighthouse does not reply."""
        answer = self.ask(RequestWork(stage, run))
        self._hear(answer)
        return answer if isinstance(answer, SwarmPart) else None

    def at_work(self, beat: Callable[[], SwarmBeat | None]) -> None:
        """Send the result of `beat` each second from now on."""
        self._beat = beat

    def rest(self, seconds: float) -> None:
        """Wait until this peer's part in the run has ended, or `seconds` have passed."""
        self.wait(lambda: self.ended is not None, seconds)

    def await_saved(self, step: int, seconds: float, *, though_away: bool = False) -> bool:
        """Wait until the lighthouse has saved the states after `step` or a later one; returns whether it has. Waits for
        `seconds` at most, and unless `though_away` only while it replies.
        """
        until = self.session.now() + seconds
        while self.saved < step and self.ended is None and (though_away or not self.is_away):
            if self.session.now() >= until:
                break
            self.look()
            if self.saved < step:
                self.rest(_AGAIN)
        return self.saved >= step

    @override
    def connection(self, member: int, *, broken: bool) -> None:
        if not broken:
            self._met(member)

    @override
    def suspect(self, member: int) -> None:
        """Peers of a swarm ask each other."""

    def look(self) -> None:
        """Send a beat now, to learn whether this peer still takes part."""
        beat = self._beat()
        if beat is not None:
            self._hear(self.ask(beat))

    def _hear(self, answer: Any) -> None:
        with self.changed:
            self.is_away = answer is None
            if isinstance(answer, StatesSaved):
                self.saved, self.wanted = max(self.saved, answer.step), answer.wanted
            if isinstance(answer, Over | Rejoin | Refusal):
                self.ended = self.ended or answer
            self.changed.notify_all()

    def _beat_on(self) -> None:
        beat = self._beat()

        def answered(answer: Any) -> None:
            if beat is not None:
                self._hear(answer)
            self.session.later(self._beat_on, BEAT)

        if not self._closed:  # without a beat yet (model or state not ready), Lookup still shows life
            self.send(Lookup(self.member) if beat is None else beat, answered)


_PATIENCE = 5.0  # seconds to connect, and for a starting lighthouse to serve
_ANSWER = 10.0  # seconds
_ASK_AGAIN = 0.05  # seconds between tries


def measure_lighthouse_link(session: Session) -> LinkRates | None:
    """Measure the link to the lighthouse, within some seconds; None if it stops replying."""

    def echo(out: int, back: int) -> None:
        answer = ask(session, ECHO, back.to_bytes(4, "big") + bytes(out))
        if answer is None or len(answer) != back:
            raise LinkLost("the lighthouse does not answer")

    try:
        return measure_link(echo, PIECE)
    except LinkLost:
        return None


def ask(session: Session, key: str, payload: bytes, seconds: float = _ANSWER) -> bytes | None:
    """The lighthouse's reply; None if it refuses or does not reply."""
    until = time.monotonic() + _PATIENCE
    while True:
        reply, refusal = session.answer(key, payload, seconds=seconds)
        if reply is not None or refusal is not None or time.monotonic() > until:
            return reply
        time.sleep(_ASK_AGAIN)


def run_status(address: str, token: Token) -> RunStatus:
    """The status of the run at `address`. ValueError if the token is not its; OSError if no lighthouse replies."""
    mend = f"isles doctor --join {address} looks at it"
    try:
        session = open_session(token, address, _PATIENCE)
    except LinkLost as error:
        raise OSError(f"{address}: no lighthouse answers there ({error}): {mend}") from None
    try:
        answer = ask(session, STATUS, b"", _PATIENCE)
    finally:
        session.close()
    if answer is None:
        raise OSError(f"{address}: the lighthouse has stopped: ask again once it is started")
    now = decode(answer, limit=LONGEST)
    if not isinstance(now, RunStatus):
        raise ValueError(f"{address}: the lighthouse there does not report its run's status; {mend}")
    return now

"""A worker's connection to the lighthouse, over a session.

    beats           by a timer, every second and at the start of each round, one at a time
    notifications   what the lighthouse pushes (proposals, views, decisions on rounds), in a callback of the session
    reports         lines of metrics, in order; buffered while the lighthouse is away

    start_round     the data that this worker reads, and who takes part
    finish_round    what becomes of a round that all land together, or none
    next_decision   between rounds: begin with a donor's state, evaluate the run's model, end

The last three are called by the training thread, which never waits for the lighthouse longer than they say. One
condition guards the `MemberState`, which callbacks and that thread share. No thread is started here, and no clock read
but the session's.

`MembershipClient` is that of a member's first worker; `FollowerClient` that of another worker of an island, which gets
the same notifications and decides nothing.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, PeerSilent, Refused
from isles.comm.tags import Tag
from isles.membership.keys import add_sequence, notify_key, signature, split_sequence
from isles.membership.member import MemberState, RoundMembers
from isles.membership.messages import (
    Ack,
    Beat,
    BeatReply,
    Done,
    Entry,
    Examine,
    Failed,
    Leave,
    Load,
    Over,
    PeerReport,
    Proposal,
    Refusal,
    Reload,
    Silent,
    View,
    decode,
    encode,
)
from isles.membership.requests import BEAT, LONGEST, PATIENCE, DecisionLog, LighthouseClient, PendingTransfers
from isles.membership.round_commit import NOTHING, RoundDecision
from isles.membership.session import ControlSession, Query

_LOG = logging.getLogger(__name__)
EXCLUDED = "a view without it is on its way"
"""Why one is not waited for any more that did not ask to leave."""


def cancel_waits(transfers: PendingTransfers | None, message: Any) -> None:
    """Have what `message` says is waited for in vain be waited for no longer."""
    if transfers is None:
        return
    match message:
        case Proposal(lost=lost):
            for member in lost:
                transfers.give_up(member, EXCLUDED)
        case Silent(member=member):
            transfers.give_up(member, PeerSilent(member))
        case RoundDecision(round=round, attempt=attempt):
            transfers.again(Tag("outer", round, attempt=attempt))
        case Failed(round=round, attempt=attempt):
            transfers.again(Tag("outer", round, attempt=attempt + 1))


def failure_notifier(client: LighthouseClient, island_rank: int, island_size: int) -> Callable[[int, int], None]:
    """What tells the others of an island of `island_size` workers, called with (round, attempt), that the one at
    `island_rank` has no answer of that attempt: so none of them waits for somebody who waits itself for one that was
    lost.
    """

    def notify(round: int, attempt: int) -> None:
        for other in range(island_size):
            if other != island_rank:
                client.send(add_sequence(0, encode(Failed(round, attempt))), key=notify_key(client.entry.member, other))

    return notify


class Notifications:
    """What is ordered of the worker at `island_rank` of the member of `entry`. Called in callbacks alone."""

    def __init__(self, session: ControlSession, entry: Entry, island_rank: int) -> None:
        self._session, self._entry, self._where = session, entry, notify_key(entry.member, island_rank)
        self._newest = -1

    def take(self, query: Query) -> Any:
        """The lighthouse's order, or the word of another worker of this island; None, and counted, where somebody else
        says it, or says again what was overheard, or where it is none.
        """
        payload, entry = query.payload, self._entry
        if not hmac.compare_digest(query.attachment, signature(entry.member, entry.key, self._where, payload)):
            return self._refuse(query, "an order that is not the lighthouse's")
        try:
            number, text = split_sequence(payload)
            message = decode(text, limit=LONGEST)
        except ValueError as error:
            query.reply()
            _LOG.warning("the lighthouse: %s", error)
            return None
        if not isinstance(message, Failed):  # which ends nothing that is not over, however often it is said
            if number <= self._newest:
                return self._refuse(query, "a replayed notification")
            self._newest = number
        query.reply()
        return message

    def _refuse(self, query: Query, why: str) -> None:
        self._session.refused.note(-1, why)
        query.refuse(b"never")


class FollowerClient(LighthouseClient):
    """Of the worker at `island_rank` in the island of the member of `entry`, whose leader decides: it hears the same
    orders.
    """

    def __init__(self, session: ControlSession, entry: Entry, island_rank: int) -> None:
        super().__init__(session, entry)
        self._notifications = Notifications(session, entry, island_rank)
        session.serve(notify_key(entry.member, island_rank), self._on_notification)

    def _on_notification(self, query: Query) -> None:
        message = self._notifications.take(query)
        if isinstance(message, View) and self.meets is not None:
            self.meets(message)
        cancel_waits(self.transfers, message)


_SOON = 0.2  # seconds until the next beat while it waits for its first round; for an answer before it begins one
_REPEAT_AFTER = 0.3  # seconds until an answer is told again
_UNDECIDED = 3.0  # seconds for a view that is on its way
_LONGEST_REASON = 200
_NEVER = 1 << 20  # an attempt that nobody comes to
_QUIET = 3.0  # seconds for which nobody waits for one that is said to be silent
_AGAIN = 0.01  # seconds, at least, from an answer to the next beat


class MembershipClient(LighthouseClient):
    """The line of the worker in the member of `entry`.

    ended: set once this worker has no further part in the run: `Over`, or `Examine` where it is to judge the model.
    decisions: the newest on each round.
    """

    def __init__(self, session: ControlSession, entry: Entry) -> None:
        super().__init__(session, entry)
        self.member, self.state, self.decisions = entry.member, MemberState(entry.member), DecisionLog()
        self.ended: Over | Examine | None = None
        self._load: Load | None = None
        self._training, self._answers = False, True
        self._answered_at = -math.inf
        self._is_asking = self._again = False
        self._next: Callable[[], None] | None = None  # keeps the next beat from coming
        self._abandoned: frozenset[int] = frozenset()
        self._met = -1  # the newest view whose members this worker knows
        self._silent: dict[int, float] = {}  # until when
        self._notifications = Notifications(session, entry, 0)
        session.serve(notify_key(entry.member, 0), self._on_notification)
        with self.changed:
            self.beat_now()

    # What the training thread asks

    def pace(self, seconds: float) -> None:
        """Tell how many seconds an inner step takes here."""
        with self.changed:
            is_new, self.state.seconds = not self.state.seconds, seconds
            if is_new:
                self.beat_now()

    def start_round(self, round: int) -> View | None:
        """This worker is in `round` now; the view whose cell it reads, see `MemberState.start_round`.

        Where rounds are shorter than a question to the lighthouse this waits for its answer, as long as it answers.
        """
        if self._answers and not self.wait(lambda: self.state.is_known(round) or self.is_over, _SOON):
            self._answers = False
        with self.changed:
            view = self.state.start_round(round)
            self._training = True
            self.beat_now()
        return view

    def skip(self, round: int) -> None:
        """This worker does no step of `round`, see `MemberState.skip`."""
        with self.changed:
            self.state.skip(round)
            self.beat_now()

    def round_members(self, round: int) -> RoundMembers:
        """Who takes part in the exchange of `round`."""
        with self.changed:
            return self.state.group(round)

    @override
    def lost(self, member: int) -> bool:
        with self.changed:
            return self.state.lost(member)

    def accepts(self, round: int, members: Sequence[int]) -> bool:
        """Whether the answer of a whole exchange may be used; those it came from count as seen."""
        with self.changed:
            return self.state.accept(round, members)

    def landed(self, decision: RoundDecision) -> None:
        """This worker has landed that round."""
        with self.changed:
            self.state.landed(decision)
            self.decisions.forget_before(decision.round)

    @property
    def is_over(self) -> bool:
        """Whether this worker has no part in the run now: it has ended, or another's state is to be loaded first."""
        return self.ended is not None or self.state.call != self.state.ready

    @property
    def is_called(self) -> bool:
        """Whether this worker is to begin with another's state, and has not got it yet."""
        with self.changed:
            return self.state.call != self.state.ready

    def decided(self, round: int) -> RoundMembers | None:
        """Who takes part in a `round` that all land together, or none, once no view is on its way that would change
        that. None where nobody can say now, or this worker has no part in it.
        """
        if self.has_answers:
            self.wait(lambda: self.state.group(round).decided or self.is_over, _UNDECIDED)
        round_members = self.round_members(round)
        has_part = self.has_answers and not self.is_over
        return round_members if has_part and round_members.decided and round_members.view >= 0 else None

    def finish_round(self, round: int, attempt: int, digest: int | None) -> RoundDecision | None:
        """What becomes of an attempt whose answer here has `digest`, or failed here: repeated until the
        lighthouse has decided (`round_commit`). None where nobody can say now, this worker has no part in the run now,
        or the others landed what it has not got.
        """
        done = Done(round, attempt, NOTHING if digest is None else digest)
        decision = self.decisions.newer(round, attempt)
        while decision is None and not self.is_over:
            answer = self.ask(done)
            if isinstance(answer, RoundDecision):
                self.decisions.hear(answer)
            elif answer is None:
                break
            self.wait(lambda: self.decisions.newer(round, attempt) is not None or self.is_over, _REPEAT_AFTER)
            decision = self.decisions.newer(round, attempt)
        if decision is not None and decision.outcome == "land" and digest is None:
            self.ask(done)  # whoever was told of it begins with another's state
            return None
        return decision

    def report_peer(self, round: int, attempt: int, error: CommError) -> None:
        """Tell of whom a failure speaks. Who is gone the lighthouse sees itself."""
        peer, by = getattr(error, "peer", -1), getattr(error, "by", -1)
        if peer == self.member:  # another one says so: that it accuses this worker is all that is known here
            peer, by = by, -1
        if isinstance(error, PeerSilent):
            self.ask(PeerReport(round, attempt, error.rank, "late"))
        elif peer >= 0 and isinstance(error, DeadlinePassed):
            self.ask(PeerReport(round, attempt, peer, "late"))
        elif peer >= 0 and isinstance(error, (Refused, Malformed, Diverged)):
            reason = "".join(one for one in str(error) if one.isprintable())
            self.ask(PeerReport(round, attempt, peer, "refused", reason[:_LONGEST_REASON], by))

    def next_decision(self, seconds: float) -> Load | Over | Examine | None:
        """What this worker, which is in no round now, is to do: begin with somebody's state, judge the run's model, or
        end. None where the lighthouse does not say so within `seconds`.
        """
        with self.changed:
            self._training = False
            self.beat_now()
        self.wait(lambda: self._is_asked() or self.ended is not None, seconds)
        with self.changed:
            return self._load if self._is_asked() else self.ended

    def _is_asked(self) -> bool:
        return self._load is not None and self._load.call > self.state.ready

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None:
        """The state that `load` named, of after `round`, is here."""
        with self.changed:
            self.state.loaded(load, round, left_out)
            self._load = None
            self.beat_now()

    def reload(self) -> None:
        """The state did not come, or is not what the others have: ask for another donor's."""
        with self.changed:
            self._load = None
        self.ask(Reload())

    def first(self, seconds: float, ahead: int = 0) -> int | None:
        """The first round of this worker, once it is known; None where that takes more than `seconds`, or another state
        is to be loaded first. ahead: so many rounds before others are in it.
        """
        self.wait(lambda: self.state.first(ahead) is not None or self.is_over, seconds)
        with self.changed:
            return None if self.state.call != self.state.ready else self.state.first(ahead)

    def until(self) -> int | None:
        """The first round that goes on without this worker."""
        with self.changed:
            return self.state.until()

    def left_out(self) -> dict[int, int]:
        """See `MemberState.left_out`; goes with this worker's state to whoever fetches that."""
        with self.changed:
            return dict(self.state.left_out)

    def leaves_out(self, others: Mapping[int, int]) -> None:
        """Add whom the donor of this worker's state knows to be left out: by member, the newest view at that time."""
        with self.changed:
            self.state.left_out |= others

    def leave(self) -> bool:
        """Ask to leave with the next view; False where nobody is there to make one."""
        return self.ask(Leave()) is not None

    def is_silent(self, member: int) -> bool:
        """Whether `member` gave no sign of life a moment ago: nobody waits for it now."""
        return self.session.now() < self._silent.get(member, -math.inf)

    @property
    def is_waiting(self) -> bool:
        """Whether this worker has a part in the run, and is in no round now."""
        return not self._training and self.ended is None

    @property
    def has_answers(self) -> bool:
        """Whether the lighthouse has been heard lately."""
        return self.session.now() - self._answered_at < PATIENCE if self.session.beats else self._answers

    @override
    def connection(self, member: int, *, broken: bool) -> None:
        with self.changed:
            self.state.connection(member, broken=broken)
            self.changed.notify_all()

    def say(self, message: Any) -> None:
        """Send `message` to the lighthouse without waiting; a word on a round that it answers with is heard."""

        def answered(answer: Any) -> None:
            if isinstance(answer, RoundDecision):
                with self.changed:
                    self.decisions.hear(answer)
                    self.changed.notify_all()

        self.send(message, answered)

    @override
    def close(self) -> None:
        with self.changed:
            if self._next is not None:
                self._next()
        super().close()

    # Beats

    def beat_now(self) -> None:
        """Beat now, or once the answer that is awaited is here. `changed` is held."""
        if self._is_asking or self._closed:
            self._again = True
            return
        if self._next is not None:
            self._next()
        self._is_asking, self._again = True, False
        beat = self.state.beat()
        self.send(beat, partial(self._answered, beat, self.session.now()))

    def _answered(self, beat: Beat, began: float, answer: Any) -> None:
        ack = None
        with self.changed:
            self._is_asking = False
            if isinstance(answer, BeatReply):
                self._answers, self._answered_at = True, self.session.now()
                ack = self.state.answered(beat, answer)
            elif isinstance(answer, Refusal):
                self.ended = self.ended or Over(answer.reason)
            self.changed.notify_all()
        self._follow()
        if ack is not None:
            self.say(ack)
        with self.changed:
            if self._again or (answer is None and not self.session.beats and self.ended is None):
                self.beat_now()
            elif self.session.beats and not self._closed:
                pause = (BEAT if self._training else _SOON) - (self.session.now() - began)
                self._next = self.session.later(self._beat, max(pause, _AGAIN))

    def _beat(self) -> None:
        with self.changed:
            self.beat_now()

    # Orders

    def _follow(self) -> None:
        """Wait for nobody any more whom a view on its way goes on without, though it did not ask to leave, and for
        nobody at all in a round that the others do without this worker; know by what views name them those whom they
        name.
        """
        with self.changed:
            before, self._abandoned = self._abandoned, self.state.abandoned()
            new, views = self._abandoned - before, [*self.state.views.values()]
            round = self.state.round if self._training and self.is_called else None
        for view in views:
            if self.meets is not None and view.number > self._met:
                self._met = view.number
                self.meets(view)
        if self.transfers is not None:
            for member in new:
                self.transfers.give_up(member, EXCLUDED)
            if round is not None:
                self.transfers.again(Tag("outer", round, attempt=_NEVER))

    def _on_notification(self, query: Query) -> None:
        """Take in an order of the lighthouse."""
        message = self._notifications.take(query)
        if isinstance(message, Silent):
            now = self.session.now()
            self._silent = {member: end for member, end in self._silent.items() if end > now}
            self._silent[message.member] = now + _QUIET
        elif message is not None and not isinstance(message, Failed):
            with self.changed:
                if message == self._load:  # said again: another beat would only have it said once more
                    return
                ack = self._take_in(message)
                if ack is not None:
                    self.say(ack)
                self.beat_now()
                self.changed.notify_all()
            self._follow()
        if not isinstance(message, Proposal):
            cancel_waits(self.transfers, message)

    def _take_in(self, message: Any) -> Ack | None:
        """Note an order of the lighthouse; the answer where it is a proposal. `changed` is held."""
        match message:
            case Proposal():
                return self.state.proposed(message)
            case View():
                self.state.receive_view(message)
            case Load():
                self._load = message
                self.state.call = max(self.state.call, message.call)
            case RoundDecision():
                self.decisions.hear(message)
            case Over() | Examine():
                self.ended = message
            case Refusal(reason=reason):
                self.ended = Over(reason)
        return None

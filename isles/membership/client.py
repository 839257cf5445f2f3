"""A worker's connection to the lighthouse, over a session.

    beats           by a timer, every second and at the start of each round, one at a time
    notifications   messages that the lighthouse pushes (proposals, views, decisions on rounds), in a session callback
    reports         lines of metrics, in order; buffered while the lighthouse is away

    start_round     the data that this worker reads, and who takes part
    finish_round    the lighthouse's decision on a round that all members land together, or none
    next_decision   between rounds: begin with a donor's state, evaluate the run's model, end

The training thread calls the last three, and never waits for the lighthouse longer than their documentation says. One
condition guards the `MemberState`, which callbacks and that thread share. No thread is started here, and no clock read
but the session's.

A member's first worker has a `MembershipClient`; the other workers of an island have a `FollowerClient`, which gets the
same notifications and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, PeerSilent, Refused
from isles.comm.tags import Tag
from isles.membership.keys import add_sequence, notify_key
from isles.membership.member import MemberState, RoundMembers
from isles.membership.messages import (
    Ack,
    Beat,
    BeatReply,
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
    encode,
)
from isles.membership.requests import BEAT, PATIENCE, DecisionLog, LighthouseClient, PendingTransfers
from isles.membership.round_commit import NOTHING, Done, RoundDecision
from isles.membership.session import ControlSession

EXCLUDED = "the next view excludes it"
"""Why waits for a member are cancelled that did not ask to leave."""


def cancel_waits(transfers: PendingTransfers | None, message: Any) -> None:
    """Cancel pending transfers that cannot complete according to `message`."""
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
    """A callback (round, attempt) that tells the other workers of an island of `island_size` that the worker at
    `island_rank` has no answer of that attempt. Otherwise they could wait for workers of other islands that themselves
    wait for a lost member.
    """

    def notify(round: int, attempt: int) -> None:
        for other in range(island_size):
            if other != island_rank:
                client.send(add_sequence(0, encode(Failed(round, attempt))), key=notify_key(client.entry.member, other))

    return notify


class FollowerClient(LighthouseClient):
    """The client of an island's worker that follows: it gets the notifications of the member of `entry`, and cancels
    waits by them. island_rank: of this worker.
    """

    def __init__(self, session: ControlSession, entry: Entry, island_rank: int) -> None:
        super().__init__(session, entry)
        self.listen(self._on_notification, island_rank)

    def _on_notification(self, message: Any) -> None:
        if isinstance(message, View) and self.meets is not None:
            self.meets(message)
        cancel_waits(self.transfers, message)


_SOON = 0.2  # seconds to the next beat while it waits for its first round; also the wait for a reply before a round
_REPEAT_AFTER = 0.3  # seconds until an answer is sent again: the pushed decision, or the answer, may be lost
_UNDECIDED = 3.0  # seconds to wait for a proposed view; then the round is postponed
_LONGEST_REASON = 200  # characters
_NEVER = 1 << 20  # an attempt number above all real ones
_QUIET = 3.0  # seconds for which a suspected member is not waited for; then it may have recovered
_AGAIN = 0.01  # seconds, at least, from a reply to the next beat, also if the reply took longer than a beat


class MembershipClient(LighthouseClient):
    """A member's client of the lighthouse, in its first worker. entry: the member's id and key.

    ended: set once this worker takes no further part in the run: `Over`, or `Examine` if it is to evaluate the model.
    decisions: the newest one on each round. stalls: see `hangs`.
    """

    def __init__(self, session: ControlSession, entry: Entry) -> None:
        super().__init__(session, entry)
        self.member, self.state, self.decisions = entry.member, MemberState(entry.member), DecisionLog()
        self.ended: Over | Examine | None = None
        self.stalls = False
        self._load: Load | None = None
        self._reloads = False  # whether another one was asked for in vain
        self._training, self._answers = False, True
        self._answered_at = -math.inf
        self._is_beating = self._beat_again = False
        self._cancel_beat: Callable[[], None] | None = None  # cancels the next beat
        self._abandoned: frozenset[int] = frozenset()
        self._newest_recorded = -1  # the newest view whose fingerprints are known here
        self._silent: dict[int, float] = {}  # by suspected member, until when
        self.listen(self._on_notification)
        with self.changed:
            self.beat_now()

    # What the training thread asks

    def pace(self, seconds: float) -> None:
        """Report the seconds of an inner step of this worker."""
        with self.changed:
            is_new, self.state.seconds = not self.state.seconds, seconds
            if is_new:
                self.beat_now()

    def start_round(self, round: int) -> View | None:
        """Begin `round`. Returns the view whose data slice this worker reads, see `MemberState.start_round`.

        If rounds are shorter than a round trip to the lighthouse, this waits for its reply, as long as it replies.
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
        """The members of the exchange of `round`."""
        with self.changed:
            return self.state.group(round)

    @override
    def lost(self, member: int) -> bool:
        with self.changed:
            return self.state.lost(member)

    def accepts(self, round: int, members: Sequence[int]) -> bool:
        """Whether the answer of a complete exchange may be used; if so, its members' work counts as seen."""
        with self.changed:
            return self.state.accept(round, members)

    def landed(self, decision: RoundDecision) -> None:
        """Note that this worker has landed a round."""
        with self.changed:
            self.state.landed(decision)
            self.decisions.forget_before(decision.round)

    @property
    def is_over(self) -> bool:
        """Whether this worker takes no part now: the run has ended, or it must load another state first."""
        return self.ended is not None or self.state.call != self.state.ready

    @property
    def is_called(self) -> bool:
        """Whether this worker must load another member's state, and has not done so yet."""
        with self.changed:
            return self.state.call != self.state.ready

    def decided(self, round: int) -> RoundMembers | None:
        """The members of a `round` that all land together, or none, once no proposed view can change them. None if that
        is not known now, or this worker takes no part.
        """
        if self.has_answers:
            self.wait(lambda: self.state.group(round).decided or self.is_over, _UNDECIDED)
        round_members = self.round_members(round)
        has_part = self.has_answers and not self.is_over
        return round_members if has_part and round_members.decided and round_members.view >= 0 else None

    def finish_round(self, round: int, attempt: int, digest: int | None) -> RoundDecision | None:
        """The decision on an attempt whose answer here has `digest`, or failed here (None).

        The answer is sent until the lighthouse has decided (`round_commit`). None if there is no decision now, if this
        worker takes no part now, or if the others landed an answer that it does not have.
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
            self.ask(done)  # the lighthouse then has this worker load another state
            return None
        return decision

    def report_peer(self, round: int, attempt: int, error: CommError) -> None:
        """Report the member that a failure names. The lighthouse detects lost members itself."""
        peer, by = getattr(error, "peer", -1), getattr(error, "by", -1)
        if peer == self.member:  # `by` accuses this worker; report the disagreement with it
            peer, by = by, -1
        if isinstance(error, PeerSilent):
            self.ask(PeerReport(round, attempt, error.rank, "late"))
        elif peer >= 0 and isinstance(error, DeadlinePassed):
            self.ask(PeerReport(round, attempt, peer, "late"))
        elif peer >= 0 and isinstance(error, (Refused, Malformed, Diverged)):
            reason = "".join(one for one in str(error) if one.isprintable())
            self.ask(PeerReport(round, attempt, peer, "refused", reason[:_LONGEST_REASON], by))

    def next_decision(self, seconds: float) -> Load | Over | Examine | None:
        """The next task of a worker that is in no round: load a state, evaluate the run's model, or end. None if the
        lighthouse has not decided within `seconds`.
        """
        with self.changed:
            self._training = False
            self.beat_now()
        if self._reloads and not self._is_asked():  # the lighthouse was away
            self.reload()
        self.wait(lambda: self._is_asked() or self.ended is not None, seconds)
        with self.changed:
            return self._load if self._is_asked() else self.ended

    def _is_asked(self) -> bool:
        return self._load is not None and self._load.call > self.state.ready

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None:
        """The state that `load` named has been loaded; it is that after `round`."""
        with self.changed:
            self.state.loaded(load, round, left_out)
            self._load = None
            self.beat_now()

    def reload(self) -> None:
        """Ask for another donor: the state did not arrive, or differs from the others'."""
        with self.changed:
            self._load = None
        self._reloads = self.ask(Reload()) is None

    def first(self, seconds: float, ahead: int = 0) -> int | None:
        """The first round of this worker once it is known. None after `seconds`, or if it must load another state
        first. ahead: join so many rounds before the others are in the view's first round.
        """
        self.wait(lambda: self.state.first(ahead) is not None or self.is_over, seconds)
        with self.changed:
            return None if self.state.call != self.state.ready else self.state.first(ahead)

    def hangs(self, stalls: bool) -> None:
        """The training thread hangs, or goes on: no beats are sent meanwhile."""
        self.stalls = stalls

    def until(self) -> int | None:
        """The first round of a view without this worker; None: there is no such view."""
        with self.changed:
            return self.state.until()

    def left_out(self) -> dict[int, int]:
        """See `MemberState.left_out`; sent along with this worker's state."""
        with self.changed:
            return dict(self.state.left_out)

    def leaves_out(self, others: Mapping[int, int]) -> None:
        """Merge the donor's `left_out`: by member, the newest view when it was left out."""
        with self.changed:
            self.state.left_out |= others

    def leave(self) -> bool:
        """Ask to leave with the next view; False if the lighthouse cannot be reached."""
        return self.ask(Leave()) is not None

    def is_silent(self, member: int) -> bool:
        """Whether the lighthouse suspected `member` a moment ago, so that nobody should wait for it."""
        return self.session.now() < self._silent.get(member, -math.inf)

    @property
    def is_waiting(self) -> bool:
        """Whether this worker belongs to the run, and is in no round now."""
        return not self._training and self.ended is None

    @property
    def has_answers(self) -> bool:
        """Whether the lighthouse has replied lately."""
        return self.session.now() - self._answered_at < PATIENCE if self.session.beats else self._answers

    @override
    def connection(self, member: int, *, broken: bool) -> None:
        with self.changed:
            self.state.connection(member, broken=broken)
            self.changed.notify_all()

    def say(self, message: Any) -> None:
        """Send `message` to the lighthouse without waiting; a decision in its reply is recorded."""

        def answered(answer: Any) -> None:
            if isinstance(answer, RoundDecision):
                with self.changed:
                    self.decisions.hear(answer)
                    self.changed.notify_all()

        self.send(message, answered)

    @override
    def close(self) -> None:
        with self.changed:
            if self._cancel_beat is not None:
                self._cancel_beat()
        super().close()

    # Beats

    def beat_now(self) -> None:
        """Send a beat now, or after the reply to the present one. Call with `changed` held."""
        if self._is_beating or self._closed:
            self._beat_again = True
            return
        if self._cancel_beat is not None:
            self._cancel_beat()
        if self.stalls:
            self._cancel_beat = self.session.later(self._beat, BEAT)
            return
        self._is_beating, self._beat_again = True, False
        beat = self.state.beat()
        self.send(beat, partial(self._answered, beat, self.session.now()))

    def _answered(self, beat: Beat, began: float, answer: Any) -> None:
        ack = None
        with self.changed:
            self._is_beating = False
            if isinstance(answer, BeatReply):
                self._answers, self._answered_at = True, self.session.now()
                ack = self.state.answered(beat, answer)
            elif isinstance(answer, Refusal):
                self.ended = self.ended or Over(answer.reason)
            self.changed.notify_all()
        # Outside of the condition: this takes the transport's locks, whose holders call `connection`, which takes it.
        self._apply_views()
        if ack is not None:
            self.say(ack)
        with self.changed:
            if self._beat_again or (answer is None and not self.session.beats and self.ended is None):
                self.beat_now()
            elif self.session.beats and not self._closed:
                pause = (BEAT if self._training else _SOON) - (self.session.now() - began)
                self._cancel_beat = self.session.later(self._beat, max(pause, _AGAIN))

    def _beat(self) -> None:
        with self.changed:
            self.beat_now()

    # Notifications

    def _apply_views(self) -> None:
        """Apply what the state now says of others: record the fingerprints in new views, cancel waits for members that
        the next view excludes against their wish, and cancel all waits in a round that goes on without this worker.
        """
        # Read under the condition, applied outside of it: see `_answered`.
        with self.changed:
            before, self._abandoned = self._abandoned, self.state.abandoned()
            new, views = self._abandoned - before, [*self.state.views.values()]
            round = self.state.round if self._training and self.is_called else None
        for view in views:
            if self.meets is not None and view.number > self._newest_recorded:
                self._newest_recorded = view.number
                self.meets(view)
        if self.transfers is not None:
            for member in new:
                self.transfers.give_up(member, EXCLUDED)
            if round is not None:
                self.transfers.again(Tag("outer", round, attempt=_NEVER))

    def _on_notification(self, message: Any) -> None:
        """Handle a notification of the lighthouse."""
        if isinstance(message, Silent):
            now = self.session.now()
            self._silent = {member: end for member, end in self._silent.items() if end > now}
            self._silent[message.member] = now + _QUIET
        elif not isinstance(message, Failed):
            with self.changed:
                if message == self._load:  # a repetition: a beat would cause another one
                    return
                ack = self._apply_message(message)
                if ack is not None:
                    self.say(ack)
                self.beat_now()
                self.changed.notify_all()
            self._apply_views()
        if not isinstance(message, Proposal):
            cancel_waits(self.transfers, message)

    def _apply_message(self, message: Any) -> Ack | None:
        """Apply a notification; returns the answer to a proposal. Call with `changed` held."""
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

"""Starts and ends the exchanges of an outer method, each with the members of its round; survives what the method may
survive (`RoundExchange`).

`AgreedExchange`: rounds that all their members land together, or none, where workers come and go and a method has one
mean for all:

    start      among whom, and as which attempt (`Roster.start_round`)
    encode     a copy of the snapshot; error feedback and low-rank bases are saved as they were before
    exchange   the answer's hash is reported, or that there is none (`Roster.finish_round`)
    outcome    land; or retry, from the snapshot and the saved state, among those who are left; or postpone

A round whose outcome cannot be had now is postponed: nothing has changed here, training goes on, and the next snapshot
holds what was learned since the last landing. A pending answer is landed once its outcome is known, and what was
learned meanwhile is added again.

`QuorumExchange`: likewise, but the mean is that of the members who delivered in time, weighted by their inner steps,
while all train on (Decoupled DiLoCo, arXiv 2604.21428):

    end of a round   snapshot; it is delivered (`isles.membership.late_shares`), and the next inner steps begin
    between steps    the members are decided: the exchange begins, behind the computation; it is done: its hash is
                     reported; the decision is to land: land, and what was learned meanwhile is added again
    next snapshot    the round before has landed, or this worker waits for it
    late             the mean was taken without this worker: fetch it, land it, add what was learned again, and deliver
                     that into the next round at once

A share holds all that was learned since the last one that got into a mean. Anchors stay equal to the bit, because all
land the same means in the same order. `round_exchange_for` says which of the three a method has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from warnings import warn

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.collectives.averaging import Averaging
from isles.comm.collectives.basic import Stamp, exchange
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Elsewhere, Malformed, PeerLost, Refused
from isles.comm.group import Group
from isles.comm.roster import Roster
from isles.membership.late_shares import Deliveries, Delivery
from isles.network.exchange_plan import MemoryItem
from isles.replicas.config import MethodConfig, WeightedConfig
from isles.replicas.loop.fragment import Exchange, Fragment, InFlight
from isles.replicas.parts.interfaces import Composition
from isles.replicas.start import T, among_even

_PAYLOAD, _ANCHORS = 0, 1  # the two buffers that a round may exchange
ROUND_FAILURES = (PeerLost, DeadlinePassed, Elsewhere, Diverged, Malformed, Refused)
"""Errors that may end an exchange here although other members have its answer."""
_POSITIVE = (1 << 61) - 1
MISSES = 8  # deadlines in succession after which a partner counts as lost
_SLOWER = 2.0  # a step elsewhere may take so many times as long as here; the deadline is added


class RoundExchange:
    """roster: who is in which round, and who is lost; rounds with lost ones are done alone.

    Where answers land later a worker may be ahead of another by all that is computed meanwhile, so such an exchange has
    that much more time than the group's deadline.
    """

    def __init__(self, roster: Roster, parts: Composition) -> None:
        self.roster, self.parts = roster, parts
        self.transport = roster.founders.transport
        self._began: tuple[int, float] | None = None
        self._late: Counter[int] = Counter()  # by member, deadlines passed in succession
        self.leeway = 1.0
        """How much payloads may differ in size because workers count for more and less."""

    def stepped(self, step: int, *, sends: bool) -> None:
        """Inner step `step` is done; the pace of the next ones is taken from the first one that is reported here.
        sends: whether a round is sent now.
        """
        if self._began is None:
            self._began = step, self.transport.now()
        self.progress(blocks=sends)

    def progress(self, *, blocks: bool) -> None:
        """Go on with what is under way behind the inner steps. blocks: until that is over, or cannot be now."""

    def members(self, round: int) -> tuple[int, ...]:
        """Positions in the roster's group of `round` (1, 2, ...) that take part in this worker's exchange."""
        group = self.roster.group(round)
        return self.parts.mixing.members(round, group.size, group.rank)

    def is_alone(self, fragment: Fragment) -> bool:
        """True if the fragment's next round has nobody else in it and nothing to do but land what it forms."""
        return self.parts.own_answer and self._present(fragment.rounds + 1).size == 1

    @property
    def is_only_one(self) -> bool:
        """True if there is nobody else in the world: what this worker does is its inner optimizer's business."""
        return self.roster.founders.size == 1 and not self.roster.grows

    def extra_memory(self, fragments: Sequence[Fragment]) -> list[MemoryItem]:
        """Memory beyond the buffers that travel."""
        return []

    def survivors(self) -> Group:
        """The workers that are left; where the method goes on without lost ones, they are asked."""
        return self.roster.survivors(asked=self.parts.on_peer_failure == "solo")

    def send(self, fragment: Fragment, payload: Tensor, step: int, lands: int, usable: bool) -> Exchange:
        """Start the exchange of a snapshot, with what error feedback adds. usable: all of it is finite."""
        parts, own = self.parts, None
        before = fragment.latest  # with rounds_late > 1 its answer lands later, but what it leaves behind is needed now
        if before is not None and (parts.feedback is not None or fragment.averaging.held_bytes):
            self.survives(before)
            self._balance(fragment, before)
        if parts.feedback is not None:
            usable = fragment.compensate(payload) and usable
            if not usable:
                payload.zero_()
        if parts.feedback is None and parts.rule.needs_residual and fragment.residual is not None:
            fragment.residual.copy_(payload)
        if parts.reading.needs_own or (parts.on_peer_failure == "solo" and lands > step):
            own = fragment.staging()
            fragment.averaging.share(payload, fragment.rounds, fragment.index, self.transport.rank, own)
        left = fragment.residual if parts.feedback is None or parts.feedback.form == "local" else None
        stamp = fragment.stamp(step, broken=not usable)
        group, means = self._present(fragment.rounds), fragment.averaging
        sent = self._start(group, fragment, fragment.rounds, payload, means, stamp, own=own, residual=left)
        fragment.latest = sent
        sent.spares, sent.is_own_broken = parts.on_broken == "leave out", not usable
        return sent

    def send_anchor(self, fragment: Fragment, round: int, step: int) -> Exchange:
        form, means = self.parts.anchor_codec, fragment.anchor_averaging
        assert form is not None and means is not None, "a rule that shares anchors needs an anchor codec"
        anchor = fragment.staging().copy_(fragment.anchor)
        own = fragment.staging() if not form.lossless or self.parts.cadence.rounds_late else None
        stamp = fragment.stamp(step)
        group = self._present(round)
        return self._start(group, fragment, round, anchor, means, stamp, part=_ANCHORS, own=own, fill=own)

    def nothing(self, fragment: Fragment, step: int) -> InFlight:
        """What lands before the first answer is due."""
        size = len(self.members(fragment.rounds))
        anchors = Exchange(fragment.anchor.clone(), None) if self.parts.rule.shares_anchors else None
        return InFlight(fragment, step, Exchange(fragment.staging().zero_(), None, participants=size), anchors)

    def receive(self, flight: InFlight, snapshot: Callable[[Fragment, Tensor], Tensor]) -> None:
        """Wait for a flight, and make error feedback of its round final. Where the round failed and the method may go
        on alone, this worker's own share (as sent, or what `snapshot` writes now) is taken for the mean.
        """
        fragment, payload = flight.fragment, flight.payload
        if not self._all_survive(flight.exchanges()):  # new buffers: late messages may still leave from the old ones
            if self.parts.reading.needs_own:  # then only the fresh share counts
                flight.payload = Exchange(torch.zeros_like(fragment.anchor), None, None, payload.participants)
            else:
                own = payload.own
                flight.payload = Exchange(snapshot(fragment, fragment.flat.new()) if own is None else own, None)
            if flight.anchors is not None:
                flight.anchors = Exchange(fragment.anchor.clone(), None)
        self._balance(fragment, payload)

    def survives(self, exchange: Exchange) -> bool:
        """Wait; False if a peer failed and `on_peer_failure` lets this worker go on without it."""
        return self._all_survive([exchange])

    def _all_survive(self, exchanges: Sequence[Exchange]) -> bool:
        """`survives` for all messages of one round. The roster is asked once, when all of them have arrived: from then
        on others rely on this worker to have its partners' work.
        """
        came = [self._came(one) for one in exchanges]  # a list: wait for each, also after one has failed
        most = max(exchanges, key=lambda one: len(one.members))
        apart = any(one.members not in ((), most.members) for one in exchanges)  # one was lost between the two
        whole = all(came) and not (apart and self.roster.grows)
        usable = self.roster.may_apply(most.round, most.members, whole=whole)
        for one in exchanges:
            one.failed = one.failed or (all(came) and not usable)
        return usable

    def _came(self, exchange: Exchange) -> bool:
        try:
            with among_even():
                exchange.wait()
        except ROUND_FAILURES as error:
            if self.parts.on_peer_failure != "solo":
                raise
            if isinstance(error, (Diverged, Malformed, Refused)):
                warn(f"{error}: this round is done without it", stacklevel=2)
            if not exchange.failed:
                self._miss(error)
            exchange.failed = True
        else:
            for member in exchange.members:
                self._late.pop(member, None)
        return not exchange.failed

    def together(self, collective: Callable[[Group], T]) -> T:
        """What `collective`, a single one or none, returns over the workers that are left; all of them call this
        together. If a worker is lost meanwhile and the method goes on without lost ones, all repeat the collective
        without it, so that either all have the result or none.
        """
        while True:
            # Asked anew at each try. It ends: a member counts as lost after MISSES deadlines at the latest.
            group = self.survivors()
            try:
                result, well = collective(group), True
            except (PeerLost, DeadlinePassed) as error:
                if self.parts.on_peer_failure != "solo":
                    raise
                self._miss(error)
                result, well = None, False
            if self.parts.on_peer_failure != "solo" or self._all_well(group, well):
                return cast(T, result)

    def _all_well(self, group: Group, well: bool) -> bool:
        """Whether all members of `group` are connected and report that they are well."""
        mine = torch.full((1,), well, dtype=torch.uint8, device="cpu")
        # All begin before the first is awaited: one that is late must not delay the others.
        answers = [group.start(exchange(group.call("eval"), other, mine), "eval") for other in group.others]
        for answer in answers:
            try:
                well = bool(answer.wait()) and well
            except (PeerLost, DeadlinePassed) as error:
                self._miss(error)
                well = False
        return well

    def _miss(self, error: PeerLost | DeadlinePassed | Elsewhere | Diverged | Malformed | Refused) -> None:
        """Report a failure. A member that is late `MISSES` times in succession counts as lost: each wait takes the
        whole deadline, and leaves a buffer and a thread behind that gloo does not give back.
        """
        member = error.rank if isinstance(error, PeerLost) else error.peer
        if isinstance(error, DeadlinePassed) and member >= 0:
            self._late[member] += 1
            if self._late[member] >= MISSES:
                self.roster.report_failure(member, PeerLost(member, f"it did not answer {MISSES} times in succession"))
                return
        self.roster.report_failure(member, error)

    def _balance(self, fragment: Fragment, payload: Exchange) -> None:
        """Make error feedback of an exchange that has arrived final."""
        residual, feedback = fragment.residual, self.parts.feedback
        if residual is None or feedback is None or payload.balanced:
            return
        payload.balanced = True
        if payload.failed or payload.is_own_broken or not payload.whole:
            residual.zero_()
            return
        if feedback.form == "global":
            residual.sub_(payload.buffer)
        residual.mul_(feedback.decay)
        fragment.left_ratio = float(residual.norm()) / fragment.progress if fragment.progress else 0.0

    def _start(
        self,
        group: Group,
        fragment: Fragment,
        round: int,
        buffer: Tensor,
        means: Averaging,
        stamp: Stamp,
        *,
        own: Tensor | None = None,
        fill: Tensor | None = None,
        residual: Tensor | None = None,
        part: int = _PAYLOAD,
        attempt: int = 0,
    ) -> Exchange:
        """Begin the exchange of a fragment's `round` in `group`.

        buffer: live until its mean lies there. own: what the others decode of it, kept with the exchange; fill: where
        that is still to be written. residual: where what they do not get of it is saved. part: which of the round's
        buffers it is. attempt: how often it was begun before.
        """
        call = group.call(round=round, fragment=fragment.index, leeway=self.leeway, attempt=attempt)
        nbytes = means.sent_bytes(round, group.size, group.rank)
        deadline = group.deadlines.of(group.channel, nbytes) + self._meanwhile(stamp.step)
        transfer = group.start(means.mean(call, buffer, stamp, fill, residual, part), deadline=deadline)
        return Exchange(buffer, transfer, own, group.size, members=group.ranks, round=round)

    def _meanwhile(self, step: int) -> float:
        """Seconds that slower workers may take to what is computed between a sending after `step` and its landing."""
        if self._began is None or step <= self._began[0]:
            return 0.0
        pace = (self.transport.now() - self._began[1]) / (step - self._began[0])
        return _SLOWER * pace * (self.parts.cadence.lands(step) - step)

    def _present(self, round: int) -> Group:
        """The members of this worker's exchange of `round`, or this worker alone where one of them is lost."""
        group, members = self.roster.group(round), self.members(round)
        alone = self.roster.has_lost([group.ranks[position] for position in members])
        return group.among((group.rank,) if alone else members)


class AttemptExchange(RoundExchange):
    """Of rounds that all members land together or none: the snapshot stays as it is, each attempt sends a copy."""

    @override
    def is_alone(self, fragment: Fragment) -> bool:
        return False

    @override
    def send(self, fragment: Fragment, payload: Tensor, step: int, lands: int, usable: bool) -> Exchange:
        return Exchange(payload, None, round=fragment.rounds, is_own_broken=not usable)

    def start_attempt(
        self, flight: InFlight, group: Group, *, round: int, step: int, attempt: int, factor: float = 1.0
    ) -> Exchange:
        """An attempt at `round` in `group`, begun. step: the same at all. factor: of this worker's share."""
        fragment, parts, usable = flight.fragment, self.parts, not flight.payload.is_own_broken
        buffer = fragment.staging().copy_(flight.payload.buffer)
        if factor != 1.0 and parts.robust == "none":  # by a robust rule shares are compared as they are
            buffer.mul_(factor)
        if parts.feedback is not None:
            usable = fragment.compensate(buffer) and usable
        if not usable:
            buffer.zero_()
        left = fragment.residual if parts.feedback is not None and parts.feedback.form == "local" else None
        stamp = fragment.stamp(step, broken=not usable)
        means = fragment.averaging
        answer = self._start(group, fragment, round, buffer, means, stamp, residual=left, attempt=attempt)
        answer.spares, answer.is_own_broken = parts.on_broken == "leave out", not usable
        return answer

    def finish_attempt(self, fragment: Fragment, answer: Exchange) -> tuple[int | None, CommError | None]:
        """Wait for an attempt: the hash of its answer, or why there is none."""
        try:
            answer.wait()
        except ROUND_FAILURES as error:
            return None, error
        return fragment.flat.digest(answer.buffer) & _POSITIVE, None


@dataclass(frozen=True, slots=True)
class _RoundState:
    """What an attempt changes beside its buffer."""

    residual: Tensor | None
    bases: dict[str, Any]

    @classmethod
    def of(cls, fragment: Fragment) -> _RoundState:
        residual = fragment.residual
        return cls(None if residual is None else residual.clone(), fragment.averaging.state_dict())

    def restore(self, fragment: Fragment) -> None:
        if fragment.residual is not None and self.residual is not None:
            fragment.residual.copy_(self.residual)
        fragment.averaging.load_state_dict(self.bases)


@dataclass(frozen=True, slots=True)
class _PendingAttempt:
    """An attempt of unknown outcome. answer: None if it failed; then: the state it left; live: the weights then."""

    round: int
    attempt: int
    answer: Exchange | None
    digest: int | None
    then: _RoundState
    live: Tensor | None


class AgreedExchange(AttemptExchange):
    """Of one fragment whose answers land at once. Beyond the buffer an attempt takes one more vector, and a copy of the
    residual and of the bases.
    """

    def __init__(self, roster: Roster, parts: Composition) -> None:
        super().__init__(roster, parts)
        self._pending: _PendingAttempt | None = None
        self._sent = 0  # inner step of the last round that landed

    @override
    def extra_memory(self, fragments: Sequence[Fragment]) -> list[MemoryItem]:
        vectors = sum(fragment.anchor.nbytes for fragment in fragments)
        residuals = sum(fragment.residual.nbytes for fragment in fragments if fragment.residual is not None)
        bases = sum(fragment.averaging.held_bytes for fragment in fragments)
        return [MemoryItem("copies for another attempt", vectors + residuals + bases, "exchange")]

    @override
    def receive(self, flight: InFlight, snapshot: Callable[[Fragment, Tensor], Tensor]) -> None:
        """Exchange until it lands, or postpone the round."""
        fragment, before = flight.fragment, _RoundState.of(flight.fragment)
        if not self._resumed(flight):
            return
        started = self.roster.start_round(fragment.rounds)
        while started is not None:
            group, attempt = started
            answer = self.start_attempt(flight, group, round=fragment.rounds, step=flight.lands, attempt=attempt)
            digest, error = self.finish_attempt(fragment, answer)
            outcome = self.roster.finish_round(fragment.rounds, attempt, digest, error)
            if outcome == "land":
                self._land(flight, answer)
                return
            # Restored at once: another attempt, and a postponed round, begin from the state before this one.
            then = _RoundState.of(fragment)
            before.restore(fragment)
            started = None
            if outcome == "retry":
                started = self.roster.start_round(fragment.rounds)
            if started is None:
                live = None if error else fragment.flat.read(fragment.flat.new())
                self._pending = _PendingAttempt(fragment.rounds, attempt, None if error else answer, digest, then, live)
        self._postpone(flight)

    def _resumed(self, flight: InFlight) -> bool:
        """Ask for the outcome of a pending attempt. True: exchange again; else the flight landed, or is postponed."""
        fragment, pending, self._pending = flight.fragment, self._pending, None
        if pending is None or pending.round != fragment.rounds:
            return True
        outcome = self.roster.finish_round(pending.round, pending.attempt, pending.digest)
        if outcome == "retry":
            return True
        if outcome == "land" and pending.answer is not None and pending.live is not None:
            pending.then.restore(fragment)
            learned = fragment.flat.read(fragment.flat.new()).sub_(pending.live)
            self._land(flight, pending.answer)
            flight.payload.learned_meanwhile = learned
            return False
        self._pending = pending
        self._postpone(flight)
        return False

    def _land(self, flight: InFlight, answer: Exchange) -> None:
        """Reuse the snapshot's buffer, which was never sent; those of failed attempts may still be read."""
        flight.fragment.release(flight)
        flight.payload = flight.fragment.latest = answer
        self._sent = flight.lands
        self._balance(flight.fragment, answer)

    def _postpone(self, flight: InFlight) -> None:
        """Undo the round: nothing has changed here."""
        fragment = flight.fragment
        fragment.release(flight)
        fragment.rounds, fragment.sent = fragment.rounds - 1, self._sent
        flight.payload.postponed = True


_STEPS = 4.0  # inner steps that others may be behind when an exchange begins


class QuorumExchange(AttemptExchange):
    """Of one fragment. land: lands a flight. Memory: two vectors a delivery, one more while it is exchanged."""

    def __init__(
        self, roster: Roster, parts: Composition, deliveries: Deliveries, land: Callable[[InFlight, None], None]
    ) -> None:
        super().__init__(roster, parts)
        self._deliveries, self._land = deliveries, land
        self._delivery: Delivery | None = None
        self._flight: InFlight | None = None
        self._live: Tensor | None = None  # the weights when it was delivered
        self._answer: Exchange | None = None
        self._attempt = 0  # that the answer is of
        self._work = self._since = 0  # inner steps that are in no mean yet; since the last delivery
        self._pace = self._before = 0.0  # seconds: of an inner step; when the last one ended

    @override
    def stepped(self, step: int, *, sends: bool) -> None:
        now = self.transport.now()
        if self._before:
            self._pace = now - self._before
        self._work, self._since, self._before = self._work + 1, self._since + 1, now
        super().stepped(step, sends=sends)

    @override
    def extra_memory(self, fragments: Sequence[Fragment]) -> list[MemoryItem]:
        return [MemoryItem("delivered shares", 3 * sum(fragment.anchor.nbytes for fragment in fragments), "exchange")]

    @override
    def receive(self, flight: InFlight, snapshot: Callable[[Fragment, Tensor], Tensor]) -> None:
        """Deliver; nothing lands now."""
        fragment = flight.fragment
        flight.payload.postponed = True
        if self._delivery is not None:  # the outcome of the one before is still unknown
            fragment.release(flight)
            fragment.rounds -= 1
            return
        while True:
            delivery = self._deliveries.new(fragment.rounds, self._work, self._pace * self._since)
            if delivery.look(self.transport.now()) != "late":
                break
            # `_catch_up` counts the missed round itself, and only if its mean was fetched.
            self._deliveries.late += 1
            fragment.rounds -= 1
            if not self._catch_up(fragment, delivery):
                fragment.release(flight)
                return
            fragment.rounds += 1
            flight.payload.buffer = snapshot(fragment, flight.payload.buffer)
        self._delivery, self._flight = delivery, flight
        self._live, self._since = fragment.flat.read(fragment.flat.new()), 0

    @override
    def progress(self, *, blocks: bool) -> None:
        """Do what can be done between two inner steps. blocks: until the delivery has landed, or cannot be decided."""
        while self._delivery is not None and self._flight is not None and self._live is not None:
            match self._delivery.look(self.transport.now()):
                case "exchanging" if self._answer is None or self._attempt != self._delivery.attempt:
                    self._exchange(self._delivery, self._flight)
                case "exchanging" if self._answer is not None and (blocks or self._is_here()):
                    self._answered(self._delivery, self._flight, self._answer)
                case "landed":
                    self._landed(self._delivery, self._flight, self._live)
                case "late" if blocks:
                    self._deliveries.late += 1
                    delivery, fragment = self._delivery, self._flight.fragment
                    self._drop()
                    fragment.rounds -= 1
                    self._catch_up(fragment, delivery)
                case "over":
                    self._drop()
                case _ if blocks and self._deliveries.client.has_answers:
                    self._delivery.wait()
                case _:
                    return

    def _is_here(self) -> bool:
        answer = self._answer
        return answer is not None and (answer.transfer is None or answer.transfer.done())

    def _exchange(self, delivery: Delivery, flight: InFlight) -> None:
        assert delivery.decision is not None
        group, self._attempt = self._deliveries.group(delivery.decision, _STEPS * self._pace), delivery.attempt
        self._answer = self.start_attempt(
            flight, group, round=delivery.round, step=delivery.round, attempt=self._attempt, factor=delivery.factor
        )

    def _answered(self, delivery: Delivery, flight: InFlight, answer: Exchange) -> None:
        digest, error = self.finish_attempt(flight.fragment, answer)
        if error is not None:
            self._deliveries.fail(delivery, error)
        else:
            delivery.answered(digest, self.transport.now())

    def _landed(self, delivery: Delivery, flight: InFlight, live: Tensor) -> None:
        """The answer is committed: move the anchor, and add what was learned since the delivery again."""
        fragment, answer, decision = flight.fragment, self._answer, delivery.decision
        assert answer is not None and decision is not None
        # Read before the landing, which writes to the weights.
        answer.learned_meanwhile = fragment.flat.read(fragment.flat.new()).sub_(live)
        fragment.release(flight)
        flight.payload = fragment.latest = answer
        self._work -= delivery.steps
        self._drop()
        if self._deliveries.is_missed(decision):
            fragment.retain_until = max(fragment.retain_until, delivery.round)
        self._land(flight, None)
        self._deliveries.landed(delivery.round)

    def _catch_up(self, fragment: Fragment, delivery: Delivery) -> bool:
        """Land what the others landed without this worker, whose work stays its own. False if nobody sends it."""
        missed = self._deliveries.missed(delivery)
        if missed is None:
            return False
        learned = fragment.flat.read(fragment.flat.new()).sub_(fragment.anchor)
        answer = Exchange(
            missed.mean, None, participants=missed.participants, whole=missed.whole, learned_meanwhile=learned
        )
        fragment.rounds += 1
        fragment.latest = answer
        self._land(InFlight(fragment, 0, answer, None), None)
        self._deliveries.landed(delivery.round)
        return True

    def _drop(self) -> None:
        self._delivery = self._flight = self._live = self._answer = None


def round_exchange_for(
    roster: Roster, parts: Composition, config: MethodConfig, land: Callable[[InFlight, None], None], *, agrees: bool
) -> RoundExchange:
    """Which one an outer method has for a fragment's rounds: of those that all land together, where workers come and
    go, or of any other. ValueError for late ones that cannot be left to the next round.
    """
    takes_quorum = isinstance(config, WeightedConfig) and config.on_late == "quorum"
    if not (roster.grows and agrees):
        if takes_quorum:
            raise ValueError(
                'on_late = "quorum": in a world of fixed size all are waited for; choose "wait", or use isles '
                "lighthouse, or isles simulate --churn"
            )
        return RoundExchange(roster, parts)
    if not takes_quorum:
        return AgreedExchange(roster, parts)
    deliveries = getattr(roster, "deliveries", None)
    assert isinstance(deliveries, Deliveries), "a roster that grows knows of deliveries"
    why = None
    if parts.landing.moves_reference or parts.rule.needs_residual:
        why = "what was learned meanwhile is added to weights that land on the anchor"
    elif parts.feedback is not None or parts.codec.name.startswith("powersgd"):
        why = "a codec's state from round to round is not available for late shares"
    if why is not None:
        raise ValueError(f'on_late = "quorum": {why}; choose "wait", or other parts')
    return QuorumExchange(roster, parts, deliveries, land)

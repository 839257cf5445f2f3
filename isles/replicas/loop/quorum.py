"""Rounds whose mean is that of those who delivered in time, weighted by their inner steps, while all train on: where
workers come and go, of methods with one mean for all (Decoupled DiLoCo, arXiv 2604.21428).

    end of a round   snapshot; it is delivered (`isles.membership.late_shares`), and the next inner steps begin
    between steps    told among whom: the exchange begins, behind the computation; it is done: its hash is told;
                     told to land: land, and what was learned meanwhile is added again
    next snapshot    the round before has landed, or it is waited for
    late             the mean was taken without this worker: fetch it, land it, keep what was learned, deliver that into
                     the next round at once

A share holds all that was learned since the last one that got into a mean. Anchors stay equal to the bit, for all land
the same means in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from typing_extensions import override

from isles.comm.roster import Roster
from isles.membership.late_shares import Deliveries, Delivery
from isles.network.exchange_plan import MemoryItem
from isles.replicas.config import MethodConfig
from isles.replicas.loop.config import WeightedConfig
from isles.replicas.loop.fragment import Exchange, Fragment, InFlight
from isles.replicas.loop.round_exchange import AgreedExchange, AttemptExchange, RoundExchange
from isles.replicas.parts.interfaces import Composition

_POSITIVE = (1 << 61) - 1
_STEPS = 4.0  # inner steps that others may be behind when an exchange begins


class QuorumExchange(AttemptExchange):
    """Of one fragment. land: what lands a flight. Beyond the buffer a delivery takes two more vectors, and one while it
    is exchanged.
    """

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
        if self._delivery is not None:  # nobody can say what became of the one before
            fragment.release(flight)
            fragment.rounds -= 1
            return
        while True:
            delivery = self._deliveries.new(fragment.rounds, self._work, self._pace * self._since)
            if delivery.look(self.transport.now()) != "late":
                break
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
        """Between two inner steps: whatever can be done now. blocks: until the delivery has landed, or nobody can say
        whether it does.
        """
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
        """An attempt, begun."""
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
        """It is everybody's: the anchor moves, and what was learned since the delivery is added again."""
        fragment, answer, decision = flight.fragment, self._answer, delivery.decision
        assert answer is not None and decision is not None
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
        """Land what the others landed without this worker, whose work stays its own. False where it cannot be had."""
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
                'on_late = "quorum": where nobody comes and goes all are waited for; choose "wait", or use isles '
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
        why = "what a codec keeps from round to round is not kept of shares that come late"
    if why is not None:
        raise ValueError(f'on_late = "quorum": {why}; choose "wait", or other parts')
    return QuorumExchange(roster, parts, deliveries, land)

"""Starts and ends the exchanges of an outer method, each with the group of its round; survives what the method may
survive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isles.comm.codecs import Codec
from isles.comm.errors import DeadlinePassed, PeerLost
from isles.comm.group import Group
from isles.comm.mean import Stamp, as_decoded, mean, sent_bytes
from isles.replicas.fragment import Exchange, Flight, Fragment
from isles.replicas.parts import Composition

_PAYLOAD, _ANCHORS = 0, 1  # the two buffers that a round may exchange


class Courier:
    """`lost`: positions whose connection broke; rounds with them are done alone."""

    def __init__(self, group: Group, parts: Composition) -> None:
        self.group, self.parts = group, parts
        self.lost: set[int] = set()

    def members(self, round: int) -> tuple[int, ...]:
        """Positions that take part in this worker's exchange of `round` (1, 2, ...); known in advance."""
        return self.parts.mixing.members(round, self.group.size, self.group.rank)

    def is_alone(self, fragment: Fragment) -> bool:
        """True if the fragment's next round has nobody else in it and nothing to do but land what it forms."""
        return self.parts.own_answer and self._present(fragment.rounds + 1) == (self.group.rank,)

    def survivors(self) -> Group:
        """The workers that are left; where the method goes on without lost ones, they are asked."""
        if self.parts.on_peer_failure != "solo":
            return self.group
        left = [position for position in range(self.group.size) if position not in self.lost]
        return self.group.among(left).answering("eval")

    def send(self, fragment: Fragment, payload: Tensor, step: int, lands: int) -> Exchange:
        """Start the exchange of a snapshot, with what error feedback adds."""
        parts, residual, usable, own = self.parts, fragment.residual, True, None
        if residual is not None:
            usable = fragment.compensate(payload)
            if not usable:
                payload.zero_()
        if parts.reading.needs_own or (parts.on_peer_failure == "solo" and lands > step):
            own = fragment.staging()
            as_decoded(payload, parts.codec, fragment.rounds, fragment.index, own)
        assert parts.feedback is not None or residual is None
        local = residual if parts.feedback is not None and parts.feedback.form == "local" else None
        stamp = Stamp(step, fragment.digest, broken=not usable)
        return self._start(fragment, fragment.rounds, payload, parts.codec, stamp, _PAYLOAD, own, None, local)

    def send_anchor(self, fragment: Fragment, round: int, step: int) -> Exchange:
        """Start the exchange of the anchor for `round`."""
        form = self.parts.anchor_codec
        assert form is not None, "a rule that shares anchors needs an anchor codec"
        anchor = fragment.staging().copy_(fragment.anchor)
        own = fragment.staging() if not form.lossless or self.parts.cadence.rounds_late else None
        stamp = Stamp(step, fragment.digest)
        return self._start(fragment, round, anchor, form, stamp, _ANCHORS, own, own, None)

    def nothing(self, fragment: Fragment, step: int) -> Flight:
        """What lands before the first answer is due."""
        size = len(self.members(fragment.rounds))
        anchors = Exchange(fragment.anchor.clone(), None) if self.parts.rule.shares_anchors else None
        return Flight(fragment, step, Exchange(fragment.staging().zero_(), None, participants=size), anchors)

    def receive(self, flight: Flight, snapshot: Callable[[Fragment, Tensor], Tensor]) -> None:
        """Wait for a flight, and make error feedback of its round final. Where the round failed and the method may go
        on alone, this worker's own share (as sent, or what `snapshot` writes now) is taken for the mean.
        """
        fragment, payload, feedback = flight.fragment, flight.payload, self.parts.feedback
        survived = [self.survives(exchange) for exchange in flight.exchanges()]
        if not all(survived):  # new buffers: late messages may still leave from the old ones
            if self.parts.reading.needs_own:  # then only the fresh share counts
                flight.payload = Exchange(torch.zeros_like(fragment.anchor), None, None, payload.participants)
            else:
                own = payload.own
                flight.payload = Exchange(snapshot(fragment, fragment.flat.new()) if own is None else own, None)
            if flight.anchors is not None:
                flight.anchors = Exchange(fragment.anchor.clone(), None)
        if fragment.residual is None or feedback is None:
            return
        if payload.failed or not payload.whole:
            fragment.residual.zero_()
            return
        if feedback.form == "global":
            fragment.residual.sub_(payload.buffer)
        fragment.residual.mul_(feedback.decay)

    def survives(self, exchange: Exchange) -> bool:
        """Wait; False if a peer failed and `on_peer_failure` lets this worker go on without it."""
        try:
            exchange.wait()
        except (PeerLost, DeadlinePassed) as error:
            if self.parts.on_peer_failure != "solo":
                raise
            if isinstance(error, PeerLost) and error.rank in self.group.ranks:
                self.lost.add(self.group.ranks.index(error.rank))
            exchange.failed = True
        return not exchange.failed

    def _start(
        self,
        fragment: Fragment,
        round: int,
        buffer: Tensor,
        form: Codec,
        stamp: Stamp,
        part: int,
        own: Tensor | None,
        fill: Tensor | None,
        residual: Tensor | None,
    ) -> Exchange:
        group = self.group.among(self._present(round))
        call = group.call(round=round, fragment=fragment.index)
        nbytes = sent_bytes(buffer.numel(), buffer.dtype, form, group.size, group.rank)
        steps = mean(call, buffer, form, stamp, fill, residual, part)
        return Exchange(buffer, group.start(steps, nbytes=nbytes), own, group.size)

    def _present(self, round: int) -> tuple[int, ...]:
        """The members of a round, or this worker alone where one of them is lost."""
        members = self.members(round)
        return (self.group.rank,) if self.lost.intersection(members) else members

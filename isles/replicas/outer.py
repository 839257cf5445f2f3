"""The one outer loop: what every method that exchanges parameters does after an inner step. No paper's formula stands
here.

After inner step t, for the fragments that the cadence names:

    snapshot   write the payload (usually outer gradient = reference - live, in float32) into staging
    receive    wait for the answers that land now
    send       encode and start the exchange of the snapshot with this round's group
    land       outer rule on the anchor, landing on the live weights; both block by block, in cache

`reference` is what the live weights were when they last landed, in the live dtype: the anchor, rounded where weights
are coarser than float32, so that rounding never looks like progress. A hash of the anchor rides in the next transfer's
header.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isles.comm.codecs import Codec
from isles.comm.errors import DeadlinePassed, PeerLost
from isles.comm.group import Group
from isles.comm.mean import Stamp, mean, sent_bytes, working_bytes
from isles.replicas.checks import rounds_for_momentum
from isles.replicas.flat import digest, word_sum
from isles.replicas.fragment import Exchange, Flight, Fragment
from isles.replicas.parts import Answer, Composition
from isles.replicas.planned import Held, Planned, groups_of, planned_rounds
from isles.replicas.sync import ReplicaSync

_PAYLOAD, _ANCHORS = 0, 1  # the two buffers that a round may exchange


class OuterSync(ReplicaSync):
    """An outer method: a `Composition` run by the one loop."""

    level = "parameter"

    @abstractmethod
    def compose(self) -> Composition:
        """The method's parts, from `self.config`."""

    def _begin(self) -> None:
        super()._begin()
        self.parts = self.compose()
        self.agrees = self.parts.mixing.agrees
        self.fragments = [Fragment(0, self.parameters, self.parts.rule.vectors)]
        self.flights: list[Flight] = []
        self.lost: set[int] = set()
        """Positions whose connection broke; rounds with them are done alone."""
        if self.parts.prefetch_anchors:
            for (
                fragment
            ) in self.fragments:  # anchors are still equal (just verified): the first exchange of them is known
                fragment.ahead = Exchange(fragment.staging().copy_(fragment.anchor), None)

    @torch.no_grad()
    def after_inner_step(self) -> None:
        """See ReplicaSync.after_inner_step."""
        self._exchange(self.parts.cadence.sends(self.steps))

    @torch.no_grad()
    def finish(self) -> None:
        """See ReplicaSync.finish: a last, shorter round where inner steps were taken since the last one."""
        for flight in self.flights:
            flight.lands = self.steps
        self._exchange([fragment.index for fragment in self.fragments if fragment.sent < self.steps], lands=self.steps)
        for fragment in self.fragments:
            if fragment.ahead is not None:
                self._survives(fragment.ahead)  # the partner counts on this worker's half of it

    def settle(self) -> None:
        """See ReplicaSync.settle."""
        for exchange in self._under_way():
            self._survives(exchange)

    def survivors(self) -> Group:
        """See ReplicaSync.survivors."""
        if self.parts.on_peer_failure != "solo":
            return self.group
        left = [position for position in range(self.group.size) if position not in self.lost]
        return self.group.among(left).answering("eval")

    def members(self, round: int) -> tuple[int, ...]:
        """Positions that take part in this worker's exchange of `round` (1, 2, ...); known in advance."""
        return self.parts.mixing.members(round, self.group.size, self.group.rank)

    def schedule(self, steps: int) -> list[Planned]:
        """See ReplicaSync.schedule."""
        sizes = [(fragment.flat.numel, fragment.flat.dtype) for fragment in self.fragments]
        return planned_rounds(self.parts, sizes, self.group.size, steps)

    def memory(self) -> list[Held]:
        """See ReplicaSync.memory."""
        flats, parts = [fragment.flat for fragment in self.fragments], self.parts
        vector = sum(flat.numel * flat.dtype.itemsize for flat in flats)
        held = [Held(what, vector, "always") for what in ("anchor", *parts.rule.vectors)]
        held.append(Held("scratch", sum(fragment.scratch.nbytes for fragment in self.fragments), "always"))
        held.append(Held("payload", vector, "exchange"))
        codecs = [parts.codec]
        if parts.rule.shares_anchors and parts.anchor_codec is not None:
            held.append(Held("anchors of the group", vector, "exchange"))
            held += [] if parts.anchor_codec.lossless else [Held("own anchor as sent", vector, "exchange")]
            codecs.append(parts.anchor_codec)
        members = max(map(len, groups_of(parts.mixing, 1, self.group.size)))
        under_way = sum(working_bytes(flat.numel, flat.dtype, codec, members) for flat in flats for codec in codecs)
        return [*super().memory(), *held, Held("messages under way", under_way, "exchange")]

    def advise(self, steps: int) -> list[str]:
        """See ReplicaSync.advise."""
        rounds = sum(0 in self.parts.cadence.sends(step) for step in range(1, steps + 1))
        if not rounds:
            raise ValueError(f"sync_every: no exchange falls into a run of {steps} steps; choose sync_every <= {steps}")
        return super().advise(steps) + rounds_for_momentum(rounds, self.parts.rule.momentum)

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """See ReplicaSync.evaluation_weights: the anchors."""
        live = [fragment.flat.read(fragment.flat.new()) for fragment in self.fragments]
        for fragment in self.fragments:
            fragment.flat.write(fragment.anchor)
        try:
            yield self.model
        finally:
            for fragment, weights in zip(self.fragments, live, strict=True):
                fragment.flat.write(weights)

    def outer_state(self) -> dict[str, Any]:
        """See ReplicaSync.outer_state."""
        assert not self.flights, "no method of this version leaves a round in flight between steps"
        return {"fragments": [fragment.state_dict() for fragment in self.fragments], "lost": sorted(self.lost)}

    def load_outer_state(self, state: dict[str, Any]) -> None:
        """See ReplicaSync.load_outer_state."""
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self.lost = set(state["lost"])

    @classmethod
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        """See ReplicaSync.regrouped: anchors and momenta as they are, the mean of linear rules' states being the state
        of their mean. Anchors sent ahead went to partners that are no more; all anchors are equal now, so the next
        group's mean is known without a message.
        """
        for fragment in outer["fragments"]:
            known = None if fragment["ahead"] is None else fragment["anchor"]
            fragment.update(ahead=known, ahead_own=None, ahead_failed=False)
        return {**outer, "lost": []}

    # One step of the loop.

    def _exchange(self, sending: Sequence[int], lands: int | None = None) -> None:
        fragments = [self.fragments[index] for index in sending]
        payloads = [self._snapshot(fragment, fragment.staging()) for fragment in fragments]
        due = [flight for flight in self.flights if flight.lands <= self.steps]
        for flight in due:
            self._receive(flight)
        for fragment, payload in zip(fragments, payloads, strict=True):
            flight = self._send(fragment, payload)
            flight.lands = flight.lands if lands is None else lands
            self.flights.append(flight)
            if flight.lands <= self.steps:
                self._receive(flight)
                due.append(flight)
        for flight in due:
            self._land(flight)
            self.flights.remove(flight)

    def _snapshot(self, fragment: Fragment, out: Tensor) -> Tensor:
        flat = fragment.flat
        for block, part, anchor in zip(flat.blocks(), flat.parts(out), flat.parts(fragment.anchor), strict=True):
            self.parts.rule.form(part, block.read(fragment.scratch), flat.rounded(block, anchor), anchor)
        return out

    def _send(self, fragment: Fragment, payload: Tensor) -> Flight:
        fragment.rounds += 1
        fragment.sent = self.steps
        anchors, fragment.ahead = fragment.ahead, None
        if anchors is None and self.parts.rule.shares_anchors:
            anchors = self._start_anchors(fragment, fragment.rounds)
        exchange = self._start(fragment, fragment.rounds, payload, self.parts.codec, _PAYLOAD)
        return Flight(fragment, self.parts.cadence.lands(self.steps), exchange, anchors)

    def _start_anchors(self, fragment: Fragment, round: int) -> Exchange:
        assert self.parts.anchor_codec is not None, "a rule that shares anchors needs an anchor codec"
        return self._start(
            fragment, round, fragment.staging().copy_(fragment.anchor), self.parts.anchor_codec, _ANCHORS
        )

    def _start(self, fragment: Fragment, round: int, buffer: Tensor, codec: Codec, part: int) -> Exchange:
        members = self.members(round)
        if self.lost.intersection(members):
            members = (self.group.rank,)
        group = self.group.among(members)
        call = group.call(round=round, fragment=fragment.index)
        nbytes = sent_bytes(buffer.numel(), buffer.dtype, codec, group.size, group.rank)
        own = fragment.staging() if part == _ANCHORS and not codec.lossless else None
        stamp = Stamp(self.steps, fragment.digest)
        return Exchange(buffer, group.start(mean(call, buffer, codec, stamp, own, part), nbytes=nbytes), own)

    def _receive(self, flight: Flight) -> None:
        """Wait for a flight; where its round failed and the method may go on alone, take this worker's own share for
        the mean.
        """
        survived = [self._survives(exchange) for exchange in flight.exchanges()]
        if all(survived):
            return
        fragment = flight.fragment  # new buffers: late messages may still leave from the old ones
        flight.payload = Exchange(self._snapshot(fragment, fragment.flat.new()), None)
        if flight.anchors is not None:
            flight.anchors = Exchange(fragment.anchor.clone(), None)

    def _survives(self, exchange: Exchange) -> bool:
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

    def _land(self, flight: Flight) -> None:
        fragment, flat, shared = flight.fragment, flight.fragment.flat, flight.anchors
        anchors, means = flat.parts(fragment.anchor), flat.parts(flight.payload.buffer)
        theirs = flat.parts(shared.buffer) if shared is not None else [None] * len(anchors)
        own = flat.parts(shared.own) if shared is not None and shared.own is not None else anchors
        vectors = {name: flat.parts(vector) for name, vector in fragment.vectors.items()}
        sums = []
        for i, block in enumerate(flat.blocks()):
            answer = Answer(means[i], theirs[i], own[i])
            self.parts.rule.apply(anchors[i], answer, {name: parts[i] for name, parts in vectors.items()})
            self.parts.landing.land(block.live, block.shaped(anchors[i]))
            if self.agrees:
                sums.append(word_sum(anchors[i]))  # while it is in cache
        fragment.digest = digest(sums)
        fragment.release(flight)
        if self.parts.prefetch_anchors:
            fragment.ahead = self._start_anchors(fragment, fragment.rounds + 1)

    def _under_way(self) -> Iterator[Exchange]:
        for flight in self.flights:
            yield from flight.exchanges()
        yield from (fragment.ahead for fragment in self.fragments if fragment.ahead is not None)

"""An outer round's work on memory, block by block while a block's entries are in cache.

    snapshot   live weights, reference -> what travels                       one sweep
    answered   what came back, anchor, vectors -> anchor, live weights       one sweep
    alone      both in one sweep, where nothing travels: the payload is its own answer and never leaves the cache

Cost is memory traffic: what is written goes to memory and is read from there again by the next sweep. A rule that asks
for whole parameters gets one after the other; a sweep of their own then lands what came of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from isles.base.modes import torch_threads
from isles.replicas.flat import digest
from isles.replicas.loop.fragment import Fragment, InFlight
from isles.replicas.parts.interfaces import Answer, Composition, RuleState


class FiniteCheck:
    """Takes the blocks of one payload, each while it is in cache, then says whether all of it was finite."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def take(self, part: Tensor) -> None:
        """The next block (b,)."""
        self._sums.append(part.sum())  # not finite if an entry is not

    @property
    def is_usable(self) -> bool:
        """Whether all entries were finite, and so were the sums of blocks: one that overflows counts as not finite."""
        return not self._sums or bool(torch.stack(self._sums).isfinite().all())


class NoCheck(FiniteCheck):
    """Where the payload is finite for sure, or reaches nobody else."""

    @override
    def take(self, part: Tensor) -> None:
        """Nothing is read."""


class Sweep:
    """The views of one fragment's blocks, made anew for each sweep: a user may move parameters between rounds.

    hashed: whether workers agree on the anchor, so that landing also hashes it. frozen: indices in the fragment of
    parameters that the round leaves as they are.
    """

    def __init__(self, fragment: Fragment, parts: Composition, hashed: bool, frozen: Sequence[int] = ()) -> None:
        self.fragment, self.flat, self.parts, self.hashed = fragment, fragment.flat, parts, hashed
        self.scratch = fragment.scratch
        self.blocks, self.anchors = self.flat.blocks(), self.flat.parts(fragment.anchor)
        self.left = fragment.residual if parts.rule.needs_residual else None
        own = fragment.reference is fragment.anchor
        self.references = self.anchors if own else self.flat.parts(fragment.reference)
        # A block may hold frozen entries beside others, which a rule's sums must not count.
        self.by_tensor = parts.rule.whole or bool(frozen and parts.rule.scalars)
        self.frozen = frozen if self.by_tensor else ()
        self.moved = self.flat.parts(fragment.anchor, by_tensor=self.by_tensor)
        cut = {name: self.flat.parts(one, by_tensor=self.by_tensor) for name, one in fragment.vectors.items()}
        self.vectors = [{name: cut[name][i] for name in cut} for i in range(len(self.moved))]
        self.words = self.flat.words(fragment.anchor) if hashed else ()
        self.sums: list[Tensor] = []
        self.local_share = (
            parts.landing.local_share if self.flat.is_staged else None
        )  # where the landing is done by `FlatParameters`

    def snapshot(self, out: Tensor, check: FiniteCheck) -> FiniteCheck:
        """Write what travels into `out` (numel,), and show it to `check`."""
        self.flat.down()
        for i, part in enumerate(self.flat.parts(out)):
            self._form(i, part)
            check.take(part)
        return check

    def answered(self, flight: InFlight, fresh: Tensor | None) -> int:
        """Land what came back of a flight; the anchor's hash, or 0. fresh: see `Reading.read`."""
        payload, shared, read = flight.payload, flight.anchors, self.parts.reading.read
        flat, by_tensor = self.flat, self.by_tensor
        mine = self.fragment.anchor if shared is None or shared.own is None else shared.own
        vectors = (fresh, payload.own, None if shared is None else shared.buffer, mine, self.left)
        new, own, theirs, anchors, left = (flat.parts_or_none(one, by_tensor=by_tensor) for one in vectors)
        self.fragment.landed += 1
        if self.local_share is None:
            flat.down()
        # Sums over a block, and products of matrices, have other bits with more threads, which others may have.
        with torch_threads(1) if self.hashed and self.parts.rule.mixes_entries else nullcontext():
            for i, mean in enumerate(flat.parts(payload.buffer, by_tensor=by_tensor)):
                if i not in self.frozen:
                    gradient = read(mean, new[i], own[i], payload.participants)
                    self._land(i, Answer(gradient, theirs[i], anchors[i], left[i]))
        for i in range(len(self.blocks)) if by_tensor else ():
            self._write(i)
        return self._landed()

    def check(self) -> FiniteCheck:
        """Whether what would travel is finite, without keeping it."""
        check, room = FiniteCheck(), self.flat.scratch()
        self.flat.down()
        for i, anchor in enumerate(self.anchors):
            part = room[: anchor.numel()]
            self._form(i, part)
            check.take(part)
        return check

    def alone(self) -> int:
        """Snapshot and landing of a round that has one member and loses nothing; the anchor's hash, or 0."""
        room = self.flat.scratch()
        self.fragment.landed += 1
        self.flat.down()
        for i, anchor in enumerate(self.anchors):
            part = room[: anchor.numel()]
            self._form(i, part)
            self._land(i, Answer(self.parts.reading.read(part, None, None, 1)))
        return self._landed()

    def _form(self, i: int, out: Tensor) -> None:
        block = self.blocks[i]
        reference = self.flat.rounded(block, self.references[i])
        self.parts.rule.form(out, block.read(self.scratch), reference, self.anchors[i])
        if self.fragment.weight != 1.0:
            out.mul_(self.fragment.weight)

    def _land(self, i: int, answer: Answer) -> None:
        anchor, state, rule = self.moved[i], RuleState(self.vectors[i], self.fragment.scalars), self.parts.rule
        if rule.whole:
            shape = self.flat.parameters[i].shape
            anchor, answer = anchor.view(shape), answer.shaped(shape)
            vectors = {name: vector.view(shape) for name, vector in state.vectors.items()}
            state = RuleState(vectors, state.scalars, self.fragment.names[i])
        rule.apply(anchor, answer, state, self.fragment.landed)
        if not self.by_tensor:
            self._write(i)  # while it is in cache

    def _landed(self) -> int:
        self.parts.rule.end(self.fragment.scalars, self.fragment.landed)
        self.flat.up(self.local_share or 0.0)
        return digest(self.sums)

    def _write(self, i: int) -> None:
        """Land block `i` of the anchor, which has moved."""
        block, anchor = self.blocks[i], self.anchors[i]
        shaped = block.shaped(anchor)
        if self.local_share is None:
            origin = shaped if self.references is self.anchors else block.shaped(self.references[i])
            self.parts.landing.land(block.live, shaped, origin)
        else:
            torch._foreach_copy_(block.live, shaped)
        if self.hashed:
            self.sums.append(self.words[i].sum())  # while it is in cache

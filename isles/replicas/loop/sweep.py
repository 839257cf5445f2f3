"""An outer round's work on memory, block by block while a block's entries are in cache.

    snapshot   live weights, reference -> what travels                       one sweep
    answered   what came back, anchor, vectors -> anchor, live weights       one sweep
    alone      both in one sweep, where nothing travels: the payload is its own answer and never leaves the cache

Cost is memory traffic: what is written goes to memory and is read from there again by the next sweep.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from isles.replicas.flat import digest
from isles.replicas.loop.fragment import Fragment, InFlight
from isles.replicas.parts.interfaces import Answer, Composition


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

    hashed: whether landing also hashes the anchor.
    """

    def __init__(self, fragment: Fragment, parts: Composition, hashed: bool) -> None:
        self.fragment, self.flat, self.parts, self.hashed = fragment, fragment.flat, parts, hashed
        self.scratch = fragment.scratch
        self.blocks, self.anchors = self.flat.blocks(), self.flat.parts(fragment.anchor)
        self.left = fragment.residual if parts.rule.needs_residual else None
        own = fragment.reference is fragment.anchor
        self.references = self.anchors if own else self.flat.parts(fragment.reference)
        vectors = {name: self.flat.parts(vector) for name, vector in fragment.vectors.items()}
        self.vectors = [{name: vectors[name][i] for name in vectors} for i in range(len(self.anchors))]
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
        flat, means = self.flat, self.flat.parts(payload.buffer)
        own, new = flat.parts_or_none(payload.own), flat.parts_or_none(fresh)
        theirs = flat.parts_or_none(None if shared is None else shared.buffer)
        mine = self.anchors if shared is None or shared.own is None else flat.parts(shared.own)
        left = flat.parts_or_none(self.left)
        self.fragment.landed += 1
        if self.local_share is None:
            flat.down()
        for i, mean in enumerate(means):
            gradient = read(mean, new[i], own[i], payload.participants)
            self._land(i, Answer(gradient, theirs[i], mine[i], left[i]))
        flat.up(self.local_share or 0.0)
        return digest(self.sums)

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
        self.flat.up(self.local_share or 0.0)
        return digest(self.sums)

    def _form(self, i: int, out: Tensor) -> None:
        block = self.blocks[i]
        reference = self.flat.rounded(block, self.references[i])
        self.parts.rule.form(out, block.read(self.scratch), reference, self.anchors[i])
        if self.fragment.weight != 1.0:
            out.mul_(self.fragment.weight)

    def _land(self, i: int, answer: Answer) -> None:
        block, anchor = self.blocks[i], self.anchors[i]
        self.parts.rule.apply(anchor, answer, self.vectors[i], self.fragment.landed)
        shaped = block.shaped(anchor)
        if self.local_share is None:
            origin = shaped if self.references is self.anchors else block.shaped(self.references[i])
            self.parts.landing.land(block.live, shaped, origin)
        else:
            torch._foreach_copy_(block.live, shaped)
        if self.hashed:
            self.sums.append(self.words[i].sum())  # while it is in cache

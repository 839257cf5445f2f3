"""What one worker holds, in parts: one account for `isles plan`, `--dry-run` and a run.

    weights, gradients, inner state       where it computes
    held                                  what the method adds, on the host, each with the time from which it is there;
                                          and what a step of a swarm or a cluster takes where it computes
    tables                                what a model has beside its parameters, such as those of rotary embeddings
    peak    = weights + tables + inner + step + always + exchange + max(gradients, end)

A run and its dry run fill it in from their tensors, a plan from closed forms. Without activations, which hang on the
batch and on the model; they are told apart. Bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

COMPARED = "weights and their mean"
"""What a comparison of replicas holds; workers of one replica are not compared."""
UNDER_WAY, PINNED = "messages under way", "pinned copies"
BLOCK = 1 << 17
"""Entries of a flat vector that are handled at a time; 512 KB of float32."""
SEGMENT, MOST_SEGMENTS = 1 << 22, 60
"""Entries of a mean's segments (16 MB of float32), and how many there may be."""


class Held(NamedTuple):
    """Memory that a worker takes beside weights, gradients and the inner optimizer's state.

    when: "always"; "pinned": likewise, where the weights are on GPUs; "exchange": from the first round on, while one is
    under way and kept for the next; "end": for validation and what follows the last step: on the host. "step": in every
    step, where it computes.
    """

    what: str
    nbytes: int
    when: Literal["always", "pinned", "exchange", "end", "step"]


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Of one worker; see above."""

    weights: int
    gradients: int
    inner: int
    held: tuple[Held, ...]
    tables: int = 0

    @property
    def computing(self) -> int:
        """Where it computes: on the GPU, if there is one."""
        return self.weights + self.tables + self.gradients + self.inner + self._sum("step")

    @property
    def training(self) -> int:
        """With an exchange under way."""
        return self.computing + self._sum("always") + self._sum("pinned") + self._sum("exchange")

    @property
    def peak(self) -> int:
        """At its fullest: while training with an exchange under way, or at the end, when gradients are gone."""
        return self.training - self.gradients + max(self.gradients, self._sum("end"))

    def _sum(self, when: str) -> int:
        return sum(held.nbytes for held in self.held if held.when == when)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterVectors:
    """Which vectors of the model an outer method keeps. rule: those of its outer rule, by name. late: rounds between
    sending and landing. own: whether what this worker sent is kept until then. anchors: whether others' anchors come
    too; sent_anchor: whether the own one is kept as it was sent. answers: whether anything is sent.
    """

    rule: tuple[str, ...] = ()
    feedback: bool = False
    own_entries: bool = False
    reference: bool = False
    late: int = 0
    own: bool = False
    anchors: bool = False
    sent_anchor: bool = False
    answers: bool = True

    def held(self, vector: int, *, scratch: int, bases: int, under_way: int) -> list[Held]:
        """Of flat vectors of so many bytes. scratch: room for blocks. bases: of factors. under_way: what means take."""
        flying = max(self.late, 1)  # with overlap by inner steps some fragments rest meanwhile: then this is the most
        held = [Held(what, vector, "always") for what in ("anchor", *self.rule)]
        held += [Held("error feedback", vector, "always")] if self.feedback else []
        held += [Held("own entries that stay", vector, "always")] if self.own_entries else []
        held += [Held("reference", vector, "always")] if self.reference else []
        held.append(Held("scratch", scratch, "always"))
        held += [Held("bases of the factors", bases, "always")] if bases else []
        held += [Held("payload", vector * (flying + (self.late > 0)), "exchange")] if self.answers else []
        held += [Held("own payload as sent", vector * (flying + 1), "exchange")] if self.own else []
        held += [Held("anchors of the group", vector, "exchange")] if self.anchors else []
        held += [Held("own anchor as sent", vector, "exchange")] if self.sent_anchor else []
        return [*held, Held(UNDER_WAY, under_way, "exchange")]


class Working(NamedTuple):
    """Bytes that a segment of a mean takes: its entries and those of its largest shard as they travel, there and back,
    and as they are decoded. gathers: whether everyone sends it whole to everyone.
    """

    whole: float
    shard: float
    shard_back: float
    decoded: float
    gathers: bool


def working_bytes(pieces: Sequence[Working], size: int, *, lossless: bool) -> float:
    """Memory beyond the vector that a mean of these segments in a group of `size` takes at its peak: what two of them
    receive, and where the codec is no mere view, what it encodes and decodes.
    """
    total = 0.0
    for piece in pieces[:2]:
        total += (size - 1) * (piece.whole if piece.gathers else max(piece.shard, piece.shard_back))
        total += 0 if lossless else piece.whole + piece.decoded
    return total


def planned_working_bytes(entries: float, size: int, bits: float, back: float, *, lossless: bool = False) -> float:
    """The same of float32 vectors of so many entries in a codec of `bits` an entry, `back` times that on its way back,
    but for the rounding of shares.
    """
    count = min(max(math.ceil(entries / SEGMENT), 1), MOST_SEGMENTS)
    each, codes = entries / count, bits / 8
    piece = Working(each * codes, each / size * codes, each / size * codes * back, 4 * each, size <= 1 + back)
    return working_bytes([piece] * min(count, 2), size, lossless=lossless)

"""Exchanges that are planned: when they start, who takes part, and what each member puts on the wire; and the memory
that a worker takes. No tensors.

A pattern is one exchange of a group of n, by position in it. Sizes are bytes: whole numbers where they are counted,
fractions where a closed form gives them.

| pattern | what moves |
|---|---|
| Swap     | everyone's message to everyone at once |
| Cross    | another message for each pair |
| Doubling | everyone's message to everyone in ceil(log2 n) phases (Bruck et al., 1997) |
| Waves    | everyone's message to everyone, again and again: what stands for other patterns of many |
| Mean     | `isles.comm.collectives.mean`: headers, then segments, two of them under way |
| Ragged   | headers, then a message whose length they tell |
| Then     | means side by side, and then another: low-rank factors |
| Tree     | position 0's message to all along a binomial tree |
| Ring     | a ring all-reduce, such as a backend's own |

`WorkerMemory` is one account for `isles plan`, `--dry-run` and a run, which fills it in from its tensors, a plan from
sketched ones. Activations are left out: they depend on the batch and the model. Bytes.

    weights, gradients, inner state       where it computes
    held                                  what the method adds, on the host, each with the time from which it is there;
                                          and what a step of a swarm or a cluster takes where it computes
    tables                                what a model has beside its parameters, such as those of rotary embeddings
    peak    = weights + tables + inner + step + always + exchange + max(gradients, end)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, Protocol

FEW = 8
"""Members up to which everyone sends to everyone in an all-gather."""


class MessagePattern(Protocol):
    """What one exchange of a group of `size` puts on the wire."""

    def sent(self, position: int, size: int) -> float:
        """Bytes that a position sends, headers included."""

    def messages(self, size: int) -> int:
        """Of all members."""


@dataclass(frozen=True, slots=True)
class Swap:
    """sizes: bytes that each position sends to each other."""

    sizes: tuple[float, ...]

    def sent(self, position: int, size: int) -> float:
        return (size - 1) * self.sizes[position]

    def messages(self, size: int) -> int:
        return size * (size - 1)


@dataclass(frozen=True, slots=True)
class Cross:
    """sizes[i][j]: bytes from position i to j; no message where 0."""

    sizes: tuple[tuple[float, ...], ...]

    def sent(self, position: int, size: int) -> float:
        return sum(nbytes for other, nbytes in enumerate(self.sizes[position]) if other != position)

    def messages(self, size: int) -> int:
        pairs = ((source, target) for source in range(size) for target in range(size) if source != target)
        return sum(self.sizes[source][target] > 0 for source, target in pairs)


@dataclass(frozen=True, slots=True)
class Doubling:
    """nbytes: of one member's message."""

    nbytes: float

    def sent(self, position: int, size: int) -> float:
        return (size - 1) * self.nbytes

    def messages(self, size: int) -> int:
        return size * math.ceil(math.log2(size))


@dataclass(frozen=True, slots=True)
class Waves:
    """sizes: bytes of a message, wave by wave; one begins when that before has arrived."""

    sizes: tuple[float, ...]

    def sent(self, position: int, size: int) -> float:
        return (size - 1) * sum(self.sizes)

    def messages(self, size: int) -> int:
        return size * (size - 1) * len(self.sizes)


@dataclass(frozen=True, slots=True)
class ShardSizes(Sequence[float]):
    """Bytes of the shard of each position, most of which are alike: runs of (how many, bytes of each)."""

    runs: tuple[tuple[int, float], ...]

    def __len__(self) -> int:
        return sum(count for count, _ in self.runs)

    def __getitem__(self, position: Any) -> Any:
        for count, nbytes in self.runs:
            if position < count:
                return nbytes
            position -= count
        raise IndexError(position)

    def __iter__(self) -> Iterator[float]:
        return chain.from_iterable(repeat(nbytes, count) for count, nbytes in self.runs)

    @property
    def total(self) -> float:
        return sum(count * nbytes for count, nbytes in self.runs)

    @property
    def largest(self) -> float:
        return max(nbytes for _, nbytes in self.runs)


class Segment(NamedTuple):
    """Of a mean. there: bytes of the shard of each owner; None: an all-gather of `back`. back: bytes that each position
    sends to each other in the end.
    """

    there: ShardSizes | None
    back: ShardSizes


@dataclass(frozen=True, slots=True)
class Mean:
    """header: bytes beside the first segment."""

    segments: tuple[Segment, ...]
    header: int

    def sent(self, position: int, size: int) -> float:
        others = (size - 1) * (self.header + sum(segment.back[position] for segment in self.segments))
        return others + sum(there.total - there[position] for there, _ in self.segments if there is not None)

    def messages(self, size: int) -> int:
        return size * (size - 1) * (1 + sum(1 if there is None else 2 for there, _ in self.segments))


@dataclass(frozen=True, slots=True)
class Ragged:
    """nbytes: of each member's message. header: bytes that go before it."""

    nbytes: float
    header: int

    def sent(self, position: int, size: int) -> float:
        return (size - 1) * (self.header + self.nbytes)

    def messages(self, size: int) -> int:
        return size * (size - 1) * (2 if self.nbytes else 1)


@dataclass(frozen=True, slots=True)
class Then:
    """first: side by side, before `second`."""

    first: tuple[Mean, ...]
    second: Mean

    def sent(self, position: int, size: int) -> float:
        return sum(mean.sent(position, size) for mean in (*self.first, self.second))

    def messages(self, size: int) -> int:
        return sum(mean.messages(size) for mean in (*self.first, self.second))


@dataclass(frozen=True, slots=True)
class Tree:
    """nbytes: of position 0's message."""

    nbytes: float

    def sent(self, position: int, size: int) -> float:
        return self.nbytes * len(fed(position, size))

    def messages(self, size: int) -> int:
        return size - 1


@dataclass(frozen=True, slots=True)
class Ring:
    """nbytes: that each member sends in all, in 2 (n - 1) steps."""

    nbytes: float

    def sent(self, position: int, size: int) -> float:
        return self.nbytes

    def messages(self, size: int) -> int:
        return 2 * size * (size - 1)


def fed(position: int, size: int) -> list[int]:
    """To whom a position of a binomial tree of `size` passes on what comes from position 0: one that has it when
    `step` have it feeds position + step, position + 2 step, ...
    """
    step, targets = 1 << position.bit_length(), []
    while step < size - position:
        targets.append(position + step)
        step *= 2
    return targets


def fed_by(position: int) -> int:
    """From whom a position above 0 has it."""
    return position - (1 << position.bit_length() - 1)


def gathered(nbytes: float, size: int) -> MessagePattern:
    """An all-gather of messages of `nbytes`: at once among few, for one latency, else in phases."""
    return Swap((nbytes,) * size) if size <= FEW else Doubling(nbytes)


def sent_by_all(pattern: MessagePattern, size: int) -> float:
    """Bytes that a group of `size` sends, all positions together."""
    if isinstance(pattern, Swap):
        return (size - 1) * sum(pattern.sizes)
    if isinstance(pattern, Mean):
        counted = Counter(map(id, pattern.segments))  # most are one object
        parts = {id(one): one.back.total + (0 if one.there is None else one.there.total) for one in pattern.segments}
        return (size - 1) * (size * pattern.header + sum(counted[key] * parts[key] for key in parts))
    if isinstance(pattern, Then):
        return sum(sent_by_all(mean, size) for mean in (*pattern.first, pattern.second))
    if isinstance(pattern, Cross | Tree):
        return sum(pattern.sent(position, size) for position in range(size))
    return size * pattern.sent(0, size)


@dataclass(frozen=True, slots=True)
class BySize:
    """The pattern of each size of group that takes part."""

    patterns: tuple[tuple[int, MessagePattern], ...]

    def __call__(self, size: int) -> MessagePattern:
        """Of a group of `size`. KeyError where none has it."""
        for known, pattern in self.patterns:
            if known == size:
                return pattern
        raise KeyError(size)


Groups = tuple[tuple[int, ...], ...]


def by_size(groups: Iterable[Sequence[int]], make: Callable[[int], MessagePattern]) -> BySize:
    """`make(size)` for each size of `groups` above 1."""
    return BySize(tuple((size, make(size)) for size in sorted({len(group) for group in groups}) if size > 1))


class PlannedExchange(NamedTuple):
    """One exchange of a run, of each of `groups` by itself.

    sent: inner steps computed when it starts; 3.4: amid the fourth. lands: the inner step after which its answer is
    waited for; of what lands at the end of a run of n steps n + 1, of what is waited for last of all n + 2. groups: of
    positions; those that are alone in this round form groups of one. flight: exchanges of one flight are all started
    before any of it is waited for; what lands at a moment is waited for before another flight starts there. A list of
    them is in the order of their starts.
    """

    sent: float
    lands: int
    fragment: int
    what: str
    groups: Groups
    pattern: BySize
    flight: int
    channel: Literal["outer", "inner", "control"] = "outer"

    @property
    def bytes_sent(self) -> tuple[float, ...]:
        """Bytes that each position hands to the transport, headers included."""
        total: list[float] = [0] * sum(map(len, self.groups))
        for group in self.groups:
            if len(group) > 1:
                pattern = self.pattern(len(group))
                for index, position in enumerate(group):
                    total[position] = pattern.sent(index, len(group))
        return tuple(total)

    @property
    def sent_by_all(self) -> float:
        sizes = Counter(map(len, self.groups))
        return sum(sizes[size] * sent_by_all(self.pattern(size), size) for size in sizes if size > 1)

    @property
    def messages(self) -> int:
        sizes = Counter(map(len, self.groups))
        return sum(sizes[size] * self.pattern(size).messages(size) for size in sizes if size > 1)


class Rhythm(NamedTuple):
    """start: inner steps at the beginning that are unlike later ones. every: steps after which sending repeats."""

    start: int
    every: int


def among(ranks: Sequence[int], planned: Sequence[PlannedExchange], numbers: Iterator[int]) -> list[PlannedExchange]:
    """`planned` with ranks for positions, and flights that no others have: the next of `numbers`."""
    flights: dict[int, int] = {}
    for one in planned:
        flights.setdefault(one.flight, len(flights))
    first = [next(numbers) for _ in flights]
    return [
        one._replace(
            groups=tuple(tuple(ranks[position] for position in group) for group in one.groups),
            flight=first[flights[one.flight]],
        )
        for one in planned
    ]


COMPARED = "weights and their mean"
"""What a comparison of replicas holds; workers of one replica are not compared."""
UNDER_WAY, PINNED = "messages under way", "pinned copies"
BLOCK = 1 << 17
"""Entries of a flat vector that are handled at a time; 512 KB of float32."""
SEGMENT, MOST_SEGMENTS = 1 << 22, 60
"""Entries of a mean's segments (16 MB of float32), and how many there may be."""


When = Literal["always", "pinned", "exchange", "end", "step"]


class MemoryItem(NamedTuple):
    """Memory that a worker takes beside weights, gradients and the inner optimizer's state.

    when: "always"; "pinned": likewise, where the weights are on GPUs; "exchange": from the first round on, while one is
    under way and kept for the next; "end": for validation and what follows the last step: on the host. "step": in every
    step, where it computes.
    """

    what: str
    nbytes: int
    when: When


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Of one worker; see above."""

    weights: int
    gradients: int
    inner: int
    held: tuple[MemoryItem, ...]
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

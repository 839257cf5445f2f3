"""Planned exchanges: when they start, which workers take part, and what each member sends; and the memory of a worker.
No tensors.

A pattern is one exchange of a group of n, by position in it. Sizes are bytes: whole numbers where they are counted,
fractions where a closed form gives them.

| pattern | what moves |
|---|---|
| Swap     | everyone's message to everyone at once |
| Cross    | another message for each pair |
| Doubling | everyone's message to everyone in ceil(log2 n) phases (Bruck et al., 1997) |
| Waves    | everyone's message to everyone, repeated: stands for other patterns of large groups |
| Mean     | `isles.comm.collectives.mean`: headers, then segments, two of them under way |
| Ragged   | headers, then a message whose length they give |
| Then     | means side by side, and then another: low-rank factors |
| Tree     | position 0's message to all along a binomial tree |
| Ring     | a ring all-reduce, such as a backend's own |

`WorkerMemory` is one account for `isles plan`, `--dry-run` and a run. A run fills it in from its tensors, a plan from
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
        """Number of messages of all members."""


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
    """sizes: bytes of a message, wave by wave; a wave begins when the one before has arrived."""

    sizes: tuple[float, ...]

    def sent(self, position: int, size: int) -> float:
        return (size - 1) * sum(self.sizes)

    def messages(self, size: int) -> int:
        return size * (size - 1) * len(self.sizes)


@dataclass(frozen=True, slots=True)
class ShardSizes(Sequence[float]):
    """Bytes of the shard of each position, stored as runs of equal sizes: (count, bytes of each)."""

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
    """A segment of a mean. there: bytes of each owner's shard; None: an all-gather of `back`. back: bytes that each
    position sends to each other one at the end.
    """

    there: ShardSizes | None
    back: ShardSizes


@dataclass(frozen=True, slots=True)
class Mean:
    """header: bytes sent before the first segment."""

    segments: tuple[Segment, ...]
    header: int

    def sent(self, position: int, size: int) -> float:
        others = (size - 1) * (self.header + sum(segment.back[position] for segment in self.segments))
        return others + sum(there.total - there[position] for there, _ in self.segments if there is not None)

    def messages(self, size: int) -> int:
        return size * (size - 1) * (1 + sum(1 if there is None else 2 for there, _ in self.segments))


@dataclass(frozen=True, slots=True)
class Ragged:
    """nbytes: of each member's message. header: bytes sent before it."""

    nbytes: float
    header: int

    def sent(self, position: int, size: int) -> float:
        return (size - 1) * (self.header + self.nbytes)

    def messages(self, size: int) -> int:
        return size * (size - 1) * (2 if self.nbytes else 1)


@dataclass(frozen=True, slots=True)
class Then:
    """first: means side by side. second: a mean after them."""

    first: tuple[Mean, ...]
    second: Mean

    def sent(self, position: int, size: int) -> float:
        return sum(mean.sent(position, size) for mean in (*self.first, self.second))

    def messages(self, size: int) -> int:
        return sum(mean.messages(size) for mean in (*self.first, self.second))


@dataclass(frozen=True, slots=True)
class Tree:
    """nbytes: of the root's message (position 0)."""

    nbytes: float

    def sent(self, position: int, size: int) -> float:
        return self.nbytes * len(fed(position, size))

    def messages(self, size: int) -> int:
        return size - 1


@dataclass(frozen=True, slots=True)
class Ring:
    """nbytes: that each member sends in total, in 2 (n - 1) steps."""

    nbytes: float

    def sent(self, position: int, size: int) -> float:
        return self.nbytes

    def messages(self, size: int) -> int:
        return 2 * size * (size - 1)


def fed(position: int, size: int) -> list[int]:
    """The positions to which a position of a binomial tree of `size` forwards the root's message: a position that has
    it when `step` positions have it sends it to position + step, position + 2 step, ...
    """
    step, targets = 1 << position.bit_length(), []
    while step < size - position:
        targets.append(position + step)
        step *= 2
    return targets


def fed_by(position: int) -> int:
    """The position from which a position above 0 receives it."""
    return position - (1 << position.bit_length() - 1)


def gathered(nbytes: float, size: int) -> MessagePattern:
    """An all-gather of messages of `nbytes`: direct in small groups, for one latency, else in phases."""
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
    """The pattern by size of the group."""

    patterns: tuple[tuple[int, MessagePattern], ...]

    def __call__(self, size: int) -> MessagePattern:
        """The pattern of a group of `size`. KeyError if there is none."""
        for known, pattern in self.patterns:
            if known == size:
                return pattern
        raise KeyError(size)


Groups = tuple[tuple[int, ...], ...]


def by_size(groups: Iterable[Sequence[int]], make: Callable[[int], MessagePattern]) -> BySize:
    """`make(size)` for each size of `groups` above 1."""
    return BySize(tuple((size, make(size)) for size in sorted({len(group) for group in groups}) if size > 1))


class PlannedExchange(NamedTuple):
    """One exchange of a run, by each of `groups` separately.

    sent: inner steps computed when it starts; 3.4: during the fourth. lands: the inner step after which workers wait
    for its result; n + 1 at the end of a run of n steps, n + 2 for the very last. groups: of positions; a worker
    without a partner in this round is a group of one. flight: exchanges of one flight all start before any of them is
    waited for; an exchange that lands at a moment is waited for before another flight starts there. A list of exchanges
    is in the order of their starts.
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
    """start: inner steps at the beginning that differ from later ones. every: steps after which sending repeats."""

    start: int
    every: int


def among(ranks: Sequence[int], planned: Sequence[PlannedExchange], numbers: Iterator[int]) -> list[PlannedExchange]:
    """`planned` with ranks in place of positions, and with new flight numbers from `numbers`."""
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
    """Memory of a worker beside weights, gradients and the inner optimizer's state.

    when: on the host: "always"; "pinned": always, if the weights are on GPUs; "exchange": from the first round on,
    while an exchange is in progress, and kept for the next; "end": for validation and after the last step. Where it
    computes: "step", in every step.
    """

    what: str
    nbytes: int
    when: When


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The memory of one worker; see the module's docstring."""

    weights: int
    gradients: int
    inner: int
    held: tuple[MemoryItem, ...]
    tables: int = 0

    @property
    def computing(self) -> int:
        """Bytes on the device on which it computes."""
        return self.weights + self.tables + self.gradients + self.inner + self._sum("step")

    @property
    def training(self) -> int:
        """Bytes while an exchange is in progress."""
        return self.computing + self._sum("always") + self._sum("pinned") + self._sum("exchange")

    @property
    def peak(self) -> int:
        """The most bytes: while training with an exchange in progress, or at the end, without gradients."""
        return self.training - self.gradients + max(self.gradients, self._sum("end"))

    def _sum(self, when: str) -> int:
        return sum(held.nbytes for held in self.held if held.when == when)

"""What a step still lacks, once everybody's ledger lie open: who runs which microbatch where, who takes which back.

A book is the set of the microbatches that a peer has counted, that is, added to its gradients. The step is right when
every microbatch is counted once at every stage. Pure functions of the ledger: the same everywhere. Loads no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class PartialRoute(NamedTuple):
    """`microbatch` runs through `visits`, peers of the stages from `first` on, which lack it. feed: who counted it at
    the stage before, and sends again what it sent then; None: the first visit has the text. sink: who counted it at the
    stage behind, and sends the gradient that it had; None: the last visit makes the loss.
    """

    microbatch: int
    first: int
    visits: tuple[int, ...]
    feed: int | None
    sink: int | None

    def after(self, peer: int) -> int | None:
        """Who gets what `peer` makes of the microbatch."""
        chain = (*(() if self.feed is None else (self.feed,)), *self.visits, self.sink)
        return chain[chain.index(peer) + 1] if peer in chain[:-1] else None


class RepairPlan(NamedTuple):
    """runs: in the order of microbatches. doubles: (microbatch, peer) that takes back what it has counted."""

    runs: tuple[PartialRoute, ...]
    doubles: tuple[tuple[int, int], ...]

    @property
    def none(self) -> bool:
        """Whether every microbatch is counted once at every stage."""
        return not (self.runs or self.doubles)


def plan_repairs(
    ledger: Mapping[int, Collection[int]], stages: Sequence[Sequence[int]], microbatches: int
) -> RepairPlan:
    """What is to be done about `microbatches` of a step. ledger: by peer, of all who are left. stages: the peers of
    each stage that are left, sorted. Where several have counted one, the lowest keeps it. What is lacking is shared out
    evenly. LookupError, naming the stage, where one has no peer.
    """
    for stage, peers in enumerate(stages):
        if not peers:
            raise LookupError(f"stage {stage} has no peer left")
    runs: list[PartialRoute] = []
    doubles: list[tuple[int, int]] = []
    assigned: Counter[int] = Counter()
    for microbatch in range(microbatches):
        holders = [[peer for peer in peers if microbatch in ledger[peer]] for peers in stages]
        doubles += [(microbatch, peer) for held in holders for peer in held[1:]]
        stage = 0
        while stage < len(stages):
            if holders[stage]:
                stage += 1
                continue
            end = stage
            while end < len(stages) and not holders[end]:
                end += 1
            visits = tuple(min(stages[at], key=lambda peer: (assigned[peer], peer)) for at in range(stage, end))
            assigned.update(visits)
            feed = holders[stage - 1][0] if stage else None
            sink = holders[end][0] if end < len(stages) else None
            runs.append(PartialRoute(microbatch, stage, visits, feed, sink))
            stage = end
    return RepairPlan(tuple(runs), tuple(doubles))


def lacking(ledger: Mapping[int, Collection[int]], stages: Sequence[Sequence[int]], microbatches: int) -> list[int]:
    """The microbatches that nobody who is left has counted at one stage or more. LookupError as `plan_repairs`."""
    found = set()
    for stage, peers in enumerate(stages):
        if not peers:
            raise LookupError(f"stage {stage} has no peer left")
        counted = {microbatch for peer in peers for microbatch in ledger[peer]}
        found |= set(range(microbatches)) - counted
    return sorted(found)


def words_for(count: int) -> int:
    """How many numbers hold which of `count` things are meant."""
    return -(-count // 63)


def as_words(chosen: Collection[int], count: int) -> list[int]:
    """Which of 0 .. count - 1, such as a book, as numbers of 63 bits."""
    words = [0] * words_for(count)
    for number in chosen:
        words[number // 63] |= 1 << number % 63
    return words


def from_words(words: Sequence[int], count: int) -> set[int]:
    """The set that `as_words` packed, of numbers below `count`."""
    found = set()
    for place, word in enumerate(words):
        word &= (1 << 63) - 1  # a stranger's may be below 0, and have no last bit
        while word:
            lowest = word & -word
            found.add(63 * place + lowest.bit_length() - 1)
            word ^= lowest
    return {number for number in found if number < count}

"""The repair of a step once every peer's ledger is known: which peer runs or subtracts which microbatch.

A ledger is the set of microbatches that a peer has counted, that is, added to its gradients. A step is complete when
every microbatch is counted once at every stage. Pure functions of the ledgers: equal at all peers. Loads no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class PartialRoute(NamedTuple):
    """`microbatch` runs through `visits`, peers of the stages from `first` on, which lack it. feed: the peer that
    counted it at the stage before, and sends its output again; None: the first visit reads the text. sink: the peer
    that counted it at the stage after, and sends its gradient again; None: the last visit computes the loss.
    """

    microbatch: int
    first: int
    visits: tuple[int, ...]
    feed: int | None
    sink: int | None

    def after(self, peer: int) -> int | None:
        """The receiver of the output of `peer`; None if it has none."""
        chain = (*(() if self.feed is None else (self.feed,)), *self.visits, self.sink)
        return chain[chain.index(peer) + 1] if peer in chain[:-1] else None


class RepairPlan(NamedTuple):
    """runs: in the order of microbatches. doubles: (microbatch, peer that subtracts it, as another one counts it)."""

    runs: tuple[PartialRoute, ...]
    doubles: tuple[tuple[int, int], ...]

    @property
    def none(self) -> bool:
        """Whether every microbatch is counted once at every stage."""
        return not (self.runs or self.doubles)


def plan_repairs(
    ledger: Mapping[int, Collection[int]], stages: Sequence[Sequence[int]], microbatches: int
) -> RepairPlan:
    """Plan the repair of a step of `microbatches`. ledger: the ledger of each remaining peer. stages: the remaining
    peers of each stage, sorted. If several peers have counted a microbatch, all but the lowest subtract it. Missing
    ones are shared out evenly. LookupError, naming the stage, if one has no peer.
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
    """Microbatches that no remaining peer has counted, at one stage or more. LookupError as in `plan_repairs`."""
    found = set()
    for stage, peers in enumerate(stages):
        if not peers:
            raise LookupError(f"stage {stage} has no peer left")
        counted = {microbatch for peer in peers for microbatch in ledger[peer]}
        found |= set(range(microbatches)) - counted
    return sorted(found)


def words_for(count: int) -> int:
    """Number of 63-bit integers that hold a subset of `count` items."""
    return -(-count // 63)


def as_words(chosen: Collection[int], count: int) -> list[int]:
    """Encode a subset of 0 .. count - 1, such as a ledger, as 63-bit integers."""
    words = [0] * words_for(count)
    for number in chosen:
        words[number // 63] |= 1 << number % 63
    return words


def from_words(words: Sequence[int], count: int) -> set[int]:
    """The set that `as_words` packed, of numbers below `count`."""
    found = set()
    for place, word in enumerate(words):
        word &= (1 << 63) - 1  # a malformed message may hold a negative number, for which the loop would not end
        while word:
            lowest = word & -word
            found.add(63 * place + lowest.bit_length() - 1)
            word ^= lowest
    return {number for number in found if number < count}

"""Which clusters are whole, agreed on by all who are left, and whether what they did together counts.

All swap one word each, as often as it takes, in step:

    gathering    known losses          again, until all know of the same ones
    then the work is tried             over the clusters that are whole
    done | failed                      all done: it counts. Else from the top, with fresh memory and fresh addresses

Guarantee. Whoever loses a node, before, during or after the work, the others come to the same clusters and either all
count what was done or none does. One more loss while the verdict itself travels can part them if the lost node was the
only one to whom the first loss showed; then a deadline, or a header, ends the run by name. A worker that is late and
not lost (DeadlinePassed) ends it too: it may come back, so nobody goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from isles.comm.collectives.basic import exchange
from isles.comm.errors import PeerLost
from isles.comm.group import Group

T = TypeVar("T")
_GATHERING, _DONE, _FAILED = range(3)
_MOST = 62  # clusters: their losses are bits of a word


class _Word(NamedTuple):
    state: int
    lost: int


class Quorum:
    """Over `world`, whose positions `clusters` names, each once."""

    def __init__(self, world: Group, clusters: Sequence[Sequence[int]]) -> None:
        if len(clusters) > _MOST:
            raise ValueError(f"{len(clusters)} clusters: {_MOST} at most")
        self.world, self.clusters = world, [tuple(cluster) for cluster in clusters]
        self._of = {position: number for number, cluster in enumerate(self.clusters) for position in cluster}
        self._lost = 0
        self._swaps = 0

    @property
    def whole(self) -> list[int]:
        """The clusters that are, by number."""
        return [number for number in range(len(self.clusters)) if not self._lost >> number & 1]

    @property
    def positions(self) -> list[int]:
        """Of all who are left."""
        return sorted(position for number in self.whole for position in self.clusters[number])

    def together(self, work: Callable[[int], T]) -> T:
        """The result of `work` once it has been done by all clusters that are whole. It is told a number that no other
        try has, the same everywhere, and may be called again where a node is lost meanwhile: it must leave nothing
        behind. DeadlinePassed where somebody is late.
        """
        if self.world.size == 1:
            return work(0)
        while True:
            word = _Word(_GATHERING, self._lost)
            while any(answer != word for answer in self._swap(word)) or word.lost != self._lost:
                word = _Word(_GATHERING, self._lost)
            try:
                result, state = work(self._swaps), _DONE
            except PeerLost:
                result, state = None, _FAILED
            answers = self._swap(_Word(state, self._lost))
            if state == _DONE and all(answer.state == _DONE for answer in answers):
                return result  # type: ignore[return-value]

    def _swap(self, word: _Word) -> list[_Word]:
        """What all who are left say. Who is lost, and what others know of losses, is noted."""
        self._swaps += 1
        words, world = torch.tensor(word), self.world
        here = self._of[world.rank]
        others = [position for position in self.positions if position != world.rank]
        calls = {other: world.start(exchange(world.call("outer"), other, words), "outer") for other in others}
        answers = []
        for other, call in calls.items():
            try:
                answer = _Word(*call.wait().tolist())
            except PeerLost:
                if self._of[other] == here:
                    raise
                self._lost |= 1 << self._of[other]
                continue
            answers.append(answer)
            self._lost |= answer.lost
        if self._lost >> here & 1:
            raise PeerLost(-1, "a node of this cluster, as the others say")
        return answers

"""Which clusters are whole, agreed on by all who are left, and whether what they did together counts.

All swap one word each, as often as it takes, in step:

    gathering    known losses          again, until all know of the same ones
    then the work is tried             over the clusters that are whole; whoever hears meanwhile that somebody does not
                                       take part, or hears no more of somebody, gives up
    done | failed                      all done: it counts. Else from the top, with fresh memory and fresh addresses

Guarantee. Whoever loses a node, before, during or after the work, the others come to the same clusters and either all
count what was done or none does. One more loss while the verdict itself travels can part them if the lost node was the
only one to whom the first loss showed; then a deadline, or a header, ends the run by name. A worker that is late and
not lost (DeadlinePassed) ends it too: it may come back, so nobody goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from isles.comm.collectives.basic import all_done
from isles.comm.errors import PeerLost
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import AnyOf, Steps, Work, awaited

T = TypeVar("T")
WORDS = MAX_FRAGMENTS - 1
"""The fragment of channel "outer" under which words travel; what is done together takes others."""
_GATHERING, _DONE, _FAILED = range(3)
_MOST = 62  # clusters: their losses are bits of a word


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What is tried: protocols that run side by side, after which `result` is what it should be. nbytes: that this
    worker sends.
    """

    result: T
    protocols: Sequence[Steps[Any]]
    nbytes: int


class _Word(NamedTuple):
    state: int
    lost: int


WORD_BYTES = 8 * len(_Word._fields)
"""That each swap sends to each other worker; where nobody is lost there are two."""


class Quorum:
    """Over `world`, whose positions `clusters` names, each once."""

    def __init__(self, world: Group, clusters: Sequence[Sequence[int]]) -> None:
        if len(clusters) > _MOST:
            raise ValueError(f"{len(clusters)} clusters: {_MOST} at most")
        self.world, self.clusters = world, [tuple(cluster) for cluster in clusters]
        self._of = {position: number for number, cluster in enumerate(self.clusters) for position in cluster}
        self._lost = 0
        self._swaps = 0
        self._coming: dict[int, tuple[Work, Tensor]] = {}
        """The others' next words, by position."""

    @property
    def whole(self) -> list[int]:
        """The clusters that are, by number."""
        return [number for number in range(len(self.clusters)) if not self._lost >> number & 1]

    @property
    def positions(self) -> list[int]:
        """Of all who are left."""
        return sorted(position for number in self.whole for position in self.clusters[number])

    def together(self, attempt: Callable[[int], Attempt[T]]) -> T:
        """The result of `attempt` once it has been made by all clusters that are whole. It is told a number that no
        other one has, the same everywhere, and may be called again where a node is lost meanwhile: it must leave
        nothing behind. DeadlinePassed where somebody is late.
        """
        while True:
            word = _Word(_GATHERING, self._lost)
            while any(answer != word for answer in self._swap(word)) or word.lost != self._lost:
                word = _Word(_GATHERING, self._lost)
            self._listen()
            made = attempt(self._swaps)
            try:
                guarded = self._guarded(made.protocols)
                finished = self.world.start(guarded, "outer", nbytes=made.nbytes).wait()
            except PeerLost:
                finished = False
            answers = self._swap(_Word(_DONE if finished else _FAILED, self._lost))
            if finished and all(answer.state == _DONE for answer in answers):
                return made.result

    def _listen(self) -> None:
        """Post receives of the others' next words."""
        call = self.world.call("outer", round=self._swaps + 1, fragment=WORDS)
        for other in self.positions:
            if other != self.world.rank and other not in self._coming:
                word = torch.zeros(len(_Word._fields), dtype=torch.int64)
                self._coming[other] = call.recv(other, word), word

    def _swap(self, word: _Word) -> list[_Word]:
        """What all who are left say. Who is lost, and what others know of losses, is noted."""
        self._listen()
        self._swaps += 1
        coming, self._coming = self._coming, {}
        call, here = self.world.call("outer", round=self._swaps, fragment=WORDS), self._of[self.world.rank]
        words = torch.tensor(word)
        waits = {
            other: self.world.start(all_done([work, call.send(other, words)]), "outer")
            for other, (work, _) in coming.items()
        }
        answers = []
        for other, wait in waits.items():
            try:
                wait.wait()
            except PeerLost:
                if self._of[other] == here:
                    raise
                self._lost |= 1 << self._of[other]
                continue
            answer = _Word(*coming[other][1].tolist())
            answers.append(answer)
            self._lost |= answer.lost
        if self._lost >> here & 1:
            raise PeerLost(-1, "a node of this cluster, as the others say")
        return answers

    def _guarded(self, protocols: Sequence[Steps[Any]]) -> Steps[bool]:
        """Run them side by side; False, and they are given up, once a word says that its sender has not done its."""
        running = {protocol: awaited([]) for protocol in protocols}
        words = dict(self._coming)
        try:
            while _advance(running):
                for other, (work, word) in list(words.items()):
                    if work.error is not None:
                        raise work.error
                    if work.done():
                        if int(word[0]) != _DONE:
                            return False
                        del words[other]
                waited = [work for works, _ in running.values() for work in works if not work.done()]
                yield AnyOf([*waited, *(work for work, _ in words.values())])
        finally:
            for protocol in running:
                protocol.close()
        return True


def _advance(running: dict[Steps[Any], tuple[Sequence[Work], int]]) -> bool:
    """Step all protocols as far as they go; whether one is left. What a work failed with is raised."""
    for protocol, (works, needed) in list(running.items()):
        while sum(work.done() for work in works) >= needed:
            for work in works:
                if work.error is not None:
                    raise work.error
            try:
                works, needed = running[protocol] = awaited(next(protocol))
            except StopIteration:
                del running[protocol]
                break
    return bool(running)

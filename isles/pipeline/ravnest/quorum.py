"""Which clusters are whole, agreed on by all who are left, and whether what they did together counts.

All swap one word each, those of broken clusters and those who stand by as well, as often as it takes, in step:

    gathering    known losses          again, until all know of the same ones
    then the work is tried             over the clusters that are whole; whoever hears meanwhile that somebody does not
                                       take part, or hears no more of somebody, gives up
    done | failed                      all done: it counts. Else from the top, with fresh memory and fresh addresses

Guarantee. Whoever loses a node, before, during or after the work, the others come to the same clusters and either all
count what was done or none does. One more loss while the verdict itself travels can part them if the lost node was the
only one to whom the first loss showed; then a deadline, or a header, ends the run by name. A worker that is late and
not lost (DeadlinePassed) ends it too: it may come back, so nobody goes on without it. Who serves what changes by what
all have agreed on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from isles.comm.collectives.basic import all_done
from isles.comm.errors import PeerLost
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import AnyOf, Steps, Work, awaited
from isles.pipeline.ravnest.seats import ClusterSeats

T = TypeVar("T")
WORDS = MAX_FRAGMENTS - 1
"""The fragment of channel "outer" under which words travel; what is done together takes others."""
_GATHERING, _DONE, _FAILED = range(3)
_BITS = 62  # of an int64, for as many positions
_IDLE = 100.0  # times as long as others wait for each other those wait who train nothing meanwhile


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What is tried: protocols that run side by side, after which `result` is what it should be. nbytes: that this
    worker sends.
    """

    result: T
    protocols: Sequence[Steps[Any]]
    nbytes: int


def word_bytes(workers: int) -> int:
    """That each swap sends to each other worker, in a world of so many; where nobody is lost there are two."""
    return 8 * (1 + _lost_words(workers))


def _lost_words(workers: int) -> int:
    return -(-workers // _BITS)


@dataclass(frozen=True, slots=True)
class _Word:
    state: int
    lost: frozenset[int]

    def packed(self, workers: int) -> Tensor:
        words = [0] * _lost_words(workers)
        for position in self.lost:
            words[position // _BITS] |= 1 << position % _BITS
        return torch.tensor([self.state, *words], dtype=torch.int64)

    @classmethod
    def unpacked(cls, packed: Tensor) -> _Word:
        state, *words = packed.tolist()
        lost = (number * _BITS + bit for number, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1)
        return cls(state, frozenset(lost))


class Quorum:
    """Over `world`, in whose positions `seats` are told."""

    def __init__(self, world: Group, seats: ClusterSeats) -> None:
        self.world, self.seats = world, seats
        """`seats`: as all have agreed on."""
        self._lost: set[int] = set()
        self._swaps = 0
        self._coming: dict[int, tuple[Work, Tensor]] = {}
        """The others' next words, by position."""

    @property
    def trains(self) -> bool:
        """Whether this worker's cluster is whole."""
        return self.seats.trains(self.world.rank)

    def mend(self) -> bool:
        """Who stands by takes places of the lost; whether clusters want the others' weights now. All ask together."""
        self.seats = self.seats.mended()
        return bool(self.seats.complete)

    def settle(self) -> None:
        """Agree on who is left; all ask together."""
        self.together(lambda number: Attempt(None, (), 0))

    def miss(self, rank: int) -> None:
        """The worker of that rank (-1: of somebody) is lost, as this one has heard."""
        if rank in self.world.ranks:
            self._lost.add(self.world.ranks.index(rank))

    def together(self, attempt: Callable[[int], Attempt[T]]) -> T:
        """The result of `attempt` once all who are left have made it. It is told a number that no other one has, the
        same everywhere, and may be called again where a node is lost meanwhile: it must leave nothing behind, and go by
        `seats`, on which all have agreed then. DeadlinePassed where somebody is late, PeerLost where no cluster is
        whole.
        """
        while True:
            word = _Word(_GATHERING, frozenset(self._lost))
            while any(answer != word for answer in self._swap(word)) or word.lost != self._lost:
                word = _Word(_GATHERING, frozenset(self._lost))
            self.seats = self.seats.without(word.lost - self.seats.lost)
            if not self.seats.whole:
                raise PeerLost(-1, "a node of the last cluster that was whole")
            self._listen()
            made = attempt(self._swaps)
            try:
                guarded = self._guarded(made.protocols)
                finished = self.world.start(guarded, "outer", nbytes=made.nbytes).wait()
            except PeerLost:
                finished = False
            answers = self._swap(_Word(_DONE if finished else _FAILED, frozenset(self._lost)))
            if finished and all(answer.state == _DONE for answer in answers):
                return made.result

    def _listen(self) -> None:
        """Post receives of the others' next words."""
        call = self.world.call("outer", round=self._swaps + 1, fragment=WORDS)
        for other in self.seats.living:
            if other != self.world.rank and other not in self._coming and other not in self._lost:
                word = torch.zeros(1 + _lost_words(self.world.size), dtype=torch.int64)
                self._coming[other] = call.recv(other, word), word

    def _swap(self, word: _Word) -> list[_Word]:
        """What all who are left say. Who is lost, and what others know of losses, is noted."""
        self._listen()
        self._swaps += 1
        coming, self._coming = self._coming, {}
        call = self.world.call("outer", round=self._swaps, fragment=WORDS)
        words, patience = word.packed(self.world.size), None
        if not self.trains:
            patience = _IDLE * self.world.deadlines.outer
        waits = {
            other: self.world.start(all_done([work, call.send(other, words)]), "outer", patience)
            for other, (work, _) in coming.items()
        }
        answers = []
        for other, wait in waits.items():
            try:
                wait.wait()
            except PeerLost:
                self._lost.add(other)
                continue
            answer = _Word.unpacked(coming[other][1])
            answers.append(answer)
            self._lost |= answer.lost
        if self.world.rank in self._lost:
            raise PeerLost(-1, "this one, as the others say")
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
                if not any(map(_goes_on, running.values())):  # none was done since, which would be waited for in vain
                    yield AnyOf([*waited, *(work for work, _ in words.values())])
        finally:
            for protocol in running:
                protocol.close()
        return True


def _goes_on(waiting: tuple[Sequence[Work], int]) -> bool:
    works, needed = waiting
    return sum(work.done() for work in works) >= needed


def _advance(running: dict[Steps[Any], tuple[Sequence[Work], int]]) -> bool:
    """Step all protocols as far as they go; whether one is left. What a work failed with is raised."""
    for protocol, (works, needed) in list(running.items()):
        while _goes_on((works, needed)):
            for work in works:
                if work.error is not None:
                    raise work.error
            try:
                works, needed = running[protocol] = awaited(next(protocol))
            except StopIteration:
                del running[protocol]
                break
    return bool(running)

"""Which clusters are whole, agreed on by all who are left, and whether what they did together counts.

All swap one word each, those of broken clusters and those who stand by as well, as often as it takes, in step:

    gathering    known losses          again, until all know of the same ones (and who comes, and leaves)
    then the work is tried             over the clusters that are whole; whoever hears meanwhile that somebody does not
                                       take part, or hears no more of somebody, gives up
    done | failed                      all done: it counts. Else from the top, with fresh memory and fresh addresses

Guarantee. Whoever loses a node, before, during or after the work, the others come to the same clusters and either all
count what was done or none does. One more loss while the verdict itself travels can part them if the lost node was the
only one to whom the first loss showed; then a deadline, or a header, ends the run by name. A worker that is late and
not lost (DeadlinePassed) ends it too: it may come back, so nobody goes on without it. Who serves what changes by what
all have agreed on alone.

Where nodes come and leave, words carry that as they carry losses: what one has heard all know when the work begins. Who
came is one of them from the next time on (`admit`), and swaps no word before.

What nodes of clusters say when they agree: one word each, of a length that all know.

state | who is lost                                        a world of fixed size
state | who is lost | who leaves | ROWS x who came, told   where nodes come and leave; what a comer tells of itself:
                                                           `isles.network.clusters.telling`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from isles.comm.collectives.basic import all_done
from isles.comm.errors import Malformed, PeerLost
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import AnyOf, Steps, Work, awaited
from isles.network.clusters.growing import ClusterGrowth
from isles.network.clusters.telling import is_told
from isles.pipeline.ravnest.seats import ClusterSeats

GATHERING, DONE, FAILED = range(3)
ROWS = 32
"""Nodes that can come at one average; others do at the next."""
_BITS = 62  # of an int64, for as many positions


@dataclass(frozen=True, slots=True)
class QuorumWord:
    """told: of those who have come, by position; `ROWS` at most."""

    state: int
    lost: frozenset[int]
    leaving: frozenset[int] = frozenset()
    told: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WordForm:
    """In a world of so many positions. is_open: nodes come and leave."""

    workers: int
    is_open: bool = False

    @property
    def numbers(self) -> int:
        """Of 8 bytes each, in a word."""
        return 1 + (2 * self._sets + 2 * ROWS if self.is_open else self._sets)

    @property
    def _sets(self) -> int:
        return -(-self.workers // _BITS)

    def packed(self, word: QuorumWord) -> Tensor:
        """Int64 (numbers,)."""
        numbers = [word.state, *self._bits(word.lost)]
        if self.is_open:
            rows = [number for position, told in sorted(word.told.items()) for number in (position, told)]
            numbers += [*self._bits(word.leaving), *rows, *[0] * (2 * ROWS - len(rows))]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def unpacked(self, rank: int, packed: Tensor) -> QuorumWord:
        """The word of worker `rank`. Malformed, naming it, for what is none."""
        state, *numbers = packed.tolist()
        lost, leaving, rows = numbers[: self._sets], numbers[self._sets : 2 * self._sets], numbers[2 * self._sets :]
        told = {position: number for position, number in zip(rows[::2], rows[1::2], strict=True) if number}
        word = QuorumWord(state, self._positions(lost), self._positions(leaving), told)
        within = all(0 <= position < self.workers for position in (*word.lost, *word.leaving, *told))
        if state not in (GATHERING, DONE, FAILED) or not within or not all(map(is_told, told.values())):
            raise Malformed(rank, "a word that is none of this agreement")
        return word

    def _bits(self, positions: Iterable[int]) -> list[int]:
        words = [0] * self._sets
        for position in positions:
            words[position // _BITS] |= 1 << position % _BITS
        return words

    def _positions(self, words: Sequence[int]) -> frozenset[int]:
        return frozenset(
            number * _BITS + bit for number, word in enumerate(words) if word for bit in range(64) if word >> bit & 1
        )


T = TypeVar("T")
WORDS = MAX_FRAGMENTS - 1
"""The fragment of channel "outer" under which words travel; what is done together takes others."""
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
    """That each swap sends to each other worker, in a world of fixed size; where nobody is lost there are two."""
    return 8 * WordForm(workers).numbers


class Quorum:
    """Over `world`, in whose positions `seats` are told. growth: how new clusters are made of those who come; None:
    nobody comes or leaves.
    """

    def __init__(self, world: Group, seats: ClusterSeats, growth: ClusterGrowth | None = None) -> None:
        self.world, self.seats, self.growth = world, seats, growth
        """`seats`: as all have agreed on."""
        self._form = WordForm(world.size, is_open=growth is not None)
        self._lost: set[int] = set()
        self._leaving: set[int] = set()
        self._told: dict[int, int] = {}
        self._agreed = QuorumWord(GATHERING, frozenset())
        self._coming: dict[int, tuple[Work, Tensor]] = {}
        """The others' next words, by position."""
        self.refused: Counter[int] = Counter()
        """Words that could not be, by position."""
        self.most = 1 << 30
        """Clusters at most."""
        self.swaps = 0
        """So far, the same everywhere."""

    @property
    def trains(self) -> bool:
        """Whether this worker's cluster is whole."""
        return self.seats.trains(self.world.rank)

    @property
    def is_gone(self) -> bool:
        """Whether this worker has left."""
        return self.world.rank in self.seats.lost

    def mend(self) -> bool:
        """Who stands by takes places of the lost and of those who leave, and makes new clusters; whether there is
        something to load or to arrange now. All ask together.
        """
        before = self.seats
        self.seats = before.mended(None if self.growth is None else replace(self.growth, most=self.most))
        return bool(self.seats.complete or self.seats.handed) or self.seats.clusters != before.clusters

    def meet(self, position: int, told: int) -> None:
        """Somebody has come, as this one has heard."""
        self._told[position] = max(told, self._told.get(position, 0))

    def leave(self) -> None:
        """This worker wants to go."""
        self._leaving.add(self.world.rank)

    def admit(self) -> list[int]:
        """All who came, as was agreed on when they were last together, stand by from now on: who they are. Who wants
        to leave may. All ask together.
        """
        before = self.seats
        self.seats = before.met(self._agreed.told, self._agreed.leaving)
        return [position for position in self.seats.waiting if position not in before.waiting]

    def enter(self, swaps: int, seats: ClusterSeats) -> None:
        """Be one of those who swap from now on, as they have told."""
        self.swaps, self.seats = swaps, seats

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
            word = self._gather()
            self.seats = self.seats.without(word.lost - self.seats.lost)
            if not self.seats.whole:
                raise PeerLost(-1, "a node of the last cluster that was whole")
            self._listen()
            made = attempt(self.swaps)
            try:
                guarded = self._guarded(made.protocols)
                finished = self.world.start(guarded, "outer", nbytes=made.nbytes).wait()
            except PeerLost:
                finished = False
            answers = self._swap(self._word(DONE if finished else FAILED))
            if finished and all(answer.state == DONE for answer in answers):
                self._agreed = word
                return made.result

    def _gather(self) -> QuorumWord:
        """What all who are left know, once that is the same."""
        while True:
            word = self._word(GATHERING)
            if all(answer == word for answer in self._swap(word)) and word == self._word(GATHERING):
                return word

    def _word(self, state: int) -> QuorumWord:
        if self.growth is None:
            return QuorumWord(state, frozenset(self._lost))
        known = {*self.seats.living, *self.seats.lost}
        told = {position: self._told[position] for position in sorted(self._told.keys() - known)[:ROWS]}
        return QuorumWord(state, frozenset(self._lost), frozenset(self._leaving), told)

    def _listen(self) -> None:
        """Post receives of the others' next words."""
        call = self.world.call("outer", round=self.swaps + 1, fragment=WORDS)
        for other in self.seats.living:
            if other != self.world.rank and other not in self._coming and other not in self._lost:
                word = torch.zeros(self._form.numbers, dtype=torch.int64, device="cpu")
                self._coming[other] = call.recv(other, word), word

    def _swap(self, word: QuorumWord) -> list[QuorumWord]:
        """What all who are left say. Who is lost, and what others know of losses, is noted."""
        self._listen()
        self.swaps += 1
        coming, self._coming = self._coming, {}
        call = self.world.call("outer", round=self.swaps, fragment=WORDS)
        words, patience = self._form.packed(word), None
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
                answer = self._form.unpacked(self.world.ranks[other], coming[other][1])
            except (PeerLost, Malformed) as error:
                self._lost.add(other)
                if isinstance(error, Malformed):
                    self.refused[other] += 1
                continue
            answers.append(answer)
            self._lost |= answer.lost
            self._leaving |= answer.leaving
            for position, told in answer.told.items():
                self.meet(position, told)
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
                    if work.done():
                        if work.error is not None or int(word[0]) != DONE:
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

"""Which clusters are whole, agreed on by all who are left, and whether what they did together counts.

All take part, those of broken clusters and those who stand by as well, as often as it takes:

    agree      who is left, who leaves, who has come: all know of the same clusters
    then the work is tried over those that are whole, by letters of this turn; whoever hears that somebody is lost, or
               agrees already, has failed
    agree      done | failed      all done: it counts. Else from the top

Guarantee, that of `isles.pipeline.peers.agreement`: whoever is lost, as many as there are and at any moment, all who
are left come to the same clusters, and either all of them count what was done or none does. A worker that is late and
not lost (DeadlinePassed) ends the run by name: it may come back, so nobody goes on without it. Who serves what changes
by what all have agreed on alone. Who has come is one of them from the next time on (`admit`).

    word     of a world of fixed size: nothing but who is lost. Where nodes come and leave: leaves | `COMERS` x (who
             came, what it tells of itself, see `isles.network.clusters.nodes`)

How a node comes to clusters that are at work, as `isles.pipeline.peers.join` has it.

asks with     what it offers (`isles.network.clusters.nodes`)
is told       `ClusterWelcome`, right after the average at which all agreed that it has come
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from isles.base.parsing import Int, Str, read_json
from isles.comm.collectives.message_queue import Mail, MailLetter, MailNote
from isles.comm.errors import Malformed, PeerLost
from isles.comm.group import Group, numbers
from isles.comm.transport import Steps, Transfer
from isles.network.clusters.formation import ClusterGrowth
from isles.network.clusters.nodes import is_told
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import ASK, COMERS, OUTER, WELCOME, WORD, Post
from isles.pipeline.peers.join import ask
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.swarm.ledger import words_for

_IDLE = 100.0  # times as long as others wait for each other those wait who train nothing meanwhile
_LONGEST = 1 << 20  # bytes of a welcome
_FIGURES = 1 + 2 * COMERS
T = TypeVar("T")


def cluster_post(world: Group, run: int, largest: int, met: Sequence[int] | None = None) -> Post:
    """The letters between all positions of `world`, also of nodes that are not here yet.

    run: a number that all nodes of this run share and others do not. largest: bytes of a message of what is done
    together. met: positions that this node listens to from the start; None: all others.
    """
    words = 8 * world.size * (1 + words_for(world.size) + _FIGURES)
    lengths = {
        WORD: range(0, words + 1, 8),
        OUTER: range(largest + 1),
        ASK: range(8, 9),
        WELCOME: range(2, _LONGEST),
    }
    group = world.among(range(world.size), "inner")  # which nodes of clusters use for nothing else
    return Post(Mail(group, run=run, lengths=lengths, met=met))


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What is tried: protocols that run side by side, after which `result` is what it should be. nbytes: that this
    worker sends.
    """

    result: T
    protocols: Sequence[Steps[Any]]
    nbytes: int


class ClusterAgreement:
    """Over `world`, in whose positions `seats` are told, by `post` of all of these. growth: how new clusters are made
    of those who come; None: nobody comes or leaves.
    """

    def __init__(self, post: Post, world: Group, seats: ClusterAssignment, growth: ClusterGrowth | None = None) -> None:
        self.post, self.world, self.seats, self.growth = post, world, seats, growth
        """`seats`: as all have agreed on."""
        self._own = Agreement(post, world.deadlines.outer, (), "outer")
        self._own.let_in(seats.living)
        self.letters = replace(world, transport=self._own.letters, channel="outer")
        """`world`, for what is done together."""
        self.most = 1 << 30
        """Clusters at most."""
        self._leaves = self._stands = False
        self._met: dict[int, int] = {}
        self._leaving: Collection[int] = ()
        self._told: dict[int, int] = {}
        if growth is not None:
            post.answers[ASK] = self._hear

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
        self._take(before.mended(None if self.growth is None else replace(self.growth, most=self.most)))
        return bool(self.seats.complete or self.seats.handed) or self.seats.clusters != before.clusters

    def join(self, clusters: Collection[int]) -> None:
        """Those have the others' weights, and who had to give its state has done so. All say so together."""
        self._take(self.seats.joined(clusters))

    def leave(self) -> None:
        """This worker wants to go."""
        self._leaves = True

    def admit(self) -> list[int]:
        """All who came, as was agreed on when they were last together, stand by from now on: who they are. Who wants
        to leave may. All ask together.
        """
        self._count_out()  # who was lost since all agreed on who is left: who comes is told of the same ones
        before = self.seats
        self.seats = before.met(self._told, self._leaving)
        comers = [position for position in self.seats.waiting if position not in before.waiting]
        self._own.let_in(comers)
        return comers

    def miss(self, rank: int) -> None:
        """The worker of that rank (-1: of somebody of this one's cluster) is lost, as this one has heard."""
        if rank in self.world.ranks:
            self.post.mail.give_up(self.world.ranks.index(rank), PeerLost(rank, "it was missed"))
        self._stands = self._stands or rank < 0

    def settle(self) -> None:
        """Agree on who is left; all ask together. PeerLost where no cluster is whole."""
        own = [] if self.growth is None else [int(self._leaves), *self._comers()]
        while not self._fit(said := self._agree(own), self._is_word):
            pass
        self._count_out()
        self._stands = False
        if self.growth is not None:
            self._leaving = [position for position, word in said.items() if word[0]]
            self._told = dict(sorted(row for word in said.values() for row in _rows(word)))

    def together(self, attempt: Callable[[], Attempt[T]]) -> T:
        """The result of `attempt` once all who are left have made it. It may be called again where a node is lost
        meanwhile: it must leave nothing behind, go by `seats`, on which all have agreed then, and send by `letters`.
        DeadlinePassed where somebody is late, PeerLost where no cluster is whole.
        """
        while True:
            self.settle()
            made = attempt()
            runs = [self.letters.start(protocol, "outer", nbytes=made.nbytes) for protocol in made.protocols]
            held = [_holds(transfer) for transfer in runs]  # each is waited for: others may still need it
            said = self._agree([int(all(held))])
            if self._fit(said, lambda word: word in ((0,), (1,))) and all(word[0] for word in said.values()):
                return made.result

    def drain(self) -> None:
        """Take in what is still to come of the last agreement, so that a checkpoint finds nothing under way."""
        self._own.drain()

    def _agree(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        place, lost = self.seats.place(self.world.rank), self._own.lost
        idles = not self.trains or self._stands or place is None or not lost.isdisjoint(self.seats.clusters[place[0]])
        self._own.patience = self.world.deadlines.outer * (_IDLE if idles else 1.0)
        return self._own.agree(own)

    def _fit(self, said: Mapping[int, tuple[int, ...]], can_be: Callable[[tuple[int, ...]], bool]) -> bool:
        """Whether all said what can be. Who did not is not read any more: all know of the same."""
        odd = [position for position, word in said.items() if not can_be(word)]
        for position in odd:
            self.post.mail.refuse(position, Malformed(self.world.ranks[position], "a word that cannot be"))
        return not odd

    def _is_word(self, word: tuple[int, ...]) -> bool:
        can_be = (0 <= position < self.world.size and is_told(told) for position, told in _rows(word))
        return all(can_be) and all(leaves in (0, 1) for leaves in word[:1])

    def _comers(self) -> list[int]:
        """Who has come by now, as this one has heard, and is none of them yet."""
        self.post.mail.wait(0.0)
        self.post.sort()
        known = {*self.seats.living, *self.seats.lost}
        rows = [number for one in sorted(self._met.keys() - known)[:COMERS] for number in (one, self._met[one])]
        return rows + [0] * (2 * COMERS - len(rows))

    def _hear(self, letter: MailLetter) -> None:
        told = int(letter.body.view(torch.int64))
        if is_told(told):
            self._met[letter.sender] = told
        else:
            why = Malformed(self.world.ranks[letter.sender], "numbers that no node tells of itself")
            self.post.mail.refuse(letter.sender, why)

    def _count_out(self) -> None:
        self.seats = self.seats.without({*self.seats.living} - {*self._own.members})
        if not self.seats.whole:
            raise PeerLost(-1, "a node of the last cluster that was whole")

    def _take(self, seats: ClusterAssignment) -> None:
        self.seats = seats
        self._own.let_go({*self._own.members} - {*seats.living})


def _rows(word: Sequence[int]) -> list[tuple[int, int]]:
    """Who came, beside what it tells of itself."""
    return [row for row in zip(word[1::2], word[2::2], strict=True) if row != (0, 0)]


def _holds(transfer: Transfer[Any]) -> bool:
    """Waits for it; False where somebody who has part in it is lost, or sent what is no message."""
    try:
        transfer.wait()
    except (PeerLost, Malformed):
        return False
    return True


_Told = tuple[Annotated[Int, Field(ge=0)], Any, dict[Str, Int]]


@dataclass(frozen=True, kw_only=True)
class ClusterWelcome:
    """What a node needs to take part in clusters at work. turn: of agreements so far. facts: of the run, by name."""

    turn: int
    seats: ClusterAssignment
    facts: Mapping[str, int]

    def packed(self) -> Tensor:
        """As bytes (n,) uint8."""
        told = [self.turn, self.seats.to_plain(), dict(self.facts)]
        return torch.frombuffer(bytearray(json.dumps(told).encode("ascii")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, body: Tensor, size: int) -> ClusterWelcome:
        """From `packed`. size: positions of the world. ValueError for what is no welcome there."""
        turn, seats, facts = read_json(_Told, body.numpy().tobytes())
        return cls(turn=turn, seats=ClusterAssignment.of_plain(seats, size), facts=facts)


def let_in(agreement: ClusterAgreement, facts: Mapping[str, int]) -> list[int]:
    """Right after an agreement: welcome those who have come, as all have agreed; their positions."""
    comers, post = agreement.admit(), agreement.post
    body = ClusterWelcome(turn=post.turn, seats=agreement.seats, facts=facts).packed()
    for position in comers:
        post.mail.send(position, MailNote(WELCOME, 0), body)
    return comers


def ask_in(
    post: Post, others: Sequence[int], told: int, gives_up: Callable[[], bool] = lambda: False
) -> ClusterWelcome | None:
    """Tell `others` what this node offers, and wait to be let in; see `isles.pipeline.peers.join.ask`."""
    group = post.mail.group
    welcome = ask(
        post,
        others,
        lambda body: ClusterWelcome.unpacked(body, group.size),
        group.deadlines.outer,
        body=numbers(told).view(torch.uint8),
        gives_up=gives_up,
    )
    if welcome is not None:
        post.turn = welcome.turn
    return welcome

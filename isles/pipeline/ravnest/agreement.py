"""Which clusters are whole, agreed on by all who are left, and whether what they did together counts.

All take part, nodes of broken clusters and on standby as well, as often as it takes:

    agree      who is left, who leaves, who has come: all know the same clusters
    attempt    the whole clusters do the work, by messages of this epoch; a node that learns of a loss, or of the next
               agreement, has failed
    agree      done | failed      all done: it counts. Otherwise from the top

Guarantee, that of `isles.pipeline.peers.agreement`: however many nodes are lost, at any moment, all who are left reach
the same clusters, and either all of them count what was done or none does. A worker that is late and not lost
(DeadlinePassed) ends the run by name: it may come back, so nobody goes on without it. The assignment changes by what
all have agreed on alone. A node that has come is a member from the next time on (`admit`).

    vote     in a world of fixed size: nothing but who is lost. Where nodes come and leave: leaves | `COMERS` x (who
             came, its descriptor, see `isles.network.clusters`)

A node joins as in `isles.pipeline.peers.inbox`: it asks with its descriptor, and gets a `ClusterWelcome` right after
the average at which all agreed that it has come.
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
from isles.comm.collectives.message_queue import MessageHeader, MessageQueue, QueuedMessage
from isles.comm.errors import Malformed, PeerLost
from isles.comm.group import Group, numbers
from isles.comm.transport import Steps, Transfer
from isles.network.clusters import ClusterGrowth, is_encoded_node
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import ASK, COMERS, OUTER, VOTE, WELCOME, PeerInbox, ask
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.swarm.ledger import words_for

_IDLE = 100.0  # times as long as others wait for each other those wait who train nothing meanwhile
_LONGEST = 1 << 20  # bytes of a welcome
_MAX_VALUES = 1 + 2 * COMERS
T = TypeVar("T")


def cluster_inbox(world: Group, run: int, largest: int, met: Sequence[int] | None = None) -> PeerInbox:
    """The messages between all positions of `world`, also of nodes that are not here yet.

    run: a number that all nodes of this run share and others do not. largest: bytes of a message of what is done
    together. met: positions that this node listens to from the start; None: all others.
    """
    fields = 8 * world.size * (1 + words_for(world.size) + _MAX_VALUES)
    lengths = {
        VOTE: range(0, fields + 1, 8),
        OUTER: range(largest + 1),
        ASK: range(8, 9),
        WELCOME: range(2, _LONGEST),
    }
    group = world.among(range(world.size), "inner")  # which nodes of clusters use for nothing else
    return PeerInbox(MessageQueue(group, run=run, lengths=lengths, met=met))


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What is tried: protocols that run side by side, after which `result` is what it should be. nbytes: that this
    worker sends.
    """

    result: T
    protocols: Sequence[Steps[Any]]
    nbytes: int


class ClusterAgreement:
    """Over `world`, in whose positions `assignment` are told, by `inbox` of all of these. growth: how new clusters are
    made of those who come; None: nobody comes or leaves.
    """

    def __init__(
        self, inbox: PeerInbox, world: Group, assignment: ClusterAssignment, growth: ClusterGrowth | None = None
    ) -> None:
        self.inbox, self.world, self.assignment, self.growth = inbox, world, assignment, growth
        """`assignment`: as all have agreed on."""
        self._own = Agreement(inbox, world.deadlines.outer, (), "outer")
        self._own.let_in(assignment.living)
        self.messages = replace(world, transport=self._own.transport, channel="outer")
        """`world`, for what is done together."""
        self.most = 1 << 30
        """Clusters at most."""
        self._leaves = self._stands = False
        self._met: dict[int, int] = {}
        self._leaving: Collection[int] = ()
        self._descriptors: dict[int, int] = {}
        if growth is not None:
            inbox.answers[ASK] = self._on_ask

    @property
    def trains(self) -> bool:
        return self.assignment.trains(self.world.rank)

    @property
    def has_departed(self) -> bool:
        return self.world.rank in self.assignment.lost

    def repair(self) -> bool:
        """Who stands by takes places of the lost and of those who leave, and makes new clusters; whether there is
        something to load or to arrange now. All ask together.
        """
        before = self.assignment
        self._take(before.repaired(None if self.growth is None else replace(self.growth, most=self.most)))
        return (
            bool(self.assignment.complete or self.assignment.handovers) or self.assignment.clusters != before.clusters
        )

    def join(self, clusters: Collection[int]) -> None:
        """Those have the others' weights, and who had to give its state has done so. All say so together."""
        self._take(self.assignment.joined(clusters))

    def leave(self) -> None:
        self._leaves = True

    def admit(self) -> list[int]:
        """All who came, as was agreed on when they were last together, stand by from now on: who they are. Who wants
        to leave may. All ask together.
        """
        self._count_out()  # who was lost since all agreed on who is left: who comes is told of the same ones
        before = self.assignment
        self.assignment = before.met(self._descriptors, self._leaving)
        comers = [position for position in self.assignment.standby if position not in before.standby]
        self._own.let_in(comers)
        return comers

    def miss(self, rank: int) -> None:
        """The worker of that rank (-1: of somebody of this one's cluster) is lost, as this one has heard."""
        if rank in self.world.ranks:
            self.inbox.queue.give_up(self.world.ranks.index(rank), PeerLost(rank, "it was missed"))
        self._stands = self._stands or rank < 0

    def settle(self) -> None:
        """Agree on who is left; all ask together. PeerLost where no cluster is whole."""
        own = [] if self.growth is None else [int(self._leaves), *self._comers()]
        while not self._fit(votes := self._agree(own), self._is_vote):
            pass
        self._count_out()
        self._stands = False
        if self.growth is not None:
            self._leaving = [position for position, vote in votes.items() if vote[0]]
            self._descriptors = dict(sorted(row for vote in votes.values() for row in _rows(vote)))

    def together(self, attempt: Callable[[], Attempt[T]]) -> T:
        """The result of `attempt` once all who are left have made it. It may be called again where a node is lost
        meanwhile: it must leave nothing behind, go by `assignment`, on which all have agreed then, and send by
        `messages`. DeadlinePassed where somebody is late, PeerLost where no cluster is whole.
        """
        while True:
            self.settle()
            made = attempt()
            runs = [self.messages.start(protocol, "outer", nbytes=made.nbytes) for protocol in made.protocols]
            done = [_succeeds(transfer) for transfer in runs]  # each is waited for: others may still need it
            votes = self._agree([int(all(done))])
            if self._fit(votes, lambda vote: vote in ((0,), (1,))) and all(vote[0] for vote in votes.values()):
                return made.result

    def drain(self) -> None:
        """Take in what is still to come of the last agreement, so that a checkpoint finds nothing under way."""
        self._own.drain()

    def _agree(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        coordinates, lost = self.assignment.coordinates_of(self.world.rank), self._own.lost
        idles = (
            not self.trains
            or self._stands
            or coordinates is None
            or not lost.isdisjoint(self.assignment.clusters[coordinates[0]])
        )
        self._own.patience = self.world.deadlines.outer * (_IDLE if idles else 1.0)
        return self._own.agree(own)

    def _fit(self, votes: Mapping[int, tuple[int, ...]], can_be: Callable[[tuple[int, ...]], bool]) -> bool:
        """Whether all said what can be. Who did not is not read any more: all know of the same."""
        odd = [position for position, vote in votes.items() if not can_be(vote)]
        for position in odd:
            self.inbox.queue.refuse(position, Malformed(self.world.ranks[position], "a word that cannot be"))
        return not odd

    def _is_vote(self, vote: tuple[int, ...]) -> bool:
        can_be = (
            0 <= position < self.world.size and is_encoded_node(descriptors) for position, descriptors in _rows(vote)
        )
        return all(can_be) and all(leaves in (0, 1) for leaves in vote[:1])

    def _comers(self) -> list[int]:
        """Who has come by now, as this one has heard, and is none of them yet."""
        self.inbox.queue.wait(0.0)
        self.inbox.sort()
        known = {*self.assignment.living, *self.assignment.lost}
        rows = [number for one in sorted(self._met.keys() - known)[:COMERS] for number in (one, self._met[one])]
        return rows + [0] * (2 * COMERS - len(rows))

    def _on_ask(self, message: QueuedMessage) -> None:
        descriptors = int(message.body.view(torch.int64))
        if is_encoded_node(descriptors):
            self._met[message.sender] = descriptors
        else:
            why = Malformed(self.world.ranks[message.sender], "numbers that no node tells of itself")
            self.inbox.queue.refuse(message.sender, why)

    def _count_out(self) -> None:
        self.assignment = self.assignment.without({*self.assignment.living} - {*self._own.members})
        if not self.assignment.whole:
            raise PeerLost(-1, "a node of the last complete cluster")

    def _take(self, assignment: ClusterAssignment) -> None:
        self.assignment = assignment
        self._own.let_go({*self._own.members} - {*assignment.living})


def _rows(vote: Sequence[int]) -> list[tuple[int, int]]:
    """Who came, beside what it tells of itself."""
    return [row for row in zip(vote[1::2], vote[2::2], strict=True) if row != (0, 0)]


def _succeeds(transfer: Transfer[Any]) -> bool:
    """Waits for it; False where somebody who has part in it is lost, or sent what is no message."""
    try:
        transfer.wait()
    except (PeerLost, Malformed):
        return False
    return True


_Facts = tuple[Annotated[Int, Field(ge=0)], Any, dict[Str, Int]]


@dataclass(frozen=True, kw_only=True)
class ClusterWelcome:
    """What a node needs to take part in clusters at work. epoch: of agreements so far. facts: of the run, by name."""

    epoch: int
    assignment: ClusterAssignment
    facts: Mapping[str, int]

    def packed(self) -> Tensor:
        """As bytes (n,) uint8."""
        descriptors = [self.epoch, self.assignment.to_plain(), dict(self.facts)]
        return torch.frombuffer(bytearray(json.dumps(descriptors).encode("ascii")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, body: Tensor, size: int) -> ClusterWelcome:
        """From `packed`. size: positions of the world. ValueError for what is no welcome there."""
        epoch, assignment, facts = read_json(_Facts, body.numpy().tobytes())
        return cls(epoch=epoch, assignment=ClusterAssignment.of_plain(assignment, size), facts=facts)


def let_in(agreement: ClusterAgreement, facts: Mapping[str, int]) -> list[int]:
    """Right after an agreement: welcome those who have come, as all have agreed; their positions."""
    comers, inbox = agreement.admit(), agreement.inbox
    body = ClusterWelcome(epoch=inbox.epoch, assignment=agreement.assignment, facts=facts).packed()
    for position in comers:
        inbox.queue.send(position, MessageHeader(WELCOME, 0), body)
    return comers


def ask_in(
    inbox: PeerInbox, others: Sequence[int], descriptors: int, gives_up: Callable[[], bool] = lambda: False
) -> ClusterWelcome | None:
    """Tell `others` what this node offers, and wait to be let in; see `isles.pipeline.peers.inbox.ask`."""
    group = inbox.queue.group
    welcome = ask(
        inbox,
        others,
        lambda body: ClusterWelcome.unpacked(body, group.size),
        group.deadlines.outer,
        body=numbers(descriptors).view(torch.uint8),
        gives_up=gives_up,
    )
    if welcome is not None:
        inbox.epoch = welcome.epoch
    return welcome

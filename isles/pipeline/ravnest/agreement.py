"""Agreement of the remaining nodes on which clusters are intact, and on whether a joint operation took effect.

All nodes take part, also those of broken clusters and on standby. Repeat until it succeeds:

    agree      on the remaining, leaving and joining nodes: all have the same assignment
    attempt    intact clusters do the operation, with messages of this epoch; it fails at a node that learns of a loss
               or of the next agreement
    agree      done | failed      if all are done, it takes effect. Otherwise start again

Guarantee, that of `isles.pipeline.peers.agreement`: however many nodes are lost, at any moment, all that remain have
the same assignment, and the operation takes effect at all of them or at none. A worker that is late but not lost
(DeadlinePassed) ends the run with an error that names it: it may come back, so the others cannot go on without it. The
assignment changes only by agreement. A joining node is a member from the next agreement on (`admit`).

    vote     in a world of fixed size: only the lost members. If nodes join and leave: leaves | `MAX_JOINERS` x
             (position of a joining node, its descriptor, see `isles.network.clusters`)

A node joins as in `isles.pipeline.peers.inbox`: it asks with its descriptor, and gets a `ClusterWelcome` right after
the average at which all agreed to admit it.
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
from isles.pipeline.peers.agreement import Agreement, row_bytes
from isles.pipeline.peers.inbox import ASK, MAX_JOINERS, OUTER, VOTE, WELCOME, PeerInbox, ask
from isles.pipeline.ravnest.assignment import ClusterAssignment

_IDLE = 100.0  # nodes that do not train wait this many times the outer deadline: they vote long before the others
_LONGEST = 1 << 20  # most bytes of a welcome
_MAX_VALUES = 1 + 2 * MAX_JOINERS
T = TypeVar("T")


def cluster_inbox(world: Group, run: int, largest: int, met: Sequence[int] | None = None) -> PeerInbox:
    """The inbox for messages between all positions of `world`, including those of nodes that join later.

    run: a number that all nodes of this run share and others do not. largest: most bytes of a message of a joint
    operation. met: positions that this node receives from at the start; None: all others.
    """
    # A vote has a row for each member: a number, the set of members that it counts as lost, and its values.
    vote_bytes = world.size * row_bytes(world.size, _MAX_VALUES)
    lengths = {
        VOTE: range(0, vote_bytes + 1, 8),
        OUTER: range(largest + 1),
        ASK: range(8, 9),
        WELCOME: range(2, _LONGEST),
    }
    group = world.among(range(world.size), "inner")  # a channel that nodes of clusters use for nothing else
    return PeerInbox(MessageQueue(group, run=run, lengths=lengths, met=met))


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """One try of a joint operation: concurrent protocols, after which `result` is valid. nbytes: bytes that this worker
    sends.
    """

    result: T
    protocols: Sequence[Steps[Any]]
    nbytes: int


class ClusterAgreement:
    """Agreement among the nodes of `world`. inbox: messages between its positions. assignment: in positions of `world`.
    growth: how joining nodes form new clusters; None: no node joins or leaves.
    """

    def __init__(
        self, inbox: PeerInbox, world: Group, assignment: ClusterAssignment, growth: ClusterGrowth | None = None
    ) -> None:
        self.inbox, self.world, self.assignment, self.growth = inbox, world, assignment, growth
        """`assignment`: the agreed one, equal at all nodes."""
        self._own = Agreement(inbox, world.deadlines.outer, (), "outer")
        self._own.add_members(assignment.living)
        self.messages = replace(world, transport=self._own.transport, channel="outer")
        """`world` with a transport for joint operations."""
        self.most = 1 << 30
        """The most clusters to form."""
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
        """Replace lost and leaving nodes by standby ones, and form new clusters; returns whether there is a state to
        load or a changed cluster. All call it together.
        """
        before = self.assignment
        self._take(before.repaired(None if self.growth is None else replace(self.growth, most=self.most)))
        return (
            bool(self.assignment.complete or self.assignment.handovers) or self.assignment.clusters != before.clusters
        )

    def join(self, clusters: Collection[int]) -> None:
        """`clusters` have loaded the others' weights, and all handovers are complete. All call it together."""
        self._take(self.assignment.with_loaded(clusters))

    def leave(self) -> None:
        self._leaves = True

    def admit(self) -> list[int]:
        """Admit the agreed joining nodes to standby, and record the leaving ones; returns the admitted positions. All
        call it together.
        """
        self._count_out()  # remove nodes lost since the agreement first: the welcome must hold the same assignment
        before = self.assignment
        self.assignment = before.with_joiners(self._descriptors, self._leaving)
        comers = [position for position in self.assignment.standby if position not in before.standby]
        self._own.add_members(comers)
        return comers

    def miss(self, rank: int) -> None:
        """Record a reported loss. rank: of the lost worker; -1: an unknown one of this node's cluster."""
        if rank in self.world.ranks:
            self.inbox.queue.give_up(self.world.ranks.index(rank), PeerLost(rank, "it was missed"))
        self._stands = self._stands or rank < 0

    def settle(self) -> None:
        """Agree on the remaining nodes; all call it together. PeerLost if no cluster is intact."""
        own = [] if self.growth is None else [int(self._leaves), *self._comers()]
        while not self._fit(votes := self._agree(own), self._is_vote):
            pass
        self._count_out()
        self._stands = False
        if self.growth is not None:
            self._leaving = [position for position, vote in votes.items() if vote[0]]
            self._descriptors = dict(sorted(row for vote in votes.values() for row in _rows(vote)))

    def together(self, attempt: Callable[[], Attempt[T]]) -> T:
        """Run a joint operation until all remaining nodes have completed it; returns its result. `attempt` is called
        again after a loss: it must have no other effects, use the current `assignment`, and send by `messages`.
        DeadlinePassed if a node is late, PeerLost if no cluster is intact.
        """
        while True:
            self.settle()
            made = attempt()
            runs = [self.messages.start(protocol, "outer", nbytes=made.nbytes) for protocol in made.protocols]
            done = [_succeeds(transfer) for transfer in runs]  # wait for each, also after a failure: others may need it
            votes = self._agree([int(all(done))])
            if self._fit(votes, lambda vote: vote in ((0,), (1,))) and all(vote[0] for vote in votes.values()):
                return made.result

    def drain(self) -> None:
        """Receive all messages of the last agreement, so that a checkpoint finds none in flight."""
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
        """Whether all votes are valid. Refuses the senders of the others: all nodes see the same votes and do so."""
        odd = [position for position, vote in votes.items() if not can_be(vote)]
        for position in odd:
            self.inbox.queue.refuse(position, Malformed(self.world.ranks[position], "an invalid vote"))
        return not odd

    def _is_vote(self, vote: tuple[int, ...]) -> bool:
        can_be = (
            0 <= position < self.world.size and is_encoded_node(descriptors) for position, descriptors in _rows(vote)
        )
        return all(can_be) and all(leaves in (0, 1) for leaves in vote[:1])

    def _comers(self) -> list[int]:
        """Nodes that have asked this one to join and are not in the assignment yet, as fields of a vote."""
        self.inbox.queue.wait(0.0)
        self.inbox.sort()
        known = {*self.assignment.living, *self.assignment.lost}
        rows = [number for one in sorted(self._met.keys() - known)[:MAX_JOINERS] for number in (one, self._met[one])]
        return rows + [0] * (2 * MAX_JOINERS - len(rows))

    def _on_ask(self, message: QueuedMessage) -> None:
        descriptors = int(message.body.view(torch.int64))
        if is_encoded_node(descriptors):
            self._met[message.sender] = descriptors
        else:
            why = Malformed(self.world.ranks[message.sender], "an invalid descriptor")
            self.inbox.queue.refuse(message.sender, why)

    def _count_out(self) -> None:
        self.assignment = self.assignment.without({*self.assignment.living} - {*self._own.members})
        if not self.assignment.whole:
            raise PeerLost(-1, "a node of the last intact cluster")

    def _take(self, assignment: ClusterAssignment) -> None:
        self.assignment = assignment
        self._own.remove_members({*self._own.members} - {*assignment.living})


def _rows(vote: Sequence[int]) -> list[tuple[int, int]]:
    """The (position, descriptor) pairs of joining nodes in a vote."""
    return [row for row in zip(vote[1::2], vote[2::2], strict=True) if row != (0, 0)]


def _succeeds(transfer: Transfer[Any]) -> bool:
    """Wait for `transfer`; False if a node of it is lost or has sent an invalid message."""
    try:
        transfer.wait()
    except (PeerLost, Malformed):
        return False
    return True


_Facts = tuple[Annotated[Int, Field(ge=0)], Any, dict[Str, Int]]


@dataclass(frozen=True, kw_only=True)
class ClusterWelcome:
    """What a joining node needs. epoch: number of agreements so far. facts: integers about the run, by name."""

    epoch: int
    assignment: ClusterAssignment
    facts: Mapping[str, int]

    def packed(self) -> Tensor:
        """Encode as (n,) uint8."""
        descriptors = [self.epoch, self.assignment.to_plain(), dict(self.facts)]
        return torch.frombuffer(bytearray(json.dumps(descriptors).encode("ascii")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, body: Tensor, size: int) -> ClusterWelcome:
        """Decode `packed`. size: positions of the world. ValueError if it is no welcome for such a world."""
        epoch, assignment, facts = read_json(_Facts, body.numpy().tobytes())
        return cls(epoch=epoch, assignment=ClusterAssignment.of_plain(assignment, size), facts=facts)


def admit_joiners(agreement: ClusterAgreement, facts: Mapping[str, int]) -> list[int]:
    """Right after an agreement: admit and welcome the agreed joining nodes; returns their positions."""
    comers, inbox = agreement.admit(), agreement.inbox
    body = ClusterWelcome(epoch=inbox.epoch, assignment=agreement.assignment, facts=facts).packed()
    for position in comers:
        inbox.queue.send(position, MessageHeader(WELCOME, 0), body)
    return comers


def request_admission(
    inbox: PeerInbox, others: Sequence[int], descriptors: int, gives_up: Callable[[], bool] = lambda: False
) -> ClusterWelcome | None:
    """Send `others` this node's descriptor, and wait to be admitted; see `isles.pipeline.peers.inbox.ask`."""
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

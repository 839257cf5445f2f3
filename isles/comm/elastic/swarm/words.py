"""What the peers of a swarm and their lighthouse say to each other, beside what is said in every world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from isles.comm.elastic.links.paths import SeatPaths
from isles.fields import MANY, Bool, Exact, Float, Int, Ints, Str

ANY = -1
"""A peer's wish for a stage, where it has none."""


@dataclass(frozen=True)
class Seek(Exact):
    """A peer has nothing to do yet. stage: that it wishes to serve, or `ANY`. run: a number that all of one
    configuration and of the same cut points share.
    """

    stage: Int
    run: Int


@dataclass(frozen=True)
class Begin(Exact):
    """Begin a swarm of `seats`, which serve `stages`, with what the lighthouse keeps of after `step`; 0: as drawn.
    epoch: of all swarms of this run, which one.
    """

    epoch: Int
    step: Int
    seats: Ints
    stages: Ints


@dataclass(frozen=True)
class Enter(Exact):
    """A swarm is at work: ask its `members` to be let in."""

    epoch: Int
    members: Ints


@dataclass(frozen=True)
class Wait(Exact):
    """Nothing can begin yet, for the `reason` that is one line for a person."""

    reason: Str


@dataclass(frozen=True)
class Apart(Exact):
    """The run does not go on with what this peer is part of: it is to come again as somebody else."""

    reason: Str


@dataclass(frozen=True)
class SwarmBeat(Exact):
    """A peer at work, each second: after `step` the swarm is `seats`, which serve `stages`. seconds: that a microbatch
    takes it; queue: microbatches that waited, on average; counted: in the newest step; since: seconds since that ended.
    place: in a run in clusters this peer's, as `PeerNow` has it.
    """

    epoch: Int
    step: Int
    seats: Ints
    stages: Ints
    seconds: Float
    queue: Float
    counted: Int
    since: Float
    place: Ints


@dataclass(frozen=True)
class StatesKept(Exact):
    """To a peer at work: the lighthouse keeps all stages' states of after `step`; 0: as drawn."""

    step: Int


@dataclass(frozen=True)
class PeerNow(Exact):
    """One peer as the lighthouse knows it. stage: `ANY` while it waits. heard: seconds since it was. place: in a run in
    clusters its cluster, its stage there, how many that has, and 1 where it is whole; () where it serves none.
    identity: fingerprint of its certificate.
    """

    seat: Int
    stage: Int
    step: Int
    seconds: Float
    queue: Float
    counted: Int
    heard: Float
    place: Ints
    identity: Str


@dataclass(frozen=True)
class SwarmNow(Exact):
    """How a swarm stands. wanted: what nothing can begin without, "" where it has begun. since: seconds since the
    newest step ended, -1 before the first. kept: the newest step of which the lighthouse keeps all stages' states.
    refused, paths: as in `RunNow`. clustered: whether it is a run in clusters.
    """

    epoch: Int
    step: Int
    last: Int
    since: Float
    kept: Int
    wanted: Str
    peers: Annotated[tuple[PeerNow, ...], MANY]
    refused: Annotated[tuple[tuple[Int, Int, Str, Int], ...], MANY]
    clustered: Bool
    paths: SeatPaths = ()

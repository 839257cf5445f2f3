"""The ranks of a run arranged on axes: replicas (`outer`), pipeline stages (`stage`), and workers inside an island
(`inner`).

rank = (outer position * stages + stage position) * inner + inner position, so the workers of an island are neighbours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from isles.comm.call import Ledger
from isles.comm.gloo.transport import DistributedTransport
from isles.comm.group import Group
from isles.comm.tags import Channel
from isles.comm.transport import Deadlines, Transport


@dataclass(frozen=True, eq=False)
class Mesh:
    """`world`: all ranks. `outer`: those that hold the same piece of the model as this one. `stage`: the stages of this
    replica. `inner`: the workers that share this island's data-parallel work."""

    world: Group
    outer: Group
    stage: Group
    inner: Group
    local_rank: int = 0
    """This worker's number among those of its machine: which GPU is its own."""

    report: Callable[[object], None] = field(default=lambda event: None, repr=False)
    """Tell whoever started the workers; nobody listens under torchrun or in a world of one."""

    stop_here: Callable[[int], bool] = field(default=lambda step: False, repr=False)
    """Asked between inner steps with the number done: True if this worker should save its state and return."""

    @property
    def transport(self) -> Transport:
        """The backend below all groups."""
        return self.world.transport

    @property
    def rank(self) -> int:
        """This worker's rank in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.world.size

    def islands(self, inner: int) -> Mesh:
        """The same workers in islands of `inner`. ValueError where they are not islands of so many."""
        world = self.world
        arranged = arrange(
            world.transport,
            inner=inner,
            local_rank=self.local_rank,
            deadlines=world.deadlines,
            ledger=world.ledger,
        )
        return replace(arranged, report=self.report, stop_here=self.stop_here)

    def close(self) -> None:
        """Give back connections and threads."""
        self.transport.close()


def arrange(
    transport: Transport,
    *,
    outer: int | None = None,
    stage: int = 1,
    inner: int = 1,
    local_rank: int | None = None,
    deadlines: Deadlines | None = None,
    ledger: Ledger | None = None,
) -> Mesh:
    """The mesh of `outer` x `stage` x `inner` workers over `transport`. ValueError when the product is not its size.

    local_rank: this worker's number on its machine; None where all are on one.
    """
    if min(1 if outer is None else outer, stage, inner) < 1:
        raise ValueError(f"mesh outer={outer}, stage={stage}, inner={inner}: every axis needs at least 1 worker")
    outer = transport.size // (stage * inner) if outer is None else outer
    if outer * stage * inner != transport.size:
        raise ValueError(
            f"mesh outer={outer} x stage={stage} x inner={inner} is {outer * stage * inner} workers, the world has "
            f"{transport.size}: start that many workers or change the mesh"
        )
    here_outer, rest = divmod(transport.rank, stage * inner)
    here_stage, here_inner = divmod(rest, inner)

    def rank(o: int, s: int, i: int) -> int:
        return (o * stage + s) * inner + i

    def group(ranks: list[int], channel: Channel) -> Group:
        return world.among(ranks, channel)

    def patient(island: Group) -> Group:
        """Whoever waits for an answer from other islands keeps its own island waiting as long."""
        waits = island.deadlines
        return replace(island, deadlines=replace(waits, inner=waits.outer)) if waits.outer > waits.inner else island

    world = Group(transport, tuple(range(transport.size)), "control", deadlines or Deadlines(), ledger or Ledger())
    return Mesh(
        world=world,
        outer=group([rank(o, here_stage, here_inner) for o in range(outer)], "outer"),
        stage=group([rank(here_outer, s, here_inner) for s in range(stage)], "pipeline"),
        inner=patient(group([rank(here_outer, here_stage, i) for i in range(inner)], "inner")),
        local_rank=transport.rank if local_rank is None else local_rank,
    )


_here = threading.local()  # a virtual worker is a thread; a real one is the process's main thread


def enter(transport: Transport, local_rank: int | None = None) -> None:
    """Make `transport` what `init()` and `mesh()` find in this thread (called by whoever starts workers)."""
    _here.transport, _here.ledger, _here.local_rank = transport, Ledger(), local_rank


def leave() -> None:
    """Close what was entered in this thread, if anything was."""
    if hasattr(_here, "transport"):
        _here.transport.close()


def current() -> Transport:
    """This worker's transport: the one entered, else the one torchrun's environment describes, else a world of one."""
    if not hasattr(_here, "transport"):
        local_rank = os.environ.get("LOCAL_RANK")  # torchrun's
        enter(DistributedTransport.from_environment(), None if local_rank is None else int(local_rank))
    return _here.transport


def init(*, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker, all ranks on `.outer`: torchrun's or Isles' environment, or a single worker."""
    return mesh(deadlines=deadlines)


def mesh(*, outer: int | None = None, stage: int = 1, inner: int = 1, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker arranged as outer x stage x inner (outer None: what is left)."""
    transport = current()
    return arrange(
        transport,
        outer=outer,
        stage=stage,
        inner=inner,
        local_rank=_here.local_rank,
        deadlines=deadlines,
        ledger=_here.ledger,
    )

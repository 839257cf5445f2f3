"""The ranks of a run arranged on axes: replicas (`outer`), pipeline stages (`stage`), and workers inside an island
(`inner`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from isles.comm.call import Ledger
from isles.comm.gloo.transport import DistributedTransport
from isles.comm.group import Group
from isles.comm.layout import Coordinate, Layout, MeshAxis, grid_of
from isles.comm.stopping import LeaveControl
from isles.comm.tags import Channel
from isles.comm.transport import Deadlines, Transport


@dataclass(frozen=True, eq=False)
class Mesh:
    """`world`: all ranks, at the places that `layout` gives them. The axes are groups of this worker's."""

    world: Group
    layout: Layout
    local_rank: int = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK", 0)))
    """This worker's number among those of its machine: which GPU is its own."""

    report: Callable[[object], None] = field(default=lambda event: None, repr=False)
    """Tell whoever started the workers; nobody listens under torchrun or in a world of one."""

    stop_here: Callable[[int], bool] = field(default=lambda step: False, repr=False)
    """Asked between inner steps with the number done: True if this worker should save its state and return."""

    leaving: LeaveControl = field(default_factory=LeaveControl, repr=False)
    """Where this worker alone is asked to end."""

    def __post_init__(self) -> None:
        if self.layout.size != self.world.size:
            raise ValueError(
                f"a layout of {self.layout.size} workers in a world of {self.world.size}: give each a place"
            )

    @cached_property
    def outer(self) -> Group:
        """Those that hold the same piece of the model as this worker, one of each replica."""
        return self._group("outer", "stage", "inner")

    @cached_property
    def stage(self) -> Group:
        """The stages of this replica, at this worker's inner position."""
        return _patient(self._group("pipeline", "replica", "inner"))

    @cached_property
    def inner(self) -> Group:
        """The workers that share the data-parallel work on this worker's piece."""
        return _patient(self._group("inner", "replica", "stage"))

    @cached_property
    def pipeline(self) -> Group:
        """Every stage of every replica at this worker's inner position, a replica's stages side by side: in a grid
        position = replica * stages + stage.
        """
        return self._group("pipeline", "inner")

    @property
    def place(self) -> Coordinate:
        """Where this worker is on the axes."""
        return self.layout.coordinates[self.rank]

    @property
    def reader(self) -> tuple[int, int]:
        """Which share of the data this worker trains on, and of how many; the stages of a replica read the same one."""
        return self.layout.reader(self.rank)

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

    def arranged(self, layout: Layout) -> Mesh:
        """The same workers at other places. ValueError for a layout of another number of them."""
        return replace(self, layout=layout)

    def close(self) -> None:
        """Give back connections and threads."""
        self.transport.close()

    def _group(self, channel: Channel, *axes: MeshAxis) -> Group:
        return self.world.among(self.layout.sharing(self.rank, *axes), channel)


def _patient(own: Group) -> Group:
    """Whoever waits for an answer from other replicas keeps the workers of its own waiting as long."""
    waits = own.deadlines
    return replace(own, deadlines=replace(waits, inner=waits.outer)) if waits.outer > waits.inner else own


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
    """The mesh of `outer` x `stage` x `inner` workers over `transport` (outer None: what is left). ValueError when the
    product is not its size.

    local_rank: this worker's number on its machine; None where all are on one.
    """
    world = Group(transport, tuple(range(transport.size)), "control", deadlines or Deadlines(), ledger or Ledger())
    return Mesh(
        world=world,
        layout=grid_of(transport.size, outer=outer, stage=stage, inner=inner),
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
        if local_rank is not None and (gpus := torch.cuda.device_count()) and not torch.cuda.is_initialized():
            torch.cuda.set_device(int(local_rank) % gpus)  # whoever has begun with a GPU has chosen one
    return _here.transport


def init(*, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker, all ranks on `.outer`: torchrun's or Isles' environment, or a single worker."""
    return mesh(deadlines=deadlines)


def mesh(*, outer: int | None = None, stage: int = 1, inner: int = 1, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker arranged as outer x stage x inner (outer None: what is left)."""
    transport = current()
    if isinstance(transport, DistributedTransport):
        deadlines = transport.waits(deadlines or Deadlines())
    return arrange(
        transport,
        outer=outer,
        stage=stage,
        inner=inner,
        local_rank=_here.local_rank,
        deadlines=deadlines,
        ledger=_here.ledger,
    )

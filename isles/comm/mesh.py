"""The ranks of a run arranged on axes: replicas (`outer`), pipeline stages (`stage`), and workers inside an island
(`inner`).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NoReturn, cast

import torch

from isles.comm.call import Ledger
from isles.comm.gloo.transport import DistributedTransport
from isles.comm.group import Group
from isles.comm.layout import Coordinate, Layout, MeshAxis, grid_of
from isles.comm.stopping import LeaveControl
from isles.comm.tags import Channel
from isles.comm.traffic import Traffic
from isles.comm.transport import Deadlines, Transport


@dataclass(frozen=True, eq=False)
class Mesh:
    """`world`: all ranks, at the coordinates that `layout` gives them. The axes are groups of this worker's."""

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
                f"a layout of {self.layout.size} workers in a world of {self.world.size}: give each its coordinates"
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
    def coordinate(self) -> Coordinate:
        """Where this worker is on the axes."""
        return self.layout.coordinates[self.rank]

    @property
    def reader(self) -> tuple[int, int]:
        """Which share of the data this worker trains on, and of how many; the stages of a replica read the same one."""
        return self.layout.reader(self.rank)

    @property
    def transport(self) -> Transport:
        return self.world.transport

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def arranged(self, layout: Layout) -> Mesh:
        """The same workers at other coordinates. ValueError for a layout of another number of them."""
        return self if layout == self.layout else replace(self, layout=layout)

    def close(self) -> None:
        self.transport.close()

    def _group(self, channel: Channel, *axes: MeshAxis) -> Group:
        return self.world.among(self.layout.sharing(self.rank, *axes), channel)


def _patient(own: Group) -> Group:
    """A worker that waits for another replica delays the workers of its own replica as long."""
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


@dataclass(frozen=True)
class _Entered:
    """What a worker is given to find: a virtual one in its thread, a real one in all threads of its process."""

    transport: Transport
    local_rank: int | None = None
    is_found: bool = False  # by `_current`, which may look again once it is closed
    ledger: Ledger = field(default_factory=Ledger)


class _PerThread(threading.local):
    own: _Entered | None = None


_here = _PerThread()
_process: list[_Entered] = []  # of this process, one at most
_virtual: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def enter(transport: Transport, local_rank: int | None = None) -> None:
    """Make `transport` what `init()` and `mesh()` find in this thread (called by whoever starts workers)."""
    _enter(_Entered(transport, local_rank))


def leave() -> None:
    """Close what was entered in this thread, if anything was."""
    if _here.own is not None:
        _here.own.transport.close()
        if _here.own in _process:
            _process.clear()


def _enter(entered: _Entered) -> None:
    _here.own = entered
    if not isinstance(entered.transport, DistributedTransport):
        _virtual.add(threading.current_thread())
    elif entered.transport.size > 1 or not entered.is_found:
        _process[:] = [entered]


def _current(join: float) -> _Entered:
    """That entered here or by this process, else the one that the environment describes, else a world of one. join:
    seconds in which all processes meet. ValueError in a thread of its own that a virtual worker has started, or a
    process that a DataLoader has.
    """
    data: Any = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:  # forked, it has what its worker knew
        raise ValueError("this process is a DataLoader's, and no worker: give its dataset the rank and size of `world`")
    entered = _here.own or next(iter(_process), None)
    if entered is None and any(thread.is_alive() for thread in list(_virtual)):
        raise ValueError("several workers run in this process, and this thread is none of theirs: pass it `world`")
    if entered is None or (entered.is_found and cast(DistributedTransport, entered.transport).is_closed):
        transport, local_rank = DistributedTransport.from_environment(join)
        entered = _Entered(transport, local_rank, is_found=True)
        if local_rank is not None and (gpus := torch.cuda.device_count()) and not torch.cuda.is_initialized():
            torch.cuda.set_device(local_rank % gpus)  # whoever has begun with a GPU has chosen one
        _enter(entered)
    return entered


def init(*, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker, all ranks on `.outer`: Isles' own, the one that torchrun, srun or mpirun describes or
    that torch.distributed has been given, or a single worker. RendezvousFailed names the processes that have not come
    within `deadlines.join` seconds.
    """
    return mesh(deadlines=deadlines)


def mesh(*, outer: int | None = None, stage: int = 1, inner: int = 1, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker arranged as outer x stage x inner (outer None: what is left)."""
    entered = _current((deadlines or Deadlines()).join)
    transport = entered.transport
    if isinstance(transport, DistributedTransport):
        deadlines = transport.waits(deadlines or Deadlines())
    return arrange(
        transport,
        outer=outer,
        stage=stage,
        inner=inner,
        local_rank=entered.local_rank,
        deadlines=deadlines,
        ledger=entered.ledger,
    )


@lru_cache(maxsize=8)  # nothing ever happens in it
def dry_mesh(workers: int, *, inner: int, rank: int, native: bool) -> Mesh:
    """The arranged world of `workers`, as `rank` sees it, before there are any. native: whether the backend that is
    planned for has a collective of its own.
    """
    return arrange(DryTransport(workers, native, rank), inner=inner)


class DryTransport:
    """A world that is only planned: it has a size, and sending raises ValueError."""

    step_seconds = 0.0
    away_seconds = 0.0

    def __init__(self, size: int, native: bool, rank: int = 0) -> None:
        self.size, self.native, self.rank, self.traffic = size, native, rank, Traffic()

    def _refuse(self, *asked: Any, **more: Any) -> NoReturn:
        raise ValueError("this method exchanges something while it is made, which cannot be planned: run it instead")

    send = recv = run = event = native_sum = followed = process_group = _refuse

    def link_estimate(self) -> None:
        """No machine, no link."""

    def now(self) -> float:
        return 0.0

    def compute(self, seconds: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

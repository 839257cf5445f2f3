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
    """world: the group of all ranks. layout: their coordinates. The axes are groups that contain this worker."""

    world: Group
    layout: Layout
    local_rank: int = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK", 0)))
    """This worker's number on its machine, which selects its GPU."""

    report: Callable[[object], None] = field(default=lambda event: None, repr=False)
    """Reports a value to the launcher. Does nothing under torchrun and in a world of one."""

    stop_here: Callable[[int], bool] = field(default=lambda step: False, repr=False)
    """Called between inner steps with the number of steps done. True: this worker must save its state and return."""

    leaving: LeaveControl = field(default_factory=LeaveControl, repr=False)
    """Asks this worker alone to end."""

    def __post_init__(self) -> None:
        if self.layout.size != self.world.size:
            raise ValueError(
                f"a layout of {self.layout.size} workers in a world of {self.world.size}: give each its coordinates"
            )

    @cached_property
    def outer(self) -> Group:
        """The workers that hold the same piece of the model as this one, one of each replica."""
        return self._group("outer", "stage", "inner")

    @cached_property
    def stage(self) -> Group:
        """The stages of this replica, at this worker's inner coordinate."""
        return _patient(self._group("pipeline", "replica", "inner"))

    @cached_property
    def inner(self) -> Group:
        """The workers that share the data-parallel work on this worker's piece."""
        return _patient(self._group("inner", "replica", "stage"))

    @cached_property
    def pipeline(self) -> Group:
        """All stages of all replicas at this worker's inner coordinate. The stages of a replica are neighbours: in a
        grid, position = replica * stages + stage.
        """
        return self._group("pipeline", "inner")

    @property
    def coordinate(self) -> Coordinate:
        """This worker's coordinate."""
        return self.layout.coordinates[self.rank]

    @property
    def reader(self) -> tuple[int, int]:
        """(share, shares): this worker's share of the data, and the number of shares. A replica's stages share one."""
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
        """The same workers with other coordinates. ValueError for a layout of another size."""
        return self if layout == self.layout else replace(self, layout=layout)

    def close(self) -> None:
        self.transport.close()

    def _group(self, channel: Channel, *axes: MeshAxis) -> Group:
        return self.world.among(self.layout.sharing(self.rank, *axes), channel)


def _patient(group: Group) -> Group:
    """Set the deadline of `inner` to that of `outer` if that is longer. A peer of the same replica may be late because
    it waits for another replica.
    """
    waits = group.deadlines
    return replace(group, deadlines=replace(waits, inner=waits.outer)) if waits.outer > waits.inner else group


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
    """Arrange the workers of `transport` as `outer` x `stage` x `inner` (outer None: computed). ValueError if the
    product is not the number of workers.

    local_rank: this worker's number on its machine; None: all are on one machine.
    """
    world = Group(transport, tuple(range(transport.size)), "control", deadlines or Deadlines(), ledger or Ledger())
    return Mesh(
        world=world,
        layout=grid_of(transport.size, outer=outer, stage=stage, inner=inner),
        local_rank=transport.rank if local_rank is None else local_rank,
    )


@dataclass(frozen=True)
class _Entered:
    """A worker's transport for `init()` and `mesh()`: one per thread for virtual workers, else one per process."""

    transport: Transport
    local_rank: int | None = None
    is_found: bool = False  # found by `_current`, which searches again once the transport is closed
    ledger: Ledger = field(default_factory=Ledger)


class _PerThread(threading.local):
    entered: _Entered | None = None


_here = _PerThread()
_process: list[_Entered] = []  # this process's transport: at most one entry
_virtual: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def enter(transport: Transport, local_rank: int | None = None) -> None:
    """Let `init()` and `mesh()` use `transport` in this thread. The code that starts workers calls this."""
    _enter(_Entered(transport, local_rank))


def leave() -> None:
    """Close the transport entered in this thread, if any."""
    if _here.entered is not None:
        _here.entered.transport.close()
        if _here.entered in _process:
            _process.clear()


def _enter(entered: _Entered) -> None:
    _here.entered = entered
    if not isinstance(entered.transport, DistributedTransport):
        _virtual.add(threading.current_thread())
    elif entered.transport.size > 1 or not entered.is_found:
        _process[:] = [entered]


def _current(join: float) -> _Entered:
    """The transport entered in this thread or process; else the one that the environment describes; else a world of
    one. join: seconds for all processes to meet. ValueError in a thread that a virtual worker has started, and in a
    DataLoader's process.
    """
    data: Any = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:  # a forked process has a copy of its worker's state
        raise ValueError("this process is a DataLoader's, and no worker: give its dataset the rank and size of `world`")
    entered = _here.entered or next(iter(_process), None)
    if entered is None and any(thread.is_alive() for thread in list(_virtual)):
        raise ValueError("several workers run in this process, and this thread is none of theirs: pass it `world`")
    if entered is None or (entered.is_found and cast(DistributedTransport, entered.transport).is_closed):
        transport, local_rank = DistributedTransport.from_environment(join)
        entered = _Entered(transport, local_rank, is_found=True)
        if local_rank is not None and (gpus := torch.cuda.device_count()) and not torch.cuda.is_initialized():
            torch.cuda.set_device(local_rank % gpus)  # the user may have chosen one already
        _enter(entered)
    return entered


def init(*, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker, with all ranks on `.outer`. It is the world that Isles started, the one of torchrun,
    srun, mpirun or an initialized torch.distributed, or a single worker. RendezvousFailed names the processes that have
    not called it within `deadlines.join` seconds.
    """
    return mesh(deadlines=deadlines)


def mesh(*, outer: int | None = None, stage: int = 1, inner: int = 1, deadlines: Deadlines | None = None) -> Mesh:
    """The world of this worker arranged as outer x stage x inner (outer None: computed)."""
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


@lru_cache(maxsize=8)  # safe, because its state never changes
def dry_mesh(workers: int, *, inner: int, rank: int, native: bool) -> Mesh:
    """The mesh of a planned world of `workers`, as `rank` sees it. native: the backend will have own collectives."""
    return arrange(DryTransport(workers, native, rank), inner=inner)


class DryTransport:
    """The transport of a planned world. It has a size; sending raises ValueError."""

    step_seconds = 0.0
    away_seconds = 0.0

    def __init__(self, size: int, native: bool, rank: int = 0) -> None:
        self.size, self.native, self.rank, self.traffic = size, native, rank, Traffic()

    def _refuse(self, *asked: Any, **more: Any) -> NoReturn:
        raise ValueError("this method communicates while it is created, which cannot be planned; run it instead")

    send = recv = run = event = native_sum = followed = process_group = _refuse

    def link_estimate(self) -> None:
        """None: a planned world has no link."""

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

"""The distributed backend: torch.distributed point-to-point messages between real processes.

Guarantees: a killed peer is reported by every transfer that needs it (PeerLost, within seconds); a silent one when the
transfer's deadline ends (DeadlinePassed); other pairs stay usable after either. Facts about gloo behind the design:
`waiters.py`.

Messages travel over gloo as uint8 views of CPU memory. `native_sum` is torch's own all_reduce, over NCCL for CUDA
buffers: the fast path inside an island.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from isles.comm.errors import PeerLost
from isles.comm.gloo.host_clock import OnHostClock
from isles.comm.gloo.life import Life
from isles.comm.gloo.transfers import PostedWork
from isles.comm.gloo.waiters import Waiters
from isles.comm.interfaces import gloo_interface
from isles.comm.tags import Tag, pack
from isles.comm.transport import Deadlines

_LOG = logging.getLogger(__name__)
_NEVER = timedelta(days=30)  # gloo's own time-out closes every pair of the rank: deadlines are kept by transfers


class DistributedTransport(OnHostClock):
    """One process of a torch.distributed world; with size 1 it needs no process group."""

    native = True

    def __init__(
        self, rank: int = 0, size: int = 1, processes: dist.ProcessGroup | None = None, life: Life | None = None
    ) -> None:
        super().__init__(life)
        self.rank, self.size = rank, size
        self._processes = processes  # None: the default process group, which is this transport's own
        self._waiters = Waiters()
        self._closed = False
        self._native_groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    @classmethod
    def join(cls, store: dist.Store, rank: int, size: int, life: Life | None = None) -> DistributedTransport:
        """Meet `size` processes over `store` and open gloo connections."""
        life = life or Life()
        life.meet(
            lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_NEVER),
            rank,
            range(size),
            lambda: dist.PrefixStore("life", store),
        )
        return cls(rank, size, life=life)

    @classmethod
    def from_environment(cls) -> DistributedTransport:
        """The world that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); one worker
        without them. A process group that the user has made (NCCL, other time-outs) stays as it is: a gloo group over
        the same ranks is made beside it.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        if interface := gloo_interface(os.environ):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        rank, size, life = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Life()
        make = _beside if dist.is_initialized() else _default
        transport = cls(rank, size, life.meet(make, rank, range(size), lambda: _own_store("world")), life)
        atexit.register(transport.close)  # a script may just end
        return transport

    def waits(self, deadlines: Deadlines) -> Deadlines:
        """These, with more time for long transfers where the kernel does not tell whether a line moves."""
        return self.life.waits(deadlines, (peer for peer in range(self.size) if peer != self.rank))

    def send(self, peer: int, data: Tensor, tag: Tag) -> PostedWork:
        return self._post(peer, data, lambda: dist.isend(data, peer, self._processes, pack(tag)))

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> PostedWork:
        return self._post(peer, out, lambda: dist.irecv(out, peer, self._processes, pack(tag)))

    def native_sum(self, buffer: Tensor, ranks: tuple[int, ...]) -> PostedWork:
        """`torch.distributed`'s all_reduce, over NCCL for CUDA buffers, else over gloo.

        With NCCL every rank needs a GPU of its own and has made it the current one (torch.cuda.set_device).
        """
        group = self.process_group(ranks, buffer.device.type)
        return self._watch(None, buffer, lambda: dist.all_reduce(buffer, group=group, async_op=True), ask_sender=False)

    def process_group(self, ranks: tuple[int, ...], device: str) -> dist.ProcessGroup:
        """Over NCCL for "cuda", else over gloo. Made once; its first use meets the
        members without a deadline.
        """
        key = (ranks, "nccl" if device == "cuda" else "gloo")
        if key not in self._native_groups:
            # Only the members meet: other groups of the mesh are made by their own.
            self._native_groups[key] = self.life.meet(
                lambda: _new_group(ranks=list(ranks), backend=key[1], use_local_synchronization=True),
                self.rank,
                ranks,
                lambda: _own_store(f"{key[1]} {ranks}"),
            )
        return self._native_groups[key]

    def close(self) -> None:
        """End the threads and the process group. Transfers that were given up are cut off, and with them all others."""
        if self._closed:
            return
        self._closed = True
        self._driver.close()
        if not self._waiters.close(0.05):
            self._cut_off()
            self._waiters.close(2.0)
        if dist.is_initialized():
            dist.destroy_process_group(self._processes)

    def _cut_off(self) -> None:
        """Close all connections of this process, so that threads that wait for a message get an error.

        What is avoided everywhere else does it: a receive with a time-out (see `waiters`).
        """
        if not dist.is_initialized():
            return
        try:
            tag = Tag("control", -1, 0, 253)  # nobody sends under it
            message = dist.irecv(torch.empty(1, dtype=torch.uint8), None, self._processes, pack(tag))
            if message is not None:
                message.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            _LOG.debug("closed all connections: %s", _first_line(error))

    def _post(self, peer: int | None, buffer: Tensor, start: Any) -> PostedWork:
        assert buffer.dtype == torch.uint8 and buffer.device.type == "cpu", "gloo takes uint8 views of CPU memory"
        return self._watch(peer, buffer, start, ask_sender=peer is None)

    def _watch(self, peer: int | None, buffer: Tensor, start: Any, *, ask_sender: bool) -> PostedWork:
        """The work of what `start` posts; a waiter thread sees its end."""
        work = PostedWork(peer, buffer, self.now)
        try:
            message = [start()]
        except RuntimeError as error:  # the pair is already closed
            work.finished(PeerLost(-1 if peer is None else peer, _first_line(error)))
            return work

        def wait() -> Callable[[], None]:
            lost: PeerLost | None = None
            try:
                message[0].wait()
                if ask_sender:
                    work.peer = message[0].source_rank()
            except RuntimeError as error:
                lost = PeerLost(-1 if peer is None else peer, _first_line(error))
            # Before anyone hears of it: torch gives up Python's lock to release a message, and a thread that does so
            # while a script comes to its end takes the process down (SIGABRT).
            message.clear()
            return partial(work.finished, lost)

        self._waiters.submit(wait)
        return work


def _new_group(**how: Any) -> dist.ProcessGroup:
    made = dist.new_group(timeout=_NEVER, **how)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _beside() -> dist.ProcessGroup:
    return _new_group(backend="gloo")


def _default() -> None:
    dist.init_process_group("gloo", timeout=_NEVER)


def _own_store(name: str) -> dist.Store:
    """A corner of the default process group's store."""
    return dist.PrefixStore(f"isles/life/{name}", distributed_c10d._get_default_store())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:160]

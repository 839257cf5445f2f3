"""The distributed backend: torch.distributed point-to-point messages between real processes.

Guarantees: a killed peer is reported by every transfer that needs it (PeerLost, within seconds); a silent one when the
transfer's deadline ends (DeadlinePassed); other pairs stay usable after either. For gloo's properties behind the design
see `isles.comm.gloo.transfers`. Messages travel over gloo as uint8 views of CPU memory. Processes started by another
program find the world in their environment, by torchrun's variables or those of srun and mpirun (`world_variables`).
They meet at a store within a deadline; the error names a missing one.

`native_sum` is torch's own all_reduce, over NCCL for CUDA buffers: the fast path inside an island. A call only queues
such a collective on NCCL's streams, and a lost member would leave the others' kernels running for ever. So each
collective is polled until it is over (`NativeGroup`). If a member is lost, or none of the group's collectives has ended
for `silence` seconds, the group is aborted, and the next call over these ranks raises PeerLost for the member with the
longest silence; after that the group is made anew.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from isles.comm.environment import world_variables
from isles.comm.errors import PeerLost, RendezvousFailed
from isles.comm.gloo.transfers import GLANCE, Liveness, OnHostClock, PostedWork, Waiters
from isles.comm.tags import Tag, pack
from isles.comm.tcp import gloo_interface, refuse_unknown_interfaces
from isles.comm.transport import Deadlines

_LATER = "raise the deadline if it starts later: isles.init(deadlines=isles.Deadlines(join=SECONDS))"


def attempt() -> str:
    """The number of this start under torchrun's --max-restarts, whose store still has the keys of those before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def store_of(variables: Mapping[str, str], seconds: float) -> dist.Store:
    """torchrun's store, or one at rank 0, as `world_variables` describes it."""
    address, port, rank = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), int(variables["RANK"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"nobody answers at {address}:{port} for {seconds:g} s, where rank 0 should"
    with failing_as(f"rank {rank}: {where}; {_LATER}"):
        return dist.TCPStore(
            address, port, None, is_host, timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
        )


def meet(store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
    """Wait until all of `ranks` have called this with a store of the same keys. RendezvousFailed after `seconds`."""
    ends_at = time.monotonic() + seconds
    # Before any wait: otherwise all would wait for each other.
    store.set(f"here/{rank}", "")
    for peer in ranks:
        try:
            left = max(ends_at - time.monotonic(), 0.01)  # above 0, which means without end to torch
            store.wait([f"here/{peer}"], timedelta(seconds=left))
        except RuntimeError as error:  # each kind of store raises its own kind
            try:
                missing = [str(one) for one in ranks if not store.check([f"here/{one}"])]
            except RuntimeError:
                raise RendezvousFailed(f"rank {rank}: the store where the workers meet is gone ({error})") from None
            who = ", ".join(missing or [str(peer)])
            raise RendezvousFailed(
                f"worker {who} of {len(ranks)} did not come to isles.init() within {seconds:g} s: every process that "
                f"is started must call it; {_LATER}"
            ) from None


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Prefix torch's own errors with `what`."""
    try:
        yield
    except dist.DistError as error:
        raise RendezvousFailed(f"{what} ({str(error).splitlines()[0]})") from None


_SOON = 0.0005  # seconds between polls of an awaited collective, whose end a step waits for; of others GLANCE


class NativeGroup:
    """torch's process group of `ranks`, in which this worker is `rank`."""

    def __init__(self, processes: Any, rank: int, ranks: tuple[int, ...], liveness: Liveness, silence: float) -> None:
        self.processes, self._rank = processes, rank
        self._others = [other for other in ranks if other != rank]
        self._liveness, self._silence = liveness, silence
        self._ended = 0.0  # when a collective was last seen to end
        self.error: PeerLost | None = None
        self._losing = threading.Lock()  # two collectives are followed by two threads, and only one may abort

    def follow(self, message: list[Any], work: PostedWork | None = None) -> Callable[[], None]:
        """Poll a collective until it is over, or the group is lost; returns a function that reports it. message: the
        collective in a list of one, dropped before the report. work: of the waiting transfer.
        """
        began = time.monotonic()
        while not message[0].is_completed():
            self._liveness.look()
            quiet = min(self._others, key=self._liveliness, default=self._rank)
            late = time.monotonic() - max(began, self._ended, self._liveness.last(quiet)) > self._silence
            why = self._liveness.loss_of(quiet) or f"a sum on GPUs has waited for it for {self._silence:g} s"
            if work is not None:
                work.peer = quiet  # the error names it
            with self._losing:
                if self.error is None and (late or self._liveness.loss_of(quiet) is not None):
                    # Before the abort: it ends the collective, and the report must already be that of the loss.
                    self.error = PeerLost(quiet, why)
                    self.processes.abort()
            if self.error is not None:
                break
            time.sleep(GLANCE if work is None else _SOON)
        self._ended = time.monotonic()
        message.clear()
        return (lambda: None) if work is None else partial(work.finished, self.error)

    def _liveliness(self, other: int) -> tuple[bool, float]:
        return self._liveness.loss_of(other) is None, self._liveness.last(other)


_LOG = logging.getLogger(__name__)
_WORLDS = count()  # worlds of `from_environment` so far; all processes count them in the same order
_NEVER = timedelta(days=30)  # longer than a run: gloo's time-out would close every pair; transfers enforce deadlines


class DistributedTransport(OnHostClock):
    """One process of a torch.distributed world; with size 1 it needs no process group."""

    native = True

    def __init__(
        self, rank: int = 0, size: int = 1, processes: dist.ProcessGroup | None = None, liveness: Liveness | None = None
    ) -> None:
        super().__init__(liveness)
        self.rank, self.size = rank, size
        self._processes = processes  # None: the default process group, which is this transport's own
        self._waiters = Waiters()
        self.is_closed = False
        self._store: dist.Store | None = None  # where its ranks meet; None: the store of torch's process group
        self._join = Deadlines().join
        self._silence = Deadlines().silence
        self._native_groups: dict[tuple[tuple[int, ...], str], NativeGroup] = {}
        self._lost: Counter[tuple[tuple[int, ...], str]] = Counter()

    @classmethod
    def join(cls, store: dist.Store, rank: int, size: int, liveness: Liveness | None = None) -> DistributedTransport:
        """Meet `size` processes over `store` and open gloo connections."""
        refuse_unknown_interfaces(os.environ)
        liveness = liveness or Liveness()
        liveness.meet(partial(_default, store, rank, size), rank, range(size), lambda: dist.PrefixStore("life", store))
        return cls(rank, size, liveness=liveness)

    @classmethod
    def from_environment(cls, join: float = 300.0) -> tuple[DistributedTransport, int | None]:
        """The world that the environment describes (`world_variables`) or that torch.distributed was initialized with,
        and this worker's number on its machine; a single worker without either. A process group of the user (NCCL,
        other time-outs) stays as it is: a gloo group over the same ranks is made beside it. RendezvousFailed if a
        process does not call this within `join` seconds.
        """
        is_beside = dist.is_available() and dist.is_initialized()
        variables = dict(os.environ) if is_beside else world_variables(os.environ)
        if variables is None:
            return cls(), _local_rank(os.environ)
        if is_beside:
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        if interface := gloo_interface({**variables, "WORLD_SIZE": str(size)}):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store = distributed_c10d._get_default_store() if is_beside else store_of(variables, join)
        # A prefix of its own: keys of a process group that was destroyed before are still in the store.
        store = dist.PrefixStore(f"isles/{next(_WORLDS)}/{attempt()}", store)
        meet(store, rank, range(size), join)
        liveness = Liveness()
        refuse_unknown_interfaces(os.environ)
        default = partial(_default, dist.PrefixStore("gloo", store), rank, size, join)
        make = partial(_new_group, join, backend="gloo") if is_beside else default
        with failing_as(f"the {size} workers met, but gloo did not connect them within {join:g} s"):
            processes = liveness.meet(make, rank, range(size), lambda: dist.PrefixStore("life", store))
        transport = cls(rank, size, processes, liveness)
        transport._store, transport._join = store, join
        atexit.register(transport.close)  # a script may end without closing
        return transport, _local_rank(variables)

    def waits(self, deadlines: Deadlines) -> Deadlines:
        """`deadlines`, with more time for long transfers if the kernel does not report a link's progress."""
        self._join, self._silence = deadlines.join, deadlines.silence
        return self.liveness.waits(deadlines, (peer for peer in range(self.size) if peer != self.rank))

    def send(self, peer: int, data: Tensor, tag: Tag) -> PostedWork:
        return self._start_message(peer, data, lambda: dist.isend(data, peer, self._processes, pack(tag)))

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> PostedWork:
        return self._start_message(peer, out, lambda: dist.irecv(out, peer, self._processes, pack(tag)))

    def native_sum(self, buffer: Tensor, ranks: tuple[int, ...]) -> PostedWork:
        """`torch.distributed`'s all_reduce, over NCCL for CUDA buffers, else over gloo.

        With NCCL every rank needs a GPU of its own, made current (torch.cuda.set_device).
        """
        group, device = self.process_group(ranks, buffer.device.type), buffer.device.type
        start = partial(dist.all_reduce, buffer, group=group, async_op=True)
        if device == "cpu":
            return self._watch(None, buffer, start, ask_sender=False)
        work = PostedWork(None, buffer, self.now)
        self.followed(start, ranks, work)
        return work

    def followed(self, start: Callable[[], Any], ranks: tuple[int, ...], work: PostedWork | None = None) -> Any:
        """Call `start`, which posts a collective on the GPUs of `ranks`, and poll it. work: of the waiting transfer."""
        group = self._native_groups[ranks, "nccl"]
        if group.error is not None:
            raise group.error
        message = start()
        self._waiters.submit(partial(group.follow, [message], work))
        return message

    def process_group(self, ranks: tuple[int, ...], device: str) -> dist.ProcessGroup:
        """torch's group over NCCL for "cuda", else over gloo. Cached, and made anew after a loss; its members meet
        within the deadline `join`, or RendezvousFailed names the missing ones.
        """
        key = (ranks, "nccl" if device == "cuda" else "gloo")
        if key in self._native_groups and self._native_groups[key].error is not None:
            del self._native_groups[key]
            self._lost[key] += 1
        if key not in self._native_groups:
            # Only the members meet here. A group that is made anew has new keys.
            prefix = f"{key[1]} {ranks} {self._lost[key]}"
            shared = dist.PrefixStore(prefix, self._store or distributed_c10d._get_default_store())
            meet(shared, self.rank, ranks, self._join)
            make = partial(_new_group, self._join, ranks=list(ranks), backend=key[1], use_local_synchronization=True)
            with failing_as(f"workers {ranks} met, but {key[1]} did not connect them"):
                processes = self.liveness.meet(make, self.rank, ranks, lambda: shared)
            self._native_groups[key] = NativeGroup(processes, self.rank, ranks, self.liveness, self._silence)
        return self._native_groups[key].processes

    def close(self) -> None:
        """End the threads and the process group. Abandoned transfers are cut off, and with them all others."""
        if self.is_closed:
            return
        self.is_closed = True
        # First, so that no protocol posts another message while the waiters end.
        self._driver.close()
        # Idle waiters end within milliseconds; one that does not waits for a message that may never come.
        if not self._waiters.close(0.05):
            self._cut_off()
            self._waiters.close(2.0)
        if dist.is_initialized():
            dist.destroy_process_group(self._processes)

    def _cut_off(self) -> None:
        """Close all connections of this process, so that threads that wait for a message get an error.

        Uses what is avoided everywhere else: a receive whose time-out closes every pair (see `transfers`).
        """
        if not dist.is_initialized():
            return
        try:
            tag = Tag("control", -1, 0, 253)  # a tag that no message has
            message = dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), None, self._processes, pack(tag))
            if message is not None:
                message.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            _LOG.debug("closed all connections: %s", _first_line(error))

    def _start_message(self, peer: int | None, buffer: Tensor, start: Any) -> PostedWork:
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
                # The group's own time-out was for meeting.
                _ = message[0].wait() if peer is None and not ask_sender else message[0].wait(_NEVER)
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


def _default(store: dist.Store, rank: int, size: int, join: float | None = None) -> None:
    seconds = _NEVER if join is None else timedelta(seconds=join)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    if join is not None:
        distributed_c10d._set_pg_timeout(_NEVER, dist.group.WORLD)


def _new_group(join: float, **how: Any) -> dist.ProcessGroup:
    """Its time-out counts until its members have met."""
    processes = dist.new_group(timeout=timedelta(seconds=join), **how)
    assert isinstance(processes, dist.ProcessGroup)
    distributed_c10d._set_pg_timeout(_NEVER, processes)
    return processes


def _local_rank(variables: Mapping[str, str]) -> int | None:
    return int(variables["LOCAL_RANK"]) if "LOCAL_RANK" in variables else None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:160]

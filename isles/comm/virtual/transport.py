"""One worker's end of the virtual backend. See `isles.comm.transport.Transport` for the contract."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isles.comm.errors import PeerLost
from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import Steps
from isles.comm.virtual.scheduler import Scheduler, VirtualWorker
from isles.comm.virtual.wire import VirtualEvent, VirtualTransfer, VirtualWire, VirtualWork
from isles.network.noise import lognormal


class VirtualTransport:
    """Worker `rank` of a `VirtualCluster`; used by that worker's thread and by the protocols it runs, by nobody else.

    Every call takes effect in the worker's turn, except `compute` and `now`, which concern its own clock alone. With
    one slot torch's global CPU generator is this worker's own between calls; protocols must not draw from it.
    """

    native = False

    def __init__(
        self,
        scheduler: Scheduler,
        wire: VirtualWire,
        rank: int,
        *,
        step_seconds: float,
        speed: float,
        compute_jitter: float,
        seed: int,
    ) -> None:
        self.rank = rank
        self.size = wire.size
        self.step_seconds = step_seconds
        self.compute_seconds = 0.0
        """Seconds of computation charged so far, factors included."""
        self.away_seconds = 0.0
        """Seconds for which it was paused, since this transport was made."""
        self._scheduler, self._wire = scheduler, wire
        self._worker: VirtualWorker = scheduler.workers[rank]
        self._speed, self._jitter, self._seed = speed, compute_jitter, seed
        self._computed = 0  # calls of `compute` so far: the jitter's counter
        self._traffic = Traffic()
        self._transfers: list[VirtualTransfer] = []  # under way
        self.suspect: Callable[[int], None] | None = None
        """Called, in an event, with each peer that this worker is blocked on, now and again."""

    @property
    def traffic(self) -> Traffic:
        """Totals up to this worker's clock. Reading takes a turn, so that what is logged does not depend on `slots`."""
        with self._worker:
            return self._traffic

    def send(self, peer: int, data: Tensor, tag: Tag) -> VirtualWork:
        """Done when the last bit has left the uplink; PeerLost if the peer has ended before."""
        self._check(peer, data)
        with self._worker:
            work = VirtualWork(self._worker, peer, None, self._scheduler.stepping)
            self._wire.send(self.rank, peer, data, tag, work)
        return work

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> VirtualWork:
        """Done at arrival; from anyone: the earliest arrival, ties by rank.

        Fails with PeerLost if the peer has ended and no such message is on its way, with ValueError if it has another
        size.
        """
        self._check(peer, out)
        with self._worker:
            work = VirtualWork(self._worker, peer, out, self._scheduler.stepping)
            self._wire.recv(self.rank, peer, tag, work)
        return work

    def run(self, protocol: Steps[Any], channel: Channel, deadline: float) -> VirtualTransfer:
        """Messages a failed transfer has asked for are dropped when they come."""
        with self._worker:
            transfer = VirtualTransfer(self._scheduler, self._worker, protocol, channel, deadline, self._traffic)
            transfer.suspect = self.suspect
            transfer.start()
            self._transfers = [other for other in (*self._transfers, transfer) if not other.finished]
        return transfer

    def event(self, seconds: float = math.inf) -> VirtualEvent:
        with self._worker:
            return VirtualEvent(self._worker, seconds)

    def link_estimate(self) -> None:
        """All workers are in this process."""

    def now(self) -> float:
        """Seconds of virtual time; inside a protocol: that of the event that steps it."""
        if self._scheduler.is_held:
            return self._scheduler.timeline.now
        return self._worker.clock

    def compute(self, seconds: float) -> None:
        """Move this worker's clock by `seconds` x its speed factor x its jitter, and by the pauses that begin
        meanwhile. ValueError for less than 0 s.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"computing takes 0 s or more, got {seconds}")
        assert not self._scheduler.is_held, "protocols take no time: charge in the worker"
        charged = seconds * self._speed * lognormal(self._jitter, self._seed, self.rank, self._computed)
        self._computed += 1
        self.compute_seconds += charged
        worker = self._worker
        begun = worker.clock
        if worker.absences is None:
            self._scheduler.advance(worker, begun + charged)
            return
        self._scheduler.advance(worker, worker.absences.after(begun, charged))
        for leaves, back in worker.absences.between(begun, worker.clock):
            self.away_seconds += back - leaves
            self._traffic.paused(leaves, back)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: clock, counters, latest arrivals. RuntimeError while a transfer is under way (those without a
        deadline listen only).

        A run that continues from the states of all workers computes the same bits, if the links were idle: each
        worker's own sends gone, and for shared uplinks and narrow downlinks all workers at one virtual time (behind a
        barrier). Else only times differ, by what was on those links.
        """
        with self._worker:
            if any(not transfer.finished and not transfer.listens for transfer in self._transfers):
                raise RuntimeError(f"worker {self.rank} has transfers under way: settle them before a checkpoint")
            latest = self._wire.latest[self.rank]
            return {
                "clock": self._worker.clock,
                "computed": self._computed,
                "compute_seconds": self.compute_seconds,
                "messages": {str(target): count for target, count in self._wire.numbers[self.rank].items()},
                "latest": [
                    [target, channel, time] for (target, channel), time in latest.items() if time > self._worker.clock
                ],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Time does not go back: an earlier state of the same run is gone on from now."""
        with self._worker:
            clock = max(float(state["clock"]), self._worker.clock)
            self._computed, self.compute_seconds = int(state["computed"]), float(state["compute_seconds"])
            numbers, latest = self._wire.numbers[self.rank], self._wire.latest[self.rank]
            numbers.clear()
            numbers.update({int(target): int(count) for target, count in state["messages"].items()})
            for target, channel, time in state["latest"]:
                key = int(target), channel
                latest[key] = max(float(time), latest.get(key, 0.0))
        self._scheduler.advance(self._worker, clock)

    def give_up(self, member: int, why: str | PeerLost) -> None:
        """In an event: nothing is waited for from `member`; later messages are tried again."""
        error = PeerLost(member, why) if isinstance(why, str) else why
        self._wire.end(self.rank, lambda peer, _: peer == member, lambda _: error)

    def again(self, tag: Tag) -> None:
        """See `VirtualWire.again`; in an event."""
        self._wire.again(self.rank, tag)

    def over(self, channel: Channel, round: int) -> None:
        """See `VirtualWire.over`."""
        with self._worker:
            self._wire.over(self.rank, channel, round)

    def close(self) -> None:
        """Nothing to give back: threads and messages are the cluster's."""

    def abandon(self, error: Exception) -> None:
        for transfer in self._transfers:
            transfer.fail(error)
        self._transfers = []

    def died(self, at: float, error: Exception) -> None:
        """The worker ended at `at`: computing charged beyond is taken back (clocks of computing workers run ahead)."""
        worker = self._worker
        if worker.clock > at:
            away = [] if worker.absences is None else worker.absences.between(at, worker.clock)
            self.compute_seconds -= worker.clock - at - sum(back - leaves for leaves, back in away)
        self.abandon(error)

    def _check(self, peer: int | None, buffer: Tensor) -> None:
        assert peer is None or (0 <= peer < self.size and peer != self.rank), f"worker {self.rank} has no peer {peer}"
        assert buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(), "not flat contiguous uint8"

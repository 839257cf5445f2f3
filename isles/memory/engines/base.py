"""Engines: the interface (work on serial lanes, events between lanes, moves, closing), an engine with a thread per
lane, and an engine without threads.
"""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isles.memory.events import EngineLane, LaneAction, LaneEvent, Urgency

LANES: tuple[EngineLane, ...] = ("up", "down", "host", "read", "write")
DEADLINE = 600.0  # the longest wait, seconds: far longer than any update of a block


class LaneFailed(RuntimeError):
    """Work on a lane failed; its error is the cause."""


class DiskFailed(LaneFailed, OSError):
    """A lane to the disk failed: the disk is full or unavailable."""


class Moves:
    """Copies between host and device; here both are the RAM. A call returns when the copy is complete."""

    def room(self) -> AbstractContextManager[object]:
        """Context for allocating or refilling storages of the device."""
        return nullcontext()

    def fill(self, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Copy tensors of the host into tensors of the device, in the formats of the latter."""
        for target, host_tensor in zip(into, source, strict=True):
            target.copy_(host_tensor)

    def to_host(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Copy tensors to the host, in the formats `dtypes`."""
        return [tensor.to("cpu", dtype, copy=True) for tensor, dtype in zip(tensors, dtypes, strict=True)]

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copy tensors to the device."""
        return [tensor.to(device, copy=True) for tensor in tensors]

    def offload(self, hosted: Container[int], model: nn.Module) -> None:
        """Put the model's parameters with ids in `hosted` on the host; other parameters and buffers on the device."""


class Engine(ABC):
    """Serial lanes. The next wait or submit of the computation raises the error of a failed lane.

    first_come: serve gradients and updates in the order of submission instead of need; for comparison. moves: copies
    between host and device; None: both are the RAM.
    """

    first_come = False

    def __init__(self, moves: Moves | None = None) -> None:
        self.moves = Moves() if moves is None else moves
        self.changed = threading.Condition(threading.RLock())
        self.failed: tuple[str, BaseException] | None = None
        self.closed = False

    def event(self, happened: bool = False) -> LaneEvent:
        return LaneEvent(self, happened)

    @abstractmethod
    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction) -> None:
        """Call `work` on the lane, then `done`; the smallest urgency first. seconds: duration on the plan's machine."""

    def computed(self, began: float, seconds: float) -> None:  # noqa: B027
        """Report that the device has computed since `began` (host seconds), for `seconds` on the plan's machine."""

    def close(self) -> None:  # noqa: B027
        """Stop: drop work that has not begun, and end all threads."""

    def fail(self, lane: str, error: BaseException) -> None:
        """Record a failure, and wake all waiting threads."""
        with self.changed:
            self.failed = self.failed or (lane, error)
            self.changed.notify_all()

    def check(self) -> None:
        """Raise LaneFailed if a lane has failed."""
        if self.failed is not None:
            lane, error = self.failed
            if isinstance(error, OSError):
                raise DiskFailed(str(error)) from error
            raise LaneFailed(f"memory: the {lane} lane failed: {type(error).__name__}: {error}") from error

    def wait_for(self, event: LaneEvent, what: str) -> None:
        with self.changed:
            woken = self.changed.wait_for(lambda: event.happened or self.failed is not None or self.closed, DEADLINE)
        self.check()
        if self.closed and not event.happened:
            raise RuntimeError(f"memory: {what} will not arrive: the run under the plan was abandoned")
        if not woken:
            raise TimeoutError(f"memory: {what} did not come within {DEADLINE:.0f} s")


class Inline(Engine):
    """An engine without threads: `submit` does the work at once. For workers that share a thread, as on the virtual
    backend.
    """

    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction) -> None:
        """Call `work` and `done` at once."""
        with torch.no_grad():
            work()
        done()

    def wait_for(self, event: LaneEvent, what: str) -> None:
        """Raise RuntimeError: no other thread could fire the event."""
        raise RuntimeError(f"memory: {what} cannot arrive: the plan does not fit its budget")


IDLE = 60.0  # seconds without work, after which a lane's thread ends


class _Job(NamedTuple):
    urgency: Urgency
    number: int
    seconds: float
    work: LaneAction
    done: LaneAction


class ThreadEngine(Engine):
    """An engine with a thread per lane. first_come: the lanes down and host serve in the order of submission, for
    comparison. pace: work takes at least its seconds on the plan's machine. So a CPU shows the order and the waits of a
    device with a link.
    """

    def __init__(self, *, pace: bool = False, first_come: bool = False) -> None:
        super().__init__()
        self.pace, self.first_come = pace, first_come
        self._queues: dict[EngineLane, list[_Job]] = {lane: [] for lane in LANES}
        self._number, self._closing = 0, False
        self._threads: dict[EngineLane, threading.Thread] = {}

    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction) -> None:
        """Queue the work. LaneFailed if a lane has failed."""
        with self.changed:
            if threading.current_thread() not in self._threads.values():
                self.check()
            if self._closing:
                return
            self._number += 1
            order = (self._number,) if self.first_come and lane in ("down", "host") else urgency
            heapq.heappush(self._queues[lane], _Job(order, self._number, seconds, work, done))
            if lane not in self._threads:  # start threads on first use: a plan may not use all lanes
                thread = threading.Thread(target=self._serve, args=(lane,), name=f"memory {lane}", daemon=True)
                self._threads[lane] = thread
                thread.start()
            self.changed.notify_all()

    def threads(self, lane: EngineLane) -> int:
        """Torch threads of the lane: more would take the computation's cores, and not change an update's bits."""
        return 1

    def computed(self, began: float, seconds: float) -> None:
        """With `pace`, sleep until `seconds` have passed since `began`."""
        self._end(began, seconds)

    def _end(self, began: float, seconds: float) -> None:
        left = began + seconds - time.perf_counter() if self.pace else 0.0
        if left > 0:
            time.sleep(left)

    def close(self) -> None:
        """Drop work that has not begun, and wait for running work. TimeoutError if it does not end."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        for lane, thread in list(self._threads.items()):
            thread.join(DEADLINE)
            if thread.is_alive():
                raise TimeoutError(f"memory: the {lane} lane did not end within {DEADLINE:.0f} s")
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _serve(self, lane: EngineLane) -> None:
        torch.set_num_threads(self.threads(lane))  # affects this thread only
        queue = self._queues[lane]
        try:
            while True:
                with self.changed:
                    if not self.changed.wait_for(lambda: queue or self._closing, IDLE):
                        del self._threads[lane]  # `submit` starts another one
                        return
                    if self._closing:
                        return
                    job = heapq.heappop(queue)
                began = time.perf_counter()
                with torch.no_grad():
                    job.work()
                self._end(began, job.seconds)
                done = job.done
                del job  # free the tensors that its work holds
                done()
                del done
        except BaseException as error:
            self.fail(lane, error)

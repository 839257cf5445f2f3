"""A thread a lane. Copies are real; with `pace` each takes at least the seconds that it takes on the plan's machine, so
that a CPU shows the order and the waits of a device with a link.
"""

from __future__ import annotations

import heapq
import threading
import time
from typing import NamedTuple

import torch

from isles.memory.engines.base import DEADLINE, LANES, Engine
from isles.memory.flow import EngineLane, LaneAction, Urgency

IDLE = 60.0  # seconds without work, after which a lane's thread ends


class _Job(NamedTuple):
    urgency: Urgency
    number: int
    seconds: float
    work: LaneAction
    done: LaneAction


class ThreadEngine(Engine):
    """first_come: lanes down and host serve in the order of submission, for comparison. pace: see the module."""

    def __init__(self, *, pace: bool = False, first_come: bool = False) -> None:
        super().__init__()
        self.pace, self.first_come = pace, first_come
        self._queues: dict[EngineLane, list[_Job]] = {lane: [] for lane in LANES}
        self._number, self._closing = 0, False
        self._threads: dict[EngineLane, threading.Thread] = {}

    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction) -> None:
        """Queue it. LaneFailed where a lane has failed."""
        with self.changed:
            if threading.current_thread() not in self._threads.values():
                self.check()
            if self._closing:
                return
            self._number += 1
            order = (self._number,) if self.first_come and lane in ("down", "host") else urgency
            heapq.heappush(self._queues[lane], _Job(order, self._number, seconds, work, done))
            if lane not in self._threads:  # a lane that the plan does not use has no thread
                thread = threading.Thread(target=self._serve, args=(lane,), name=f"memory {lane}", daemon=True)
                self._threads[lane] = thread
                thread.start()
            self.changed.notify_all()

    def threads(self, lane: EngineLane) -> int:
        """Of torch on the lane: more would change the last bits of no update, but take the computation's cores."""
        return 1

    def computed(self, began: float, seconds: float) -> None:
        """Wait for the rest of them, with `pace`."""
        self._end(began, seconds)

    def _end(self, began: float, seconds: float) -> None:
        left = began + seconds - time.perf_counter() if self.pace else 0.0
        if left > 0:
            time.sleep(left)

    def close(self) -> None:
        """Drop what has not begun, wait for what has. TimeoutError where that does not end."""
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
        torch.set_num_threads(self.threads(lane))  # of this thread alone
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
                del job  # and with it what its work holds
                done()
                del done
        except BaseException as error:
            self.fail(lane, error)

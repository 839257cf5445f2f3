"""Messages and transfers of a virtual run, as their owner sees them.

A transfer is a protocol (generator) that is stepped in the caller's turn up to its first wait, and from then on by
the events it waits for, at their virtual time: stepping takes no time, and what it sends leaves then.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from isles.comm.errors import DeadlinePassed
from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import DOUBT_AFTER, DOUBT_EVERY, Steps, awaited
from isles.comm.virtual.fates import Fates
from isles.comm.virtual.scheduler import Awaited, Scheduler, VirtualWorker
from isles.modes import own_modes
from isles.network.engine import ARRIVED, LAST, Event


class Waiter(Protocol):
    """Who waits for a work."""

    def one_done(self, work: VirtualWork) -> None:
        """It has ended, now."""


class VirtualWork:
    """One message on its way. See `isles.comm.transport.Work`."""

    __slots__ = ("_owner", "_transfer", "at", "error", "finished", "out", "peer", "waiter")

    def __init__(self, owner: VirtualWorker, peer: int | None, out: Tensor | None, transfer: Awaited | None) -> None:
        self.peer = peer
        self.out = out  # a receive's buffer
        self.finished = False
        self.at = math.inf
        self.error: Exception | None = None
        self.waiter: Waiter | None = None  # whose yield waits for this
        self._owner = owner
        self._transfer = transfer  # in whose protocol it was made

    def done(self) -> bool:
        with self._owner:
            return self.finished

    def abandoned(self) -> BaseException | None:
        """What ended the transfer that made it: then nobody will read it."""
        return None if self._transfer is None else self._transfer.error

    def finish(self, error: Exception | None = None) -> None:
        """It is gone, has arrived, or has failed, now; a paused owner hears of it when it is back."""
        if self._owner.absences is not None:
            timeline = self._owner.scheduler.timeline
            back = self._owner.back(timeline.now)
            if back > timeline.now:
                timeline.at(back, ARRIVED, self._owner.rank, self._finish, error)
                return
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        self.finished, self.error, self.out = True, error, None
        self.at = self._owner.scheduler.timeline.now
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter.one_done(self)


class VirtualBell(VirtualWork):
    """See `isles.comm.transport.Bell`."""

    __slots__ = ("alarm",)

    def __init__(self, owner: VirtualWorker, seconds: float) -> None:
        super().__init__(owner, None, None, None)
        timeline = owner.scheduler.timeline
        self.alarm: Event | None = None
        if seconds < math.inf:
            self.alarm = timeline.at(timeline.now + seconds, ARRIVED, owner.rank, self._rung)

    def ring(self) -> None:
        with self._owner:
            if not self.finished:
                if self.alarm is not None:
                    self._owner.scheduler.timeline.cancel(self.alarm)
                self._rung()

    def _rung(self) -> None:
        self.alarm = None
        self.finish()


class VirtualTransfer:
    """A protocol under way. See `isles.comm.transport.Transfer`."""

    def __init__(
        self,
        scheduler: Scheduler,
        owner: VirtualWorker,
        steps: Steps[Any],
        channel: Channel,
        deadline: float,
        traffic: Traffic,
        fates: Fates,
    ) -> None:
        self.error: BaseException | None = None
        self.finished = False
        self.tag: Tag | None = None
        self._scheduler, self._owner = scheduler, owner
        self._steps: Steps[Any] | None = steps
        self._channel: Channel = channel
        self._seconds = deadline
        self._traffic, self._fates = traffic, fates
        self._began = scheduler.timeline.now
        self._pending: dict[VirtualWork, None] = {}  # in the order of the yield
        self._needed = 0  # of them, before the protocol goes on
        self._deadline: Event | None = None
        self._result: Any = None
        self.doubt: Callable[[int], None] | None = None
        """See `VirtualTransport.doubt`."""

    @property
    def listens(self) -> bool:
        """Whether it waits for what may never come."""
        return self._seconds == math.inf

    def start(self) -> None:
        """Step to the first wait, in the caller's thread and turn."""
        self._advance(None)
        if not self.finished and self._seconds < float("inf"):
            timeline = self._scheduler.timeline
            self._deadline = timeline.at(timeline.now + self._seconds, LAST, self._owner.rank, self._late)

    def wait(self) -> Any:
        """Blocks in virtual time."""
        assert not self._scheduler.is_held, "a protocol yields what it waits for"
        with self._owner:
            if not self.finished:
                start = self._owner.clock
                if self.doubt is not None:
                    self._scheduler.timeline.at(start + DOUBT_AFTER, LAST, self._owner.rank, self._doubt)
                self._scheduler.block(self._owner, self)
                self._traffic.waited(self._channel, start, self._owner.clock)
        if self.error is not None:
            raise self.error
        return self._result

    def _doubt(self) -> None:
        """Its owner stands still: is anybody there whom it waits for?"""
        if self.finished or self._owner.awaits is not self or self.doubt is None:
            return
        timeline = self._scheduler.timeline
        if (back := self._owner.back(timeline.now)) > timeline.now:
            timeline.at(back, LAST, self._owner.rank, self._doubt)
            return
        for peer in dict.fromkeys(work.peer for work in self._pending):
            if peer is not None:
                self.doubt(peer)
        timeline.at(timeline.now + DOUBT_EVERY, LAST, self._owner.rank, self._doubt)

    def done(self) -> bool:
        with self._owner:
            return self.finished

    def one_done(self, work: VirtualWork) -> None:
        """A work this transfer may be waiting for has ended; a failed one is raised in the protocol without delay."""
        if work not in self._pending:
            return
        del self._pending[work]
        self._needed -= 1
        if work.error is not None or self._needed == 0:
            with _threads_own_modes():
                self._advance(work.error)

    def fail(self, error: BaseException) -> None:
        """Abandon the protocol; `wait` raises `error`. Nothing happens to other transfers, nor if it has ended."""
        if self.finished:
            return
        steps, self._steps = self._steps, None
        self._end(None, error)
        if steps is not None:
            with self._stepping():
                try:
                    steps.close()
                except Exception as failure:  # its clean-up failed as well: told with the first cause
                    error.add_note(f"and closing the protocol raised {failure!r}")

    def _late(self) -> None:
        timeline = self._scheduler.timeline
        back = self._owner.back(timeline.now)
        if back > timeline.now:  # what came in its absence is looked at before the clock
            self._deadline = timeline.at(back, LAST, self._owner.rank, self._late)
            return
        peer = next((work.peer for work in self._pending), None)
        self.fail(DeadlinePassed(-1 if peer is None else peer, self._channel, self._seconds))

    def _advance(self, error: Exception | None) -> None:
        """Step until something has to be waited for, or the protocol ends."""
        steps = self._steps
        assert steps is not None
        self._pending.clear()
        with self._stepping():
            while True:
                try:
                    waited = steps.throw(error) if error is not None else next(steps)
                except StopIteration as end:
                    self._end(end.value, None)
                    return
                except BaseException as failure:  # whatever the protocol raises belongs to whoever waits
                    self._end(None, failure)
                    return
                works, needed = cast("tuple[Sequence[VirtualWork], int]", awaited(waited))
                error = next((work.error for work in works if work.error is not None), None)
                pending = [work for work in works if not work.finished]
                done = len(works) - len(pending)
                if error is None and done < needed:
                    self._pending, self._needed = dict.fromkeys(pending), needed - done
                    for work in pending:
                        work.waiter = self
                    return

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._result, self.error, self.finished, self._steps = result, error, True, None
        self._pending.clear()
        if error is not None and self.tag is not None:
            self._fates.failed(self._owner.rank, self.tag, error)
        self._traffic.transfer(self._channel, self._began, self._scheduler.timeline.now)
        if self._deadline is not None:
            self._scheduler.timeline.cancel(self._deadline)
            self._deadline = None
        if self._owner.awaits is self:
            self._scheduler.wake(self._owner)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Transport calls in here belong to the event, and the works they make to this transfer."""
        scheduler = self._scheduler
        before, scheduler.stepping = scheduler.stepping, self
        try:
            yield
        finally:
            scheduler.stepping = before


@contextlib.contextmanager
def _threads_own_modes() -> Iterator[None]:
    """torch's modes as a fresh thread has them: the step runs in whatever worker's thread is at hand, perhaps amid its
    evaluation without gradients, under autocast or a meter of memory, while with real processes it runs in a thread of
    its own."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(own_modes())
        modes.enter_context(torch.enable_grad())
        if _len_torch_dispatch_stack():
            modes.enter_context(_disable_current_modes())
        yield

"""Messages and transfers of a virtual run: their data, and which send matches which receive. `isles.network.engine`
determines how long they take: a send is done when its message has left, a receive when it has arrived.

Bytes are copied once, when the message has left, straight into the posted receive. If there is none yet, or one from
anyone (which takes the earliest arrival, not known before), they wait in a copy.

Matching: by (source, target, tag), oldest message to oldest receive; a receive from a named rank goes before one from
anyone.

A transfer is a protocol (generator) that is stepped in the caller's turn up to its first wait, and then by the events
that it waits for, at their virtual time. Stepping takes no time, and its sends leave then.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from isles.base.modes import own_modes
from isles.comm.errors import DeadlinePassed, Malformed, PeerLost, RoundClosed
from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import SUSPECT_AFTER, SUSPECT_EVERY, Steps, works_of
from isles.comm.virtual.scheduler import Blocker, Scheduler, VirtualWorker
from isles.network.engine import ARRIVED, LAST, Event, EventQueue, Wire, WireMessage
from isles.network.links import Topology


class VirtualWork:
    """One message in flight. See `isles.comm.transport.Work`."""

    __slots__ = ("_owner", "_transfer", "at", "error", "finished", "out", "peer", "waiter")

    def __init__(self, owner: VirtualWorker, peer: int | None, out: Tensor | None, transfer: Blocker | None) -> None:
        self.peer = peer
        self.out = out  # a receive's buffer
        self.finished = False
        self.at = math.inf
        self.error: Exception | None = None
        self.waiter: Callable[[VirtualWork], None] | None = None  # called when done: a transfer waits for this
        self._owner = owner
        self._transfer = transfer  # the transfer that made it

    def done(self) -> bool:
        with self._owner:
            return self.finished

    def abandoned(self) -> BaseException | None:
        """The error of the transfer that made it, if that has failed: then its data will not be used."""
        return None if self._transfer is None else self._transfer.error

    def finish(self, error: Exception | None = None) -> None:
        """It has left, arrived or failed, now; a paused owner sees it when it resumes."""
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
            waiter(self)


class VirtualEvent(VirtualWork):
    """See `isles.comm.transport.WaitEvent`."""

    __slots__ = ("alarm",)

    def __init__(self, owner: VirtualWorker, seconds: float) -> None:
        super().__init__(owner, None, None, None)
        timeline = owner.scheduler.timeline
        self.alarm: Event | None = None
        if seconds < math.inf:
            self.alarm = timeline.at(timeline.now + seconds, ARRIVED, owner.rank, self._event_set)

    def set(self) -> None:
        with self._owner:
            if not self.finished:
                if self.alarm is not None:
                    self._owner.scheduler.timeline.cancel(self.alarm)
                self._event_set()

    def _event_set(self) -> None:
        self.alarm = None
        self.finish()


class VirtualTransfer:
    """A protocol in progress. See `isles.comm.transport.Transfer`."""

    def __init__(
        self,
        scheduler: Scheduler,
        owner: VirtualWorker,
        steps: Steps[Any],
        channel: Channel,
        deadline: float,
        traffic: Traffic,
    ) -> None:
        self.error: BaseException | None = None
        self.finished = False
        self._scheduler, self._owner = scheduler, owner
        self._steps: Steps[Any] | None = steps
        self._channel: Channel = channel
        self._seconds = deadline
        self._traffic = traffic
        self._began = scheduler.timeline.now
        self._pending: dict[VirtualWork, None] = {}  # in the order of the yield
        self._needed = 0  # how many of them must be done before the protocol goes on
        self._deadline: Event | None = None
        self._result: Any = None
        self.suspect: Callable[[int], None] | None = None
        """See `VirtualTransport.suspect`."""

    @property
    def listens(self) -> bool:
        """Whether it has no deadline, because it waits for messages that may never be sent."""
        return self._seconds == math.inf

    def start(self) -> None:
        self._advance(None)
        if not self.finished and self._seconds < float("inf"):
            timeline = self._scheduler.timeline
            self._deadline = timeline.at(timeline.now + self._seconds, LAST, self._owner.rank, self._late)

    def wait(self) -> Any:
        assert not self._scheduler.is_held, "a protocol yields what it waits for"
        with self._owner:
            if not self.finished:
                start = self._owner.clock
                if self.suspect is not None:
                    self._scheduler.timeline.at(start + SUSPECT_AFTER, LAST, self._owner.rank, self._doubt)
                self._scheduler.block(self._owner, self)
                self._traffic.waited(self._channel, start, self._owner.clock)
        if self.error is not None:
            raise self.error
        return self._result

    def _doubt(self) -> None:
        """Its owner is blocked: call `suspect` for each peer that it waits for."""
        if self.finished or self._owner.awaits is not self or self.suspect is None:
            return
        timeline = self._scheduler.timeline
        if (back := self._owner.back(timeline.now)) > timeline.now:
            timeline.at(back, LAST, self._owner.rank, self._doubt)
            return
        for peer in dict.fromkeys(work.peer for work in self._pending):
            if peer is not None:
                self.suspect(peer)
        timeline.at(timeline.now + SUSPECT_EVERY, LAST, self._owner.rank, self._doubt)

    def done(self) -> bool:
        with self._owner:
            return self.finished

    def one_done(self, work: VirtualWork) -> None:
        """A work that this transfer may wait for has ended; an error is raised in the protocol at once."""
        if work not in self._pending:
            return
        del self._pending[work]
        self._needed -= 1
        if work.error is not None or self._needed == 0:
            with _threads_own_modes():
                self._advance(work.error)

    def fail(self, error: BaseException) -> None:
        """Abandon the protocol, so that `wait` raises `error`. No effect on other transfers, nor if it has ended."""
        if self.finished:
            return
        steps, self._steps = self._steps, None
        self._end(None, error)
        if steps is not None:
            with self._stepping():
                try:
                    steps.close()
                except Exception as failure:  # its clean-up failed as well: noted on the first error
                    error.add_note(f"and closing the protocol raised {failure!r}")

    def _late(self) -> None:
        timeline = self._scheduler.timeline
        back = self._owner.back(timeline.now)
        if back > timeline.now:  # arrivals during the pause count before the deadline
            self._deadline = timeline.at(back, LAST, self._owner.rank, self._late)
            return
        peer = next((work.peer for work in self._pending), None)
        self.fail(DeadlinePassed(-1 if peer is None else peer, self._channel, self._seconds))

    def _advance(self, error: Exception | None) -> None:
        """Step until the protocol has to wait, or ends."""
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
                except BaseException as failure:  # any exception of the protocol is raised in `wait`
                    self._end(None, failure)
                    return
                works, needed = cast("tuple[Sequence[VirtualWork], int]", works_of(waited))
                error = next((work.error for work in works if work.error is not None), None)
                pending = [work for work in works if not work.finished]
                done = len(works) - len(pending)
                if error is None and done < needed:
                    self._pending, self._needed = dict.fromkeys(pending), needed - done
                    for work in pending:
                        work.waiter = self.one_done
                    return

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._result, self.error, self.finished, self._steps = result, error, True, None
        self._pending.clear()
        self._traffic.transfer(self._channel, self._began, self._scheduler.timeline.now)
        if self._deadline is not None:
            self._scheduler.timeline.cancel(self._deadline)
            self._deadline = None
        if self._owner.awaits is self:
            self._scheduler.wake(self._owner)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Transport calls in here belong to the event, and the works that they make to this transfer."""
        scheduler = self._scheduler
        before, scheduler.stepping = scheduler.stepping, self
        try:
            yield
        finally:
            scheduler.stepping = before


def _threads_own_modes() -> contextlib.AbstractContextManager[Any]:
    """Default torch modes. A step runs in any worker's thread, perhaps amid an evaluation without gradients, under
    autocast or a memory meter; with real processes it runs in a thread of its own."""
    return _without_meters() if _len_torch_dispatch_stack() else own_modes(gradients=True)


@contextlib.contextmanager
def _without_meters() -> Iterator[None]:
    with own_modes(gradients=True), _disable_current_modes():
        yield


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class VirtualMessage(WireMessage):
    """A message with its data and its receive."""

    __slots__ = ("data", "dropped", "error", "nbytes", "receive", "sent", "tag")

    def __init__(self, source: int, target: int, tag: Tag, data: Bytes, sent: VirtualWork) -> None:
        super().__init__(source, target, tag.channel, 8.0 * data.nbytes)
        self.tag, self.nbytes = tag, data.nbytes
        self.data: Bytes | None = data  # the sender's memory until it has left, then a copy, or None once delivered
        self.sent = sent
        self.receive: VirtualWork | None = None
        self.error: Exception | None = None  # the error of that receive when this arrives
        self.dropped = False  # one end was lost when it left: it is never delivered


class VirtualWire(Wire[VirtualMessage]):
    """The network between the ranks of `topology`."""

    def __init__(self, topology: Topology, seed: int, timeline: EventQueue) -> None:
        super().__init__(topology, seed, timeline)
        self.size = topology.workers
        self._posted: dict[tuple[int, int | None, Tag], list[VirtualWork]] = {}  # (target, source, tag)
        self._arrived: dict[tuple[int, Tag], dict[int, deque[VirtualMessage]]] = {}  # (target, tag) -> source
        self._coming: Counter[tuple[int, int, Tag]] = Counter()  # (target, source, tag): sent, and no receive bound yet
        self.sent = 0
        """Bytes of all messages."""
        self._over: dict[tuple[int, Channel], int] = {}  # by rank and channel: the newest closed round
        self._again: dict[tuple[int, Channel], tuple[int, int]] = {}  # the newest retried round, and its newest attempt
        self._lost: dict[int, str] = {}
        self._dead: set[int] = set()  # lost ranks whose messages in flight are dropped

    def send(self, source: int, target: int, data: Tensor, tag: Tag, work: VirtualWork) -> None:
        """Queue `data` on the uplink of `source`. `work` is done when it has left; PeerLost if the target has ended."""
        self.sent += data.nbytes
        if target in self._lost:
            work.finish(PeerLost(target, self._lost[target]))
            return
        key = target, source, tag
        self._coming[key] = self._coming.get(key, 0) + 1
        self.carry(VirtualMessage(source, target, tag, data.numpy(), work))

    def recv(self, target: int, source: int | None, tag: Tag, work: VirtualWork) -> None:
        """Fill `work.out` with the next message under `tag`; PeerLost at once if none can come."""
        arrived = self._arrived.get((target, tag))
        if arrived and (source is None or source in arrived):
            if source is None:
                source = min(arrived, key=lambda rank: (arrived[rank][0].arrival, rank))
            message = arrived[source].popleft()
            if not arrived[source]:
                del arrived[source]
                if not arrived:
                    del self._arrived[target, tag]
            self._deliver(message, work)
            return
        if source is not None and self._has_passed(target, tag):
            work.finish(RoundClosed(source, "another attempt of that round has begun"))
            return
        key = (target, source, tag)
        queue = self._posted.get(key)
        if queue is None:
            self._posted[key] = [work]
        else:
            queue.append(work)
        if self._lost:
            self._fail_hopeless(key)

    def lost(self, rank: int, why: str) -> None:
        """`rank` has ended: its messages are still delivered; waits for more get PeerLost, in rank order."""
        self._lost[rank] = why
        for key in [key for key in self._posted if key[0] == rank]:
            del self._posted[key]
        for key in [key for key in self._arrived if key[0] == rank]:
            del self._arrived[key]
        for key in sorted((key for key in self._posted if key[1] in (rank, None)), key=lambda key: key[0]):
            self._fail_hopeless(key)

    def dead(self, rank: int) -> None:
        """`rank` died: messages that have not left its link are dropped. `lost` notifies the others."""
        self._dead.add(rank)

    def cut(self, rank: int, why: str) -> None:
        """As `lost`, until `restore`; also fails the waits of `rank`."""
        arrived = sorted((key for key in self._posted if key[0] == rank), key=str)
        works = [(key[1], work) for key in arrived for work in self._posted.pop(key)]
        self.lost(rank, why)
        for peer, work in works:
            work.finish(PeerLost(rank if peer is None else peer, why))

    def end(self, target: int, is_vain: Callable[[int, Tag], bool], why: Callable[[int], Exception]) -> None:
        """Fail the waits of `target` for (source, tag) if they are in vain."""
        keys = [key for key in self._posted if key[0] == target]
        for source, key in sorted((key[1], key) for key in keys if key[1] is not None):
            for work in self._posted.pop(key, []) if is_vain(source, key[2]) else []:
                work.finish(why(source))

    def over(self, rank: int, channel: Channel, round: int) -> None:
        """Close the rounds of `channel` up to `round` at `rank`: workers that have sent to one of them, or will, get an
        error, and do not wait for `rank` in it.
        """
        self._over[rank, channel] = round
        self.end(rank, lambda _, tag: self._is_over(rank, tag), lambda peer: PeerLost(peer, "that round is over here"))
        for key in [key for key in self._arrived if key[0] == rank and self._is_over(*key)]:
            for message in (message for queue in self._arrived.pop(key).values() for message in queue):
                self._came_late(message)

    def again(self, rank: int, tag: Tag) -> None:
        """The attempt of `tag` has begun at `rank`: cancel its waits in earlier attempts of that round."""
        known = self._again.get((rank, tag.channel), (-1, 0))
        self._again[rank, tag.channel] = max(known, (tag.round, tag.attempt))
        why = "another attempt of that round has begun"
        self.end(rank, lambda _, old: self._has_passed(rank, old), lambda peer: RoundClosed(peer, why))

    def _is_over(self, rank: int, tag: Tag) -> bool:
        over = self._over.get((rank, tag.channel))
        return over is not None and tag.round <= over

    def _has_passed(self, rank: int, tag: Tag) -> bool:
        round, attempt = self._again.get((rank, tag.channel), (-1, 0))
        return tag.round == round and tag.attempt < attempt

    def _came_late(self, message: VirtualMessage) -> None:
        """The message's round is closed at its target: its sender gets an error, one latency later."""
        source, target, tag = message.source, message.target, message.tag
        latency = (self._ways[target].get(source) or self._way(target, source))[2]

        def notify() -> None:
            self.end(
                source,
                lambda peer, old: peer == target and old.channel == tag.channel and old.round <= tag.round,
                RoundClosed,
            )

        self.timeline.at(self.timeline.now + latency, ARRIVED, source, notify)

    def restore(self, rank: int) -> None:
        """`rank` is connected again; its earlier messages are lost."""
        self._lost.pop(rank, None)

    def _fail_hopeless(self, key: tuple[int, int | None, Tag]) -> None:
        """Fail receives of `key` that exceed the number of messages still to arrive."""
        target, source, tag = key
        if source is None:
            if len(self._lost) < self.size - 1:
                return  # some worker is left that may send
            coming, rank = sum(self._coming[target, peer, tag] for peer in self._lost), next(reversed(self._lost))
        elif source in self._lost:
            coming, rank = self._coming[target, source, tag], source
        else:
            return
        # Look it up again each time: a failed receive resumes its protocol, which may post and end others.
        while len(queue := self._posted.get(key, [])) > coming:
            work = queue.pop()
            if not queue:
                del self._posted[key]
            work.finish(PeerLost(rank, self._lost[rank]))

    def left(self, message: VirtualMessage) -> None:
        """Copy the bytes, so that the sender may overwrite its memory."""
        if message.target in self._lost or message.source in self._dead:
            message.dropped, message.data = True, None
        else:
            self._bind(message)
        message.sent.finish()

    def _bind(self, message: VirtualMessage) -> None:
        key = (message.target, message.source, message.tag)
        if (
            self._coming[key] == 1 and (receive := self._take(key)) is not None
        ):  # 1: no older message of its key is in flight
            self._count_down(key)
            message.receive = receive
            _fill(message, receive)
        else:
            assert message.data is not None
            message.data = message.data.copy()

    def arrived(self, message: VirtualMessage) -> None:
        """Deliver it, or store it for a later receive."""
        target, source, tag = message.target, message.source, message.tag
        if message.receive is not None:
            self._hand_over(message, message.receive)
            return
        self._count_down((target, source, tag))
        if target in self._lost or message.dropped:
            self._fail_hopeless((target, source, tag))
            return
        receive = self._take((target, source, tag)) or self._take((target, None, tag))
        if receive is not None:
            self._deliver(message, receive)
        elif self._is_over(target, tag):
            self._came_late(message)
        else:
            self._arrived.setdefault((target, tag), {}).setdefault(source, deque()).append(message)

    def _take(self, key: tuple[int, int | None, Tag]) -> VirtualWork | None:
        queue = self._posted.get(key)
        if queue is None:
            return None
        if len(queue) == 1:
            return self._posted.pop(key)[0]
        return queue.pop(0)

    def _count_down(self, key: tuple[int, int, Tag]) -> None:
        self._coming[key] -= 1
        if not self._coming[key]:
            del self._coming[key]  # tags are never reused, so the counter would grow for ever

    def _deliver(self, message: VirtualMessage, receive: VirtualWork) -> None:
        _fill(message, receive)
        receive.peer = message.source
        self._hand_over(message, receive)

    def _hand_over(self, message: VirtualMessage, receive: VirtualWork) -> None:
        receive.finish(message.error)


def _fill(message: VirtualMessage, receive: VirtualWork) -> None:
    """Copy the bytes, unless the sizes differ or the transfer was abandoned: its owner may have reused the memory."""
    data, out = message.data, receive.out
    message.data = None
    assert data is not None and out is not None
    if receive.abandoned() is not None:
        return
    if data.nbytes != out.numel():
        what = f"a message of {data.nbytes} bytes met a receive of {out.numel()} bytes ({message.tag})"
        message.error = Malformed(message.source, f"{what}; both sides must agree on the size")
        return
    out.numpy()[:] = data

"""Two connections made one: what comes on one leaves on the other, unread; for pairs without a way to each other.

What they say is encrypted from end to end. Of each direction so much is kept as the other end has not taken yet, and no
more is read meanwhile: a slow pair holds up itself alone. One thread for all of them, beside the loop's.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_KEPT = 1 << 18  # bytes of each direction
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Way:
    """What goes from one connection to the other. rest: what came and has not left."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target, self.rest = source, target, memoryview(b"")

    def read(self, room: memoryview) -> int:
        """Bytes that came, by way of `room`. EOFError, OSError where it is over."""
        with contextlib.suppress(BlockingIOError):
            read = self.source.recv_into(room)
            if not read:
                raise EOFError
            self.rest = room[:read]
            self.write()
            self.rest = memoryview(bytes(self.rest))
            return read
        return 0

    def write(self) -> None:
        """As much as the target takes."""
        with contextlib.suppress(BlockingIOError):
            while self.rest:
                self.rest = self.rest[self.target.send(self.rest) :]


class Splices:
    """carried: called with bytes that went through."""

    def __init__(self, carried: Callable[[int], None]) -> None:
        self._carried = carried
        self._room = memoryview(bytearray(_KEPT))
        self._selector = selectors.DefaultSelector()
        self._ways: dict[socket.socket, tuple[_Way, _Way]] = {}  # by connection: from it, to it
        self._events: dict[socket.socket, int] = {}  # that are waited for
        self._new: SimpleQueue[tuple[socket.socket, socket.socket] | None] = SimpleQueue()
        self._wakes, self._awake = socket.socketpair()
        self._awake.setblocking(False)
        self._thread: threading.Thread | None = None

    def add(self, one: socket.socket, other: socket.socket) -> None:
        """Make these one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="isles-splices", daemon=True)
            self._thread.start()
        self._new.put((one, other))
        self._wakes.send(b"x")

    def close(self) -> None:
        """End them all. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._new.put(None)
            self._wakes.send(b"x")
            thread.join(5.0)
        self._wakes.close()
        self._awake.close()

    def _work(self) -> None:
        self._selector.register(self._awake, _READ)
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._awake:
                    if not self._take_in():
                        return
                elif key.fileobj in self._ways:
                    self._move(key.fileobj, events)

    def _take_in(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)
        with contextlib.suppress(Empty):
            while (pair := self._new.get_nowait()) is not None:
                there, back = _Way(*pair), _Way(*reversed(pair))
                self._ways |= {pair[0]: (there, back), pair[1]: (back, there)}
                for end in pair:
                    self._await(end)
            for end in [*self._ways]:
                self._end(end)
            return False
        return True

    def _move(self, end: socket.socket, events: int) -> None:
        out, into = self._ways[end]
        try:
            if events & _READ:
                self._carried(out.read(self._room))
            if events & _WRITE:
                into.write()
        except (EOFError, OSError):
            self._end(end)
            return
        self._await(end)
        self._await(out.target)

    def _await(self, end: socket.socket) -> None:
        out, into = self._ways[end]
        events = (0 if out.rest else _READ) | (_WRITE if into.rest else 0)
        before = self._events.get(end, 0)
        if events == before:
            return
        if events and before:
            self._selector.modify(end, events)
        elif events:
            self._selector.register(end, events)
        elif before:
            self._selector.unregister(end)
        self._events[end] = events

    def _end(self, end: socket.socket) -> None:
        ways = self._ways.get(end)
        for one in () if ways is None else (ways[0].source, ways[0].target):
            self._ways.pop(one)
            if self._events.pop(one, 0):
                self._selector.unregister(one)
            one.close()

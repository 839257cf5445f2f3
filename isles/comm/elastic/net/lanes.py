"""Words over one TLS connection, in two lanes: urgent ones go before the others, and between the pieces of a long one.

    word  = kind (1 byte), number (8), milliseconds (4), lengths of key (2) and of what goes beside (4); these; payload
    piece = flags (1 byte: 1 urgent, 2 the last of its word), length (2); so much of a word. Without length: a beat

A piece fits a TLS record. What the kernel takes beyond the one that it is sending is kept small, or urgent words would
wait behind it. Whoever is silent for a lease is gone; pieces of a long word over a slow line are signs of life.

All of it runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from isles.comm.sockets.frames import BadFrame
from isles.comm.sockets.lost import LinkLost, close, ends
from isles.comm.sockets.silence import Silence

MAX_MESSAGE = 4 << 20
"""Bytes of a word's payload."""
PIECE = 1 << 14
_LONGEST = MAX_MESSAGE + (1 << 16)
_PIECE = struct.Struct(">BH")
_WORD = struct.Struct(">BQIHI")
_URGENT, _LAST = 1, 2
_BEAT = _PIECE.pack(_URGENT | _LAST, 0)
_LOOKS = 4  # and beats, in a lease
_LOOK = 1.0  # seconds between them, at most
_UNSENT = 1 << 17  # bytes that the kernel takes before they can be sent
_NOTSENT_LOWAT = 25  # of linux/tcp.h
_FLUSH = 2.0  # seconds for what was said to leave


class FrameKind(IntEnum):
    """What a word is. Of a client: ASK, SERVE, PRESENT, WATCH; of the hub: WELCOME, SEEN, GONE; of whoever was asked,
    and passed on: REPLY, REFUSAL, NOBODY.
    """

    WELCOME, ASK, REPLY, REFUSAL, NOBODY, SERVE, PRESENT, WATCH, SEEN, GONE = range(10)


class Frame(NamedTuple):
    """One word. number: of the question that it asks or answers, or of what is watched. milliseconds: for an answer."""

    kind: FrameKind
    number: int
    key: str = ""
    payload: bytes | memoryview = b""
    beside: bytes | memoryview = b""
    milliseconds: int = 0

    @property
    def size(self) -> int:
        """Bytes of what it says."""
        return len(self.payload) + len(self.beside)


def packed(frame: Frame) -> bytes:
    """The word as bytes."""
    key = frame.key.encode("ascii")
    head = _WORD.pack(frame.kind, frame.number, frame.milliseconds, len(key), len(frame.beside))
    return b"".join((head, key, frame.beside, frame.payload))


def frame_of(word: bytes) -> Frame:
    """The word of these bytes. BadFrame where they are none."""
    try:
        kind, number, milliseconds, key, beside = _WORD.unpack_from(word)
        at = _WORD.size + key
        if at + beside > len(word):
            raise BadFrame("a word that is cut short")
        body = memoryview(word)
        name = word[_WORD.size : at].decode("ascii")
        if not name.isprintable():
            raise BadFrame("an address that is none")
        return Frame(FrameKind(kind), number, name, body[at + beside :], body[at : at + beside], milliseconds)
    except (struct.error, ValueError) as error:
        raise BadFrame("what it says is no word of Isles") from error


class LaneConnection:
    """One end of a connection whose other end was let in. lease: seconds of silence until it counts as gone. most:
    bytes that wait to be sent.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lease: float, most: int) -> None:
        self._reader, self._writer, self._most = reader, writer, most
        self.here, self.there = ends(writer)
        self._lanes: tuple[deque[memoryview], deque[memoryview]] = deque(), deque()
        self._waiting, self._any = 0, asyncio.Event()
        self._silence = Silence(lease)
        writer.transport.set_write_buffer_limits(high=_UNSENT)
        own = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                own.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)

    def send(self, frame: Frame, *, urgent: bool) -> bool:
        """Have it sent; False where too much waits already."""
        if self._waiting + frame.size > self._most:
            return False
        word = packed(frame)
        self._waiting += len(word)
        self._lanes[urgent].append(memoryview(word))
        self._any.set()
        return True

    def expects(self, lease: float) -> None:
        """Count the other end as gone after `lease` seconds of silence."""
        self._silence.seconds = lease

    async def run(self, heard: Callable[[Frame, bool], None]) -> None:
        """Have `heard` called with each word, and whether it is urgent, until the connection breaks; raises what broke
        it. LinkLost for silence.
        """
        tasks = [asyncio.ensure_future(one) for one in (self._read(heard), self._write(), self._look())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self) -> None:
        """Break it off."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Once what was said has left, or that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH):
                while self._waiting and not self._writer.transport.is_closing():
                    await asyncio.sleep(0.005)
        await close(self._writer)

    async def _read(self, heard: Callable[[Frame, bool], None]) -> None:
        parts, sizes = (list[bytes](), list[bytes]()), [0, 0]
        while True:
            flags, length = _PIECE.unpack(await self._reader.readexactly(_PIECE.size))
            self._silence.heard()
            if not length:
                continue
            lane = flags & _URGENT
            sizes[lane] += length
            if sizes[lane] > _LONGEST:
                raise BadFrame("a word longer than any")
            parts[lane].append(await self._reader.readexactly(length))
            if flags & _LAST:
                word = b"".join(parts[lane])
                parts[lane].clear()
                sizes[lane] = 0
                heard(frame_of(word), bool(lane))

    async def _write(self) -> None:
        while True:
            await self._any.wait()
            batch = list[bytes | memoryview]()
            room = PIECE
            while room > 0 and (lane := next((one for one in (1, 0) if self._lanes[one]), None)) is not None:
                word = self._lanes[lane].popleft()
                piece, rest = word[:PIECE], word[PIECE:]
                if rest:
                    self._lanes[lane].appendleft(rest)
                batch += (_PIECE.pack((_URGENT if lane else 0) | (0 if rest else _LAST), len(piece)), piece)
                room -= len(piece)
                self._waiting -= len(piece)
            self._writer.write(b"".join(batch))
            await self._writer.drain()
            if not any(self._lanes):
                self._any.clear()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(self._silence.seconds / _LOOKS, _LOOK))
            if self._silence.over():
                raise LinkLost(f"no sign of life for {self._silence.seconds:g} s")
            if not self._waiting and not self._writer.transport.get_write_buffer_size():
                self._writer.write(_BEAT)

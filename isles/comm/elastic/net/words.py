"""What a hub and its clients say to each other: words, each a message of one `Connection`.

word = kind (1 byte), number (8), milliseconds (4), lengths of key (2) and of what goes beside (4); these; payload
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from isles.comm.sockets.frames import BadFrame

MAX_MESSAGE = 4 << 20
"""Bytes of a word's payload."""
LONGEST = MAX_MESSAGE + (1 << 16)
"""Bytes of a word."""
_WORD = struct.Struct(">BQIHI")


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


def frame_of(word: bytes | bytearray) -> Frame:
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

"""What travels between two machines: frames, measured before they are kept; and JSON, parsed as what strangers wrote.

    frame = b"isle" + length (4 bytes, big-endian) + that many bytes of a message; length 0 says only "I am here"

The two highest bits of the length are flags: `URGENT`, and `MORE` where the message goes on in a later frame. No
pickle: what comes is plain data, and anything else is `BadFrame`.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

from isles.parsing import parse_json

MARK = b"isle"
HEAD = struct.Struct(">4sI")
URGENT, MORE = 1 << 31, 1 << 30
LONGEST = 16 << 20  # bytes of a message from one who belongs to the run; they have some hundred
STRANGERS = 64 << 10  # bytes of a message from one of whom nothing is known
ALIVE = HEAD.pack(MARK, 0)
_OTHER = "what answers there is not Isles"
_DEEPEST = 32  # tables and lists in each other; those of Isles have 6


class BadFrame(ValueError):
    """What came is no message of Isles."""


def packed(message: Any) -> bytes:
    """The frame of a message: anything that JSON holds."""
    body = json.dumps(message).encode()
    return HEAD.pack(MARK, len(body)) + body


def head_of(head: bytes, longest: int) -> tuple[int, bool, bool]:
    """Of the first `HEAD.size` bytes of a frame: bytes that follow, whether it is urgent, and whether its message goes
    on. BadFrame where it is longer than `longest`.
    """
    mark, flags = HEAD.unpack(head)
    length = flags & ~(URGENT | MORE)
    if mark != MARK or length > longest or (flags and not length):
        raise BadFrame(_OTHER)
    return length, bool(flags & URGENT), bool(flags & MORE)


def message_of(body: bytes) -> Any:
    """The message of a body. BadFrame where it is no JSON, or deeper than any message of Isles."""
    try:
        return parse_json(body, _DEEPEST)
    except ValueError as error:
        raise BadFrame(_OTHER) from error


async def heard(reader: asyncio.StreamReader, longest: int) -> Any:
    """The first message on a connection. BadFrame, or EOFError where there is none."""
    body, more = b"", True
    while more or not body:
        length, _, more = head_of(await reader.readexactly(HEAD.size), longest - len(body))
        body += await reader.readexactly(length)
    return message_of(body)

"""What travels between two machines: frames of JSON, measured before they are kept, and parsed as what strangers wrote.

    frame = b"isle" + length (4 bytes, big-endian) + JSON in UTF-8; a frame of length 0 says only "I am here"

No pickle: what comes is plain data, and anything else is `BadFrame`.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from isles.parsing import parse_json

MARK = b"isle"
HEAD = struct.Struct(">4sI")
LONGEST = 16 << 20  # bytes of a message from one who belongs to the run; they have some hundred
STRANGERS = 64 << 10  # bytes of a message from one of whom nothing is known
ALIVE = HEAD.pack(MARK, 0)
_DEEPEST = 32  # tables and lists in each other; those of Isles have 6


class BadFrame(ValueError):
    """What came is no message of Isles."""


def packed(message: Any) -> bytes:
    """The frame of a message: anything that JSON holds."""
    body = json.dumps(message).encode()
    return HEAD.pack(MARK, len(body)) + body


def length_of(head: bytes, longest: int) -> int:
    """Of the body that follows the first `HEAD.size` bytes of a frame. BadFrame where it is longer than `longest`."""
    mark, length = HEAD.unpack(head)
    if mark != MARK or length > longest:
        raise BadFrame("what answers there is not Isles")
    return length


def message_of(body: bytes) -> Any:
    """The message of a body. BadFrame where it is no JSON, or deeper than any message of Isles."""
    try:
        return parse_json(body, _DEEPEST)
    except ValueError as error:
        raise BadFrame("what answers there is not Isles") from error

"""Files with a checksum (CRC-32) of the rest of themselves. Loads no torch.

JSON           {"check": "1a2b3c4d", ...
safetensors    the header's metadata begins with "check"; the other entries are the file's notes
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.base.durable import write_text
from isles.base.parsing import parse_json

UNCHECKED = "00000000"
"""Placeholder of a safetensors file's checksum while it is computed."""
CHECK_AT = 8 + len('{"__metadata__": {"check": "')
"""Offset of the checksum in the file."""
_END = CHECK_AT + len(UNCHECKED)
_CHECK = re.compile(rb'\{"check": "([0-9a-f]{8})",\n')
_LONGEST_HEADER = 1 << 28


def write_checked(path: Path, record: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object of at least one entry."""
    rest = json.dumps(record, indent=indent).removeprefix("{")
    write_text(path, f'{{"check": "{zlib.crc32(rest.encode()):08x}",\n{rest}')


def read_checked(path: Path) -> dict[str, Any]:
    """Read a file of `write_checked`, or one that a user wrote without a checksum. ValueError if it is damaged."""
    data = path.read_bytes()
    check = _CHECK.match(data)
    if check is not None and int(check[1], 16) != zlib.crc32(data[check.end() :]):
        raise ValueError(f"{path}: damaged")
    record = parse_json(data.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path}: damaged")
    return record


def read_notes(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. ValueError if the file is damaged, or has no checksum."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError(f"{path}: damaged")
        header = size.to_bytes(8, "little") + file.read(size)
        before, found, behind = header[:CHECK_AT], header[CHECK_AT:_END], header[_END:]
        checksum = zlib.crc32(before + UNCHECKED.encode() + behind)
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    if found != f"{checksum:08x}".encode():
        raise ValueError(f"{path}: damaged")
    notes: dict[str, str] = parse_json(header[8:].decode("utf-8"))["__metadata__"]
    return notes


def is_whole(path: Path) -> bool:
    """Whether it is a safetensors file with a valid checksum."""
    try:
        return bool(read_notes(path))
    except (OSError, ValueError):
        return False

"""JSON and TOML that somebody else wrote, measured before they are parsed: a small text may else take gigabytes.

What is too long, too deep or of too many parts is a mistake of the file as any other: ValueError, in one line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

_LONGEST_JSON, _PARTS = 64 << 20, 1 << 22  # characters, and values: 100 bytes of memory each
_LONGEST_TOML, _KEYS = 16 << 20, 1 << 16  # characters, and keys and lists
_DEEPEST = 64  # tables and lists in each other; those of Isles have 20 at most
_BITS = 1000  # of a whole number: a float has room for it
_DOTS = 8  # of one key: tomllib takes the square of them, so 200 kB of `a.a.a` would be 20 GB
_NAME = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+{_NAME}(?:[ \t]*+\.[ \t]*+{_NAME}){{{_DOTS}}}", re.MULTILINE)


def parse_json(text: str | bytes, deepest: int = _DEEPEST) -> Any:
    """As `json.loads`, of UTF-8. ValueError for whatever is no JSON, or is too large."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    _refuse_large("characters", len(text), _LONGEST_JSON)
    _refuse_large("values", sum(map(text.count, ",[{")), _PARTS)
    return _parsed(json.loads, text, deepest)


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. ValueError for whatever is no TOML, or is too large."""
    _refuse_large("characters", len(text), _LONGEST_TOML)
    _refuse_large("keys and lists", sum(map(text.count, "=[")), _KEYS)
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of it has more than {_DOTS} parts")
    return _parsed(tomllib.loads, text.removeprefix("\ufeff"), _DEEPEST)  # the mark that Windows writes


def _refuse_large(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has {number} {what}, and no more than {most} are read")


def _parsed(loads: Callable[[str], Any], text: str, deepest: int) -> Any:
    """What `loads` reads, where no more than `deepest` tables and lists are in each other."""
    with suppress(RecursionError):
        found = loads(text)
        level = [found]
        while level and deepest >= 0:
            _refuse_large("bits in a number", max([n.bit_length() for n in level if isinstance(n, int)] or [0]), _BITS)
            inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
            level, deepest = [*chain.from_iterable(inner)], deepest - 1
        if not level:
            return found
    raise ValueError("it nests too deep")

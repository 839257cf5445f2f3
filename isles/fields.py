"""What another machine says is data: every field is looked at before it is used. Unfit: it is not as it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from isles.errors import printable

LAST_PORT = 65535


class Unfit(ValueError):
    """A field is missing, of another type, or out of its range."""


def table(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise Unfit(f"{what} is no table")
    return value


def integer(message: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """low <= message[key] <= high; true and false are no integers."""
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Unfit(f"{key} is no whole number from {low} to {high}")
    return value


def port(message: Mapping[str, Any], key: str) -> int:
    """A TCP port."""
    return integer(message, key, 1, LAST_PORT)


def number(message: Mapping[str, Any], key: str, low: float = 0.0) -> float:
    """A finite number that is not below `low`."""
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(f"{key} is no number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or found < low:
        raise Unfit(f"{key} is no number from {low:g} on")
    return found


def text(message: Mapping[str, Any], key: str, longest: int = 200) -> str:
    """A text, as one line that may be printed."""
    value = message.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise Unfit(f"{key} is no text of at most {longest} characters")
    return printable(value)

"""JSON and TOML that somebody else wrote: what nests so deep that the parser gives up is a mistake of the file as any
other, and not an error of the program.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`. ValueError for whatever is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. ValueError for whatever is no TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None

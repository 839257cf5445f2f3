"""How Isles words a user's mistake: one line that names the key and the mend."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(key: str, given: str, known: Iterable[str]) -> str:
    """The line for a name that is not in `known`: the closest one first, then all."""
    names = sorted(known)
    close = get_close_matches(given, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {key} {given!r}: {hint}choose one of {', '.join(names)}"

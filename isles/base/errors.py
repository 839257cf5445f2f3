"""How Isles reports a user's mistake (one line that names the key and what to do), text that others wrote, and Python's
warnings.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


def unknown_name(key: str, value: str, known: Iterable[str]) -> str:
    """The line for a name that is not in `known`: the closest one first, then all."""
    close = nearest(value, names := sorted(known))
    hint = f"did you mean {close!r}? " if close else ""
    return f"unknown {key} {value!r}: {hint}choose one of {', '.join(names)}"


def nearest(value: str, known: Iterable[str]) -> str | None:
    """The one of `known` that a user may have meant by `value`; None if none is near. Case does not matter. Keys with
    dots are compared by their last part; a number after a colon is kept as typed.
    """
    folded, asked = {name.casefold(): name for name in known}, value.casefold()
    if close := get_close_matches(asked, folded, n=1, cutoff=0.85):
        return folded[close[0]]
    kind, colon, number = value.partition(":")
    kinds = [name.partition(":")[0] for name in folded if ":" in name]
    if colon and (close := get_close_matches(kind.casefold(), kinds, n=1)):
        return f"{close[0]}:{number}"
    ends = {name.rpartition(".")[2]: own for name, own in reversed(folded.items())}
    end = asked.rpartition(".")[2]
    close = get_close_matches(end, ends, n=1) or [name for name in ends if name.startswith(end) and len(end) > 1]
    return ends[close[0]] if close else None


def in_section(section: str, message: str, keys: Iterable[str]) -> str:
    """The message with its section in front where it begins with one of the section's keys."""
    first = message.split(maxsplit=1)[0] if message else ""
    return f"{section}.{message}" if first.removesuffix(":") in keys else message


def demand(config: Any, keys: str, fits: Callable[[Any], bool], hint: str) -> None:
    """ValueError "KEY = VALUE: hint" for the first of `keys`, with spaces between them, whose value does not fit."""
    for key in keys.split():
        if not fits(value := getattr(config, key)):
            raise ValueError(f"{key} = {value}: {hint}")


def as_typed(value: Any) -> str:
    """The value of a setting as a CONFIG.toml has it."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def printable(text: str, longest: int = 2000) -> str:
    """What somebody else wrote, as one line for a terminal: no control or formatting characters (escapes, line breaks,
    changes of direction, halves of surrogates), no more than `longest` characters.
    """
    shown = "".join(_shown(character) for character in text[:longest])
    return shown + ("..." if len(text) > longest else "")


def _shown(character: str) -> str:
    return character if character.isprintable() else " " if character.isspace() else "?"


@contextmanager
def notify_warnings(notify: Callable[[Any], None]) -> Iterator[None]:
    """Python warnings become notices to the user, each once, instead of source lines on stderr."""
    seen: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in seen:
            seen.add(text)
            notify({"notice": text})

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield

"""What "package.module:name" names: how methods and models of one's own are found; names that load on first use."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def is_import_target(text: str) -> bool:
    """Whether `text` has the form package.module:name."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def import_target(key: str, target: str) -> Any:
    """The object at `target` (package.module:name). ValueError, begun with `key`, where there is none."""
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{key} cannot be imported: {error}") from error
    except Exception as error:  # the module is the user's: whatever it raises
        raise ValueError(f"{key} cannot be imported: {describe(error)}") from error


def on_first_use(
    package: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of `package`, whose names are imported when they are first asked for.

    homes: by module, such as ".config", the names that it has, in one string; "MemoryProfile=Profile" for one that
    says too little outside of its module.
    """
    named = [(name.partition("="), home) for home, names in homes.items() for name in names.split()]
    modules = {public: (home, own or public) for (public, _, own), home in named}
    here = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own = modules[name]
        here[name] = getattr(import_module(home, package), own)  # the next access no longer comes through here
        return here[name]

    return sorted(modules), load, lambda: sorted({*here, *modules})


def describe(error: Exception) -> str:
    """An error of a user's own code in one line, with the place where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text

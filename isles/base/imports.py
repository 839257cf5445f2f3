"""What "package.module:name" names: how methods and models of one's own are found; names that load on first use."""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Callable, Iterable
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
    except Exception as error:  # the module is the user's: whatever it raises
        said = error if isinstance(error, ImportError | AttributeError | SyntaxError) else describe(error)
        raise ValueError(f"{key} cannot be imported: {said}") from error


def on_first_use(
    package: str, targets: Iterable[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of `package`, whose names are imported when they are first asked for. They
    are those that its source imports under `if TYPE_CHECKING:`: one list for type checkers and Python.

    targets: further ones, package.module:name.
    """
    here = vars(sys.modules[package])
    source = ast.parse(Path(here["__file__"]).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    homes = {
        alias.asname or alias.name: (str(statement.module), alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.name != "*"
    }
    homes |= {name: (module, name) for module, _, name in (target.partition(":") for target in targets)}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = homes[name]
        here[name] = getattr(import_module(module), own)  # the next access no longer comes through here
        return here[name]

    return sorted(homes), load, lambda: sorted({*here, *homes})


def describe(error: Exception) -> str:
    """An error of a user's own code in one line, with the place where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text

"""TOML tables that a user wrote: read from a file, and turned into a dataclass, one line an error; and what the fields
of such a dataclass say of themselves.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isles.errors import unknown_name
from isles.parsing import parse_toml


def read_toml(path: str) -> dict[str, Any]:
    """What the file holds. ValueError where it cannot be read or is no TOML."""
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a TOML file") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def typed(section: str, cls: type, values: Mapping[str, Any]) -> Any:
    """The dataclass `cls` from the keys of a section. ValueError that names section.key and the mend."""
    known = [field.name for field in fields(cls)]
    for key in values:
        if key not in known:
            raise ValueError(unknown_name("key", f"{section}.{key}", [f"{section}.{name}" for name in known]))
    try:
        # As JSON, for the strict check of Python values takes no list for a tuple; strict: "yes" is no boolean, true no
        # number. TOML's dates become strings: `--set data.path=2024-05-01` means a folder.
        return _adapter(cls).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ValueError(_worded(section, error)) from None


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    """Made once a class: it takes longer than all that it reads."""
    return TypeAdapter(cls)


def field_docs(cls: type) -> dict[str, str]:
    """What the string below each field of a dataclass says, in one line; a field that a class derived from another
    gives a new default keeps its words, unless it has its own. "" where there are none, or no source to read.
    """
    found = dict.fromkeys((field.name for field in fields(cls)), "")
    for owner in reversed(cls.__mro__):
        found |= {name: text for name, text in _own_docs(owner).items() if name in found}
    return found


def _own_docs(cls: type) -> dict[str, str]:
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # typed at a prompt, or built in
        return {}
    assert isinstance(node, ast.ClassDef)
    found = {}
    for statement, below in pairwise(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    found[statement.target.id] = " ".join(text.split())
    return found


def _worded(section: str, error: ValidationError) -> str:
    """pydantic's first complaint in one line that begins with section.key."""
    first = error.errors()[0]
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    if first["type"] == "value_error":
        if message.startswith("unknown "):  # unknown codec 'zip': choose ...
            return f"unknown {section}.{message.removeprefix('unknown ')}"
        return message if message.startswith(f"{section}.") else f"{section}.{message}"
    key = ".".join([section, *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return f"{key} is missing: give it a value"
    hint = {"string_type": ", in quotes", "tuple_type": ", in brackets"}.get(first["type"], "")
    return f"{key} = {first['input']!r}: {message[0].lower()}{message[1:]}{hint}"

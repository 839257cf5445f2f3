"""TOML tables that a user wrote: read from a file, turned into a dataclass with one line an error, and the
documentation of such a dataclass's fields.

A field whose default is made by another dataclass is a table inside the section. Keys are written with dots:
"pipeline.swarm.peers" is key peers of table swarm of section pipeline.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from isles.base.errors import as_typed, unknown_name
from isles.base.parsing import adapter, parse_toml

T = TypeVar("T")


def read_toml(path: str) -> dict[str, Any]:
    """What the file holds. ValueError where it cannot be read or is no TOML."""
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a TOML file") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def parse_value(text: str) -> Any:
    """A TOML value; anything that is none is taken as a string, so that paths and names need no quotes."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def typed(section: str, cls: type, values: Mapping[str, Any]) -> Any:
    """The dataclass `cls` from the keys of a section. ValueError that names section.key and what to do."""
    _refuse_unknown(section, cls, values, [f"{section}.{key}" for key in keys_of(cls)])
    try:
        # As JSON, for the strict check of Python values takes no list for a tuple; strict: "yes" is no boolean, true no
        # number. TOML's dates become strings: `--set data.path=2024-05-01` means a folder.
        return adapter(cls).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ValueError(_worded(section, error)) from None


def _refuse_unknown(section: str, cls: type, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """ValueError for a key of `values`, at any depth, that is none of `known`, or for a value where a table belongs."""
    names, tables = {field.name for field in fields(cls)}, tables_of(cls)
    for key, value in values.items():
        if key not in names:
            raise ValueError(unknown_name("key", f"{section}.{key}", known))
        if key in tables:
            own = [name for name in known if name.startswith(f"{section}.{key}.")]
            if not isinstance(value, Mapping):
                raise ValueError(f"{section}.{key} = {as_typed(value)}: it is a table; set one of {', '.join(own)}")
            _refuse_unknown(f"{section}.{key}", tables[key], value, own)


def tables_of(cls: type) -> dict[str, type]:
    """The dataclasses of the tables inside of config dataclass `cls`, by name."""
    made = {field.name: field.default_factory for field in fields(cls)}
    return {name: maker for name, maker in made.items() if isinstance(maker, type) and is_dataclass(maker)}


def keys_of(cls: type) -> list[str]:
    """The keys of config dataclass `cls`, those of its tables included."""
    tables = tables_of(cls)
    plain = [field.name for field in fields(cls) if field.name not in tables]
    return plain + [f"{name}.{key}" for name, table in tables.items() for key in keys_of(table)]


def in_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        table = found
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return found


def table_of(tables: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The table that would hold `key`, empty where there is none, and the key's name in it."""
    *sections, name = key.split(".")
    table: Any = tables
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}, name


def changed(config: T, settings: Mapping[str, Any]) -> T:
    """Config dataclass `config` with other values by their keys. ValueError where they are refused."""
    own = in_tables(settings)
    for key, value in own.items():
        if is_dataclass(table := getattr(config, key)) and isinstance(value, dict):
            own[key] = changed(table, value)
    return replace(config, **own)  # type: ignore[type-var]


def non_defaults(config: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a config dataclass that are not at their defaults: key, value."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from ((f"{field.name}.{key}", inner) for key, inner in non_defaults(value))
        elif value != field.default:
            yield field.name, value


def refuse(config: Any, why: str, *names: str) -> None:
    """ValueError "KEY = VALUE why" for the first setting off its default that is one of `names`, or in such a table."""
    for key, value in non_defaults(config):
        if any(key == name or key.startswith(f"{name}.") for name in names):
            raise ValueError(f"{key} = {as_typed(value)} {why}")


def field_docs(cls: type) -> dict[str, str]:
    """What the string below each field of a dataclass says, in one line; a field that a class derived from another
    gives a new default has the same text, unless it has its own. "" where there are none, or no source to read.
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
    if first["loc"] and str(first["loc"][-1]).startswith(("int", "float", "bool", "literal[")):  # a branch of a union
        field = first["loc"][:-1]
        branches = [one["msg"].removeprefix("Input should be ") for one in error.errors() if one["loc"][:-1] == field]
        first["loc"], first["msg"] = field, f"Input should be {' or '.join(branches)}"
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    if first["type"] == "value_error":
        section = ".".join([section, *map(str, first["loc"])])
        if message.startswith("unknown "):  # unknown codec 'zip': choose ...
            return f"unknown {section}.{message.removeprefix('unknown ')}"
        return message if message.startswith(f"{section}.") else f"{section}.{message}"
    key = ".".join([section, *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return f"{key} is missing: give it a value"
    hint = {"string_type": ", in quotes", "tuple_type": ", in brackets"}.get(first["type"], "")
    return f"{key} = {first['input']!r}: {message[0].lower()}{message[1:]}{hint}"

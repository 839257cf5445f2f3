"""The full configuration as commented TOML: every key with its default and the docstring below its field."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import tomlkit

from isles.replicas import METHODS, config_of
from isles.tables import field_docs, tables_of
from isles.training.config.sections import ORDER, SECTIONS

_WIDTH = 100


def template(name: str) -> str:
    """TOML that `read_config` reads to the defaults of method `name`; keys without a default stand commented out."""
    made_for = config_of(name)
    lines = [
        f"# isles train THIS.toml    (method {name}: {METHODS[name].what})" if name in METHODS else f"# method {name}"
    ]
    for section in ORDER:
        cls = made_for if section == "replicas" else SECTIONS[section]
        lines += ["", *commented(section, cls, {"method": name} if section == "replicas" else {})]
    return "\n".join(lines) + "\n"


def commented(section: str, cls: type, given: Mapping[str, Any] | None = None) -> list[str]:
    """A section's lines: its head, the keys of `given`, then those of the config class with their defaults and
    docstrings.
    """
    tables = tables_of(cls)
    lines = [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in (given or {}).items())]
    for key, text in field_docs(cls).items():
        lines += [] if key in tables else _entry(cls, key, text)
    for key, table in tables.items():
        lines += ["", *_comment(inspect.getdoc(table) or ""), *commented(f"{section}.{key}", table)]
    return lines


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _entry(cls: type, key: str, text: str) -> list[str]:
    field = next(field for field in fields(cls) if field.name == key)
    comments = _comment(text)
    if field.default is None:
        return [*comments, f"# {key} ="]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return [*comments, f"{key} = {_toml(default)}"]


def _toml(value: Any) -> str:
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()

"""The full configuration as commented TOML: every key with its default and the docstring below its field."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

import tomlkit

from isles.replicas import METHODS, config_of
from isles.tables import field_docs
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
    first = [f"{key} = {_toml(value)}" for key, value in (given or {}).items()]
    return [f"[{section}]", *first, *(line for key, text in field_docs(cls).items() for line in _entry(cls, key, text))]


def _entry(cls: type, key: str, text: str) -> list[str]:
    field = next(field for field in fields(cls) if field.name == key)
    comments = textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    if field.default is None:
        return [*comments, f"# {key} ="]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return [*comments, f"{key} = {_toml(default)}"]


def _toml(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return f"{{ {', '.join(f'{key} = {_toml(entry)}' for key, entry in asdict(value).items())} }}"
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()

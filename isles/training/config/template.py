"""The full configuration as commented TOML: every key with its default and what its owner's docstring says of it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

import tomlkit

from isles.replicas import METHODS, method
from isles.training.config.reading import SECTIONS

_ORDER = ("model", "data", "inner", "replicas", "world", "memory", "run")
_WIDTH = 100


def template(name: str) -> str:
    """TOML that `read_config` reads to the defaults of method `name`; keys without a default stand commented out."""
    made_for = method(name).Config
    lines = [
        f"# isles train THIS.toml    (method {name}: {METHODS[name][1]})" if name in METHODS else f"# method {name}"
    ]
    for section in _ORDER:
        cls = made_for if section == "replicas" else SECTIONS[section]
        lines += ["", *commented(section, cls, {"method": name} if section == "replicas" else {})]
    return "\n".join(lines) + "\n"


def commented(section: str, cls: type, given: Mapping[str, Any] | None = None) -> list[str]:
    """A section's lines: its head, the keys of `given`, then those of the config class with their defaults and what its
    docstring says of them.
    """
    first = [f"{key} = {_toml(value)}" for key, value in (given or {}).items()]
    return [f"[{section}]", *first, *(line for key, text in described(cls).items() for line in _entry(cls, key, text))]


def described(cls: type) -> dict[str, str]:
    """What the docstring of a config class says of each field: the text behind `key: ` or `key, other key: `."""
    names = [field.name for field in fields(cls)]
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").split())
    one = "|".join(map(re.escape, names)) or "(?!)"
    heads = list(re.finditer(rf"(?:(?<=[.)]\s)|^)((?:{one})(?:, (?:{one}))*)(?: None)?: ", text))
    found = dict.fromkeys(names, "")
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=False):
        said = text[head.end() : end].strip()
        for name in head.group(1).split(", "):
            found[name] = (found[name] + " " + said).strip()
    return found


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

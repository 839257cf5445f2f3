"""The full configuration as commented TOML: every key with its default and what its owner's docstring says of it."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import fields
from typing import Any

import tomlkit

from isles.replicas import METHODS, method
from isles.training.border import SECTIONS

_ORDER = ("model", "data", "inner", "replicas", "world", "run")
_WIDTH = 100


def template(name: str) -> str:
    """TOML that `read_config` reads to the defaults of method `name`; keys without a default stand commented out."""
    made_for = method(name).Config
    lines = [
        f"# isles train THIS.toml    (method {name}: {METHODS[name][1]})" if name in METHODS else f"# method {name}"
    ]
    for section in _ORDER:
        cls = made_for if section == "replicas" else SECTIONS[section]
        lines += ["", f"[{section}]"]
        if section == "replicas":
            lines.append(f"method = {_toml(name)}")
        lines += [line for key, text in described(cls).items() for line in _entry(cls, key, text)]
    return "\n".join(lines) + "\n"


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
    return [*comments, f"{key} = {_toml(field.default)}"]


def _toml(value: Any) -> str:
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()

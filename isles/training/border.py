"""Where a user's words become a `Config`: TOML, `--set`, and the checks, one line an error that names key and mend.

embedded.toml (only without a CONFIG.toml)  <  CONFIG.toml  <  --method, --workers, --steps  <  --set section.key=value
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import TypeAdapter, ValidationError

from isles.data.config import DataConfig
from isles.errors import unknown_name
from isles.models.config import ModelConfig
from isles.replicas import method
from isles.training.config import Config, RunConfig, WorldConfig
from isles.training.inner import InnerConfig

_SECTIONS = {"model": ModelConfig, "data": DataConfig, "inner": InnerConfig, "world": WorldConfig, "run": RunConfig}
DEFAULT_METHOD = "noloco"

Tables = dict[str, dict[str, Any]]


def read_config(path: str | None, flags: Mapping[str, Any], assignments: Sequence[str]) -> Config:
    """The run that a user asked for. flags: {"section.key": value}, None for not given; assignments:
    "section.key=value".

    ValueError: anything that is not as it should be.
    """
    given = _parse_file(path) if path is not None else {}
    for key, value in flags.items():
        if value is not None:
            _assign(given, key, value)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: write --set section.key=value")
        _assign(given, key.strip(), _parse_value(text.strip()))
    for name in given:
        if name not in (*_SECTIONS, "replicas"):
            raise ValueError(unknown_name("section", name, [*_SECTIONS, "replicas"]))
    return resolve(given if path is not None else _over(_embedded(_method_of(given)), given))


def resolve(tables: Tables) -> Config:
    """The typed configuration of complete tables."""
    name = _method_of(tables)
    settings = {key: value for key, value in tables.get("replicas", {}).items() if key != "method"}
    replicas = _typed("replicas", method(name).Config, settings)
    sections = {section: _typed(section, cls, tables.get(section, {})) for section, cls in _SECTIONS.items()}
    return Config(method=name, replicas=replicas, **sections)


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `read_config` reads back to an equal one."""
    document = tomlkit.document()
    for section in ("model", "data", "inner"):
        document.add(section, _table(asdict(getattr(config, section))))
    document.add("replicas", _table({"method": config.method, **asdict(config.replicas)}))
    for section in ("world", "run"):
        document.add(section, _table(asdict(getattr(config, section))))
    return tomlkit.dumps(document)


def _table(values: Mapping[str, Any]) -> Any:
    table = tomlkit.table()
    for key, value in values.items():
        if value is not None:  # TOML has no null; a key that is absent has its default
            table.add(key, list(value) if isinstance(value, tuple) else value)
    return table


def _parse_file(path: str) -> Tables:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(
                f"{path}: {name} stands outside a section; put it below [{'], ['.join(_SECTIONS)}] or [replicas]"
            )
    return tables


def _parse_value(text: str) -> Any:
    """A TOML value; anything that is none is taken as a string, so that paths and names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(tables: Tables, key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if not dot or not name:
        raise ValueError(f"{key}: write section.key, such as replicas.sync_every")
    tables.setdefault(section, {})[name] = value


def _method_of(tables: Tables) -> str:
    name = tables.get("replicas", {}).get("method", DEFAULT_METHOD)
    if not isinstance(name, str):
        raise ValueError(f"replicas.method = {name!r}: write a name in quotes")
    return name


def _embedded(name: str) -> Tables:
    """The built-in small run, with its table for the method."""
    tables = tomllib.loads(files("isles.training").joinpath("embedded.toml").read_text(encoding="utf-8"))
    methods = tables.pop("methods")
    tables["replicas"] = {"method": name, **methods.get(name, {})}
    return tables


def _over(below: Tables, above: Tables) -> Tables:
    return {section: {**below.get(section, {}), **above.get(section, {})} for section in {**below, **above}}


def _typed(section: str, cls: type, values: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(cls)]
    if section == "replicas":
        known.append("method")
    for key in values:
        if key not in known:
            raise ValueError(unknown_name("key", f"{section}.{key}", [f"{section}.{name}" for name in known]))
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise ValueError(message if message.startswith(f"{section}.") else f"{section}.{message}") from None
        key = ".".join([section, *(str(part) for part in first["loc"])])
        raise ValueError(f"{key} = {first['input']!r}: {message[0].lower()}{message[1:]}") from None

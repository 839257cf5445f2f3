"""Read a user's settings into a `Config`: TOML, `--set`, and checks. An error is one line with the key and the advice.

embedded.toml (only without a CONFIG.toml)  <  CONFIG.toml  <  --method, --workers, --steps  <  --set section.key=value

`gather` does everything that does not need the method; `resolve` adds the method's settings. Neither loads torch,
unless the method or a part is the user's own: `isles.replicas.config_of`, `isles.training.config.trust.check_code`.

`template` writes the full configuration as commented TOML: every key with its default, and the docstring of its field.

`ending` computes the inner steps of a run with `run.tokens`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomlkit

from isles.base.errors import nearest, unknown_name
from isles.base.parsing import parse_toml
from isles.base.schema import backend_of
from isles.base.tables import field_docs, in_tables, keys_of, parse_value, read_toml, tables_of, typed
from isles.models.model_limits import limits
from isles.network.units import parse_count
from isles.replicas import METHODS, canonical, config_of, method
from isles.training.config.conflicts import wanted
from isles.training.config.presets import FOLDER
from isles.training.config.sections import ORDER, SECTIONS, Config
from isles.training.config.trust import beside, check, check_code, referenced_names
from isles.training.config.world import WorldConfig


def tokens_a_step(config: Config, replicas: int) -> int:
    """Tokens on which `replicas` replicas (islands or single workers) train in an inner step."""
    readers = replicas * config.world.inner
    rows = config.data.batch_size * (readers if config.data.batch_mode == "per_worker" else 1)
    return rows * config.inner.accumulation * limits(config.model).context


def ending(config: Config, every: int = 1) -> Config:
    """`config` with `run.steps` computed from `run.tokens`, if that is set: the steps that all replicas need, rounded
    up to a multiple of `every`.
    """
    if not config.run.tokens:
        return config
    steps = -(-config.run.tokens // tokens_a_step(config, config.replicas_in_all))
    return replace(config, run=replace(config.run, steps=-(-steps // every) * every))


def ending_after(config: Config, replicas: int, step: int) -> Config:
    """`config` for a run that resumes with `replicas` replicas after `step` inner steps: `run.steps` is computed from
    the remaining tokens. Then `run.tokens` is cleared, because it counts from the start.
    """
    if not config.run.tokens:
        return config
    left = max(config.run.tokens - step * tokens_a_step(config, replicas), 0)
    more = -(-left // tokens_a_step(config, config.replicas_in_all))
    return replace(config, run=replace(config.run, steps=max(step + more, 1), tokens=0))


DEFAULT_METHOD = "noloco"
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

Tables = dict[str, dict[str, Any]]
ConfigSource = str | Mapping[str, Any] | None  # the path of a CONFIG.toml, or its tables; None: the embedded run


def read_config(
    path: ConfigSource,
    flags: Mapping[str, Any],
    assignments: Sequence[str],
    *,
    shared: bool = False,
    beside: Sequence[str] = (),
    trust: bool = False,
) -> Config:
    """The configuration of the run that a user requested. flags: {"section.key": value}; None: not set. assignments:
    "section.key=value".

    shared: the settings are for several methods, as in a comparison. Settings of [replicas] that only another method
    has are then ignored. beside: the user's own methods in the comparison. trust: as in `gather`.

    ValueError for any invalid setting.
    """
    tables = gather(path, flags, assignments, trust=trust)
    return resolve(_without_others(tables, beside) if shared else tables)


def _without_others(tables: Tables, beside: Sequence[str]) -> Tables:
    """`tables` without the settings of [replicas] that only other methods have."""
    known = {field.name for field in fields(config_of(_method_of(tables)))}
    others = {field.name for other in (*METHODS, *beside) for field in fields(config_of(other))} - known
    settings = {key: value for key, value in tables.get("replicas", {}).items() if key not in others}
    if isinstance(options := settings.get("options"), dict):
        settings["options"] = {axis: table for axis, table in options.items() if axis in known}
    return {**tables, "replicas": settings}


def gather(
    path: ConfigSource, flags: Mapping[str, Any], assignments: Sequence[str], *, trust: bool = False, machines: int = 1
) -> Tables:
    """The user's tables; without a file, laid over the embedded ones. Checks all sections except [replicas]. Arguments
    as in `read_config`. trust: import the code that the file names, whoever made the run. machines: number of machines
    that train together.
    """
    raw = merged_tables(path, flags, assignments)
    if isinstance(path, str):
        check(Path(path), raw, trust=trust)
    for name in raw:
        if name not in ORDER:
            raise ValueError(unknown_name("section", name, ORDER))
    tables = raw if path is not None else over(_embedded(_method_of(raw)), raw)
    if path is None and "cadence" in raw.get("replicas", {}):  # the user's cadence replaces the embedded rounds
        tables["replicas"] = {key: value for key, value in tables["replicas"].items() if key in raw["replicas"]}
    tables = over(tables, {"world": _numbered(tables, machines)})
    sections(tables)
    return tables


def _numbered(tables: Tables, machines: int) -> dict[str, int]:
    """The numbers for which "auto" stands in [world]."""
    world = tables.get("world", {})
    numbers = {"threads": 0} if world.get("threads") == "auto" else {}
    if world.get("workers", "auto") == "auto":
        device = str(tables.get("model", {}).get("device", "auto"))
        gpus = 0 if device == "cpu" or not backend_of(tables).has_processes else gpus_here()
        numbers["workers"] = machines * (1 if ":" in device else gpus) if gpus else WorldConfig.workers
    return numbers


def gpus_here() -> int:
    """Number of GPUs that torch sees on this machine. Does not load torch if the system has no GPU driver."""
    if "torch" not in sys.modules and not any(map(os.path.exists, _DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def merged_tables(path: ConfigSource, flags: Mapping[str, Any], assignments: Sequence[str]) -> Tables:
    """A user's settings by section, unchecked, for commands with further sections. Arguments as in `read_config`."""
    raw = _parse_file(path)
    rows = raw.pop("methods", {})
    name = flags.get("replicas.method") or raw.get("replicas", {}).get("method", DEFAULT_METHOD)
    if rows and name in _checked(rows):
        raw, flags = over(raw, _sectioned(name, rows[name])), {**flags, "replicas.method": None}
    if isinstance(path, str):
        beside(raw, Path(path).parent)
        own = raw.get("replicas", {}).get("method", DEFAULT_METHOD)
        if Path(path).parent == FOLDER and canonical(flags.get("replicas.method") or own) != own:
            raw["replicas"] = {}  # the settings of the preset's method go with it
    for key, value in flags.items():
        if value is not None:
            raw = _assigned(raw, key, value)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: write --set section.key=value")
        raw = _assigned(raw, key.strip(), parse_value(text.strip()))
    named_keys = [key for key, value in flags.items() if value is not None]
    named_keys += [assignment.partition("=")[0].strip() for assignment in assignments]
    tokens = raw.get("run", {}).get("tokens")
    if "run.steps" in named_keys and tokens:
        raise ValueError(f"run.tokens = {tokens} and run.steps both say when the run ends: remove one of them")
    return raw


def method_tables(path: str | None) -> list[str]:
    """Names of the tables [methods.NAME] of a CONFIG.toml: methods, or rows of a comparison with a key `method`."""
    return list(_checked(_parse_file(path).get("methods", {})))


def _checked(rows: dict[str, Any]) -> dict[str, Any]:
    for name, table in rows.items():
        if not isinstance(table, dict):
            raise ValueError(f"methods.{name} = {table!r}: write a table, [methods.{name}]")
        _method_of({"replicas": {"method": table.get("method", name)}})  # raises for an unknown method
    return rows


def _sectioned(name: str, table: Mapping[str, Any]) -> Tables:
    """The sections that a table [methods.NAME] sets. Its direct keys belong to [replicas]; [methods.NAME.inner] belongs
    to [inner], and so on.
    """
    tables = {section: dict(table[section]) for section in ORDER if isinstance(table.get(section), dict)}
    return tables | {"replicas": {"method": name, **{key: value for key, value in table.items() if key not in tables}}}


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; values of `above` win."""
    tables = [key for key in below if isinstance(below[key], Mapping) and isinstance(above.get(key), Mapping)]
    return {**below, **above, **{key: over(below[key], above[key]) for key in tables}}


def resolve(tables: Tables) -> Config:
    """The typed configuration of complete tables."""
    name, typed_sections = _method_of(tables), sections(tables)
    config_class = config_of(name)
    settings = {key: value for key, value in tables.get("replicas", {}).items() if key != "method"}
    known = [field.name for field in fields(config_class)]
    for key in settings:
        if key not in known:
            raise ValueError(_foreign(key, name, known))
    required = wanted(f'pipeline.routing = "{typed_sections["pipeline"].routing}"', name)
    settings = {key.removeprefix("replicas."): value for key, value in required.items()} | settings
    hf = typed_sections["model"].hf
    if hf is not None and "tokenizer" not in tables.get("data", {}) and Path(hf).expanduser().is_dir():
        typed_sections["data"] = replace(typed_sections["data"], tokenizer=hf)
    if "seed" in known:  # run.seed also determines the method's draws
        settings.setdefault("seed", typed_sections["run"].seed)
    config = Config(method=name, replicas=typed("replicas", config_class, settings), **typed_sections)
    check_code(config)
    return ending(config)


def sections(tables: Tables) -> dict[str, Any]:
    """Each section of the tables except [replicas] as its class, checked. Loads no torch."""
    for section, cls in SECTIONS.items():
        for key in tables.get(section, {}).keys() - {field.name for field in fields(cls)}:
            if meant := settings_like(f"{section}.{key}"):
                raise ValueError(f"unknown key '{section}.{key}': did you mean '{meant[0]}'?")
    return {section: typed(section, cls, tables.get(section, {})) for section, cls in SECTIONS.items()}


_ELSEWHERE = {"learning_rate": "lr", "grad_clip": "max_norm", "block_size": "context", "seq_len": "context"}
_ELSEWHERE |= {"n_embd": "d_model", "hidden_size": "d_model", "max_steps": "steps", "local_steps": "sync_every"}


def settings_like(key: str) -> list[str]:
    """The settings that a user may have meant by `key`, with or without a section: those with its last part, here or in
    another tool, or the nearest one.
    """
    known = [f"{section}.{name}" for section, cls in SECTIONS.items() for name in keys_of(cls)]
    known += {f"replicas.{name}": 0 for method in METHODS for name in keys_of(config_of(method))}
    section, _, last = key.casefold().replace("-", "_").rpartition(".")
    last = _ELSEWHERE.get(last, last)
    near = nearest(last, [name for name in known if name.startswith(section)])
    return [name for name in known if name.rpartition(".")[2] == last] or ([near] if near else [])


def settings_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their keys, of those that are given by key, by a name that only one section has, or as the options of
    `isles train`. ValueError for any other name, or for a setting that is given twice.
    """
    found, model = dict[str, Any](), str(values.get("model"))
    kind = "hf" if "/" in model or Path(model).is_dir() else "factory" if ":" in model else "size"
    named = {"method": "replicas.method", "seed": "run.seed", "data": "data.path", "model": f"model.{kind}"}
    for name, value in values.items():
        like = [name] if "." in name else [named[name]] if name in named else settings_like(name)
        exact = len(like) == 1 and (like[0] == named.get(name, name) or like[0].endswith(f".{name}"))
        if not exact or like[0] in found:
            hint = f"did you mean {' or '.join(like)}? " if like else ""
            raise ValueError(f"{name} = {value!r}: {hint}write a setting's key, once: **{{'inner.lr': 0.01}}")
        found[like[0]] = round(parse_count("--tokens", value)) if name == "tokens" else value
    return found


def _foreign(key: str, name: str, known: Sequence[str]) -> str:
    """The message for a key of [replicas] that method `name` does not have: misspelt, or another method's."""
    owners = [other for other in METHODS if key in [field.name for field in fields(config_of(other))]]
    if not owners:
        return unknown_name("key", f"replicas.{key}", [f"replicas.{key}" for key in ("method", *known)])
    return f"replicas.{key} is a setting of {', '.join(owners)}, not of {name}: remove it, or choose another method"


def to_toml(config: Config, named: Mapping[str, Any] | None = None, *, sparse: bool = False) -> str:
    """The whole configuration as TOML; `read_config` reads it back to an equal one. named: values to write in place of
    some settings. sparse: without keys at their defaults.
    """
    first = {"replicas": {"method": config.method}}
    written = (_table(name, getattr(config, name), named or {}, first.get(name, {}), sparse) for name in ORDER)
    return "\n".join(filter(None, written))


def for_members(config: Config) -> str:
    """The configuration as TOML for other machines. Keys at their defaults are left out, because isles of the former
    minor version does not know the newest ones.
    """
    text = to_toml(config, sparse=True)
    return text if resolve(parse_toml(text)) == config else to_toml(config)  # a default may follow from another key


def run_name(config: Config) -> str:
    """16 hex digits that identify this configuration, independent of paths and machines."""
    return hashlib.sha256(to_toml(config, {**referenced_names(config), "model.device": ""}).encode()).hexdigest()[:16]


def _table(name: str, config: Any, named: Mapping[str, Any], first: Mapping[str, Any], sparse: bool) -> str:
    """A section, built line by line: a tomlkit table would be scanned again for every added key. "" for an empty one
    that is `sparse`.
    """
    lines, tables, inner = [f"[{name}]\n"], list[str](), tables_of(type(config))
    defaults = {field.name: field.default for field in fields(config)} if sparse else {}
    for key, value in {**first, **vars(config)}.items():
        value = named.get(f"{name}.{key}", value)
        if key in inner:
            text = _table(f"{name}.{key}", value, named, {}, sparse)
            tables += [f"\n{text}"] if text else []
        elif key in defaults and value == defaults[key]:
            continue
        elif isinstance(value, dict):
            tables.append("\n" + tomlkit.dumps({name: {key: value}}))
        elif value is not None:  # TOML has no null; an absent key has its default
            lines.append(f"{key} = {tomlkit.item(_listed(value)).as_string()}\n")
    return "" if sparse and not lines[1:] + tables else "".join(lines + tables)


def _listed(value: Any) -> Any:
    """Convert tuples to lists, nested ones too."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _parse_file(path: ConfigSource) -> Tables:
    try:
        tables = read_toml(path) if isinstance(path, str) else in_tables(path or {})
    except ValueError as error:
        if not isinstance(path, str) or Path(path).suffix == ".toml" or not Path(path).exists():
            raise
        mend = "go on with the run: isles resume" if (Path(path) / "config.toml").exists() else "train on it: --data"
        raise ValueError(f"{path}: is no CONFIG.toml; to {mend} {path}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} stands outside a section; put it below [{'], ['.join(ORDER)}]")
    return tables


def _assigned(tables: Tables, key: str, value: Any) -> Tables:
    if "." not in key or key.endswith("."):
        like = settings_like(key)
        raise ValueError(f"{key}: {f'did you mean {like[0]!r}? ' if like else ''}write section.key, such as inner.lr")
    return over(tables, in_tables({key: value}))


def _method_of(tables: Tables) -> str:
    name = tables.get("replicas", {}).get("method", DEFAULT_METHOD)
    if not isinstance(name, str):
        raise ValueError(f"replicas.method = {name!r}: write a name in quotes")
    return canonical(name)


def _embedded(name: str) -> Tables:
    """The built-in small run, with the settings of its table for the method, also for the inner optimizer."""
    tables = parse_toml(files("isles.training.config").joinpath("embedded.toml").read_text(encoding="utf-8"))
    methods = tables.pop("methods")
    return over(tables, _sectioned(name, methods.get(name) or _inherited(name, methods)))


def _inherited(name: str, tables: Tables) -> dict[str, Any]:
    """The settings for a user's own method: those of its nearest base class that the embedded run has."""
    if name in METHODS:
        return {}
    cls, names = method(name), {method(known): known for known in METHODS}
    keys = [field.name for field in fields(cls.Config)]
    settings = next((tables[names[base]] for base in cls.__mro__ if names.get(base) in tables), {})
    return {key: value for key, value in settings.items() if key in (*keys, *ORDER)}


_WIDTH = 100


_BRIEF = ["model.size", "data.path", "data.tokenizer", "data.batch_size", "inner.lr", "inner.warmup_steps"]
_BRIEF += ["world.workers", "run.steps", "replicas.sync_every"]


def template(name: str, *, brief: bool = False) -> str:
    """TOML of the defaults of method `name`, keys without one commented out; brief: of the main settings."""
    name = canonical(name)
    config_class = config_of(name)
    own = [f"replicas.{key}" for key in (*config_class.__annotations__, *keys_of(config_class))]  # its own first
    shown = list(dict.fromkeys([*_BRIEF, *own]))[:15] if brief else None
    lines = [
        f"# isles train THIS.toml    (method {name}: {METHODS[name].what})" if name in METHODS else f"# method {name}"
    ]
    for section in ORDER:
        cls = config_class if section == "replicas" else SECTIONS[section]
        head = {"method": name} if section == "replicas" else {}
        if shown is None or head or any(key.startswith(f"{section}.") for key in shown):
            lines += ["", *commented(section, cls, head, shown)]
    return "\n".join(lines) + "\n"


def commented(section: str, cls: type, raw: Mapping[str, Any] | None = None, shown: Any = None) -> list[str]:
    """A section's lines: its head, the keys of `raw`, and the class's (or those `shown`) with defaults and texts."""
    tables = tables_of(cls)
    lines = [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in (raw or {}).items())]
    for key, text in field_docs(cls).items():
        left_out = key in tables or (shown is not None and f"{section}.{key}" not in shown)
        lines += [] if left_out else _entry(cls, key, text)
    for key, table in tables.items() if shown is None else ():
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

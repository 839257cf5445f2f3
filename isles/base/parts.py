"""Settings that may name code of your own, "package.module:Class": the one table of them.

    [replicas]
    method = "custom"
    rule = "mine:SignMomentum"

    [replicas.options.rule]         # the class is called as SignMomentum(lr=0.02)
    lr = 0.02

Whoever reads settings asks `names_code` and `check_options`, which import none of that code; `make` does, and calls it.
Errors are one line that begins with the key inside its section, as the user typed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from operator import attrgetter
from typing import Any, NamedTuple

from isles.base.errors import as_typed, unknown_name
from isles.base.imports import describe, import_target, is_import_target


class CodeSetting(NamedTuple):
    """A row of `CODE`.

    section, key: of the setting. options: the table, in the section, that the code is called with. interface: the
    target of what the class must be, "" where another room makes it. names: the target of a table of kinds: with one
    of them before the colon, as in "topk:64", a value is no code. says: what an object must have beside the interface.
    """

    section: str
    key: str
    options: str = ""
    interface: str = ""
    names: str = ""
    says: tuple[str, ...] = ()


_PARTS = {"cadence": "Cadence", "mixing": "Mixing", "reading": "Reading", "rule": "OuterRule", "landing": "Landing"}
CODE: dict[str, CodeSetting] = {
    "method": CodeSetting("replicas", "method"),
    "model": CodeSetting("model", "factory", "options"),
    "optimizer": CodeSetting("inner", "optimizer", "options", "torch.optim:Optimizer"),
    "codec": CodeSetting(
        "replicas",
        "codec",
        "options.codec",
        "isles.comm.codecs.base:Codec",
        "isles.comm.codecs.kinds:KINDS",
        ("name", "lossless", "biased", "shared_mask"),
    ),
    **{
        axis: CodeSetting("replicas", axis, f"options.{axis}", f"isles.replicas.parts.interfaces:{interface}")
        for axis, interface in _PARTS.items()
    },
    "source": CodeSetting("data", "source", "path", "collections.abc:Iterable"),
    "router": CodeSetting("pipeline", "routing", "options.router", "isles.pipeline.routers:Router"),
    "boundary": CodeSetting(
        "pipeline",
        "boundary.kind",
        "options.boundary",
        "isles.pipeline.boundaries.base:Boundary",
        "isles.pipeline.boundaries.names:EXAMPLES",
    ),
}
"""By axis: every setting of a run that may name code."""


def names_code(axis: str, value: object) -> bool:
    """Whether `value` of the axis' setting is the name of code, and no built-in name. Imports none of that code."""
    setting, text = CODE[axis], str(value)
    if not setting.interface:
        return ":" in text
    module, _, name = text.partition(":")
    if not is_import_target(text) or not name.isidentifier():
        return False
    return "." in module or not setting.names or module not in import_target(axis, setting.names)


def check_options(section: str, settings: Any) -> None:
    """ValueError for a table in `settings.options`, by axis, whose setting names no code. Imports nothing."""
    keys = {axis: row.key for axis, row in CODE.items() if row.section == section and row.options == f"options.{axis}"}
    keys = {axis: key for axis, key in keys.items() if hasattr(settings, key.partition(".")[0])}
    for axis in settings.options or {}:
        if axis not in keys:
            known = ", ".join(f"options.{one}" for one in keys)
            raise ValueError(f"options.{axis} belongs to no part: choose one of {known}, or take it out")
        key, value = keys[axis], attrgetter(keys[axis])(settings)
        if not names_code(axis, value):
            raise ValueError(
                f"options.{axis} is for code of your own, and {key} = {as_typed(value)} is none: leave it out, or set "
                f'{key} = "package.module:Class"'
            )


def one_of_or_code(axis: str, value: str, allowed: Iterable[str]) -> None:
    """ValueError unless `value` of the axis' setting is one of `allowed`, or names code."""
    if value not in (known := list(allowed)) and not names_code(axis, value):
        raise ValueError(unknown_name(CODE[axis].key, value, known) + ", or package.module:Class for your own")


def make(axis: str, target: str, options: Mapping[str, Any] | None, *first: Any) -> Any:
    """The part at `target`: its class called with `first` and `options`.

    Raises:
        ValueError: it cannot be imported, is no such part, lacks a method, takes other options, or raises an error.
    """
    setting, options = CODE[axis], options or {}
    stated, interface = f'{setting.key} = "{target}"', import_target(axis, setting.interface)
    is_protocol = bool(getattr(interface, "_is_protocol", False))
    like = f"isles.{interface.__name__}" if "isles" in setting.interface else setting.interface.replace(":", ".")
    try:
        found = import_target(stated, target)
    except ValueError as error:
        raise ValueError(f"{error}; correct the name, or put the module's folder on PYTHONPATH") from error
    if not isinstance(found, type):
        raise ValueError(f"{stated} is a {type(found).__name__}: name a class, as {like} describes")
    if not is_protocol and not issubclass(found, interface):
        raise ValueError(f"{stated}: derive the class from {like}")
    made, lacked = None, sorted(getattr(found, "__abstractmethods__", ()))
    if not lacked:
        _check_arguments(setting.options, target, list(signature(found).parameters.values())[len(first) :], options)
        try:
            made = found(*first, **options)
        except Exception as error:  # the class is the user's: whatever it raises
            raise ValueError(f"{stated} cannot be made; correct it, or {setting.options}: {describe(error)}") from error
        own = {name: value for name, value in vars(interface).items() if is_protocol and not name.startswith("_")}
        stubs = [name for name, stub in own.items() if getattr(found, name, None) is stub]  # of a class derived from it
        lacked = stubs + [name for name in (*own, *setting.says) if not hasattr(made, name)]
    if lacked:
        raise ValueError(f"{stated} lacks {', '.join(lacked)}: {like} says what the class must have")
    return made


def _check_arguments(table: str, target: str, taken: list[Parameter], options: Mapping[str, Any]) -> None:
    named = {one.name: one for one in taken if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    for name, value in options.items():
        if name not in named and not any(one.kind is Parameter.VAR_KEYWORD for one in taken):
            mend = f"choose one of {', '.join(named)}" if named else "it takes none, leave it out"
            raise ValueError(f"{table}.{name} = {as_typed(value)}: {target} has no such option; {mend}")
    for name, one in named.items():
        if one.default is Parameter.empty and name not in options:
            raise ValueError(f"{table}.{name} is missing: {target} cannot be made without it")

"""How a part of your own is made of its name, see `isles.base.parts`. Errors are one line that begins with the key
inside its section, as the user typed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from isles.base.errors import as_typed
from isles.base.imports import describe, import_target
from isles.base.parts import CODE


def part_class(axis: str, target: str, options: Mapping[str, Any], *first: Any) -> type:
    """The class at `target`, which takes `options` behind the arguments `first`; it is not called yet.

    Raises:
        ValueError: it cannot be imported, is no such part, lacks a method, or takes other options.
    """
    setting = CODE[axis]
    stated, own = f'{setting.key} = "{target}"', setting.options
    try:
        found = import_target(stated, target)
    except ValueError as error:
        raise ValueError(f"{error}; correct the name, or put the module's folder on PYTHONPATH") from error
    interface = import_target(axis, setting.interface)
    if not isinstance(found, type):
        raise ValueError(f"{stated} is a {type(found).__name__}: name a class, as isles.{interface.__name__} describes")
    if not _is_protocol(interface) and not issubclass(found, interface):
        raise ValueError(f"{stated}: derive the class from isles.{interface.__name__}")
    _refuse_missing(stated, sorted(getattr(found, "__abstractmethods__", ())), interface)
    taken = list(signature(found).parameters.values())[len(first) :]
    named = [one.name for one in taken if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    for name, value in options.items():
        if name not in named and not any(one.kind is Parameter.VAR_KEYWORD for one in taken):
            mend = f"choose one of {', '.join(named)}" if named else "it takes none, leave it out"
            raise ValueError(f"{own}.{name} = {as_typed(value)}: {target} has no such option; {mend}")
    for one in taken:
        if one.name in named and one.default is Parameter.empty and one.name not in options:
            raise ValueError(f"{own}.{one.name} is missing: {target} cannot be made without it")
    return found


def make(axis: str, target: str, options: Mapping[str, Any] | None, *first: Any) -> Any:
    """The part at `target`: its class called with `first` and `options`. ValueError as `part_class`, or where the class
    raises an error, or makes what is no such part.
    """
    found, setting = part_class(axis, target, options or {}, *first), CODE[axis]
    stated = f'{setting.key} = "{target}"'
    try:
        made = found(*first, **(options or {}))
    except Exception as error:  # the class is the user's: whatever it raises
        raise ValueError(f"{stated} cannot be made; correct it, or {setting.options}: {describe(error)}") from error
    interface = import_target(axis, setting.interface)
    wanted = [name for name in vars(interface) if not name.startswith("_")] if _is_protocol(interface) else []
    lacked = [name for name in (*wanted, *setting.says) if not hasattr(made, name) or _is_stub(found, interface, name)]
    _refuse_missing(stated, lacked, interface)
    return made


def _is_protocol(interface: type) -> bool:
    return bool(getattr(interface, "_is_protocol", False))


def _is_stub(found: type, interface: type, name: str) -> bool:
    """Whether a class that derives from a protocol leaves this as the protocol has it, which does nothing."""
    return _is_protocol(interface) and getattr(found, name, None) is vars(interface).get(name, found)


def _refuse_missing(stated: str, names: list[str], interface: type) -> None:
    if names:
        raise ValueError(f"{stated} lacks {', '.join(names)}: isles.{interface.__name__} says what the class must have")

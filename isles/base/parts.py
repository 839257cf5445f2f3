"""Settings that may name code of your own, "package.module:Class": the one table of them.

    [replicas]
    method = "custom"
    rule = "mine:SignMomentum"

    [replicas.options.rule]         # the class is called as SignMomentum(lr=0.02)
    lr = 0.02

Whoever reads settings asks `names_code` and `check_options`, which import none of that code; `isles.base.part_maker`
does, and calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from isles.base.errors import as_typed, unknown_name
from isles.base.imports import import_target, is_import_target


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


def check_options(options: Mapping[str, Any] | None, values: Mapping[str, object]) -> None:
    """ValueError for a table of options whose setting names no code.

    Args:
        options: by axis.
        values: what the axes' settings are.
    """
    for axis in options or {}:
        if axis not in values:
            known = ", ".join(f"options.{one}" for one in values)
            raise ValueError(f"options.{axis} belongs to no part: choose one of {known}, or take it out")
        if not names_code(axis, values[axis]):
            key = CODE[axis].key
            raise ValueError(
                f"options.{axis} is for code of your own, and {key} = {as_typed(values[axis])} is none: leave it out, "
                f'or set {key} = "package.module:Class"'
            )


def one_of_or_code(axis: str, value: str, allowed: Iterable[str]) -> None:
    """ValueError unless `value` of the axis' setting is one of `allowed`, or names code."""
    if value not in (known := list(allowed)) and not names_code(axis, value):
        raise ValueError(unknown_name(CODE[axis].key, value, known) + ", or package.module:Class for your own")

"""JSON, TOML and messages that somebody else wrote. Text is measured before it is parsed, for a small text may take
gigabytes; what is too long, too deep or of too many parts is a ValueError in one line.

A message from another machine is read as a type that says how large its numbers, texts and lists may be, and as
nothing else; `Unfit` where it does not fit.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from isles.base.errors import printable

_LONGEST_JSON, _PARTS = 64 << 20, 1 << 22  # characters, and values: 100 bytes of memory each
_LONGEST_TOML, _KEYS = 16 << 20, 1 << 16  # characters, and keys and lists
_DEEPEST = 64  # tables and lists in each other; those of Isles have 20 at most
_BITS = 1000  # of a whole number: a float has room for it
_DOTS = 8  # of one key: tomllib takes the square of them, so 200 kB of `a.a.a` would be 20 GB
_NAME = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+{_NAME}(?:[ \t]*+\.[ \t]*+{_NAME}){{{_DOTS}}}", re.MULTILINE)


def parse_json(text: str | bytes, deepest: int = _DEEPEST) -> Any:
    """As `json.loads`, of UTF-8. ValueError for whatever is no JSON, or is too large."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    _refuse_large("characters", len(text), _LONGEST_JSON)
    _refuse_large("values", sum(map(text.count, ",[{")), _PARTS)
    return _parsed(json.loads, text, deepest)


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. ValueError for whatever is no TOML, or is too large."""
    _refuse_large("characters", len(text), _LONGEST_TOML)
    _refuse_large("keys and lists", sum(map(text.count, "=[")), _KEYS)
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of it has more than {_DOTS} parts")
    return _parsed(tomllib.loads, text.removeprefix("\ufeff"), _DEEPEST)  # the mark that Windows writes


def _refuse_large(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has {number} {what}, and no more than {most} are read")


def _parsed(loads: Callable[[str], Any], text: str, deepest: int) -> Any:
    """What `loads` reads, where no more than `deepest` tables and lists are in each other."""
    with suppress(RecursionError):
        found = loads(text)
        level = [found]
        while level and deepest >= 0:
            _refuse_large("bits in a number", max([n.bit_length() for n in level if isinstance(n, int)] or [0]), _BITS)
            inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
            level, deepest = [*chain.from_iterable(inner)], deepest - 1
        if not level:
            return found
    raise ValueError("it nests too deep")


LAST_PORT = 65535
_LARGEST = 1 << 62


class Unfit(ValueError):
    """A field is missing, of another type, or out of its range."""


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("no control or formatting characters belong there")
    return value


def _whole(value: Any) -> Any:
    """A text without halves of surrogates, which JSON has and UTF-8 has not."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


MANY = Field(max_length=1 << 16, fail_fast=True)
"""Of any list: nothing behind its first mistake is looked at."""
Int = Annotated[int, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
Ints = Annotated[tuple[Int, ...], MANY]
Float = Annotated[float, Field(strict=True, gt=-1e300, lt=1e300, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Nonnegative = Annotated[Float, Field(ge=0)]
Port = Annotated[int, Field(strict=True, ge=1, le=LAST_PORT)]
Str = Annotated[str, Field(strict=True, max_length=4096), AfterValidator(_one_line)]
UTF8 = BeforeValidator(_whole)
OneLine = Annotated[str, UTF8, Field(strict=True, max_length=200), AfterValidator(printable)]
"""Whatever it holds, it comes as a line that may be printed."""


class Exact:
    """A dataclass that `read` makes of a table. Unknown keys are ignored, those with a default may be missing."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @model_validator(mode="before")
    @classmethod
    def _has_all(cls, value: Any) -> Any:
        known = cls.__dataclass_fields__
        required = {key for key, one in known.items() if one.default is one.default_factory}  # it has neither
        if not isinstance(value, dict) or not required <= value.keys():
            raise ValueError(f"its keys are {', '.join(known)}")
        return {key: part for key, part in value.items() if key in known}


def read(kind: Any, value: Any, what: str = "") -> Any:
    """`value`, as JSON holds it, as a `kind`, each number and text of which is one of the types above. Unfit, in one
    line that begins with `what` or the kind's name, where it is none.
    """
    return _read(adapter(kind).validate_python, value, what or kind.__name__)


def read_json(kind: Any, text: bytes) -> Any:
    """Likewise of JSON, where a `kind` may have plain types too: they are read strictly."""
    return _read(partial(adapter(kind).validate_json, strict=True), text)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once: it takes longer than all that it reads."""
    return TypeAdapter(kind)


def _read(validate: Callable[[Any], Any], value: Any, *root: str) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, (*root, *first["loc"]))) or "all of it"
        raise Unfit(printable(f"{where}: {first['msg'].removeprefix('Value error, ')}", 150)) from None


def value_of(message: Mapping[str, Any], key: str, kind: Any) -> Any:
    """message[key], as a `kind`."""
    return read(kind, message.get(key), key)


def table(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise Unfit(f"{what} is no table")
    return value


def integer(message: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """low <= message[key] <= high; true and false are no integers."""
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Unfit(f"{key} is no whole number from {low} to {high}")
    return value

"""What another machine says is data: it is read as a type that says how large its numbers, texts and lists may be, and
as that alone. Unfit: it is not as it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from isles.errors import printable

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
    """A dataclass that `read` makes of a table with exactly its keys, those with a default included."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @model_validator(mode="before")
    @classmethod
    def _has_all(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"its keys are {', '.join(cls.__dataclass_fields__)}")
        return value


def read(kind: Any, value: Any, what: str = "") -> Any:
    """`value`, as JSON holds it, as a `kind`, each number and text of which is one of the types above. Unfit, in one
    line that begins with `what` or the kind's name, where it is none.
    """
    return _read(_adapter(kind).validate_python, value, what or kind.__name__)


def read_json(kind: Any, text: bytes) -> Any:
    """Likewise of JSON, where a `kind` may have plain types too: they are read strictly."""
    return _read(partial(_adapter(kind).validate_json, strict=True), text)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
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

"""The table of codecs, and the parser of their names. A row has the import target of the class, and describes what the
codec does to the entries. This module does not load torch, so that checking a setting does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isles.base.errors import unknown_name
from isles.base.parts import names_code

CHUNK = 4096
"""Entries of a chunk. topk, dct_topk and randk select some entries of each chunk."""


class CodecKind(NamedTuple):
    """A row of the table. The three flags have no defaults: `isles.replicas.parts.legal` depends on them."""

    target: str
    """module:Class."""
    lossless: bool
    """Decoding returns the encoded vector, bit for bit."""
    biased: bool
    """The codec shrinks or drops part of the vector."""
    shared_mask: bool
    """All members of an exchange drop the same entries, and send the others exactly."""
    number: Callable[[str], float] | None = None
    """Parses the number after the colon. None: the name has no number, and the codec sends all entries."""
    unfit: Callable[[float], str | None] | None = None
    """Returns the advice for an invalid number, None for a valid one."""


def _entries(k: float) -> str | None:
    return None if 0 < k <= CHUNK and k % 2 == 0 else f"choose an even number of entries a chunk, 2 to {CHUNK}"


def _fraction(fraction: float) -> str | None:
    return None if 0 < fraction <= 1 else "choose a fraction above 0, up to 1"


def _rank(rank: float) -> str | None:
    return None if rank >= 1 else "choose a rank of at least 1"


_HERE = "isles.comm.codecs"
KINDS: dict[str, CodecKind] = {
    "none": CodecKind(f"{_HERE}.scaled:Identity", lossless=True, biased=False, shared_mask=False),
    "fp16": CodecKind(f"{_HERE}.scaled:Float16", lossless=False, biased=False, shared_mask=False),
    "bf16": CodecKind(f"{_HERE}.scaled:BFloat16", lossless=False, biased=False, shared_mask=False),
    "int8": CodecKind(f"{_HERE}.integers:Int8", lossless=False, biased=False, shared_mask=False),
    "int4": CodecKind(f"{_HERE}.integers:Int4", lossless=False, biased=False, shared_mask=False),
    "int2": CodecKind(f"{_HERE}.integers:Int2", lossless=False, biased=True, shared_mask=False),
    "fp4": CodecKind(f"{_HERE}.integers:Float4", lossless=False, biased=False, shared_mask=False),
    "sign": CodecKind(f"{_HERE}.scaled:Sign", lossless=False, biased=True, shared_mask=False),
    "topk": CodecKind(f"{_HERE}.sparse:TopK", False, True, False, int, _entries),
    "dct_topk": CodecKind(f"{_HERE}.sparse:DCTTopK", False, True, False, int, _entries),
    "randk": CodecKind(f"{_HERE}.sparse:RandomK", False, True, True, float, _fraction),
    "powersgd": CodecKind(f"{_HERE}.lowrank:LowRank", False, True, False, int, _rank),
}
"""Every form by the part of its name before the colon. Names with a part after the colon share the kind's flags."""
CODECS: dict[str, str] = {kind: row.target for kind, row in KINDS.items() if row.number is None} | {
    "int8:stochastic": f"{_HERE}.integers:StochasticInt8",
    "int4:stochastic": f"{_HERE}.integers:StochasticInt4",
}
"""Import targets of the codecs that send every entry, by name."""
NAMES = (*CODECS, "topk:64", "dct_topk:64", "randk:0.01")
FORMS = (*NAMES, "powersgd:16")
_OR_CODE = ", or package.module:Class for your own"


class CodecName(NamedTuple):
    """A parsed name: the class, the number after the colon, and the codec after the plus. is_own: the class is the
    user's; it is imported when the codec is created.
    """

    target: str
    number: float | None = None
    values: str | None = None
    is_own: bool = False


def read_codec(name: str) -> CodecName:
    """Parse the name of a codec, or "package.module:Class" of a user's codec. ValueError for any other name."""
    if names_code("codec", name):
        return CodecName(name, is_own=True)
    if name in CODECS:
        return CodecName(CODECS[name])
    kind, number, values = _split_name(name)
    if kind not in ("topk", "dct_topk", "randk") or (kind == "randk" and values):
        raise ValueError(unknown_name("codec", name, NAMES) + _OR_CODE)
    return CodecName(KINDS[kind].target, _number(name, kind, number), values or None)


def read_form(name: str) -> CodecName:
    """Parse the name of a codec, as `read_codec`, or of the low-rank form."""
    kind, number, values = _split_name(name)
    if kind == "powersgd":
        return CodecName(KINDS[kind].target, _number(name, kind, number), values or None)
    if kind in KINDS or name in CODECS or names_code("codec", name):
        return read_codec(name)
    raise ValueError(unknown_name("codec", name, FORMS) + _OR_CODE)


def _split_name(name: str) -> tuple[str, str, str]:
    """Split kind:number+values; ("", "", "") for any other text."""
    kind, colon, suffix = name.partition(":")
    number, plus, values = suffix.partition("+")
    return ("", "", "") if not colon or (plus and values not in CODECS) else (kind, number, values)


def _number(name: str, kind: str, text: str) -> float:
    row = KINDS[kind]
    assert row.number is not None and row.unfit is not None
    try:
        number = row.number(text)
    except ValueError:
        raise ValueError(f"codec = {name}: write a number behind the colon") from None
    complaint = row.unfit(number)
    if complaint is not None:
        shown = number if isinstance(number, int) else f"{number:g}"
        raise ValueError(f"codec = {kind}:{shown}: {complaint}")
    return number

"""Codecs: the form in which a vector crosses the wire. `codec(name)` looks one up.

A codec turns a flat floating-point tensor into a packed uint8 buffer whose length is known from the number of elements
alone, and back. Scales and places travel inside the buffer, so counted bytes are honest.

    none fp16 bf16 int8 int4 int2 fp4 sign every entry, in fewer bits
    int8:stochastic int4:stochastic        the same, rounded at random: unbiased
    topk:64 dct_topk:64 randk:0.01         some entries (of each 4096: 64; a hundredth)
    topk:64+int4                           the same, and the values in the form of another codec
    powersgd:16 powersgd:16+int4           low-rank factors, for outer methods: `form(name)`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from isles.comm.codecs.base import Codec
from isles.comm.codecs.casts import BFloat16, Float16, Identity
from isles.comm.codecs.float4 import Float4
from isles.comm.codecs.integers import Int2, Int4, Int8
from isles.comm.codecs.lowrank import LowRank
from isles.comm.codecs.randomk import RandomK
from isles.comm.codecs.sign import Sign
from isles.comm.codecs.stochastic import StochasticInt4, StochasticInt8
from isles.comm.codecs.topk import DCTTopK, TopK
from isles.errors import unknown_name

CODECS: dict[str, type[Codec]] = {
    form.name: form
    for form in (Identity, Float16, BFloat16, Int8, StochasticInt8, Int4, StochasticInt4, Int2, Float4, Sign)
}
SPARSE: dict[str, type[TopK]] = {"topk": TopK, "dct_topk": DCTTopK}
NAMES = (*CODECS, "topk:64", "dct_topk:64", "randk:0.01")
FORMS = (*NAMES, "powersgd:16")
Form = Codec | LowRank
"""In what form a vector whose tensors' shapes are known may be averaged."""
KINDS: dict[str, type[Codec] | type[LowRank]] = {
    **{name: form for name, form in CODECS.items() if ":" not in name},
    **SPARSE,
    "randk": RandomK,
    "powersgd": LowRank,
}
"""Every form by what stands before the colon; one of a name after a colon loses what the kind loses."""


def codec(name: str) -> Codec:
    """The codec called `name`, see the module. ValueError for any other."""
    if name in CODECS:
        return CODECS[name]()
    kind, number, values = _taken_apart(name)
    if kind not in (*SPARSE, "randk") or (kind == "randk" and values):
        raise ValueError(unknown_name("codec", name, NAMES))
    with _told(kind, name):
        return RandomK(float(number)) if kind == "randk" else SPARSE[kind](int(number), values)


def form(name: str) -> Form:
    """The codec, or the low-rank form, called `name`, see the module. ValueError for any other."""
    kind, number, values = _taken_apart(name)
    if kind != "powersgd":
        if kind or name in CODECS:
            return codec(name)
        raise ValueError(unknown_name("codec", name, FORMS))
    with _told(kind, name):
        return LowRank(rank=int(number), values=values or Identity())


def _taken_apart(name: str) -> tuple[str, str, Codec | None]:
    """kind:number+values; ("", "", None) for what is no such name."""
    kind, colon, rest = name.partition(":")
    number, plus, values = rest.partition("+")
    if not colon or (plus and values not in CODECS):
        return "", "", None
    return kind, number, CODECS[values]() if plus else None


@contextmanager
def _told(kind: str, name: str) -> Iterator[None]:
    """Complaints about a number, with the name in front: the codecs' own, and Python's in the user's words."""
    try:
        yield
    except ValueError as error:
        own = str(error).startswith(kind)
        raise ValueError(f"codec = {str(error) if own else f'{name}: write a number behind the colon'}") from None


__all__ = ["CODECS", "FORMS", "KINDS", "NAMES", "Codec", "Form", "codec", "form"]

"""Codecs: the form in which a vector crosses the wire. `codec(name)` looks one up.

A codec turns a flat floating-point tensor into a packed uint8 buffer whose length is known from the number of elements
alone, and back. Scales and places travel inside the buffer, so counted bytes are honest.

    none fp16 bf16 int8 int4 fp4 sign      every entry, in fewer bits
    topk:64 dct_topk:64 randk:0.01         some entries (of each 4096: 64; a hundredth)
    topk:64+int4                           the same, and the values in the form of another codec
"""

from __future__ import annotations

from isles.comm.codecs.base import Codec
from isles.comm.codecs.casts import BFloat16, Identity
from isles.comm.codecs.float4 import Float4
from isles.comm.codecs.half import Float16
from isles.comm.codecs.integers import Int4, Int8
from isles.comm.codecs.randomk import RandomK
from isles.comm.codecs.sign import Sign
from isles.comm.codecs.topk import DCTTopK, TopK
from isles.errors import unknown_name

CODECS: dict[str, type[Codec]] = {form.name: form for form in (Identity, Float16, BFloat16, Int8, Int4, Float4, Sign)}
SPARSE: dict[str, type[TopK]] = {"topk": TopK, "dct_topk": DCTTopK}
NAMES = (*CODECS, "topk:64", "dct_topk:64", "randk:0.01")


def codec(name: str) -> Codec:
    """The codec called `name`, see the module. ValueError for any other."""
    if name in CODECS:
        return CODECS[name]()
    kind, colon, rest = name.partition(":")
    number, plus, values = rest.partition("+")
    if not colon or kind not in (*SPARSE, "randk") or (plus and (kind == "randk" or values not in CODECS)):
        raise ValueError(unknown_name("codec", name, NAMES))
    try:
        if kind == "randk":
            return RandomK(float(number))
        k = int(number)
    except ValueError as error:
        told = str(error) if str(error).startswith(kind) else f"codec {name!r}: write a number behind the colon"
        raise ValueError(told) from None
    return SPARSE[kind](k, CODECS[values]() if plus else None)


__all__ = ["CODECS", "NAMES", "Codec", "codec"]

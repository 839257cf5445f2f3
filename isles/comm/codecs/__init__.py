"""Codecs: the form in which a vector crosses the wire. `codec(name)` looks one up.

A codec turns a flat floating-point tensor into a packed uint8 buffer whose length is known from the number of elements
alone, and back. Scales travel inside the buffer, so counted bytes are honest.
"""

from __future__ import annotations

from isles.comm.codecs.base import Codec
from isles.comm.codecs.blocks import Int8
from isles.comm.codecs.casts import BFloat16, Float16, Identity
from isles.errors import unknown_name

CODECS: dict[str, type[Codec]] = {"none": Identity, "fp16": Float16, "bf16": BFloat16, "int8": Int8}


def codec(name: str) -> Codec:
    """The codec called `name`: none, fp16, bf16 or int8. ValueError for any other."""
    if name not in CODECS:
        raise ValueError(unknown_name("codec", name, CODECS))
    return CODECS[name]()


__all__ = ["CODECS", "Codec", "codec"]

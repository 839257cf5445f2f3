"""Codecs: the form in which a vector crosses the wire. `codec(name)` makes one; `kinds` is their table.

A codec encodes a flat floating-point tensor as a packed uint8 buffer, and decodes it again. The number of elements
alone determines the buffer's length. Scales and indices travel inside the buffer, so the byte counts include them.
`base` is the interface; `scaled`, `integers`, `sparse` and `lowrank` hold the codecs:

    none fp16 bf16 int8 int4 int2 fp4 sign all entries, in fewer bits each
    int8:stochastic int4:stochastic        all entries, rounded at random: unbiased
    topk:64 dct_topk:64 randk:0.01         some entries of each chunk of 4096: 64 of them; one hundredth
    topk:64+int4                           some entries, with their values encoded by another codec
    powersgd:16 powersgd:16+int4           low-rank factors, for outer methods: `form(name)`
    package.module:Class                   your own class, called with the options
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isles.base.imports import import_target
from isles.base.parts import make
from isles.comm.codecs.kinds import CodecName, read_codec, read_form

if TYPE_CHECKING:
    from isles.comm.codecs.base import Codec
    from isles.comm.codecs.lowrank import Form

__all__ = ["codec", "form"]


def codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """Create the codec called `name`.

    Args:
        name: one of the names in the module's docstring.
        options: keyword arguments of your own class.

    Raises:
        ValueError: if the name is unknown, or the class is not a codec.
    """
    return _create(read_codec(name), options)


def form(name: str, options: Mapping[str, Any] | None = None) -> Form:
    """Create the codec or the low-rank form called `name`."""
    return _create(read_form(name), options)


def _create(parsed: CodecName, options: Mapping[str, Any] | None) -> Any:
    if parsed.is_own:
        return make("codec", parsed.target, options)
    kind = import_target("codec", parsed.target)
    values = {} if parsed.values is None else {"values": codec(parsed.values)}
    return kind(**values) if parsed.number is None else kind(parsed.number, **values)

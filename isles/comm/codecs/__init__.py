"""Codecs: the form in which a vector crosses the wire. `codec(name)` makes one; `kinds` is their table.

A codec turns a flat floating-point tensor into a packed uint8 buffer whose length is known from the number of elements
alone, and back. Scales and indices travel inside the buffer, so counted bytes are honest. `base` is the interface;
`scaled`, `integers`, `sparse` and `lowrank` hold the codecs:

    none fp16 bf16 int8 int4 int2 fp4 sign every entry, in fewer bits
    int8:stochastic int4:stochastic        the same, rounded at random: unbiased
    topk:64 dct_topk:64 randk:0.01         some entries (of each 4096: 64; a hundredth)
    topk:64+int4                           the same, and the values in the form of another codec
    powersgd:16 powersgd:16+int4           low-rank factors, for outer methods: `form(name)`
    package.module:Class                   one of your own, called with the options
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
    """A codec by its name.

    Args:
        name: see the module.
        options: what the class of one of your own is called with.

    Raises:
        ValueError: for any other name, or a class that is no codec.
    """
    return _made(read_codec(name), options)


def form(name: str, options: Mapping[str, Any] | None = None) -> Form:
    """As `codec`, or the low-rank form called `name`."""
    return _made(read_form(name), options)


def _made(parsed: CodecName, options: Mapping[str, Any] | None) -> Any:
    if parsed.is_own:
        return make("codec", parsed.target, options)
    kind = import_target("codec", parsed.target)
    values = {} if parsed.values is None else {"values": codec(parsed.values)}
    return kind(**values) if parsed.number is None else kind(parsed.number, **values)

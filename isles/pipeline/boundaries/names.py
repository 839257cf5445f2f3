"""The values of `pipeline.boundary.kind`, read. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from isles.base.parts import names_code

BoundaryKind = Literal["none", "subspace", "dct", "bottleneck", "maxout", "own"]
StreamCodec = Literal["none", "fp16", "bf16", "int8", "int4", "fp4"]
"""Codecs of every entry: each message has a length that both sides know."""
EXAMPLES = {"subspace": "subspace:16", "dct": "dct:0.75", "bottleneck": "bottleneck:16", "maxout": "maxout:16"}


@dataclass(frozen=True, slots=True)
class BoundaryName:
    """rank: numbers a token, of all but "dct", whose sparsity is the share of entries that stay behind. kind "own": a
    class of somebody's own, whose numbers its code knows.
    """

    kind: BoundaryKind
    rank: int = 0
    sparsity: float = 0.0

    @property
    def has_layers(self) -> bool:
        """It comes with parameters, at the cuts."""
        return self.kind in ("bottleneck", "maxout")

    @property
    def is_one_way(self) -> bool:
        """The last stage has nothing that would fit through, so that no stream can come home from it."""
        return self.kind in ("subspace", "bottleneck", "maxout")

    def check_width(self, width: int) -> None:
        """ValueError where a stream of `width` has no such boundary."""
        if self.rank > width:
            raise ValueError(
                f'pipeline.boundary.kind = "{self.kind}:{self.rank}": the stream is only {width} wide (model.d_model); '
                f"choose at most {width}"
            )
        if self.kind == "maxout" and width % self.rank:
            raise ValueError(
                f'pipeline.boundary.kind = "maxout:{self.rank}": {width} is no multiple of {self.rank}; choose a '
                f"divisor of {width} (model.d_model)"
            )


def entries_sent(width: int, sparsity: float) -> int:
    """K of a token's `width` entries; the 1e-9 keeps 1 of 100 at 0.99."""
    return max(1, math.ceil((1 - sparsity) * width - 1e-9))


def index_bytes(width: int) -> int:
    """Bytes that say which entry of `width` it is."""
    return 1 if width <= 1 << 8 else 2


def boundary_name(text: str) -> BoundaryName:
    """ValueError, in a line without the section, for anything else than the five, or the name of code."""
    if names_code("boundary", text):
        return BoundaryName("own")
    kind, colon, number = text.partition(":")
    if kind == "none" and not colon:
        return BoundaryName("none")
    if kind not in EXAMPLES:
        raise ValueError(
            f'kind = "{text}" is not known: choose "none", {_listed()}, or package.module:Class for your own'
        )
    try:
        value = float(number) if kind == "dct" else int(number)
    except ValueError:
        raise ValueError(f'kind = "{text}": write it with a number, such as "{EXAMPLES[kind]}"') from None
    if kind == "dct":
        if not 0 <= value < 1:
            raise ValueError(f'kind = "{text}": the sparsity is a share from 0 to below 1, such as "{EXAMPLES[kind]}"')
        return BoundaryName("dct", sparsity=value)
    if value < 1:
        raise ValueError(f'kind = "{text}": choose 1 number a token or more, such as "{EXAMPLES[kind]}"')
    return BoundaryName(kind, rank=int(value))  # type: ignore[arg-type]


def _listed() -> str:
    return " or ".join(f'"{example}"' for example in EXAMPLES.values())

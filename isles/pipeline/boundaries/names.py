"""Parses the values of `pipeline.boundary.kind`. Loads no torch."""

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
    """rank: numbers per token, for all but "dct", which has sparsity, the fraction of entries that are not sent. kind
    "own": a user's class, which has its own numbers.
    """

    kind: BoundaryKind
    rank: int = 0
    sparsity: float = 0.0

    @property
    def has_layers(self) -> bool:
        """Whether it has parameters, at the cuts."""
        return self.kind in ("bottleneck", "maxout")

    @property
    def is_one_way(self) -> bool:
        """Whether the output of the last stage cannot be sent through it, so that the stream cannot return to the
        origin.
        """
        return self.kind in ("subspace", "bottleneck", "maxout")

    def check_width(self, width: int) -> None:
        """ValueError if a stream of `width` is too narrow for it."""
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
    """Parse the name. ValueError, in a line without the section, if it is none of the five, and no name of code."""
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

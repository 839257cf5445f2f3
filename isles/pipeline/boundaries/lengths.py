"""Bytes of the messages between stages, by formula, for plans; a run's own are `isles.pipeline.wire`. Loads no torch.

n tokens    forward    n (numbers e + places + id)        numbers: of a token's stream that travel; e: bytes of one,
            backward   n  numbers e + loss                a block's share of a scale included
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.network.planner.forms import FORMS
from isles.network.routing.wires import Sizes
from isles.pipeline.boundaries.names import boundary_name

_BITS = {name: FORMS[name].bits for name in ("none", "bf16", "int8", "int4", "fp4")} | {"fp16": 16.0}
_ID, _LOSS = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBoundary:
    """What crosses between stages, in float32. boundary, codec, gradient_codec: as of [pipeline]; turn_every: its
    `subspace_update`. ValueError for names that there are not.
    """

    boundary: str = "none"
    codec: str = "none"
    gradient_codec: str = "none"
    turn_every: int = 0

    def __post_init__(self) -> None:
        kind = boundary_name(self.boundary).kind
        for name in (self.codec, self.gradient_codec):
            if name not in _BITS:
                raise ValueError(f'codec = "{name}" is not known: choose one of {", ".join(_BITS)}')
        if self.turn_every < 0 or (self.turn_every and kind != "subspace"):
            raise ValueError(
                f'subspace_update = {self.turn_every} with boundary = "{self.boundary}": only a subspace is turned, '
                "every so many steps; choose 0, or a subspace"
            )

    def __str__(self) -> str:
        what = "the whole stream" if self.boundary == "none" else self.boundary
        forms = {self.codec, self.gradient_codec} - {"none"}
        turns = f", turned every {self.turn_every} steps" if self.turn_every else ""
        return what + (f" in {' and '.join(sorted(forms))}" if forms else "") + turns

    @property
    def rank(self) -> int:
        """Numbers a token; 0 where they hang on the width."""
        return boundary_name(self.boundary).rank

    @property
    def is_one_way(self) -> bool:
        """See `BoundaryName`."""
        return boundary_name(self.boundary).is_one_way

    def sizes(self, tokens: float, width: int) -> Sizes:
        """Of messages about so many tokens. ValueError where a stream of `width` has no such boundary."""
        name = boundary_name(self.boundary)
        name.check_width(width)
        entries = tokens * name.numbers(width)
        side = tokens * name.place_bytes(width)
        forth, back = (round(entries * _BITS[codec] / 8) for codec in (self.codec, self.gradient_codec))
        return Sizes(forward=forth + round(side) + round(tokens * _ID), home=forth + round(side), backward=back + _LOSS)

    def table_bytes(self, vocab: float, width: int) -> float:
        """That a worker holds beside the model: a subspace's basis and frozen table."""
        return 4.0 * width * (vocab + self.rank) if boundary_name(self.boundary).kind == "subspace" else 0.0

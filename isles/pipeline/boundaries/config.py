"""The `[pipeline.boundary]` table: what of the stream crosses between stages. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.errors import demand
from isles.pipeline.boundaries.names import StreamCodec, boundary_name
from isles.tables import refuse


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """What of the stream crosses between stages, and in which form."""

    kind: str = "none"
    """What of the stream crosses between stages: "none", all of it; "subspace:16", 16 numbers a token of a stream that
    is kept in a subspace (Protocol Models); "dct:0.75", the quarter of a token's entries of largest size;
    "bottleneck:16" and "maxout:16", 16 numbers of learned layers.
    """
    codec: StreamCodec = "none"
    """Form of what the boundary sends forward; all but "none" lose something."""
    gradient_codec: StreamCodec = "none"
    """The same backward."""
    form: Literal["coordinates", "row-wise", "projected"] = "coordinates"
    """How weights are kept in a subspace: by their coordinates in it; or of full size, with one second moment a row, or
    with a projection after each step.
    """
    blocks: int = 0
    """Blocks, from the first on, that write into the subspace; 0: all before the last stage."""
    update_every: int = 0
    """Steps after which the subspace is turned towards the gradients, again and again; 0: never."""
    update_rate: float = 0.05
    """How far it is turned, from 0 to 0.5."""

    def __post_init__(self) -> None:
        if boundary_name(self.kind).kind != "subspace":
            why = 'acts with kind = "subspace:16" and the like: choose that, or leave it out'
            refuse(self, why, "form", "blocks", "update_every")
        demand(self, "blocks", lambda x: x >= 0, "choose 0 (all before the last stage) or more")
        demand(self, "update_every", lambda x: x >= 0, "choose 0 (never) or more steps")
        if self.update_every and self.form != "coordinates":
            raise ValueError(
                f"update_every = {self.update_every}: only coordinates turn with their subspace; choose "
                'form = "coordinates", or 0'
            )
        demand(self, "update_rate", lambda x: 0 < x <= 0.5, "choose a rate above 0, at most 0.5")
        if not self.update_every:
            refuse(self, "acts with update_every: set that, or leave it out", "update_rate")

    @property
    def lossy(self) -> list[str]:
        """The settings that change what is computed, as they are written."""
        found = [("kind", self.kind)] if boundary_name(self.kind).kind not in ("none", "subspace") else []
        found += [(key, getattr(self, key)) for key in ("codec", "gradient_codec") if getattr(self, key) != "none"]
        return [f'pipeline.boundary.{key} = "{value}"' for key, value in found]

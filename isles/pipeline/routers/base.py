"""What the executor asks a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isles.network.routing.routes import Route


class Router(Protocol):
    """The ways of a step's microbatches, the same at every worker that asks."""

    def routes(self, step: int) -> Sequence[Route]:
        """Those of inner step `step`, counted from 1. Positions are those of `mesh.pipeline`: replica x stages +
        stage.
        """
        ...

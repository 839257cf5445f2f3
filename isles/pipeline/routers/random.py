"""NoLoCo's random routing (arXiv 2506.10911, section 3.1): at every boundary the replicas are permuted anew for each
microbatch, so that all stages of one depth see everybody's text and stay close without an exchange of weights.

Every worker computes the permutation from (seed, step, microbatch, boundary); nothing is agreed upon over the wire. The
backward pass takes the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.network.routing.routes import Route, random_routes


@dataclass(frozen=True)
class RandomRouter:
    """As `FixedRouter`, with a permutation of the replicas at every boundary. Each worker gets each of the
    `microbatches` exactly once.
    """

    replicas: int
    stages: int
    microbatches: int
    home: bool
    seed: int

    def routes(self, step: int) -> Sequence[Route]:
        """Those of this step."""
        return tuple(
            random_routes(self.replicas, self.stages, self.microbatches, home=self.home, seed=self.seed, step=step)
        )

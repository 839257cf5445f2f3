"""What one worker holds, in parts: one account for `isles plan`, `--dry-run` and a run.

    weights, gradients, inner state       where it computes
    held                                  what the method adds, on the host, each with the time from which it is there;
                                          and what a step of a swarm or a cluster takes where it computes
    tables                                what a model has beside its parameters, such as those of rotary embeddings
    peak    = weights + tables + inner + step + always + exchange + max(gradients, end)

A run fills it in from its tensors, a plan from sketched ones. Without activations, which hang on the
batch and on the model; they are told apart. Bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

COMPARED = "weights and their mean"
"""What a comparison of replicas holds; workers of one replica are not compared."""
UNDER_WAY, PINNED = "messages under way", "pinned copies"
BLOCK = 1 << 17
"""Entries of a flat vector that are handled at a time; 512 KB of float32."""
SEGMENT, MOST_SEGMENTS = 1 << 22, 60
"""Entries of a mean's segments (16 MB of float32), and how many there may be."""


When = Literal["always", "pinned", "exchange", "end", "step"]


class Held(NamedTuple):
    """Memory that a worker takes beside weights, gradients and the inner optimizer's state.

    when: "always"; "pinned": likewise, where the weights are on GPUs; "exchange": from the first round on, while one is
    under way and kept for the next; "end": for validation and what follows the last step: on the host. "step": in every
    step, where it computes.
    """

    what: str
    nbytes: int
    when: When


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Of one worker; see above."""

    weights: int
    gradients: int
    inner: int
    held: tuple[Held, ...]
    tables: int = 0

    @property
    def computing(self) -> int:
        """Where it computes: on the GPU, if there is one."""
        return self.weights + self.tables + self.gradients + self.inner + self._sum("step")

    @property
    def training(self) -> int:
        """With an exchange under way."""
        return self.computing + self._sum("always") + self._sum("pinned") + self._sum("exchange")

    @property
    def peak(self) -> int:
        """At its fullest: while training with an exchange under way, or at the end, when gradients are gone."""
        return self.training - self.gradients + max(self.gradients, self._sum("end"))

    def _sum(self, when: str) -> int:
        return sum(held.nbytes for held in self.held if held.when == when)

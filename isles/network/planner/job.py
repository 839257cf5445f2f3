"""What `planner` is asked about: a model, the time of its steps, and the workers with their lines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isles.network.links import Links

MOST_PARAMETERS, MOST_LAYERS, MOST_WORKERS = 1e15, 750, 2000

Matrices = tuple[tuple[float, float, int], ...]
"""(rows, columns, how many of them): of a decoder queries, keys and values; out; gate and up; down; others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained. layers: of the decoder. step_seconds: of one inner step of computing. tokens: of the whole
    run, and of one step of all workers; None: not asked for. matrices: of the model; None: `usual_matrices`.
    device_bytes: memory of a worker's GPU; None: not known. messages: of a round, about, that a replay plays: where the
    library has more, its buffers are cut more coarsely.
    """

    parameters: float
    layers: int
    step_seconds: float
    workers: int
    links: Links
    tokens: float | None = None
    step_tokens: float | None = None
    matrices: Matrices | None = None
    device_bytes: float | None = None
    messages: float = 6_000

    @property
    def steps(self) -> int | None:
        """Inner steps of the run; None: not known."""
        if self.tokens is None or self.step_tokens is None:
            return None
        return max(1, round(self.tokens / self.step_tokens))

    @property
    def known_matrices(self) -> Matrices:
        """`matrices`, or the usual ones."""
        return usual_matrices(self.parameters, self.layers) if self.matrices is None else self.matrices

    @property
    def mlp_share(self) -> float:
        """Of the parameters, those in gate, up and down."""
        return sum(rows * columns * count for rows, columns, count in self.known_matrices[2:4]) / self.parameters

    def __post_init__(self) -> None:
        for key in ("parameters", "step_seconds", "tokens", "step_tokens"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{key} = {value}: choose a number above 0")
        if self.parameters > MOST_PARAMETERS:
            raise ValueError(f"parameters = {self.parameters:g}: choose up to {MOST_PARAMETERS:g}")
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ValueError(f"layers = {self.layers}: choose 1 to {MOST_LAYERS}")
        if not 2 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers = {self.workers}: choose 2 to {MOST_WORKERS}")
        if (self.tokens is None) != (self.step_tokens is None):
            raise ValueError("tokens and step_tokens: give both, for hours, or neither")
        self.links.check(self.workers)


def usual_matrices(parameters: float, layers: int) -> Matrices:
    """Those of a decoder of this size with a gated MLP four times as wide as the stream, and little embedding."""
    width = math.sqrt(parameters / layers / 16)
    sides = ((3, 1, 1), (1, 1, 1), (4, 1, 2), (1, 4, 1))  # queries, keys and values; out; gate and up; down
    return tuple((rows * width, columns * width, count * layers) for rows, columns, count in sides)

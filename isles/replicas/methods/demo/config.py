"""The settings of DeMo, with the names and defaults of the authors' code where they have one; symbols as in `demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import override

from isles.base.errors import demand
from isles.replicas.config import Dimension, MethodConfig, at_least, one_of

Base = Literal["sign", "sgd", "muon"]
Projection = Literal["dct", "identity", "random"]
Values = Literal["fp32", "bf16", "int8", "sign"]
Reduce = Literal["contributors", "world"]

MOST_EDGE = 256  # indices within a block then fit into 16 bits


@dataclass(frozen=True, kw_only=True)
class DeMoConfig(MethodConfig):
    """Settings of `demo`."""

    compression_decay: float = 0.999
    """What is kept of the momentum at each step (beta)."""
    compression_topk: int = 32
    """Coefficients sent of each block (k), all of a block that has fewer."""
    compression_chunk: int = 64
    """Largest edge of a block (s)."""
    subtract: float = 1.0
    """Share of what was sent that leaves the momentum (alpha)."""
    base: Base = "sign"
    """Update of the decoded momentum: sign; sgd: itself; muon: its nearest orthogonal matrix (vectors: sign)."""
    transform: Projection = "dct"
    """Transform of each block: dct; identity; random: orthogonal matrices drawn anew at each step."""
    value_dtype: Values = "bf16"
    """Form of the coefficients on the wire: fp32, bf16, int8, or sign: one bit, each counting as 1 or -1."""
    fold_lr: bool = True
    """Gradients enter the momentum times the learning rate."""
    zero_tol: float = 1e-6
    """Entries of a decoded block below this share of its largest count as zero."""
    reduce: Reduce = "contributors"
    """A coefficient is averaged over the workers that sent it (contributors), or over all (world)."""
    padding: bool = True
    """Fill up dimensions that have no divisor between half of compression_chunk and it; false: cut them into blocks as
    thin as the largest divisor.
    """
    check_every: int = 100
    """Steps between comparisons of the weights' hashes, which travel with the coefficients (0: never)."""
    seed: int = 0
    """Seed of the random transform."""

    def __post_init__(self) -> None:
        demand(self, "compression_decay", lambda x: 0 <= x < 1, "choose 0 <= compression_decay < 1")
        at_least("compression_topk", self.compression_topk, 1)
        if not 1 <= self.compression_chunk <= MOST_EDGE:
            raise ValueError(f"compression_chunk = {self.compression_chunk}: choose 1 to {MOST_EDGE}, such as 64")
        demand(self, "subtract", lambda x: 0 <= x <= 1, "choose 0 to 1")
        demand(self, "zero_tol", lambda x: 0 <= x < 1, "choose 0 <= zero_tol < 1")
        at_least("check_every", self.check_every, 0)
        for key, allowed in (("base", Base), ("transform", Projection), ("value_dtype", Values), ("reduce", Reduce)):
            one_of(key, getattr(self, key), get_args(allowed))
        if self.value_dtype == "sign" and self.base == "sgd":
            raise ValueError('value_dtype = "sign": one bit has no size, which base = "sgd" needs; choose bf16 or int8')

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        sent = Dimension.around("replicas.compression_topk", self.compression_topk, 4, whole=True)
        return [Dimension.below_1("replicas.compression_decay", self.compression_decay, 10), *([sent] if timed else [])]

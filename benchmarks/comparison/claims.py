"""What is said of the methods, put to the runs: `better` beats `worse` by a margin in every seed, or it does not.

A seed gives both the same weights to begin with and the same data in the same order, so their difference is taken seed
by seed. The margins were written down before the runs were made, and are not moved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from benchmarks.comparison.figures import Figures, differences


@dataclass(frozen=True)
class Claim:
    """loss(worse) - loss(better) >= margin, nats a token; a negative margin: `better` is worse by that at most. source:
    who says so.
    """

    better: str
    worse: str
    margin: float
    source: str

    @property
    def words(self) -> str:
        """As a sentence for people."""
        better, worse = f"`{self.better}`", f"`{self.worse}`"
        if self.margin > 0:
            return f"{better} beats {worse} by {self.margin:g}"
        if self.margin == 0:
            return f"{better} beats {worse}"
        return f"{better} is behind {worse} by no more than {-self.margin:g}"


_OURS = "expected here"
CLAIMS = (
    Claim("ddp", "localsgd", 0.05, _OURS),
    Claim("ddp", "diloco", 0.02, _OURS),
    Claim("ddp", "noloco", 0.05, "NoLoCo, table 2: both low-communication methods are behind data parallel"),
    Claim("fsdp", "ddp", -0.01, "the same mathematics"),
    Claim("fedavg", "localsgd", -0.01, "the same mathematics"),
    Claim("diloco", "localsgd", 0.0, "DiLoCo, section 4: Nesterov is the best outer step"),
    Claim("slowmo", "localsgd", 0.0, "SlowMo"),
    Claim("postlocal-sgd", "localsgd", 0.0, "Post-local SGD"),
    Claim("diloco-islands", "diloco", 0.0, _OURS + ": two replicas with twice the batch are nearer to data parallel"),
    Claim("streaming-diloco", "diloco", -0.03, "Streaming DiLoCo, table 5"),
    Claim("diloco", "eager", 0.03, "Eager Updates, table 6, for the smallest models"),
    Claim("eager", "delayed", 0.0, "Eager Updates, figure 5"),
    Claim("noloco", "diloco", 0.0, "NoLoCo, most rows of its tables"),
    Claim("streaming-noloco", "noloco", -0.03, _OURS),
    Claim("sparseloco", "diloco", -0.05, _OURS),
    Claim("dilocox", "diloco", -0.25, _OURS),
    Claim("sparta", "localsgd", -0.1, _OURS),
    Claim("ddp", "demo", 0.05, _OURS + ": at toy size DeMo trails AdamW"),
    Claim("ddp", "dct-dp", 0.0, _OURS),
    Claim("ddp", "ist", 0.05, _OURS + ": a subnet does not see what the others' units do"),
    *(Claim(name, "none", 0.03, _OURS) for name in ("diloco", "noloco", "eager", "dilocox", "sparta", "demo", "ist")),
)


@dataclass(frozen=True)
class Judged:
    """A claim and what the runs say of it: the differences in the seeds that both rows have."""

    claim: Claim
    found: tuple[float, ...]

    @property
    def verdict(self) -> Literal["holds", "does not hold", "in some seeds", "not run"]:
        """Whether it holds in every seed, in none, or in some."""
        if not self.found:
            return "not run"
        kept = sum(one >= self.claim.margin for one in self.found)
        return "holds" if kept == len(self.found) else "in some seeds" if kept else "does not hold"

    @property
    def mean(self) -> float:
        """Mean difference."""
        return mean(self.found)


def judge(rows: Mapping[str, Figures]) -> list[Judged]:
    """Every claim about rows that are asked for."""
    return [
        Judged(claim, tuple(differences(rows[claim.worse], rows[claim.better]).values()))
        for claim in CLAIMS
        if claim.better in rows and claim.worse in rows
    ]

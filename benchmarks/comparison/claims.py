"""What is said of the methods, put to the runs: `better` beats `worse` by a margin, or it does not, or it stays open.

A seed gives both the same weights to begin with and the same data in the same order, so their difference is taken seed
by seed: its mean, 95 % interval (Student's t), and p of the difference from the margin after Holm's correction over all
claims. The margins were written down before the runs were made, and are not moved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.comparison.cases import ROWS
from benchmarks.comparison.figures import Figures, differences
from isles.report.comparison import ALONE, NEVER, Paired, holm, paired


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
    Claim("fedavg", "localsgd", -0.01, "the same mathematics"),
    Claim("diloco", "localsgd", 0.0, "DiLoCo, section 4: Nesterov is the best outer step"),
    Claim("slowmo", "localsgd", 0.0, "SlowMo"),
    Claim("postlocal-sgd", "localsgd", 0.0, "Post-local SGD"),
    Claim("diloco-islands", "diloco", 0.0, _OURS + ": two replicas with twice the batch are nearer to data parallel"),
    Claim("streaming-diloco", "diloco", -0.03, "Streaming DiLoCo, table 5"),
    Claim("diloco", "eager", 0.03, "Eager Updates, table 6, for the smallest models"),
    Claim("eager", "delayed", 0.0, "Eager Updates, figure 5"),
    Claim("noloco", "diloco", -0.02, _OURS),
    Claim("streaming-noloco", "noloco", -0.03, _OURS),
    Claim("sparseloco", "diloco", -0.05, _OURS),
    Claim("dilocox", "diloco", -0.25, _OURS),
    Claim("sparta", "localsgd", -0.1, _OURS),
    Claim("ddp", "demo", 0.05, _OURS + ": at toy size DeMo trails AdamW"),
    Claim("ddp", "dct-dp", 0.0, _OURS),
    Claim("ddp", "ist", 0.05, _OURS + ": a subnet does not see what the others' units do"),
    Claim("noloco-50", "diloco-100", 0.0, "NoLoCo, table 2, most rows"),
    Claim(ALONE, "ddp", 0.0, _OURS + ": as many tokens in more steps"),
    *(Claim(name, NEVER, 0.0, _OURS) for name in ROWS if name not in (NEVER, ALONE)),
)


@dataclass(frozen=True)
class Judged:
    """A claim, and what the runs say of it. found: of the seeds that both rows have, less the margin; p: corrected."""

    claim: Claim
    found: Paired | None
    p: float

    @property
    def verdict(self) -> Literal["holds", "does not hold", "open"]:
        """Whether these seeds tell the difference from the margin, and on which side of it it lies."""
        if self.found is None or self.p >= 0.05:
            return "open"
        return "holds" if self.found.mean > 0 else "does not hold"


def judge(parts: Mapping[str, Mapping[str, Figures]]) -> list[tuple[str, Judged]]:
    """Every claim about rows that are asked for, in each part; p is corrected for all of them together."""
    claims = [
        (part, claim) for part, rows in parts.items() for claim in CLAIMS if {claim.better, claim.worse} <= rows.keys()
    ]
    found = [differences(parts[part][claim.worse], parts[part][claim.better]) for part, claim in claims]
    tests = [
        paired([one - claim.margin for one in values.values()]) if len(values) > 1 else None
        for (_, claim), values in zip(claims, found, strict=True)
    ]
    ps = iter(holm([test.p for test in tests if test is not None]))
    return [
        (part, Judged(claim, test, 1.0 if test is None else next(ps)))
        for (part, claim), test in zip(claims, tests, strict=True)
    ]

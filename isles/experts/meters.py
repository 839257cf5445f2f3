"""What experts cost: FLOPs of training, routing and serving, the budget that ensembles share, and bytes.

Budget (HDEE): experts that differ in size and steps are compared at one total,

    sum_j C_j T_j = E C_ref T_ref        C: training FLOPs a token (isles.models.sizes), T: steps, batches equal
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isles.models.sizes import Shape, flops_per_token

TOLERANCE = 0.01


@dataclass(frozen=True)
class Share:
    """One expert's part of a budget: its model and its steps."""

    shape: Shape
    steps: int


def cost(share: Share) -> float:
    """FLOPs of a sequence a step over all its steps, without the constant batch: C_j T_j."""
    return float(flops_per_token(share.shape)) * share.steps


def check_budget(name: str, shares: Mapping[str, Share], reference: Share, tolerance: float = TOLERANCE) -> float:
    """Total cost over that of as many reference experts. ValueError where it is off 1 by more than `tolerance`."""
    ratio = sum(map(cost, shares.values())) / (len(shares) * cost(reference))
    if abs(ratio - 1) > tolerance:
        parts = ", ".join(f"{expert} {cost(share) / cost(reference):.3f}" for expert, share in shares.items())
        raise ValueError(
            f"{name}: the budget does not balance: the experts cost {ratio:.3f} times {len(shares)} reference experts "
            f"({parts} of one each; tolerance {tolerance:g}): change sizes or steps until they add up to {len(shares)}"
        )
    return ratio


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """What crosses between the machines of E experts, in bytes.

    between_experts: while they train: nothing, by construction (each is a run of its own). start: each expert's first
    weights, or its part of the assignment. result: the trained weights. scoring_per_token, generating_per_token: of a
    sequence, from each other machine, where the experts stay apart.
    """

    between_experts: int
    start: tuple[int, ...]
    result: tuple[int, ...]
    scoring_per_token: int
    generating_per_token: int


def bytes_of(starts: Sequence[int], results: Sequence[int], vocab: int, serving: int) -> ExpertTraffic:
    """serving: how many experts a token needs; a float32 score of each but one, or a distribution, travels."""
    return ExpertTraffic(
        between_experts=0,
        start=tuple(starts),
        result=tuple(results),
        scoring_per_token=4 * (serving - 1),
        generating_per_token=4 * vocab * (serving - 1),
    )


def score_bytes(sequences: int, experts: int) -> dict[str, int]:
    """One round of SMALLTALK's score exchange with 16-bit scores, bytes a router: what it makes (the paper's count),
    and what it sends to and receives from the other E - 1.
    """
    made = 2 * sequences
    return {"made": made, "sent": (experts - 1) * made, "received": (experts - 1) * made}

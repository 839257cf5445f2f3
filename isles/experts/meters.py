"""What experts cost: FLOPs of training, routing and serving, the budget that ensembles share, and bytes.

Budget (HDEE): experts that differ in size and steps are compared at one total,

    sum_j C_j T_j = E C_ref T_ref        C: training FLOPs a token (isles.models.sizes), T: steps, batches equal

SMALLTALK's own count (appendix A.3, arXiv 2410.03529) of a forward pass of B sequences of S tokens through a decoder of
width H, L layers and a feed-forward layer of width D over V words, which the paper's table can be redone with:

    fwd = B S H + L (8 B S H^2 + 4 B S^2 H + 4 B S H D) + 2 B S H V + 3 B S V;    training = 3 fwd a step
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
class PaperModel:
    """A decoder as the SMALLTALK paper counts it. heads do not enter."""

    hidden: int
    layers: int
    ffn: int
    vocab: int

    def forward(self, sequences: float, length: int) -> float:
        """FLOPs of a forward pass, see the module."""
        B, S, H, D, V = sequences, length, self.hidden, self.ffn, self.vocab
        layer = 8 * B * S * H**2 + 4 * B * S**2 * H + 4 * B * S * H * D
        return B * S * H + self.layers * layer + 2 * B * S * H * V + 3 * B * S * V


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """A SMALLTALK run: E experts for `steps` of `batch` sequences of `length` tokens, routers for theirs; scoring reads
    `prefix` tokens of each sequence.
    """

    experts: int
    expert: PaperModel
    steps: int
    batch: int
    router: PaperModel
    router_steps: int
    router_batch: int
    length: int
    prefix: int

    def training(self) -> float:
        """FLOPs of all experts' steps."""
        return self.experts * self.steps * 3 * self.expert.forward(self.batch, self.length)

    def overhead(self, router_length: int | None = None) -> dict[str, float]:
        """FLOPs beside the experts' own: training the routers (on sequences of `router_length` tokens, default the
        prefix), and scoring each sequence by each router, for the routers' rounds and for the experts' data.
        """
        length = self.prefix if router_length is None else router_length
        score = self.experts * self.router.forward(1, self.prefix)
        return {
            "routers": self.experts * self.router_steps * 3 * self.router.forward(self.router_batch, length),
            "rounds": self.experts * self.router_steps * self.router_batch * score,
            "partition": self.experts * self.steps * self.batch * score,
        }

    def inference(self) -> tuple[float, float]:
        """FLOPs of a sequence: (its expert, all routers over the prefix)."""
        return self.expert.forward(1, self.length), self.experts * self.router.forward(1, self.prefix)


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """What crosses between the machines of E experts, in bytes.

    between_experts: while they train: nothing, by construction (each is a run of its own). start: each expert's first
    weights, or its part of the assignment. result: the trained weights. serving: a token of a sequence, from each other
    machine, where the experts stay apart: scoring and generating.
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

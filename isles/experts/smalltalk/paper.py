"""SMALLTALK's own table of costs (table 3 and appendix A.3, arXiv 2410.03529): what routing adds to training, and what
a sequence costs at inference.

A forward pass of B sequences of S tokens through a decoder of width H, L layers and a feed-forward layer of width D
over V words, as the paper counts it:

    fwd = B S H + L (8 B S H^2 + 4 B S^2 H + 4 B S H D) + 2 B S H V + 3 B S V;    training = 3 fwd a step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


LENGTH, PREFIX = 1024, 256  # tokens of a sequence, and of those that routers read
BATCH, ROUTER_BATCH, ROUTER_STEPS = 128, 32, 128_000  # sequences of a step
ROUTER = PaperModel(hidden=96, layers=12, ffn=384, vocab=32_000)
EXPERTS = {  # by the paper's name: the model, its steps, and how many of them
    "335M": (PaperModel(hidden=1024, layers=24, ffn=4096, vocab=32_000), 256_000, (4, 8, 16, 32)),
    "1.3B": (PaperModel(hidden=2048, layers=24, ffn=8192, vocab=32_000), 512_000, (4, 16, 32)),
}


def table() -> list[dict[str, Any]]:
    """Table 3, a row an ensemble: FLOPs of training, the routing's overhead in training (training the routers, and
    scoring each sequence by each router, for the routers' rounds and for the experts' data), and both for one sequence
    at inference. Routers are counted as the paper has them: trained on whole sequences.
    """
    rows = []
    for name, (expert, steps, counts) in EXPERTS.items():
        for count in counts:
            score = count * ROUTER.forward(1, PREFIX)
            routers = count * ROUTER_STEPS * 3 * ROUTER.forward(ROUTER_BATCH, LENGTH)
            scored = count * ROUTER_STEPS * ROUTER_BATCH, count * steps * BATCH
            rows.append(
                {
                    "expert": name,
                    "experts": count,
                    "training": count * steps * 3 * expert.forward(BATCH, LENGTH),
                    "training_overhead": routers + sum(sequences * score for sequences in scored),
                    "inference": expert.forward(1, LENGTH),
                    "inference_overhead": score,
                }
            )
    return rows

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


LENGTH, PREFIX = 1024, 256  # tokens of a sequence, and of those that routers read
ROUTER = PaperModel(hidden=96, layers=12, ffn=384, vocab=32_000)
EXPERTS = {  # by the paper's name: the model, its steps, and how many of them
    "335M": (PaperModel(hidden=1024, layers=24, ffn=4096, vocab=32_000), 256_000, (4, 8, 16, 32)),
    "1.3B": (PaperModel(hidden=2048, layers=24, ffn=8192, vocab=32_000), 512_000, (4, 16, 32)),
}


def table() -> list[dict[str, Any]]:
    """Table 3, a row an ensemble: FLOPs of training, the routing's overhead in training, and both for one sequence at
    inference. Routers are counted as the paper has them: 128,000 steps of 32 sequences of 1,024 tokens.
    """
    rows = []
    for name, (expert, steps, counts) in EXPERTS.items():
        for count in counts:
            run = PaperRun(
                experts=count,
                expert=expert,
                steps=steps,
                batch=128,
                router=ROUTER,
                router_steps=128_000,
                router_batch=32,
                length=LENGTH,
                prefix=PREFIX,
            )
            training, overhead = run.training(), sum(run.overhead(router_length=LENGTH).values())
            serving, routing = run.inference()
            rows.append(
                {
                    "expert": name,
                    "experts": count,
                    "training": training,
                    "training_overhead": overhead,
                    "inference": serving,
                    "inference_overhead": routing,
                }
            )
    return rows

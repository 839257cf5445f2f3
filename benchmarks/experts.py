"""Speed of ensembles on the CPU.

    python -m benchmarks.experts [--json]

mixture     scores of E experts and their mixture, against the sum of the experts' own forward passes to a loss
routed      routers read a prefix, each sequence is scored by its expert, against the routers' forward passes and one
            expert's over all sequences

Decoders of 2.3M parameters over 256 ids, 48 sequences of 256 tokens, prefix 64, one thread; parties take turns, a
number is the median over the turns. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks._measure import Row, interleaved, report
from isles.data import load_tokenizer
from isles.experts import mixture
from isles.experts.forest import Served
from isles.experts.routing import Routers, route
from isles.models import ModelConfig, build
from isles.training.config.reading import read_config
from isles.training.records.saved_run import SavedRun

EXPERTS, SEQUENCES, CONTEXT, PREFIX = 3, 48, 256, 64
TURNS = 7


def served(model: ModelConfig, name: str) -> Served:
    """Fresh models of one shape, as if they had been trained."""
    config = replace(read_config(None, {}, []), model=model)
    runs = [SavedRun(config, build(model, seed=seed).eval(), load_tokenizer("bytes")) for seed in range(EXPERTS)]
    return Served([f"{name}-{seed}" for seed in range(EXPERTS)], runs)


@torch.no_grad()
def forward(these: Served, tokens: Tensor) -> None:
    """Every model's own pass from tokens to its loss."""
    for run in these.runs:
        run.model(tokens)


def main() -> int:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description="Ensembles on the CPU.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    experts = served(ModelConfig(size="2M", context=CONTEXT, device="cpu"), "expert")
    small = ModelConfig(d_model=32, layers=1, heads=2, ffn=96, context=CONTEXT, device="cpu")
    routers = served(small, "router")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (SEQUENCES, CONTEXT + 1), generator=generator)
    one = experts.only([0])
    gate = Routers(routers)
    uniform = mixture.uniform(EXPERTS)

    def mixed() -> None:
        scores = experts.scores(tokens)
        mixture.perplexity(mixture.mix(scores, mixture.posterior(scores, uniform)))

    def routed() -> None:
        chosen = route(gate, tokens, PREFIX)
        for expert in chosen.unique().tolist():
            experts.only([expert]).scores(tokens[chosen == expert])

    def apart() -> None:
        forward(routers, tokens[:, :PREFIX])
        forward(one, tokens)

    times = interleaved(
        {"mixture": mixed, "their passes": lambda: forward(experts, tokens), "routed": routed, "its parts": apart},
        TURNS,
    )
    rows = [
        Row(f"mixture of {EXPERTS}", times["mixture"].per(times["their passes"]), "of their passes", ("<=", 1.1)),
        Row("routed, top 1", times["routed"].per(times["its parts"]), "of its parts", ("<=", 1.1)),
        Row("routed, top 1", times["routed"].per(times["mixture"]), "of the mixture"),
    ]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())

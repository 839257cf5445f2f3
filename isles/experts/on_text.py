"""One forest judged on one text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from isles.errors import unknown_name
from isles.experts import mixture
from isles.experts.domains import Domain, DomainText
from isles.experts.priors import CACHED_SEQUENCES, cached, updating
from isles.experts.registry import Forest
from isles.experts.routing import gate_of, route
from isles.experts.served import Served

PRIORS = ("uniform", "cached", "updating")
SEQUENCES = 256


def judged_on(path: Path, data: str, prior: str, top_k: int | None) -> dict[str, str]:
    """What to print: the perplexity of the forest, and of each expert alone, on the test part of `data`'s validation
    text (the cached prior is of the other part). ValueError: anything that does not fit.
    """
    if prior not in PRIORS:
        raise ValueError(unknown_name("prior", prior, PRIORS))
    forest = Forest.load(path)
    gated = bool(forest.routers) or forest.clusters is not None
    if gated and (prior != "uniform" or top_k is not None):
        raise ValueError("--prior and --top-k are for forests that mix; this one routes each sequence to one expert")
    experts = Served.load(forest.experts)
    # Split as for training: of a text that an expert was trained on, only what it did not see is judged.
    fraction = min(run.config.data.validation_fraction for run in experts.runs)
    settings = replace(experts.runs[0].config.data, validation_fraction=fraction, batch_size=1)
    text = DomainText(Domain(name="text", path=data, difficulty="held_out"), settings, experts.context)
    tokens = text.sequences("test", SEQUENCES)
    scores_ENT = experts.scores(tokens)
    gate = gate_of(forest, experts.tokenizer)
    if gate is not None:
        expert_of = route(gate, tokens, forest.prefix)
        mixed = scores_ENT[expert_of, torch.arange(len(tokens))]
        share = torch.bincount(expert_of, minlength=len(experts)) / len(tokens)
    else:
        before = _before(scores_ENT, prior, text, experts)
        if top_k is not None:
            before = mixture.top_k(before, top_k)
        weights = mixture.posterior(scores_ENT, before)
        mixed, share = mixture.mix(scores_ENT, weights), weights.exp().mean((1, 2))
    found = {
        "sequences": f"{len(tokens)} of {experts.context} tokens",
        "perplexity": f"{mixture.perplexity(mixed):.4f}",
    }
    for name, scores, part in zip(experts.names, scores_ENT, share.tolist(), strict=True):
        found[f"  {name} alone"] = f"{mixture.perplexity(scores):.4f}   share {part:.3f}"
    return found


def _before(scores_ENT: Tensor, prior: str, text: DomainText, experts: Served) -> Tensor:
    if prior == "uniform":
        return mixture.uniform(len(experts))
    if prior == "updating":
        return updating(scores_ENT)
    return cached(experts.scores(text.sequences("prior", CACHED_SEQUENCES)))

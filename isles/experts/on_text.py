"""One forest judged on one text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from isles.experts import mixture
from isles.experts.domains import Domain, DomainText
from isles.experts.joining import Joined, Joining
from isles.experts.registry import Forest
from isles.experts.routing.priors import CACHED_SEQUENCES

SEQUENCES = 256


def judged_on(path: Path, data: str, joining: Joining) -> dict[str, str]:
    """What to print: the perplexity of the forest, and of each expert alone, on the test part of `data`'s validation
    text (a cached prior is of the other part). ValueError: anything that does not fit.
    """
    joined = Joined(Forest.load(path), joining)
    experts = joined.experts
    # Split as for training: of a text that an expert was trained on, only what it did not see is judged.
    fraction = min(run.config.data.validation_fraction for run in experts.runs)
    settings = replace(experts.runs[0].config.data, validation_fraction=fraction, batch_size=1)
    text = DomainText(Domain(name="text", path=data, difficulty="held_out"), settings, experts.context)
    tokens = text.sequences("test", SEQUENCES)
    scores_ENT = experts.scores(tokens)
    weights = joined.weights(tokens, scores_ENT, text.sequences("prior", CACHED_SEQUENCES))
    found = {
        "sequences": f"{len(tokens)} of {experts.context} tokens",
        "perplexity": f"{mixture.perplexity(mixture.mix(scores_ENT, weights)):.4f}",
        "experts that run": f"{joined.runs_per_token} of {len(experts)} a token",
    }
    shares = weights.exp().mean((1, 2)).tolist()
    for name, scores, share in zip(experts.names, scores_ENT, shares, strict=True):
        found[f"  {name} alone"] = f"{mixture.perplexity(scores):.4f}   share {share:.3f}"
    return found

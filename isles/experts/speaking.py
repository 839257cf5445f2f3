"""A forest that goes on from a prompt: by all experts' mixed distribution, or by the one that routers choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from isles.data.tokenizer import Tokenizer
from isles.experts import mixture
from isles.experts.registry import Forest
from isles.experts.routing import prefix_scores, route
from isles.experts.served import Served
from isles.training.saved import SavedRun, load_run


@dataclass(frozen=True)
class Speaker:
    """What `isles.models.generate` needs, and a line about who speaks."""

    logits: Callable[[Tensor], Tensor]
    tokens: Tensor
    context: int
    tokenizer: Tokenizer
    note: str


def speaker(path: Path, prompt: str) -> Speaker:
    """For the forest in `path`. ValueError: no forest, an expert missing, a prompt too short to route."""
    forest = Forest.load(path)
    if not forest.routers:
        served = Served.load(forest.experts)
        tokens = served.runs[0].encode(prompt)
        note = f"mixed from {len(served)} experts: {', '.join(served.names)}"
        return Speaker(served.logits(mixture.uniform(len(served))), tokens, served.context, served.tokenizer, note)
    routers = Served.load(forest.routers)
    tokens = routers.runs[0].encode(prompt)
    expert = int(route(routers, tokens[None], forest.prefix)[0])
    scores = prefix_scores(routers, tokens[None], forest.prefix)[:, 0].log_softmax(0).exp()
    member = forest.experts[expert]
    run: SavedRun = load_run(member.run)
    note = f"by {member.name}, to which the prompt is routed with a probability of {float(scores[expert]):.3f}"
    return Speaker(run.logits, tokens, run.context, run.tokenizer, note)

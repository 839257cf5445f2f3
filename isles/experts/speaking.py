"""A forest that goes on from a prompt: by all experts' mixed distribution, or by the one that routers choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from isles.data.tokenizer import Tokenizer
from isles.experts import mixture
from isles.experts.registry import Forest
from isles.experts.routing import gate_of, route
from isles.experts.served import Served
from isles.training.saved import encoded, load_run


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
    tokenizer = load_run(forest.experts[0].run).tokenizer
    gate = gate_of(forest, tokenizer)
    if gate is None:
        served = Served.load(forest.experts)
        tokens = encoded(tokenizer, prompt)
        note = f"mixed from {len(served)} experts: {', '.join(served.names)}"
        return Speaker(served.logits(mixture.uniform(len(served))), tokens, served.context, served.tokenizer, note)
    tokens = encoded(tokenizer, prompt)
    expert = int(route(gate, tokens[None], forest.prefix)[0])
    chance = float(gate.chances(gate.scores(tokens[None], forest.prefix))[expert, 0])
    member = forest.experts[expert]
    run = load_run(member.run)
    note = f"by {member.name}, to which the prompt is routed with a probability of {chance:.3f}"
    return Speaker(run.logits, tokens, run.context, run.tokenizer, note)

"""A forest that goes on from prompts: by all experts' mixed distribution, or by the one that a gate chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from isles.experts import mixture
from isles.experts.joining import Joined, Joining
from isles.experts.registry import Forest
from isles.experts.routing.priors import CACHED_SEQUENCES, following
from isles.experts.routing.routing import route, weights_of
from isles.training.records.saved import encoded, load_run


@dataclass(frozen=True)
class Voice:
    """What `isles.models.generate` needs for one prompt, and a line about who speaks."""

    logits: Callable[[Tensor], Tensor]
    tokens: Tensor
    context: int
    note: str


class Speaker:
    """The forest in `path`, asked one prompt after another. data: text for a cached prior.

    ValueError: no forest, an expert missing, a way of joining that does not fit.
    """

    def __init__(self, path: Path, joining: Joining, data: str | None = None) -> None:
        self.joined = Joined(Forest.load(path), joining)
        self.tokenizer = self.joined.tokenizer
        if data is not None and joining.prior != "cached":
            raise ValueError("--data is the text of a cached prior: add --prior cached, or leave it out")
        self.heard = 0
        self.believed = None
        if self.joined.gate is None:
            held = None if data is None else self.joined.text(data).sequences("prior", CACHED_SEQUENCES)
            self.believed = self.joined.prior(held)

    def voice(self, prompt: str) -> Voice:
        """For one prompt. ValueError: too short to route."""
        tokens = encoded(self.tokenizer, prompt)
        if self.joined.gate is None:
            return self._mixed(tokens)
        return self._chosen(tokens) if self.joined.joining.route == "once" else self._growing(tokens)

    def listen(self, tokens: Tensor) -> None:
        """Take in a text (T,), for an updating prior: of what its experts say of it at the last."""
        experts = self.joined.experts
        if self.joined.joining.prior == "updating" and self.believed is not None and len(tokens) > 1:
            scores_ET = experts.scores(tokens[None, -experts.context - 1 :])[:, 0]
            self.believed = following(self.believed, scores_ET, first=not self.heard)
            self.heard += 1

    def _mixed(self, tokens: Tensor) -> Voice:
        experts = self.joined.experts
        assert self.believed is not None
        prior = mixture.top_k(self.believed, self.joined.top)
        shares = ", ".join(
            f"{name} {share:.3f}" for name, share in zip(experts.names, prior.exp().tolist(), strict=True)
        )
        note = f"mixed from {self.joined.top} of {len(experts)} experts, prior: {shares}"
        return Voice(experts.logits(prior), tokens, experts.context, note)

    def _chosen(self, tokens: Tensor) -> Voice:
        joined, gate = self.joined, self.joined.gate
        assert gate is not None
        expert = int(route(gate, tokens[None], joined.prefix)[0])
        chance = float(gate.log_chances(gate.scores(tokens[None], joined.prefix))[expert, 0].exp())
        member = joined.forest.experts[expert]
        run, read = load_run(member.run), min(joined.prefix, len(tokens))  # no other one is loaded
        note = (
            f"by {member.name}, to which the prompt's first {read} tokens are routed with a probability of {chance:.3f}"
        )
        return Voice(run.logits, tokens, run.context, note)

    def _growing(self, tokens: Tensor) -> Voice:
        experts, gate, top = self.joined.experts, self.joined.gate, self.joined.top
        assert gate is not None

        def logits(so_far: Tensor) -> Tensor:
            weights_EN = weights_of(gate, so_far, len(experts))
            return experts.next_token(so_far, mixture.top_k(weights_EN, top)[:, 0], mixture.constant)[:, None]

        note = f"mixed from {top} of {len(experts)} experts, their weights computed again after every token"
        return Voice(logits, tokens, experts.context, note)

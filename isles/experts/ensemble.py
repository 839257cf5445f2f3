"""How the experts of one forest answer together, by the user's choice.

mixing forests (HDEE)                prior: uniform, cached, updating or given; the `top` experts of it; the posterior
                                     follows the text
routing forests (SMALLTALK, c-BTM)   route "once": one expert, from the first `prefix` tokens
                                     route "growing": the gate's weights of the text so far, computed again as it grows;
                                     the `top` experts of these

`Speaker`: a forest that continues prompts, by all experts' mixed distribution, or by the one that a gate chooses.

One set of parameters out of several experts, to branch a new one from (Branch-Train-Merge, arXiv 2208.03306):

    theta = sum_j P(j) theta_j,    P(j): the mean posterior of expert j over validation text of the new domain

For experts of one shape that come from one seed. In OUT: model.safetensors, average.json (of which runs, in what
shares) and the config.toml of the first; enough for `run.start`, `isles eval` and `isles generate`. It is no run: it
has no summary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isles.base.errors import unknown_name
from isles.data import DataConfig
from isles.experts import mixture
from isles.experts.domains import Domain, DomainText
from isles.experts.forest import Forest, ForestMember, Served, tokenizer_of
from isles.experts.routing import (
    CACHED_SEQUENCES,
    Gate,
    cached,
    following,
    gate_of,
    growing,
    parse_prior,
    route,
    updating,
    weights_of,
)
from isles.training.records.saved_run import SavedRun, encoded, load_saved
from isles.training.records.shard import save_model
from isles.training.records.writer import write_config

JoinMode = Literal["once", "growing"]
PRIORS = ("uniform", "cached", "updating")
SEQUENCES = 256  # of a text that a forest is evaluated on, at most
EVERY = 16  # tokens between two computations of growing weights, where a text is evaluated


@dataclass(frozen=True, kw_only=True)
class Joining:
    """prior: a name of PRIORS, or shares such as "0.2,0.3,0.5". top: so many experts answer; None: all. prefix: tokens
    that the gate reads; None: as many as it was made for. route: see the module.
    """

    prior: str = "uniform"
    top: int | None = None
    prefix: int | None = None
    route: JoinMode = "once"

    def __post_init__(self) -> None:
        if self.prior not in PRIORS and not self.prior[:1].isdigit():
            raise ValueError(f"unknown prior {self.prior!r}: choose {', '.join(PRIORS)}, or shares such as 0.2,0.8")
        if self.route not in get_args(JoinMode):
            raise ValueError(unknown_name("route", self.route, get_args(JoinMode)))

    def check(self, forest: Forest) -> None:
        """ValueError where something is asked for that the forest does not have."""
        if not forest.gated:
            if self.prefix is not None or self.route != "once":
                raise ValueError("--prefix and --route are for forests that route; this one mixes its experts")
            return
        if self.prior != "uniform":
            raise ValueError("--prior is for forests that mix; this one routes by what it reads")
        if self.route == "once" and self.top is not None:
            raise ValueError("--top-experts needs --route growing: routed once, one expert answers")
        if self.route == "growing" and self.prefix is not None:
            raise ValueError("--prefix is of --route once: growing weights read all of the text")
        if self.prefix is not None and not 2 <= self.prefix <= forest.prefix:
            raise ValueError(f"--prefix {self.prefix}: choose 2 to {forest.prefix}, with which the forest was made")


class Joined:
    """A forest that answers in one way. ValueError where the way does not fit the forest, or an expert is missing."""

    def __init__(self, forest: Forest, joining: Joining) -> None:
        joining.check(forest)
        self.forest, self.joining = forest, joining
        experts = len(forest.experts)
        self.top = experts if joining.top is None else joining.top
        if not 1 <= self.top <= experts:
            raise ValueError(f"--top-experts {self.top}: choose 1 to {experts}, for there are {experts} experts")
        self.tokenizer = tokenizer_of(forest.experts[0])
        self.gate: Gate | None = gate_of(forest, self.tokenizer)

    @cached_property
    def experts(self) -> Served:
        """All models, loaded when they are first asked for: who routes once needs one of them."""
        return Served.load(self.forest.experts)

    @property
    def prefix(self) -> int:
        """Tokens that the gate reads where it chooses once."""
        return self.joining.prefix or self.forest.prefix

    @property
    def runs_per_token(self) -> int:
        """Experts that each token of a text needs."""
        return 1 if self.gate is not None and self.joining.route == "once" else self.top

    def text(self, data: str, **settings: Any) -> DomainText:
        """The text of `data`, as the first expert reads its own but for `settings`."""
        own = replace(self.experts.runs[0].config.data, batch_size=1, **settings)
        return DomainText(Domain(name="text", path=data, difficulty="held_out"), own, self.experts.context)

    def prior(self, held: Tensor | None) -> Tensor:
        """log P(j) (E,) that no text changes; the uniform one for an updating prior. held: sequences of validation text
        for a cached one (N, T + 1). ValueError where they are missing.
        """
        experts = len(self.experts)
        if self.joining.prior in ("uniform", "updating"):
            return mixture.uniform(experts)
        if self.joining.prior != "cached":
            return parse_prior(self.joining.prior, experts)
        if held is None:
            raise ValueError("--prior cached needs --data: validation text of the domain that is asked about")
        return cached(self.experts.scores(held[:CACHED_SEQUENCES]))

    def weights(self, tokens: Tensor, scores_ENT: Tensor, held: Tensor | None) -> Tensor:
        """(E, N, T) log-weights of each token of (N, T + 1) behind the first. held: see `prior`."""
        if self.gate is None:
            before = updating(scores_ENT) if self.joining.prior == "updating" else self.prior(held)
            return mixture.posterior(scores_ENT, mixture.top_k(before, self.top))
        if self.joining.route == "growing":
            return mixture.top_k(growing(self.gate, tokens, len(self.experts), EVERY), self.top)
        chosen_N = route(self.gate, tokens, self.prefix)
        one_EN = torch.full((len(self.experts), len(tokens)), mixture.NEVER, dtype=torch.float64, device="cpu")
        return mixture.constant(scores_ENT, one_EN.scatter(0, chosen_N[None], 0.0))


def evaluated_on(path: Path, data: str, joining: Joining) -> dict[str, str]:
    """What to print: the perplexity of the forest, and of each expert alone, on the test part of `data`'s validation
    text (a cached prior is of the other part). ValueError: anything that does not fit.
    """
    joined = Joined(Forest.load(path), joining)
    experts = joined.experts
    # Split as for training: of a text that an expert was trained on, only what it did not see is evaluated.
    fraction = min(run.config.data.validation_fraction for run in experts.runs)
    text = joined.text(data, validation_fraction=fraction)
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


@dataclass(frozen=True)
class Voice:
    """What `isles.models.factory` needs for one prompt, and a line about who speaks."""

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
        self.seen_tokens = 0
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
            self.believed = following(self.believed, scores_ET, first=not self.seen_tokens)
            self.seen_tokens += 1

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
        run, read = load_saved(member.run), min(joined.prefix, len(tokens))  # no other one is loaded
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


WEIGHTS = "model.safetensors"


def averaged(served: Served, shares: Sequence[float]) -> SavedRun:
    """The experts of `served` as one model. ValueError as `Served.average`."""
    first = served.runs[0]
    model = deepcopy(first.model)
    model.load_state_dict(served.average(shares))
    return replace(first, model=model)


def shares_on(served: Served, data: DataConfig) -> list[float]:
    """The experts' mean posterior on the text of `data`: on the part of its validation text that nothing is evaluated
    on.

    ValueError where it holds too little.
    """
    text = DomainText(Domain(name="new", path=data.path), data, served.context)
    return cached(served.scores(text.sequences("prior", CACHED_SEQUENCES)), statistic="mean").exp().tolist()


def write_average(served: Served, shares: Sequence[float], out: Path) -> None:
    """Keep the average in `out`; the weights come last, so where they are, all is. ValueError: `out` holds a model."""
    if (out / WEIGHTS).exists():
        raise ValueError(f"--out {out}: holds a model already; name another directory")
    one = averaged(served, shares)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"of": served.names, "shares": list(shares)}
    (out / "average.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    write_config(one.config, out)
    save_model(one.model, out / WEIGHTS)


def make_average(parents: Sequence[str], folder: Path, out: Path, data: DataConfig) -> None:
    """The average of runs of `folder`, in the shares of their posterior on `data`, unless it is there already."""
    if (out / WEIGHTS).is_file():
        return
    served = Served.load([ForestMember(name=name, run=folder / name) for name in parents])
    write_average(served, shares_on(served, data), out)

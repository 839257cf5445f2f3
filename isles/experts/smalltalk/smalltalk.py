"""SMALLTALK LM, "No Need to Talk" (arXiv 2410.03529): the plan. A hard mixture of E models that never exchange anything
while they train; small routers, one an expert, decide from a short prefix which one a sequence belongs to.

    score_e(x) = sum_{s < M} log p(x_{s+1} | x_1..x_s; router e);    e*(x) = argmax_e score_e(x)        (M: prefix)

routers      rounds of: each trains on its share -> all score N new sequences -> scores are exchanged -> balanced shares
partition    the pool is scored and assigned, in balance, in chunks
experts      each trains on full sequences of its share: an ordinary run
use          the routers read the prefix once; one expert does the rest; no balance there

Deviations: routers train on the prefix (equation 9) unless `router_length = "full"`, which the paper's FLOP table
implies. Scores cross as 16-bit fixed-point means a token, where half floats of sums would merge near ties. Where the
pool is smaller than the rounds want, its sequences come again in another order. Perplexity is printed with and without
the tokens of the prefix, for the choice was made with knowledge of those.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from isles.base.errors import demand
from isles.experts.jobs import ExpertJob, configured
from isles.experts.routing.assignment import AssignmentRule
from isles.models import flops_per_token
from isles.models.config import ModelConfig
from isles.replicas import config_of
from isles.training.config.sections import Config

Dense = Literal["batch", "steps"]
GateName = Literal["routers", "clusters"]


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """Shape of the routers, as in [model]; the vocabulary and context are the experts'."""

    d_model: int = 96
    """Width of the stream."""
    layers: int = 12
    """Blocks."""
    heads: int = 12
    """Attention heads."""
    ffn: int = 384
    """Width of the feed-forward layers."""


@dataclass(frozen=True, kw_only=True)
class SmalltalkConfig:
    """Settings of `smalltalk`."""

    seeds: tuple[int, ...] = (0,)
    """A whole set of runs for each; tables show means."""
    experts: int = 4
    """Experts (E), and as many routers."""
    gate: GateName = "routers"
    """What parts the text and chooses, "routers", or c-BTM's "clusters" over words, which need no training, for
    comparison.
    """
    steps: int = 256_000
    """Inner steps of each expert; its batch is data.batch_size."""
    prefix: int = 256
    """Tokens that routers read in training and at inference."""
    prefixes: tuple[int, ...] = (32, 64, 128, 256)
    """Lengths that routing is evaluated with, none longer than prefix."""
    router: RouterShape = field(default_factory=RouterShape)
    rounds: int = 94
    """Rounds of training and assigning."""
    round_sequences: int = 43_945
    """New sequences of a round, a router."""
    router_batch: int = 32
    """Sequences of a router's step."""
    router_lr: float = 1e-4
    """Learning rate of the routers, constant after the warm-up."""
    router_warmup: int = 1000
    """Steps of their linear warm-up."""
    router_length: Literal["prefix", "full"] = "prefix"
    """What routers train on, "prefix" or "full" sequences."""
    assignment: AssignmentRule = "greedy"
    """Who gets which sequence: "greedy" (the paper's), or "sequential", "optimal", "unbalanced" for comparison."""
    reweigh_every: int = 16
    """Tokens after which the weights of the mixture that grows with the text are computed again, where it is judged."""
    chunk: int = 0
    """Sequences that are assigned together when the pool is parted (0: all)."""
    dense: tuple[Dense, ...] = get_args(Dense)
    """Models to compare with, trained on the whole pool with E times the "batch" or E times the "steps"."""
    characters: int = 600_000
    """Characters of each default domain."""
    sequences: int = 256
    """Sequences of each domain that are evaluated."""

    def __post_init__(self) -> None:
        keys = "experts steps rounds round_sequences router_batch reweigh_every characters sequences"
        demand(self, keys, lambda x: x >= 1, "choose 1 or more")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds = {list(self.seeds)}: name at least one, each of 0 or more, once")
        demand(self, "prefix", lambda x: x >= 2, "a router scores the tokens after the first; choose 2 or more")
        if self.router_batch > self.round_sequences:
            raise ValueError(
                f"router_batch = {self.router_batch} is more than round_sequences = {self.round_sequences}: lower it"
            )
        for prefix in self.prefixes:
            if not 2 <= prefix <= self.prefix:
                raise ValueError(
                    f"prefixes = {list(self.prefixes)}: each must lie between 2 and prefix = {self.prefix}"
                )
        if self.chunk and self.chunk < self.experts:
            raise ValueError(f"chunk = {self.chunk}: choose 0 (all) or at least one sequence an expert")


def seeded(base: Config, seed: int) -> Config:
    """What every run of a seed shares."""
    return configured(base, steps=base.run.steps, path=base.data.path, run={"seed": seed})


def router_config(own: SmalltalkConfig, base: Config, pool: Path) -> Config:
    """A router's run: its model, one worker, a constant rate after the warm-up, as many steps as all rounds take."""
    steps = own.rounds * -(-own.round_sequences // own.router_batch)
    alone = replace(base, method="none", replicas=config_of("none")())
    return configured(
        alone,
        steps=steps,
        path=str(pool),
        model=vars(own.router),
        data={"batch_size": own.router_batch},
        inner={"lr": own.router_lr, "warmup_steps": own.router_warmup, "final_lr_fraction": 1.0, "accumulation": 1},
        world={"workers": 1},
    )


def router_seed(seed: int, router: int) -> int:
    """Of a router's weights: with equal ones the first rounds would be noise."""
    return int.from_bytes(hashlib.sha256(f"{seed} router {router}".encode()).digest()[:4], "little")


def expert_jobs(own: SmalltalkConfig, base: Config, segments: Path, pool: Path) -> list[ExpertJob]:
    """The experts' runs on their segments, and the dense ones on the pool."""
    batch = base.data.batch_size
    jobs = [
        ExpertJob(
            name=f"expert-{expert}",
            config=configured(base, steps=own.steps, path=str(segments / str(expert))),
            role="expert",
        )
        for expert in range(own.experts)
    ]
    forms = {"batch": (own.steps, own.experts * batch), "steps": (own.experts * own.steps, batch)}
    for form in own.dense:
        steps, sequences = forms[form]
        config = configured(base, steps=steps, path=str(pool), data={"batch_size": sequences})
        jobs.append(ExpertJob(name=f"dense-{form}", config=config, role="dense"))
    return jobs


@dataclass(frozen=True, kw_only=True)
class RouterFlops:
    """What routers add, in FLOPs. per_token: of training, on sequences of `length` tokens. reading: of all routers over
    the prefix of one sequence.
    """

    length: int
    per_token: float
    reading: float

    def rounds(self, own: SmalltalkConfig) -> float:
        """Scoring the sequences of all rounds."""
        return float(own.rounds * own.experts * own.round_sequences * self.reading)


def router_flops(own: SmalltalkConfig, model: ModelConfig, context: int) -> RouterFlops:
    """By formula, beside experts of `model`."""
    shape = replace(model, **vars(own.router)).shape()
    length = own.prefix if own.router_length == "prefix" else context
    one = (own.prefix - 1) * flops_per_token(shape, backward=False, sequence=own.prefix)
    per_token = float(flops_per_token(shape, sequence=length))
    return RouterFlops(length=length, per_token=per_token, reading=float(one * own.experts))


def check(own: SmalltalkConfig, model: ModelConfig, context: int) -> None:
    """ValueError where the router or the prefix does not fit the model."""
    if model.own is not None:
        raise ValueError(f"model.{model.own}: routers are made from Isles' own decoder; take it out")
    if own.prefix > context:
        raise ValueError(f"smalltalk.prefix = {own.prefix} is longer than model.context = {context}: lower it")
    replace(model, **vars(own.router))

"""SMALLTALK LM, "No Need to Talk" (arXiv 2410.03529): the plan, the training of its routers, and the paper's own
count of costs. A hard mixture of E models that never exchange anything while they train; small routers, one an expert,
decide from a short prefix which one a sequence belongs to.

    score_e(x) = sum_{s < M} log p(x_{s+1} | x_1..x_s; router e);    e*(x) = argmax_e score_e(x)        (M: prefix)

routers      rounds of: each trains on its share -> all score N new sequences -> scores are exchanged -> balanced shares
partition    the pool is scored and assigned, in balance, in chunks
experts      each trains on full sequences of its share: an ordinary run
use          the routers read the prefix once; one expert does the rest; no balance there

Deviations: routers train on the prefix (equation 9) unless `router_length = "full"`, which the paper's FLOP table
implies. Scores cross as 16-bit fixed-point means a token, where half floats of sums would merge near ties. Where the
pool is smaller than the rounds want, its sequences come again in another order. Perplexity is printed with and without
the tokens of the prefix, for the choice was made with knowledge of those.

The paper's table of costs (table 3 and appendix A.3): what routing adds to training, and what
a sequence costs at inference.

A forward pass of B sequences of S tokens through a decoder of width H, L layers and a feed-forward layer of width D
over V words, as the paper counts it:

    fwd = B S H + L (8 B S H^2 + 4 B S^2 H + 4 B S H D) + 2 B S H V + 3 B S V;    training = 3 fwd a step

Training the routers: hard EM over a group of E workers, one router each.

    shares <- random, equal
    repeat `rounds` times:
        train the router on its share, one pass                          (its optimizer and rate go on)
        score the prefixes of N new sequences                            N = E * round_sequences
        all-gather the scores                                            2 N bytes made by each router
        shares <- balanced assignment, the same on every worker          compared by hash

Only scores cross between routers. Every worker reads every sequence's prefix from the pool, which all have. A router of
a worker is its rank; states are checkpointed after every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from isles.base.errors import demand
from isles.base.modes import generator_of
from isles.comm.errors import Diverged
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.data import load_corpus
from isles.data.loader import windows
from isles.data.order import epoch_order
from isles.experts.forest import score
from isles.experts.jobs import ExpertJob, configured
from isles.experts.routing import AssignmentRule, assign, digest, from_wire, purity, to_wire
from isles.models import build, flops_per_token, limits
from isles.models.config import ModelConfig
from isles.replicas import config_of
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.optimizer import wrapped
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.saved_run import SavedRun
from isles.training.records.shard import save_model

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
        inner={"lr": own.router_lr, "warmup_steps": own.router_warmup, "schedule": "constant", "accumulation": 1},
        world={"workers": 1},
    )


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


@dataclass(frozen=True, kw_only=True)
class RouterTask:
    """What every worker knows. config: a router's run. label: (N,) the domain of each sequence of the pool, for reports
    only. out: where router-E/model.safetensors and checkpoints go.
    """

    own: SmalltalkConfig
    config: Config
    label: np.ndarray
    out: Path


def train_router(world: Mesh, task: RouterTask, resume: int | None = None) -> dict[str, Any] | None:
    """One worker's part: the summary of its router, or None where it was stopped (its state is in a checkpoint)."""
    own, group = task.own, world.outer
    router = TextRouter(task, group)
    first = 0
    if resume is not None:
        router.load_state_dict(Checkpoints(task.out).read_shard(resume, group.rank))
        first = resume
    for done in range(first + 1, own.rounds + 1):
        world.report({"round": done, "worker": world.rank, **router.round(done)})
        if done < own.rounds:
            Checkpoints(task.out).write_shard(done, world.rank, router.state_dict())
            world.report({"checkpoint": done, "worker": world.rank})
            if world.stop_here(done):
                return None
    folder = task.out / f"router-{group.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    save_model(router.model, folder / "model.safetensors")
    traffic = world.world.traffic
    return {
        "steps": router.optimizer.steps,
        "tokens": router.tokens,
        "score_bytes_sent": traffic["outer"].bytes_sent,
        "score_bytes_received": traffic["outer"].bytes_received,
        "control_bytes_sent": traffic["control"].bytes_sent,
    }


class TextRouter:
    """A router in training, and where it stands in the pool."""

    def __init__(self, task: RouterTask, group: Group) -> None:
        self.task, self.group, self.own = task, group, task.own
        config = task.config
        corpus = load_corpus(config.data)
        self.tokenizer = corpus.tokenizer
        corpus.train.check()
        self.rows = windows(corpus.train.tokens, limits(config.model).context, corpus.row)
        # Each router has weights of its own: with equal ones the first rounds would be noise.
        seed = generator_of(f"{config.run.seed} router {group.rank}").initial_seed()
        self.model = build(config.model, seed=seed, rank=group.rank)
        self.optimizer, _ = wrapped(config, self.model, group.among([group.rank]))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: lr_factor(done + 1, config.run.steps, config.inner)
        )
        self.size = group.size * self.own.round_sequences
        self.sequences = self.drawn(0)
        self.expert_of = epoch_order(self.size, seed=config.run.seed, epoch=0, share=1).astype(np.int64) % group.size
        self.tokens = 0

    def drawn(self, round: int) -> np.ndarray:
        """The pool's indices of a round's sequences: the pool in a random order, then in another one."""
        positions = round * self.size + np.arange(self.size)
        epochs, offsets = np.divmod(positions, len(self.rows))
        found = np.empty(self.size, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            order = epoch_order(len(self.rows), seed=self.task.config.run.seed, epoch=epoch, share=2)
            found[epochs == epoch] = order[offsets[epochs == epoch]]
        return found

    def round(self, number: int) -> dict[str, Any]:
        """One round: train, score, exchange, assign. What is worth knowing of it."""
        loss = self._train(self.sequences[self.expert_of == self.group.rank])
        self.sequences = self.drawn(number)
        scores_NE = self._exchange()
        self.expert_of = assign(scores_NE, self.own.assignment)
        self._agree(number)
        best, traffic = np.sort(scores_NE, axis=1), self.group.traffic["outer"]
        return {
            "loss": loss,
            "load": int((self.expert_of == self.group.rank).sum()),
            "purity": purity(self.expert_of, self.task.label[self.sequences]),
            "displaced": float((self.expert_of != scores_NE.argmax(1)).mean()),  # by balance, from their best router
            "margin": float((best[:, -1] - best[:, -2]).mean()) if self.group.size > 1 else None,
            "bytes_sent": traffic.bytes_sent,
            "bytes_received": traffic.bytes_received,
        }

    def _train(self, mine: np.ndarray) -> float:
        """One pass over the share; mean loss a token, nats."""
        length = self.own.prefix if self.own.router_length == "prefix" else self.rows.shape[1]
        losses = []
        for start in range(0, len(mine), self.own.router_batch):
            tokens = self._tokens(mine[start : start + self.own.router_batch], length)
            loss = self.model(tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.tokens += tokens[:, 1:].numel()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean()) if losses else float("nan")

    def _exchange(self) -> np.ndarray:
        """(N, E) scores of this round's sequences, as all workers decode them: mean log-probability a token."""
        tokens = self._tokens(self.sequences, self.own.prefix)
        saved = SavedRun(self.task.config, self.model, self.tokenizer)
        gathered = self.group.all_gather(to_wire(score(saved, tokens).mean(-1)), "outer")
        return np.stack([from_wire(wire) for wire in gathered], axis=1)

    def _agree(self, number: int) -> None:
        """Diverged where another worker came to another assignment."""
        mine = bytes.fromhex(digest(self.expert_of))[:8]
        for peer, theirs in enumerate(self.group.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))):
            if bytes(theirs.tolist()) != mine:
                raise Diverged(self.group.ranks[peer], number, "its assignment is another one")

    def _tokens(self, sequences: np.ndarray, length: int) -> Tensor:
        tokens = torch.from_numpy(self.rows[sequences, :length].astype(np.int64))
        return tokens.to(next(self.model.parameters()).device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "model": dict(self.model.state_dict()),
            "schedule": self.schedule.state_dict(),
            "sequences": torch.from_numpy(self.sequences),
            "expert_of": torch.from_numpy(self.expert_of),
            "tokens": self.tokens,
            "traffic": self.group.traffic.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.sequences, self.expert_of = state["sequences"].numpy(), state["expert_of"].numpy()
        self.tokens = state["tokens"]
        self.group.traffic.load_state_dict(state["traffic"])

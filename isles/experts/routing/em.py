"""Training the routers: hard EM over a group of E workers, one router each.

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

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isles.comm.errors import Diverged
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.data import load_corpus
from isles.data.loader import windows
from isles.data.order import epoch_order
from isles.experts.forest import score
from isles.experts.routing.assignment import assign, digest, purity
from isles.experts.routing.routing import from_wire, to_wire
from isles.experts.smalltalk.smalltalk import SmalltalkConfig, router_seed
from isles.models import build, limits
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.optimizer import wrapped
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.saved_run import SavedRun
from isles.training.records.shard import save_model


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
        self.model = build(config.model, seed=router_seed(config.run.seed, group.rank), rank=group.rank)
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

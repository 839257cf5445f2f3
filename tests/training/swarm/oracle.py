"""One process that holds all peers of a swarm: replicas of stages, told who counted which microbatch in which step. And
the peers that tell it; a module of its own, so that fresh processes can import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from isles.comm.mesh import Mesh
from isles.data import Corpus, Loader, load_corpus
from isles.models import limits
from isles.models.stages import Stage
from isles.replicas.loop.outer import OuterSync
from isles.replicas.parts.choices import RandomGroups
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.optimizer import inner_optimizer
from isles.training.stage_runner import build_stage, planned_cut, run_scheme
from isles.training.swarm.trainer import SwarmTrainer

Counted = Sequence[Mapping[int, Sequence[int]]]
"""By step and peer, the microbatches."""


class PeerCopy:
    """One peer: its stage, its inner optimizer, its anchor and outer momentum."""

    def __init__(self, config: Config, stage: int) -> None:
        cut = planned_cut(config)
        self.at = stage
        self.module: Stage = build_stage(config, cut, run_scheme(config, cut), stage, 0)
        self.inner = inner_optimizer(self.module, config.inner, "adamw")
        self.parameters = list(self.module.parameters())
        self.anchor = self.live
        self.momentum = torch.zeros_like(self.anchor)

    @property
    def live(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    @property
    def square(self) -> float:
        return sum(float(parameter.grad.square().sum()) for parameter in self.parameters if parameter.grad is not None)

    @torch.no_grad()
    def land(self) -> None:
        """The live weights are the anchor."""
        begin = 0
        for parameter in self.parameters:
            parameter.copy_(self.anchor[begin : begin + parameter.numel()].view(parameter.shape))
            begin += parameter.numel()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad *= factor


def diloco(peers: Sequence[PeerCopy], config: Any, round: int) -> None:
    """Of one stage."""
    gradient = torch.stack([peer.anchor - peer.live for peer in peers]).mean(0)
    for peer in peers:
        peer.momentum = config.outer_momentum * peer.momentum + gradient
        peer.anchor = peer.anchor - config.outer_lr * (gradient + config.outer_momentum * peer.momentum)


def noloco(peers: Sequence[PeerCopy], config: Any, round: int) -> None:
    """Of one stage; who is left over is alone."""
    groups = RandomGroups(config.group_size, config.seed)
    moved = []
    for position, peer in enumerate(peers):
        group = [peers[each] for each in groups.members(round, len(peers), position)]
        progress = torch.stack([each.live - each.anchor for each in group]).mean(0)
        apart = peer.anchor - torch.stack([each.anchor for each in group]).mean(0)
        step = config.outer_momentum * peer.momentum + config.outer_lr * progress - config.pull * apart
        moved.append(step)
    for peer, step in zip(peers, moved, strict=True):
        peer.momentum, peer.anchor = step, peer.anchor + step


RULES = {"diloco": diloco, "noloco": noloco}


def trained(config: Config, stages: Sequence[int], counted: Counted) -> list[PeerCopy]:
    """The peers after the run. stages: by peer."""
    peers = [PeerCopy(config, stage) for stage in stages]
    corpus, rule = load_corpus(config.data), RULES[config.method]
    loader = Loader(corpus, config.data, context=limits(config.model)[0], worker=0, workers=1, seed=config.run.seed)
    rows, count, every = config.data.batch_size, config.pipeline.microbatches, config.replicas.sync_every  # type: ignore[attr-defined]
    columns = [[peer for peer in peers if peer.at == stage] for stage in range(max(stages) + 1)]
    rounds = 0
    for step, ledger in enumerate(counted, 1):
        for peer in peers:
            peer.module.zero_grad()
        for microbatch in range(count):
            first = (step - 1) * rows + microbatch * rows // count
            tokens = loader.read(np.arange(first, first + rows // count))
            way = [next(peer for peer, own in ledger.items() if stages[peer] == at and microbatch in own)
                   for at in range(len(columns))]  # fmt: skip
            x = tokens[:, :-1]
            for at, place in enumerate(way):
                last = at == len(way) - 1
                x = peers[place].module(x, tokens[:, 1:] if last else None, enter=at == 0, leave=last)
            (x / count).backward()
        for place, peer in enumerate(peers):
            peer.scale(count / len(ledger[place]) if ledger.get(place) else 0.0)
        squares = [[peer.square for peer in column if peer.square] for column in columns]
        norm = sum(sum(each) / len(each) for each in squares) ** 0.5
        for place, peer in enumerate(peers):
            if not ledger.get(place):
                continue
            peer.scale(min(config.inner.max_norm / (norm + 1e-6), 1.0))
            for group in peer.inner.param_groups:
                group["lr"] = config.inner.lr * lr_factor(step, config.run.steps, config.inner)
            peer.inner.step()
        if step % every == 0 or step == len(counted):
            rounds += 1
            for column in columns:
                rule(column, config.replicas, rounds)
            for peer in peers:
                peer.land()
    return peers


def furthest(config: Config, done: Sequence[dict[str, Any]]) -> float:
    """The largest distance of an entry of an anchor from this. done: what `run_peer` returned, by rank."""
    ledger = [{rank: each["counted"][step] for rank, each in enumerate(done)} for step in range(config.run.steps)]
    stages = [place.stage for place in layout_of(config).coordinates]
    peers = trained(config, stages, ledger)
    return max(float((each["anchor"] - peer.anchor).abs().max()) for each, peer in zip(done, peers, strict=True))


class Recorded(SwarmTrainer):
    """Remembers what it has counted in each step, and who was there at its end."""

    def __init__(self, config: Config, world: Mesh, corpus: Corpus) -> None:
        super().__init__(config, world, corpus)
        self.counted: list[list[int]] = []
        self.present: list[tuple[int, ...]] = []

    def step(self) -> None:
        super().step()
        assert self.model_step.last is not None
        self.counted.append(sorted(self.model_step.swarm.peer.tally.counted))
        self.present.append(self.model_step.last.members)


def run_peer(world: Mesh, read: Config, corpus: Corpus) -> dict[str, Any]:
    """A whole run; what this peer counted, and holds after its last exchange."""
    trainer = Recorded(read, world.arranged(layout_of(read)), corpus)
    result = trainer.run(None)
    assert result is not None
    (fragment,) = cast(OuterSync, trainer.optimizer).fragments
    return {
        "counted": trainer.counted,
        "anchor": fragment.anchor.clone(),
        "momentum": fragment.vectors["momentum"].clone(),
        "stage": trainer.model_step.swarm.stages[world.rank],
        "moves": trainer.model_step.moves,
        "members": trainer.model_step.swarm.agreement.members,
        "present": trainer.present,
        "std": result["replica_std"],
    }

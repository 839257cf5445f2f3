"""Peers of a small swarm; a module of its own, so that fresh processes can import it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from isles.comm.collectives.message_queue import MessageQueue
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.models.cuts import PieceCosts, cut_points, pieces
from isles.models.stages import Stage
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.compute import stage_shares
from isles.pipeline.config import Consistency, PipelineConfig, SwarmConfig
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import LARGE, PeerInbox, message_lengths
from isles.pipeline.swarm.peer import StageWork, SwarmPeer
from isles.pipeline.swarm.placement import Rebalancer, StagePlacement
from isles.pipeline.swarm.swarm import Swarm
from isles.pipeline.wire import StageForm

SEQUENCES = 2


@dataclass(frozen=True)
class Setting:
    """peers: of each stage, in the order of ranks."""

    peers: tuple[int, ...] = (3, 3, 3)
    microbatches: int = 6
    consistency: Consistency = "exact"
    seed: int = 0
    steps: int = 1
    room: int | None = None
    deadlines: tuple[float, float] = (30.0, 75.0)
    patience: float = 1000.0
    charged: bool = False

    @property
    def stages(self) -> list[int]:
        """By rank."""
        return [stage for stage, count in enumerate(self.peers) for _ in range(count)]

    @property
    def config(self) -> PipelineConfig:
        forward, backward = self.deadlines if self.consistency != "strict" else (30.0, 75.0)
        own = SwarmConfig(consistency=self.consistency, forward_deadline=forward, backward_deadline=backward)
        return PipelineConfig(
            routing="swarm", stages=len(self.peers), loss_at="last", microbatches=self.microbatches, swarm=own
        )

    @property
    def shape(self) -> Shape:
        layers = len(self.peers)
        return Shape(d_model=8, layers=layers, heads=2, ffn=16, vocab=50, context=4, tie_embeddings=False)


def text(microbatch: int, step: int, vocab: int = 50, context: int = 4) -> Tensor:
    """(B, T+1)."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(0, vocab, (SEQUENCES, context + 1), generator=generator)


def swarm_of(world: Mesh, setting: Setting) -> Swarm:
    shape, stages = setting.shape, setting.stages
    parts = pieces(cut_points([1] * shape.layers, len(setting.peers)), shape.layers, loss_at_origin=False)
    piece = parts[stages[world.rank]]
    stage = Stage(Decoder(shape, seed=1, dtype=torch.float64), piece)
    form = StageForm(
        sequences=SEQUENCES,
        length=shape.context,
        vocab=shape.vocab,
        dtype=torch.float64,
        boundary=FullStream(shape.d_model),
    )
    costs = PieceCosts(blocks=(1.0,) * shape.layers, head=0.0)
    shares = stage_shares(piece, costs, 1, recompute=False) if setting.charged else None
    group = world.world.among(range(world.size), "pipeline")
    longest = sum(parameter.nbytes for parameter in stage.parameters())
    lengths = message_lengths(
        form, gradient=longest, state=longest, peers=world.size, microbatches=setting.microbatches
    )
    inbox = PeerInbox(MessageQueue(group, run=9, lengths=lengths, channels=LARGE))
    work = StageWork(stage, group, form, setting.microbatches, shares=shares, autocast=nullcontext)
    agreement = Agreement(inbox, setting.patience, range(world.size))
    placement = StagePlacement(stages, Rebalancer("none", [1.0] * len(setting.peers)))
    peer = SwarmPeer(work, agreement, setting.config, setting.room, 1000 * setting.seed + world.rank)
    return Swarm(peer, list(stage.parameters()), placement)


def train(world: Mesh, setting: Setting) -> Any:
    """(summed gradients by name, loss, norm) of each step, with one update of plain SGD in between."""
    torch.set_num_threads(1)
    swarm = swarm_of(world, setting)
    done = []
    stage = swarm.peer.work.stage
    for number in range(1, setting.steps + 1):
        swarm.peer.work.text = lambda microbatch, number=number: text(microbatch, number)
        result = swarm.step()
        gradients = {name: parameter.grad.clone() for name, parameter in stage.named_parameters()}
        done.append((gradients, result.loss, result.norm, swarm.peer.counts))
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter -= 0.1 * parameter.grad
    swarm.agreement.inbox.queue.settle()
    return done


def timed(world: Mesh, setting: Setting) -> list[float]:
    """Seconds of the worker's clock that each step takes."""
    torch.set_num_threads(1)
    swarm = swarm_of(world, setting)
    took = []
    for number in range(1, setting.steps + 1):
        swarm.peer.work.text = lambda microbatch, number=number: text(microbatch, number)
        began = world.transport.now()
        swarm.step()
        took.append(world.transport.now() - began)
    return took


@cache
def whole(setting: Setting) -> list[tuple[dict[str, Tensor], float]]:
    """The same in one process: gradients summed in microbatch order."""
    model = Decoder(setting.shape, seed=1, dtype=torch.float64)
    done = []
    for number in range(1, setting.steps + 1):
        model.zero_grad()
        losses = []
        for microbatch in range(setting.microbatches):
            loss = model(text(microbatch, number)).loss
            (loss / setting.microbatches).backward()
            losses.append(float(loss.detach()))
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        done.append((gradients, sum(losses) / len(losses)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return done


def furthest(setting: Setting, results: Sequence[Any]) -> float:
    """The largest distance of a gradient's entry, over peers that came to an end, from one process's."""
    distance = 0.0
    for peer in results:
        for (gradients, loss, *_), (expected, mean) in zip(peer, whole(setting), strict=True):
            distance = max(distance, abs(loss - mean))
            for name, gradient in gradients.items():
                distance = max(distance, float((gradient - expected[name]).abs().max()))
    return distance

"""What the nodes of these tests do, in a module of its own so that fresh processes can import it; and the recursion
that they are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.comm.mesh import Mesh
from isles.models.cuts import cut_points, pieces
from isles.models.stages import Stage
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.compute import StageShares
from isles.pipeline.config import PipelineConfig
from isles.pipeline.ravnest.stage import AsyncStage
from isles.pipeline.wire import StageForm

WIDTH, VOCAB, LENGTH, SEQUENCES, BLOCKS = 12, 50, 8, 2, 4


class Wet(nn.Module):
    """A small model in pieces, with dropout in every block."""

    def __init__(self, dropout: float = 0.2, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(WIDTH, dtype=dtype),
                    nn.Linear(WIDTH, 7 + number, dtype=dtype),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(7 + number, WIDTH, dtype=dtype),
                )
                for number in range(blocks)
            )
            self.head = nn.Linear(WIDTH, VOCAB, dtype=dtype)

    def enter(self, tokens_BT: Tensor) -> Tensor:
        return self.embed(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        return x_BTD + block(x_BTD)

    def leave(self, x_BTD: Tensor) -> Tensor:
        return self.head(x_BTD)


@dataclass(frozen=True)
class Row:
    """One cluster and its way of running. limit: microbatches in flight; None: as many as stages."""

    stages: int
    optimizer: str = "sgd"
    limit: int | None = None
    every: int = 1
    order: Literal["plan", "arrival"] = "plan"
    dropout: float = 0.2
    recompute: bool = True
    microbatches: tuple[int, ...] = (9, 5)
    shares: StageShares | None = field(default=None, compare=False)

    @property
    def in_flight(self) -> int:
        return self.stages if self.limit is None else self.limit

    def room(self, stage: int) -> int:
        """Forwards that a stage holds at most."""
        return 1 if stage == self.stages - 1 else max(1, self.in_flight - stage)


def window(number: int) -> Tensor:
    """The text of a microbatch of the run."""
    return torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(500 + number))


def stages_of(row: Row, model: nn.Module) -> list[Stage]:
    """Of a cluster."""
    cuts = cut_points([1.0] * BLOCKS, row.stages)
    return [Stage(model, piece) for piece in pieces(cuts, BLOCKS, loss_at_origin=False)]


def stepper(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """With a state of its own."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)
    return torch.optim.AdamW(parameters, lr=0.01)


def options(row: Row) -> PipelineConfig:
    """A cluster of one stage is beside longer ones."""
    return PipelineConfig(
        stages=max(row.stages, 2),
        in_flight=row.in_flight,
        microbatches=row.every,
        order=row.order,
        recompute=row.recompute,
    )


def form(dtype: torch.dtype = torch.float32) -> StageForm:
    return StageForm(sequences=SEQUENCES, length=LENGTH, vocab=VOCAB, dtype=dtype, boundary=FullStream(WIDTH))


def made(world: Mesh, row: Row, update: Callable[[Stage], Callable[[int], None]] | None = None) -> AsyncStage:
    """This worker's node of a cluster of the first workers."""
    group = world.world.among(range(row.stages), "pipeline")
    stage = stages_of(row, Wet(row.dropout))[group.rank]
    optimizer = stepper(row.optimizer, list(stage.parameters()))

    stales: list[int] = []

    def step(stale: int) -> None:
        stales.append(stale)
        optimizer.step()
        optimizer.zero_grad()

    update = (lambda stage: step) if update is None else update
    node = AsyncStage(stage, update(stage), group, form(), options(row), shares=row.shares)
    node.stales = stales  # type: ignore[attr-defined]  # what each update was told
    return node


def train(world: Mesh, rows: list[Row]) -> list[dict[str, Any] | None]:
    """For each row: losses, weights, what was used and applied. Workers that a row does not need stand by."""
    torch.set_num_threads(1)
    results: list[dict[str, Any] | None] = []
    for row in rows:
        if world.rank >= row.stages:
            results.append(None)
            continue
        torch.manual_seed(10 + world.rank)
        node = made(world, row)
        losses, passed, played, first = [], [], [], 0
        for count in row.microbatches:
            texts = (window(number) for number in range(first, first + count)) if world.rank == 0 else ()
            losses += node.run(texts)
            passed += node.passed
            played += [(span.task.kind, span.task.microbatch, span.start, span.end) for span in node.played]
            first += count
        results.append(
            {
                "losses": losses,
                "weights": {name: parameter.detach().clone() for name, parameter in node.stage.named_parameters()},
                "stales": node.stales,  # type: ignore[attr-defined]
                "passed": passed,
                "versions": node.most_versions,
                "held": node.most_held,
                "played": played,
                "seconds": world.transport.now(),
            }
        )
    return results


def schedule(row: Row, stage: int) -> Iterator[tuple[int, int]]:
    """(version used, version applied) of each microbatch, by the paper's recursion with drains between stretches."""
    first = 0
    for count in row.microbatches:
        for own in range(count):
            back = max(0, own - row.room(stage) + 1)  # backward passes of this stretch before its forward pass
            yield (first + back) // row.every, (first + own) // row.every
        first += count


def recursion(row: Row, used: list[list[int]] | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One process: stage s's gradient of microbatch u at the weights of version used[s][u], through one graph, added to
    the newest.
    """
    parts = stages_of(row, Wet(row.dropout))
    own = [list(part.parameters()) for part in parts]
    retained = [[[weight.detach().clone() for weight in weights]] for weights in own]
    optimizers = [stepper(row.optimizer, weights) for weights in own]
    random = [torch.Generator().manual_seed(10 + stage).get_state() for stage in range(row.stages)]
    used = used or [[version for version, _ in schedule(row, stage)] for stage in range(row.stages)]
    losses = []
    with torch.random.fork_rng(devices=[]):
        for number in range(sum(row.microbatches)):
            for stage, weights in enumerate(own):
                for weight, old in zip(weights, retained[stage][used[stage][number]], strict=True):
                    weight.data = old.clone()
            text = window(number)
            x = text[:, :-1]
            for stage, part in enumerate(parts):
                torch.set_rng_state(random[stage])
                last = stage == row.stages - 1
                x = part(x, text[:, 1:] if last else None, enter=stage == 0, leave=last)
                random[stage] = torch.get_rng_state()
            losses.append(x.detach())
            (x / row.every).backward()
            for stage, weights in enumerate(own):
                for weight, new in zip(weights, retained[stage][-1], strict=True):
                    weight.data = new.clone()
                if (number + 1) % row.every == 0:
                    optimizers[stage].step()
                    optimizers[stage].zero_grad()
                    retained[stage].append([weight.detach().clone() for weight in weights])
    found = {name: weight.detach() for part in parts for name, weight in part.named_parameters()}
    return losses, found


def plain(row: Row) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Ordinary training of the whole model, a step a microbatch, by torch alone; dropout off."""
    model = Wet(0.0)
    optimizer = stepper(row.optimizer, list(model.parameters()))
    losses = []
    for number in range(sum(row.microbatches)):
        text = window(number)
        x = model.enter(text[:, :-1])
        for block in model.blocks:
            x = model.through(block, x)
        loss = nn.functional.cross_entropy(model.leave(x).flatten(0, 1), text[:, 1:].flatten())
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}

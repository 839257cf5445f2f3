"""Recovery of stages that have lost all of their workers, from the remaining ones (CheckFree, arXiv 2506.15461).

    checkfree    W_s <- (w_{s-1} W_{s-1} + w_{s+1} W_{s+1}) / (w_{s-1} + w_{s+1}),   w: norm of a stage's last gradient
    checkfree+   the same; half of the microbatches visit the ends in exchanged order, so stage 2 can replace stage 1,
                 and the last but one the last: a lost one is their copy
    average      both neighbours equally    copy   the stage before    random   new random weights
    checkpoint   all stages as they were some steps ago

A recovered stage starts with empty moments and a learning rate that is 1.1 times as high. Stage 0 is never lost: it has
the text and the embedding, and, as the loss is computed there, the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.basic import all_done
from isles.comm.mesh import Mesh
from isles.models.stages import Stage
from isles.network.noise import uniform
from isles.pipeline.config import RecoveryConfig

RATE = 1.1
"""Times the learning rate of a stage that was made anew; the paper's."""
_NORM_BYTES = 8


def lost_stages(step: int, stages: int, chance: float, seed: int) -> list[int]:
    """The stages that are lost after inner step `step`, each with probability `chance`; the same at every worker."""
    return [stage for stage in range(1, stages) if uniform(seed, 0x10C4EC, step, stage) < chance]


def sources(kind: str, stage: int, stages: int) -> tuple[int, ...]:
    """The stages that a lost one is recovered from: two are averaged, one is copied; none if it needs none."""
    if kind in ("random", "checkpoint"):
        return ()
    last = stage == stages - 1
    if kind == "copy" or last:
        return (stage - 1,)
    if kind == "checkfree+" and stage == 1:
        return (2,)
    return stage - 1, stage + 1


def refuse_neighbours(step: int, lost: Sequence[int], kind: str, stages: int) -> None:
    """ValueError if a stage would be recovered from another lost one."""
    for stage in lost:
        also_lost = [other for other in sources(kind, stage, stages) if other in lost]
        if also_lost:
            pair = sorted((stage, also_lost[0]))
            raise ValueError(
                f"stages {pair[0]} and {pair[1]} are both lost after inner step {step}: "
                f'pipeline.recovery.kind = "{kind}" makes a stage of its neighbours; choose "checkpoint", or a smaller '
                "pipeline.recovery.stage_loss"
            )


def refuse_unequal(blocks: Sequence[int], setting: str) -> None:
    """ValueError, naming the setting, if the stages' numbers of blocks differ."""
    if len(set(blocks)) > 1:
        raise ValueError(
            f"{setting}: stages of {', '.join(map(str, blocks))} blocks cannot stand in for each other; choose "
            "pipeline.cut or model.layers so that all have as many"
        )


def block_parameters(stage: Stage) -> dict[str, Tensor]:
    """The parameters of the blocks in their order, which neighbours have too, by their names in the whole model."""
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    return {names[id(parameter)]: parameter for block in stage.blocks for parameter in block.parameters()}


def gradient_norm(stage: Stage) -> float:
    """Norm of the gradients of the blocks of `stage`."""
    gradients = [own.grad for own in block_parameters(stage).values() if own.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def merged(before: Tensor, before_norm: float, after: Tensor, after_norm: float) -> Tensor:
    """CheckFree's mean of two neighbours; with equal norms the plain mean, with one norm of 0 a copy of the other."""
    total = before_norm + after_norm
    share = after_norm / total if total > 0 else 0.5
    return before * (1 - share) + after * share


class Recovery:
    """One worker's part in the recovery of lost stages. seed: determines which are lost. drawn: returns new random
    weights of this stage for a seed.

    ValueError if the stages' blocks differ, so that none can replace another.
    """

    def __init__(
        self,
        stage: Stage,
        world: Mesh,
        blocks: Sequence[int],
        settings: RecoveryConfig,
        seed: int,
        drawn: Callable[[int], Mapping[str, Tensor]],
    ) -> None:
        if sources(settings.kind, 1, 3):
            refuse_unequal(blocks, f'pipeline.recovery.kind = "{settings.kind}"')
        self.stage, self.world, self.settings, self.seed, self.drawn = stage, world, settings, seed, drawn
        self.stages = len(blocks)
        self.norm = 0.0
        """Of this stage's last gradient, its blocks' alone."""
        self.snapshot: dict[str, Any] | None = None

    def after_step(self, step: int, inner: Optimizer) -> tuple[list[int], float]:
        """Called after inner step `step`, before its gradients are cleared. Returns the lost stages, and the factor of
        this worker's learning rate.
        """
        self.norm = gradient_norm(self.stage)
        settings, here = self.settings, self.world.coordinate.stage
        lost = lost_stages(step, self.stages, settings.stage_loss, self.seed)
        refuse_neighbours(step, lost, settings.kind, self.stages)
        if settings.kind == "checkpoint":
            self._go_back(step, inner, is_lost=bool(lost))
            return lost, 1.0
        for stage in lost:
            self._send(stage)
        if here not in lost:
            return lost, 1.0
        with torch.no_grad():
            self._rebuild(step)
        inner.state.clear()
        return lost, RATE

    def state_dict(self) -> dict[str, Any]:
        return {"norm": self.norm, "snapshot": self.snapshot}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norm, self.snapshot = state["norm"], state["snapshot"]

    def _parameters(self) -> list[Tensor]:
        return list(block_parameters(self.stage).values())

    def _holders(self, stage: int) -> list[int]:
        """The ranks of `stage` at this worker's coordinate inside a stage."""
        inner = self.world.coordinate.inner
        coordinates = [(coordinate, rank) for rank, coordinate in enumerate(self.world.layout.coordinates)]
        return [
            rank for coordinate, rank in sorted(coordinates) if coordinate.stage == stage and coordinate.inner == inner
        ]

    def _pairs(self, source: int, lost: int) -> list[tuple[int, int]]:
        """(source, receiver) for every worker of the lost stage: in the same column if there is a source there."""
        donors = self._holders(source)
        return [(donors[number % len(donors)], taker) for number, taker in enumerate(self._holders(lost))]

    def _send(self, lost: int) -> None:
        """This stage's weights and norm to the workers of a lost stage that are made of it."""
        if self.world.coordinate.stage not in sources(self.settings.kind, lost, self.stages):
            return
        takers = [taker for donor, taker in self._pairs(self.world.coordinate.stage, lost) if donor == self.world.rank]
        if not takers:
            return
        norm = torch.tensor([self.norm], dtype=torch.float64, device="cpu")
        wire = torch.cat((as_bytes(self._flat().cpu()), as_bytes(norm)))
        group = self.world.world
        works = [group.call("control").send(taker, wire) for taker in takers]
        group.start(all_done(works), "control", nbytes=wire.numel()).wait()

    def _rebuild(self, step: int) -> None:
        kind, here = self.settings.kind, self.world.coordinate.stage
        if kind == "random":
            self.stage.load_state_dict(self.drawn(step))
            return
        found = [self._received(source) for source in sources(kind, here, self.stages)]
        if len(found) == 1:
            flat = found[0][0]
        else:
            (before, before_norm), (after, after_norm) = found
            if kind == "average":
                before_norm = after_norm = 1.0
            flat = merged(before, before_norm, after, after_norm)
        parameters = self._parameters()
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    def _received(self, source: int) -> tuple[Tensor, float]:
        """Weights and norm of the stage `source`."""
        group, own = self.world.world, self._flat().cpu()
        donor = next(
            donor for donor, taker in self._pairs(source, self.world.coordinate.stage) if taker == self.world.rank
        )
        wire = torch.empty(own.nbytes + _NORM_BYTES, dtype=torch.uint8, device="cpu")
        group.start(all_done([group.call("control").recv(donor, wire)]), "control", nbytes=wire.numel()).wait()
        norm = wire[own.nbytes :].clone().view(torch.float64)
        return wire[: own.nbytes].view(own.dtype), float(norm)

    def _flat(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters()])

    def _go_back(self, step: int, inner: Optimizer, *, is_lost: bool) -> None:
        """Load what was kept, at every stage; else keep what there is when it is time. Before the first copy there is
        only the beginning.
        """
        if is_lost and self.snapshot is None:
            self.stage.load_state_dict(self.drawn(0))  # as the run began
            inner.state.clear()
        elif is_lost:
            assert self.snapshot is not None
            self.stage.load_state_dict(self.snapshot["model"])
            rates = [group["lr"] for group in inner.param_groups]
            inner.load_state_dict(self.snapshot["inner"])
            for group, rate in zip(inner.param_groups, rates, strict=True):
                group["lr"] = rate  # the schedule goes on
        elif step % self.settings.every == 0:
            self.snapshot = deepcopy({"model": self.stage.state_dict(), "inner": inner.state_dict()})

"""Steps of plans on virtual workers, and the same in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import isles
from isles.comm.layout import Layout
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.models.decoder import next_token_loss
from isles.network.routing.events import orders_of
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import Paths, Problem, replay_paths
from isles.pipeline.config import PipelineConfig, SkippipeConfig
from isles.pipeline.pipeline import Pipeline, cut_of

CONTEXT = 6
SHAPE = Shape(d_model=8, layers=4, heads=2, ffn=12, vocab=20, context=CONTEXT, tie_embeddings=False)
CUT = (2, 3)  # stages of 2, 1 and 1 blocks


def any_paths(problem: Problem, seed: int) -> Paths:
    """Any stages after the first in any order, each at any of its nodes."""
    rng, later = random.Random(seed), range(1, len(problem.stages))
    paths = {}
    for slot in problem.slots:
        order = rng.sample(later, rng.randint(1, len(later)))
        paths[slot] = (slot[0], *(rng.choice(problem.stages[stage]) for stage in order))
    return paths


def wire(problem: Problem) -> isles.Links:
    """Whose messages take the problem's delays."""
    return isles.Links(bandwidth=float("inf"), latency=[list(row) for row in problem.delays])


def window(microbatch: int) -> Tensor:
    """The text of a microbatch (1, T+1)."""
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randint(0, SHAPE.vocab, (1, CONTEXT + 1), generator=generator)


def whole_model(dtype: torch.dtype) -> Decoder:
    return Decoder(SHAPE, seed=1, dtype=dtype)


def pipeline_of(world: Mesh, plan: PipelinePlan, dtype: torch.dtype = torch.float32, **settings: Any) -> Pipeline:
    """This worker's; settings: of [pipeline]."""
    problem, model = plan.problem, whole_model(dtype)
    own = problem.memory * problem.waves
    stages = len(problem.stages)
    cut = CUT[: stages - 1]
    return Pipeline(
        model,
        world.arranged(Layout.columns(problem.stages)),
        batch_size=own,
        context=CONTEXT,
        vocab=SHAPE.vocab,
        cut=cut_of(model, stages, cut=cut, loss_at="origin"),
        config=PipelineConfig(
            stages=stages,
            microbatches=own,
            routing="skippipe",
            skippipe=SkippipeConfig(plan="plan.json", gradients=settings.pop("gradients", "global")),
            cut=cut,
            **settings,
        ),
        plan=plan,
    )


def own_batch(plan: PipelinePlan, rank: int) -> Tensor | None:
    """What an origin reads: the text of its microbatches; None at others."""
    mine = [window(route.microbatch) for route in plan.routes if route.origin == rank]
    return torch.cat(mine) if mine else None


def step(world: Mesh, plan: PipelinePlan, dtype: torch.dtype, settings: dict[str, Any]) -> dict[str, Any]:
    """One step: its seconds, this worker's losses by microbatch, its gradients by name."""
    torch.set_num_threads(1)
    run = pipeline_of(world, plan, dtype, **settings)
    batch = own_batch(plan, world.rank)
    texts = {} if batch is None else dict(zip(_own(plan, world.rank), batch.split(1), strict=True))
    losses = run.executor.step(1, texts)
    gradients = {name: own.grad for name, own in run.stage.named_parameters()}
    return {"seconds": world.transport.now(), "losses": losses, "gradients": gradients}


def _own(plan: PipelinePlan, rank: int) -> list[int]:
    return [route.microbatch for route in plan.routes if route.origin == rank]


def on_virtual(plan: PipelinePlan, dtype: torch.dtype = torch.float32, **settings: Any) -> list[dict[str, Any]]:
    """`step` of every worker, in the order of ranks."""
    problem = plan.problem
    args = (plan, dtype, settings)
    return isles.run_virtual(step, problem.nodes, links=wire(problem), args=args, step_seconds=1.0)


def one_process(plan: PipelinePlan, dtype: torch.dtype) -> tuple[dict[int, Tensor], dict[int, dict[str, Tensor]]]:
    """By microbatch: the loss of the model run in that route's order, and the gradients of its share of the mean."""
    bounds = [0, *CUT[: len(plan.problem.stages) - 1], SHAPE.layers]
    losses, gradients = {}, {}
    for route in plan.routes:
        model, tokens = whole_model(dtype), window(route.microbatch)
        stages = [plan.problem.stage_of[node] for node in route.visits]
        order = [block for stage in stages for block in range(bounds[stage], bounds[stage + 1])]
        loss = next_token_loss(model.logits(tokens[:, :-1], order=order), tokens[:, 1:])
        (loss / plan.problem.microbatches).backward()
        losses[route.microbatch] = loss.detach()
        named = model.named_parameters()
        gradients[route.microbatch] = {name: own.grad for name, own in named if own.grad is not None}
    return losses, gradients


def summed_at(plan: PipelinePlan, rank: int, each: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of what node `rank` does, added up in the order in which it does it."""
    tasks = orders_of(replay_paths(plan.problem, plan.paths).spans).get(rank, [])
    sums: dict[str, Tensor] = {}
    for task in tasks:
        for name, gradient in each[task.microbatch].items():
            of_loss = name.startswith(("norm", "head"))
            if task.kind == ("L" if of_loss else "B"):
                sums[name] = sums[name] + gradient if name in sums else gradient
    return sums


def sum_of_all(each: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradient of the mean loss over all microbatches."""
    sums: dict[str, Tensor] = {}
    for gradients in each.values():
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient
    return sums


def faster(problem: Problem, seconds: float) -> Problem:
    """The same with all forwards of so many seconds."""
    return replace(problem, forward=(seconds,) * problem.nodes)


def silent(module: nn.Module) -> None:
    """Let a block write nothing to the stream."""
    for name, parameter in module.named_parameters():
        if name in ("attention.out.weight", "mlp.down.weight"):
            parameter.data.zero_()

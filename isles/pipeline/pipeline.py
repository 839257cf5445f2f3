"""`Pipeline`: a model cut into stages over the workers of a replica, for a loop of one's own.

    world = isles.mesh(stage=2)                                         # replicas x 2 stages
    pipeline = isles.Pipeline(model, world, batch_size=16, context=128)
    inner = isles.Plain(pipeline.stage, adamw, peers=world.stage, charged=True)
    optimizer = isles.DiLoCo(pipeline.stage, inner, world.outer, sync_every=50)
    loss = pipeline.step(batch)                                         # instead of model(batch).loss.backward()
    optimizer.step()

Stage 0 of each replica has the text; the others pass None. `model` may be on the meta device at workers that load
weights afterwards; otherwise it must be the same model everywhere.

Rotation of a run's subspace (`isles.pipeline.boundaries.scheme`): all stages of all replicas at the same step, by a sum
over all of their last stages.

    last stages     M summed over the workers inside the stage and over the replicas, in rank order -> U, the same bits
    their replicas  U from the last stage to the others

It happens every `every` steps, when all replicas wait for each other. An outer method's vectors are in coordinates, so
they rotate along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isles.base.imports import describe
from isles.base.parts import make, names_code
from isles.comm.codecs import codec
from isles.comm.group import same_text
from isles.comm.mesh import Mesh
from isles.models.cuts import Piece, PieceCosts, cut_points, pieces
from isles.models.stages import Stage, costs_of, is_tied, width_of
from isles.network.routing.events import fixed_routes, in_flight
from isles.network.routing.plan import PipelinePlan
from isles.pipeline.boundaries.base import Boundary
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Between, Crossings, Inside, Scheme, scheme_of, turned
from isles.pipeline.compute import Context, task_shares
from isles.pipeline.config import PipelineConfig
from isles.pipeline.evaluation import assembled, mean_loss
from isles.pipeline.executor import Announce, Executor, Ways
from isles.pipeline.partial import planned_routes
from isles.pipeline.routers import PipelineGrid, StepRoutes, always, exchanged_routes, own_routes, random_router
from isles.pipeline.wire import StageForm


class BasisTurns:
    """One worker's rotations of the subspace. every: steps; 0: never. rate: see `turned`."""

    def __init__(self, scheme: Scheme, stage: Stage, world: Mesh, *, every: int, rate: float) -> None:
        self.scheme = scheme if isinstance(scheme, Inside) and every else None
        self.stage, self.world, self.every, self.rate = stage, world, every, rate

    def before(self, step: int) -> None:
        """Called before inner step `step`, counted from 1, by all workers."""
        scheme, stages = self.scheme, self.world.stage
        if scheme is None or scheme.drift is None or step == 1 or (step - 1) % self.every:
            return
        basis = scheme.basis.clone()
        if stages.rank == stages.size - 1:
            total = scheme.drift.total
            for group in (self.world.inner, self.world.outer):
                total = torch.stack(group.all_gather(total, channel="pipeline")).sum(0)
            basis = turned(basis, total, self.rate)
            scheme.drift.total.zero_()
        stages.broadcast(basis, source=stages.size - 1, channel="pipeline")
        scheme.rotate(self.stage, basis)

    def state_dict(self) -> dict[str, Any] | None:
        """None if there are no rotations."""
        if self.scheme is None or self.scheme.drift is None:
            return None
        return {"basis": self.scheme.basis, "drift": self.scheme.drift.total}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None and self.scheme is not None and self.scheme.drift is not None:
            self.scheme.rotate(self.stage, state["basis"])
            self.scheme.drift.total.copy_(state["drift"])


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model is cut. home: the loss is computed at the origin. width: of the stream."""

    pieces: tuple[Piece, ...]
    home: bool
    costs: PieceCosts
    width: int

    @property
    def begins(self) -> tuple[int, ...]:
        """The first block of each stage but the first."""
        return tuple(piece.blocks.start for piece in self.pieces[1:])

    def scheme(self, config: PipelineConfig, *, vocab: int | None, seed: int) -> Scheme:
        """The boundary scheme for one worker. vocab: token ids; seed: of drawn values. ValueError if the stream has no
        such boundary.
        """
        name = boundary_name(config.boundary.kind)
        if name.kind == "subspace" and vocab is None:
            raise ValueError(
                f'pipeline.boundary.kind = "{config.boundary.kind}" wants to know how many token ids there are: set '
                "model.vocab"
            )
        if self.home and name.is_one_way:
            raise ValueError(
                f'pipeline.boundary.kind = "{config.boundary.kind}": the embedding of this model is its head as well, '
                "so the stream must come home, and what leaves the last stage does not fit through; choose "
                'model.tie_embeddings = false, or "dct:0.75"'
            )
        cuts = self.begins
        crossings = Crossings(cuts=cuts, home=self.home, width=self.width, vocab=vocab or 0)
        bound, layers = config.boundary.blocks, len(self.costs.blocks)
        if bound and not cuts[-1] <= bound <= layers:
            raise ValueError(
                f"pipeline.boundary.blocks = {bound}: the last stage begins at block {cuts[-1]}, and all before it "
                f"write into the subspace; choose {cuts[-1]} to {layers}, or 0"
            )
        if name.kind == "own":
            return Between(crossings, own_boundary(config, self.width))
        turns = bool(config.boundary.update_every)
        return scheme_of(name, crossings, form=config.boundary.form, seed=seed, blocks=bound, turns=turns)


def cut_of(
    model: nn.Module,
    stages: int,
    *,
    costs: PieceCosts | None = None,
    cut: Sequence[int] = (),
    loss_at: Literal["auto", "last", "origin"] = "auto",
    key: str = "pipeline.cut",
) -> Cut:
    """Where to cut `model` (which needs no values). costs: of its blocks, if better known than by their parameters.
    key: of the setting `cut`, for messages. ValueError if the model has no blocks, fewer blocks than stages, or its
    embedding is also its head while the loss is to be computed at the last stage.
    """
    tied = is_tied(model)
    if tied and loss_at == "last":
        raise ValueError(
            'pipeline.loss_at = "last": the embedding of this model is its head as well, and both lie at the first '
            'stage; choose "origin", or model.tie_embeddings = false'
        )
    home = tied if loss_at == "auto" else loss_at == "origin"
    known = costs_of(model) if costs is None else costs
    cuts = cut or cut_points(known.to_cut(loss_at_origin=home), stages)
    made = tuple(pieces(cuts, len(known.blocks), loss_at_origin=home, key=key))
    return Cut(pieces=made, home=home, costs=known, width=width_of(model))


class Pipeline:
    """One worker's stage of a model, and its part of every step.

    model: the whole model, of which this worker's stage is taken; or a stage that `scheme` was fitted to, with its
    `cut`. batch_size: sequences of a replica's batch, of `context` targets each. columns: number of last columns of a
    row of integers that travel with the stream (None: the whole sequence, context + 1). vocab: number of token ids
    (None: unknown, so they travel in 4 bytes each). config: the settings of [pipeline]; `stages` is the mesh's. plan:
    the paths of routing = "skippipe", over a layout of `Layout.columns(plan.problem.stages)`; average the gradients
    over `world.outer` afterwards. quiet: `lambda: optimizer.no_sync()` if workers inside a stage share its gradients.
    autocast: entered around forward passes. announce: called with the order of each step's tasks in advance. seed: of
    random routes, and of values that the boundaries draw.

    ValueError for a model that cannot be cut, or a batch that does not divide.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Mesh,
        *,
        batch_size: int,
        context: int,
        vocab: int | None = None,
        columns: int | None = None,
        cut: Cut | None = None,
        scheme: Scheme | None = None,
        quiet: Context = nullcontext,
        autocast: Context = nullcontext,
        announce: Announce = lambda tasks: None,
        seed: int = 0,
        config: PipelineConfig | None = None,
        plan: PipelinePlan | None = None,
    ) -> None:
        stages, replicas = world.stage.size, world.outer.size
        self.config = config or PipelineConfig(stages=stages)
        if batch_size % self.config.microbatches:
            raise ValueError(
                f"a batch of {batch_size} sequences does not divide into {self.config.microbatches} microbatches: "
                "choose a divisor as microbatches"
            )
        self.world = world
        self.cut = cut or cut_of(model, stages, cut=self.config.cut, loss_at=self.config.loss_at)
        here = world.layout.coordinates[world.rank]
        self.scheme = scheme or self.cut.scheme(self.config, vocab=vocab, seed=seed)
        self.stage = model if isinstance(model, Stage) else Stage(model, self.cut.pieces[here.stage])
        if scheme is None:
            self.scheme.fit(self.stage)
        every, rate = self.config.boundary.update_every, self.config.boundary.update_rate
        self.turns = BasisTurns(self.scheme, self.stage, world, every=every, rate=rate)
        settings = self.scheme.settings(self.stage)
        if settings is not None:
            same_text(world.world, settings, "its subspace is another one; check versions and processors")
        self.reads = here.stage == 0
        """Whether this worker wants text."""
        self._steps = 0
        form = form_of(self.stage, self.scheme, self.config, batch_size=batch_size, context=context, vocab=vocab)
        form = replace(form, columns=columns)
        ways = ways_of(self.config, self.cut, replicas)
        router = router_of(self.config, replicas, home=self.cut.home, seed=seed)
        microbatches = self.config.microbatches
        if plan is not None:
            microbatches = plan.problem.microbatches
            router, ways = planned_routes(plan, world.pipeline.ranks, self.config, self.config.order)
        self.executor = Executor(
            self.stage,
            world.pipeline,
            router,
            form,
            microbatches,
            ways,
            quiet=quiet,
            autocast=autocast,
            announce=announce,
        )

    def step(self, batch: Tensor | None, number: int | None = None) -> Tensor | None:
        """Run forward and backward of one inner step, on all workers of all replicas together: `.grad` of the stage
        becomes that of the mean loss over a replica's batch. batch: (batch_size, context + 1) int64 if this worker
        reads. number: of the step, from 1; None: one more than the last. Returns the mean loss of the microbatches that
        visit this worker, in nats; None if none did.

        PeerLost or DeadlinePassed, naming the peer, if one does not do its share.
        """
        self._steps = self._steps + 1 if number is None else number
        self.turns.before(self._steps)
        parts = () if batch is None else batch.split(self.executor.form.sequences)
        routes = self.executor.router(self._steps) if parts else ()
        own = sorted(route.microbatch for route in routes if route.origin == self.executor.group.rank)
        losses = self.executor.step(self._steps, dict(zip(own, parts, strict=True)))
        return torch.stack([losses[microbatch] for microbatch in sorted(losses)]).mean() if losses else None

    def judge(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats over the rows of `batches` (b, context + 1), which stage 0 passes; the same at all stages.
        All stages of the replica must call it together.
        """
        return mean_loss(self.executor.compute, self.world.stage, batches, home=self.cut.home)

    def assembled(self, whole: nn.Module) -> nn.Module | None:
        """`whole` filled with the weights of all stages, at stage 0; None at the others, where `whole` may be on the
        meta device. All stages of the replica must call it together.
        """
        self.scheme.fit(whole)
        filled = assembled(self.stage, self.world.stage, whole, self.cut.pieces)
        return None if filled is None else self.scheme.unsplit(filled)


def own_boundary(config: PipelineConfig, width: int) -> Boundary:
    """The user's own boundary that `config` names. ValueError if it cannot be made, fails on a small stream, or its
    output has not the declared sizes.
    """
    name = config.boundary.kind
    try:
        boundary = make("boundary", name, config.options_of("boundary"), width)
    except ValueError as error:
        raise ValueError(f"pipeline.{error}") from error
    x_BTD = torch.zeros(1, 2, width, dtype=torch.float32, device="cpu")
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="cpu")
    try:
        payload, side = boundary.encode(x_BTD, tokens)
        made = tuple(payload.shape), 0 if side is None else side.numel()
        stated, back = boundary.sizes(1, 2), tuple(boundary.decode(payload, side, tokens).shape)
    except Exception as error:  # the class is the user's: whatever it raises
        raise ValueError(f'pipeline.boundary.kind = "{name}" fails at a width of {width}: {describe(error)}') from error
    if (made, back) != (stated, tuple(x_BTD.shape)):
        what = f"encode makes {made} and sizes says {stated}, decode makes {back} of {tuple(x_BTD.shape)}"
        raise ValueError(f'pipeline.boundary.kind = "{name}": {what}')
    return boundary


def form_of(
    stage: Stage, scheme: Scheme, config: PipelineConfig, *, batch_size: int, context: int, vocab: int | None
) -> StageForm:
    """The form of messages about a microbatch, for a batch of `batch_size` sequences; see `Pipeline`. stage: fitted."""
    return StageForm(
        sequences=batch_size // config.microbatches,
        length=context,
        vocab=vocab or 1 << 31,
        dtype=next(stage.parameters()).dtype,
        boundary=scheme.boundary(stage),
        codec=codec(config.boundary.codec),
        gradient_codec=codec(config.boundary.gradient_codec),
    )


def ways_of(config: PipelineConfig, cut: Cut, replicas: int) -> Ways:
    """How the executor of `replicas` replicas runs its steps."""
    return Ways(
        room=in_flight(config.in_flight, replicas, len(cut.pieces)),
        order=config.order,
        recompute=config.recompute,
        shares=task_shares(cut.pieces, cut.costs, config.microbatches, replicas, recompute=config.recompute),
    )


def router_of(config: PipelineConfig, replicas: int, *, home: bool, seed: int) -> StepRoutes:
    """The router of the microbatches. seed: of random routes. ValueError as `isles.base.parts.make`."""
    if names_code("router", config.routing):
        grid = PipelineGrid(replicas, config.stages, config.microbatches, home, seed)
        return own_routes(make("router", config.routing, config.options_of("router")), grid, config.routing)
    if config.recovery.stage_loss and config.recovery.kind == "checkfree+":
        return always(exchanged_routes(replicas, config.stages, config.microbatches))
    if config.routing == "random":
        return random_router(replicas, config.stages, config.microbatches, home=home, seed=seed)
    return always(fixed_routes(replicas, config.stages, config.microbatches, home=home))

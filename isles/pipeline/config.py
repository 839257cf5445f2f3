"""The `[pipeline]` section: how a replica is cut in depth, and how its microbatches travel; with its tables
[pipeline.swarm], [pipeline.ravnest], [pipeline.boundary], [pipeline.skippipe] and [pipeline.recovery]. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from isles.base.errors import demand
from isles.base.parts import check_options, one_of_or_code
from isles.base.tables import refuse
from isles.network.routing.events import in_flight
from isles.pipeline.boundaries.names import StreamCodec, boundary_name


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """What of the stream crosses between stages, and in which form."""

    kind: str = "none"
    """What of the stream crosses between stages: "none", all of it; "subspace:16", 16 numbers a token of a stream that
    is kept in a subspace (Protocol Models); "dct:0.75", the quarter of a token's entries of largest size;
    "bottleneck:16" and "maxout:16", 16 numbers of learned layers; or package.module:Class of your own.
    """
    codec: StreamCodec = "none"
    """Form of what the boundary sends forward; all but "none" lose something."""
    gradient_codec: StreamCodec = "none"
    """The same backward."""
    form: Literal["coordinates", "row-wise", "projected"] = "coordinates"
    """How weights are kept in a subspace: by their coordinates in it; or of full size, with one second moment a row, or
    with a projection after each step.
    """
    blocks: int = 0
    """Blocks, from the first on, that write into the subspace; 0: all before the last stage."""
    update_every: int = 0
    """Steps after which the subspace is turned towards the gradients, again and again; 0: never."""
    update_rate: float = 0.05
    """How far it is turned, from 0 to 0.5."""

    def __post_init__(self) -> None:
        if boundary_name(self.kind).kind != "subspace":
            why = 'acts with kind = "subspace:16" and the like: choose that, or leave it out'
            refuse(self, why, "form", "blocks", "update_every")
        demand(self, "blocks", lambda x: x >= 0, "choose 0 (all before the last stage) or more")
        demand(self, "update_every", lambda x: x >= 0, "choose 0 (never) or more steps")
        if self.update_every and self.form != "coordinates":
            raise ValueError(
                f"update_every = {self.update_every}: only coordinates turn with their subspace; choose "
                'form = "coordinates", or 0'
            )
        demand(self, "update_rate", lambda x: 0 < x <= 0.5, "choose a rate above 0, at most 0.5")
        if not self.update_every:
            refuse(self, "acts with update_every: set that, or leave it out", "update_rate")

    @property
    def lossy(self) -> list[str]:
        """The settings that change what is computed, as they are written."""
        found = [("kind", self.kind)] if boundary_name(self.kind).kind not in ("none", "subspace") else []
        found += [(key, getattr(self, key)) for key in ("codec", "gradient_codec") if getattr(self, key) != "none"]
        return [f'pipeline.boundary.{key} = "{value}"' for key, value in found]


Consistency = Literal["exact", "strict", "relaxed"]


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """With pipeline.routing = "swarm"."""

    peers: tuple[int, ...] = ()
    """Workers of every stage at the start, such as [3, 2], the first of them of stage 0; empty: shared out evenly."""
    consistency: Consistency = "exact"
    """What a step is worth where peers are lost: "exact", the gradient of the same microbatches once each, mended from
    what neighbours have kept; "strict", the same by beginning the step again; "relaxed", what a lost peer had counted
    is run again, and counts twice at other stages.
    """
    forward_deadline: float = 30.0
    """Seconds after which a microbatch whose forward pass was not told to be done goes to another peer."""
    backward_deadline: float = 75.0
    """The same from there until its gradient is back."""
    rebalance: Literal["none", "queue", "throughput"] = "none"
    """Who goes to another stage between two steps: nobody; whoever has the shortest queue, to the stage with the
    longest ("queue"); whoever helps the slowest stage most ("throughput").
    """
    rebalance_every: float = 300.0
    """Seconds from one look at that to the next."""
    hysteresis: float = 0.25
    """By how much a move must help, as a share of what there is."""
    stage_lost: Literal["stop", "rebuild"] = "stop"
    """Where a stage has lost all of its peers: "stop", the run ends, and goes on from its last checkpoint with the
    weights that it had; "rebuild", somebody goes there and makes the stage of its two neighbours (CheckFree). The first
    stage and the last, which hold embedding and head, are not made anew.
    """
    stage_patience: float = 30.0
    """With stage_lost = "rebuild": seconds that the others wait for a new peer, where one can come, before one of
    another stage goes there.
    """
    delay_updates: int = 0
    """1: a stage adds up a step's gradients behind the next step's microbatches, whose weights are then one update
    older; 0, before them.
    """

    def __post_init__(self) -> None:
        if self.peers and min(self.peers) < 1:
            raise ValueError(f"peers = {list(self.peers)}: every stage needs at least 1 at the start")
        demand(self, "delay_updates", lambda x: x in (0, 1), "choose 0, or 1 step")
        demand(self, "hysteresis", lambda x: x >= 0, "choose 0 or more, such as 0.25")
        keys = "forward_deadline backward_deadline rebalance_every"
        demand(self, keys, lambda x: 0 < x < math.inf, "choose seconds above 0")
        demand(self, "stage_patience", lambda x: 0 <= x < math.inf, "choose 0 seconds or more, such as 30")
        if self.consistency == "strict":
            why = 'does not go with consistency = "strict": no microbatch goes to another peer, and '
            why += "world.pipeline_deadline ends the run; leave it out"
            refuse(self, why, "forward_deadline", "backward_deadline")
        if self.stage_lost == "stop":
            refuse(self, 'acts with stage_lost = "rebuild": set that, or leave it out', "stage_patience")
        if self.rebalance == "none":
            refuse(self, 'acts with rebalance = "queue" or "throughput": set that', "rebalance_every", "hysteresis")


@dataclass(frozen=True, kw_only=True)
class RavnestConfig:
    """With pipeline.routing = "ravnest"."""

    clusters: tuple[tuple[int, ...], ...] = ()
    """Of every cluster the first block of each stage but the first, so [[2, 4], [3], []] are clusters of 3, 2 and 1
    stages, workers in that order; empty: alike, cut as `cut` says.
    """
    stage_lr: Literal["1", "1/(1+tau)"] = "1"
    """Factor on the learning rate of an update by a gradient tau updates old."""
    average_optimizer: bool = False
    """Clusters average the optimizer's state as well as the weights."""
    spares: int = 0
    """Where workers come and go: so many of those who wait go on standing by for lost ones; the others make new
    clusters as soon as they can.
    """

    def __post_init__(self) -> None:
        demand(self, "spares", lambda x: x >= 0, "choose 0 or more")
        if self.clusters and not any(self.clusters):
            raise ValueError('clusters of one stage each are replicas: leave routing out, and choose method "localsgd"')


_ROUTINGS: dict[str, tuple[str, ...]] = {
    "skippipe": (),
    "swarm": ("order", "recompute", "together", "recovery.stage_loss", "boundary.update_every"),
    "ravnest": ("boundary.kind",),
}
"""Those that have a table of their own, and which settings do not go with them."""


@dataclass(frozen=True, kw_only=True)
class SkippipeConfig:
    """With pipeline.routing = "skippipe"."""

    plan: str = ""
    """The file that `isles plan paths` wrote."""
    gradients: Literal["global", "visits"] = "global"
    """The gradient of a stage is that of the mean loss over all microbatches ("global"), or the mean over those that
    visit it ("visits").
    """


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Stages that are lost, by chance, and made again: for experiments."""

    stage_loss: float = 0.0
    """The chance, drawn from run.seed, that a stage behind the first is lost with all of its workers after a step."""
    kind: Literal["checkfree", "checkfree+", "average", "copy", "random", "checkpoint"] = "checkfree"
    """What a lost stage is made of: of its neighbours, by their gradients' norms ("checkfree"), with the ends exchanged
    in half of the microbatches ("checkfree+"), alike ("average"); of the one before ("copy"); drawn anew ("random"); or
    all stages go back ("checkpoint").
    """
    every: int = 50
    """Steps between the copies in memory that kind = "checkpoint" goes back to."""

    def __post_init__(self) -> None:
        demand(self, "stage_loss", lambda x: 0 <= x < 1, "choose a chance from 0 to below 1, such as 0.01")
        demand(self, "every", lambda x: x >= 1, "choose 1 or more steps")
        if not self.stage_loss:
            refuse(self, "acts with stage_loss only: set that, or leave it out", "kind")
        if self.kind != "checkpoint":
            refuse(self, 'acts with kind = "checkpoint" only', "every")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a replica is cut in depth, and how its microbatches travel."""

    stages: int = 1
    """Workers in a row that hold a replica's blocks, a part each; 1: every worker holds the whole model."""
    microbatches: int = 4
    """Into how many a replica's batch is cut; more keep the stages busier, on smaller products."""
    routing: str = "fixed"
    """Which way they go: "fixed" through their own replica's stages; "random" at every boundary to a replica drawn for
    each (NoLoCo), which keeps the replicas' stages alike and makes all replicas wait for each other in every step;
    "skippipe" by the paths of a plan, which leave out stages and exchange them; "swarm" at every boundary to a peer of
    the next stage chosen by its speed, where peers may be lost; "ravnest" through clusters of stages that update
    without waiting for each other, each microbatches times a step; or package.module:Class of your own.
    """
    loss_at: Literal["auto", "last", "origin"] = "auto"
    """Where the loss is computed: "last" stage; or "origin", where the text is, which a model needs whose embedding is
    its head as well; "auto" takes the origin for those.
    """
    in_flight: int | str = "auto"
    """Forward passes that a worker holds for their backward: a number; "1f1b", stages - stage, the least that keeps all
    busy on a fast network; "auto", two more, for slow ones; "all", as many as there are.
    """
    order: Literal["plan", "arrival"] = "plan"
    """In which order a worker does its tasks: "plan", one list that all know, the same bits on any network; "arrival",
    whatever has come, which is faster where links vary a lot.
    """
    recompute: bool = False
    """Keep a stage's input alone for the backward pass and run the forward pass again: less memory, a third more work.
    """
    cut: tuple[int, ...] = ()
    """The first block of every stage after the first, such as [2, 4]; empty: where the slowest stage is fastest."""
    clip: Literal["model", "stage"] = "model"
    """Whose gradient inner.max_norm bounds: the whole replica's, as unsplit, for one small message between stages a
    step; or each stage's own.
    """
    together: bool = True
    """Virtual only: a replica's stages reach each other over world.virtual.inner_links; false, and where clusters are
    named: over world.virtual.links.
    """
    options: dict[str, dict[str, Any]] | None = None
    """What parts of your own are called with: [pipeline.options.router], [pipeline.options.boundary]."""

    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    ravnest: RavnestConfig = field(default_factory=RavnestConfig)
    skippipe: SkippipeConfig = field(default_factory=SkippipeConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    def __post_init__(self) -> None:
        one_of_or_code("router", self.routing, ("fixed", "random", *_ROUTINGS))
        check_options("pipeline", self)
        if self.routing == "swarm" and self.swarm.peers:
            self._take_stages("peers", list(self.swarm.peers), len(self.swarm.peers))
        if self.routing == "ravnest" and self.ravnest.clusters:
            clusters = [list(cuts) for cuts in self.ravnest.clusters]
            self._take_stages("clusters", clusters, max(map(len, clusters)) + 1)
        demand(self, "stages microbatches", lambda x: x >= 1, "choose 1 or more")
        in_flight(self.in_flight, 1, self.stages)  # refuses what it does not know
        for routing in _ROUTINGS:
            if routing != self.routing:
                refuse(self, f'acts with routing = "{routing}" only: set that, or leave it out', routing)
        self._check_routing()
        self._check_lost_stages()
        if boundary_name(self.boundary.kind).is_one_way and self.where_loss == "origin":
            raise ValueError(
                f'boundary.kind = "{self.boundary.kind}": the loss is asked for at the origin, and what leaves the '
                'last stage does not fit through; choose "none" or "dct:0.75"'
            )
        if self.stages == 1:
            names = (field.name for field in fields(self) if field.name != "stages")
            refuse(self, "acts on several stages only: set pipeline.stages, or leave it out", *names)
        if self.cut and len(self.cut) != self.stages - 1:
            raise ValueError(
                f"cut = {list(self.cut)}: {self.stages} stages begin at {self.stages - 1} blocks after the first; name "
                "as many, or leave it out"
            )

    def options_of(self, axis: str) -> Mapping[str, Any]:
        """What the code that an axis, router or boundary, names is called with."""
        return (self.options or {}).get(axis, {})

    def _take_stages(self, key: str, value: list[Any], stages: int) -> None:
        """`key` of the routing's own table says how many stages there are; whoever asks sees them in `stages`."""
        if self.stages not in (1, stages):
            raise ValueError(f"stages = {self.stages}: {self.routing}.{key} = {value} is {stages} stages; leave it out")
        object.__setattr__(self, "stages", stages)

    def _check_routing(self) -> None:
        not_with = _ROUTINGS.get(self.routing, ())
        if not_with and self.loss_at != "last":
            not_with += ("loss_at",)
        if self.ravnest.clusters:
            not_with += ("together",)
        refuse(self, f'does not go with routing = "{self.routing}": leave it out', *not_with)
        if not_with and self.stages == 1:
            hint = "swarm.peers = [3, 2]" if self.routing == "swarm" else "ravnest.clusters = [[2, 4], [3], []]"
            raise ValueError(f'stages = 1: with routing = "{self.routing}" say stages, or pipeline.{hint}')
        if self.routing == "skippipe":
            if not self.skippipe.plan:
                raise ValueError(
                    'routing = "skippipe" wants pipeline.skippipe.plan = "plan.json", a file of `isles plan paths`'
                )
            if self.loss_at == "last":
                raise ValueError('loss_at = "last": with a plan the loss is computed at the origin; leave it out')
            refuse(self, "does not go with a plan, which says how many a node holds: leave it out", "in_flight")
        if self.routing == "ravnest":
            if self.in_flight == "all":
                raise ValueError(
                    'in_flight = "all": with routing = "ravnest" a cluster never drains by itself; give a number'
                )
            if self.cut and self.ravnest.clusters:
                raise ValueError("cut and ravnest.clusters say the same: leave cut out")
        if self.swarm.stage_lost == "rebuild":
            if self.stages < 3:
                raise ValueError(
                    f'swarm.stage_lost = "rebuild": of {self.stages} stages none has two neighbours that it could be '
                    'made of; choose "stop", or 3 stages or more'
                )
            if boundary_name(self.boundary.kind).has_layers:
                raise ValueError(
                    f'swarm.stage_lost = "rebuild" with boundary.kind = "{self.boundary.kind}": a stage has learned '
                    'layers that its neighbours do not have; choose "stop"'
                )

    def _check_lost_stages(self) -> None:
        if self.recovery.stage_loss and self.loss_at == "last":
            raise ValueError(
                'loss_at = "last": the first stage is never lost, so it must hold what ends the stream; leave it out'
            )
        if self.recovery.kind == "checkfree+" and (self.routing != "fixed" or self.stages < 3):
            raise ValueError(
                'recovery.kind = "checkfree+" exchanges stages of fixed routes: choose routing = "fixed" and 3 stages '
                'or more, or "checkfree"'
            )

    @property
    def where_loss(self) -> Literal["auto", "last", "origin"]:
        """`loss_at`, or the place where only that will do."""
        if self.routing == "swarm":
            return "last"
        return "origin" if self.skippipe.plan or self.recovery.stage_loss else self.loss_at

    @property
    def neighbours(self) -> int:
        """Workers in a row that reach each other over world.virtual.inner_links: the stages of a replica; with a plan,
        a swarm or clusters none, for their nodes lie where links say.
        """
        return self.stages if self.is_grid and self.together else 1

    @property
    def is_grid(self) -> bool:
        """Whether workers in a row are a replica each: not by a plan, in a swarm, or where clusters are named."""
        return not (self.skippipe.plan or self.routing == "swarm" or self.ravnest.clusters)

    def peers_of(self, workers: int) -> list[list[int]]:
        """The ranks of every stage of a swarm at the start. ValueError for others than the peers that were named."""
        peers = list(self.swarm.peers)
        if not peers:
            each, more = divmod(workers, self.stages)
            peers = [each + (stage < more) for stage in range(self.stages)]
            if not each:
                raise ValueError(
                    f"pipeline.stages = {self.stages}: {workers} workers leave a stage without a peer; set "
                    f"world.workers to {self.stages} or more"
                )
        if sum(peers) != workers:
            raise ValueError(
                f"pipeline.swarm.peers = {peers}: they are {sum(peers)} workers, world.workers = {workers}; "
                f"set it to {sum(peers)}"
            )
        begins = [sum(peers[:stage]) for stage in range(len(peers))]
        return [list(range(begin, begin + count)) for begin, count in zip(begins, peers, strict=True)]

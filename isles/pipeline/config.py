"""The `[pipeline]` section: how a replica is cut in depth, and how its microbatches travel. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from isles.errors import as_typed
from isles.network.routing.orders import in_flight
from isles.pipeline.boundaries.names import StreamCodec, boundary_name

Consistency = Literal["exact", "strict", "relaxed"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a replica is cut in depth, and how its microbatches travel."""

    stages: int = 1
    """Workers in a row that hold a replica's blocks, a part each; 1: every worker holds the whole model."""
    microbatches: int = 4
    """Into how many a replica's batch is cut; more keep the stages busier, on smaller products."""
    routing: Literal["fixed", "random", "skippipe", "swarm", "ravnest"] = "fixed"
    """Which way they go: "fixed" through their own replica's stages; "random" at every boundary to a replica drawn for
    each (NoLoCo), which keeps the replicas' stages alike and makes all replicas wait for each other in every step;
    "skippipe" by the paths of a plan, which leave out stages and exchange them; "swarm" at every boundary to a peer of
    the next stage chosen by its speed, where peers may be lost; "ravnest" through clusters of stages
    that update without waiting for each other, each microbatches times a step.
    """
    clusters: tuple[tuple[int, ...], ...] = ()
    """With routing = "ravnest": of every cluster the first block of each stage but the first, so [[2, 4], [3], []] are
    clusters of 3, 2 and 1 stages, workers in that order; empty: alike, cut as `cut` says.
    """
    stage_lr: Literal["1", "1/(1+tau)"] = "1"
    """With routing = "ravnest": factor on the learning rate of an update by a gradient tau updates old."""
    average_optimizer: bool = False
    """With routing = "ravnest": clusters average the optimizer's state as well as the weights."""
    spares: int = 0
    """With routing = "ravnest" where workers come and go: so many of those who wait go on standing by for lost ones;
    the others make new clusters as soon as they can.
    """
    peers: tuple[int, ...] = ()
    """With routing = "swarm": workers of every stage at the start, such as [3, 2], the first of them of stage 0; empty:
    shared out evenly.
    """
    consistency: Consistency = "exact"
    """With routing = "swarm": what a step is worth where peers are lost: "exact", the gradient of the same microbatches
    once each, mended from what neighbours have kept; "strict", the same by beginning the step again; "relaxed", what a
    lost peer had counted is run again, and counts twice at other stages.
    """
    forward_deadline: float = 30.0
    """With routing = "swarm": seconds after which a microbatch whose forward pass was not told to be done goes to
    another peer.
    """
    backward_deadline: float = 75.0
    """With routing = "swarm": the same from there until its gradient is back."""
    rebalance: Literal["none", "queue", "throughput"] = "none"
    """With routing = "swarm": who goes to another stage between two steps: nobody; whoever has the shortest queue, to
    the stage with the longest ("queue"); whoever helps the slowest stage most ("throughput").
    """
    rebalance_every: float = 300.0
    """Seconds from one look at that to the next."""
    hysteresis: float = 0.25
    """By how much a move must help, as a share of what there is."""
    stage_lost: Literal["stop", "rebuild"] = "stop"
    """With routing = "swarm": where a stage has lost all of its peers: "stop", the run ends, and goes on from its last
    checkpoint with the weights that it had; "rebuild", somebody goes there and makes the stage of its two neighbours
    (CheckFree). The first stage and the last, which hold embedding and head, are not made anew.
    """
    stage_patience: float = 30.0
    """With stage_lost = "rebuild": seconds that the others wait for a new peer, where one can come, before one of
    another stage goes there.
    """
    delay_updates: int = 0
    """With routing = "swarm": 1, a stage adds up a step's gradients behind the next step's microbatches, whose weights
    are then one update older; 0, before them.
    """
    plan: str = ""
    """With routing = "skippipe": the file that `isles pipeline plan` wrote."""
    gradients: Literal["global", "visits"] = "global"
    """With routing = "skippipe": the gradient of a stage is that of the mean loss over all microbatches ("global"), or
    the mean over those that visit it ("visits").
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
    """Keep a stage's input alone for the backward pass and run the forward pass again: less memory, a third more
    work.
    """
    cut: tuple[int, ...] = ()
    """The first block of every stage after the first, such as [2, 4]; empty: where the slowest stage is fastest."""
    clip: Literal["model", "stage"] = "model"
    """Whose gradient inner.max_norm bounds: the whole replica's, as unsplit, for one small message between stages a
    step; or each stage's own.
    """
    boundary: str = "none"
    """What of the stream crosses between stages: "none", all of it; "subspace:16", 16 numbers a token of a stream that
    is kept in a subspace (Protocol Models); "dct:0.75", the quarter of a token's entries of largest size;
    "bottleneck:16" and "maxout:16", 16 numbers of learned layers.
    """
    subspace: Literal["coordinates", "row-wise", "projected"] = "coordinates"
    """How weights are kept in a subspace: by their coordinates in it; or of full size, with one second moment a row, or
    with a projection after each step.
    """
    subspace_blocks: int = 0
    """Blocks, from the first on, that write into the subspace; 0: all before the last stage."""
    subspace_update: int = 0
    """Steps after which the subspace is turned towards the gradients, again and again; 0: never."""
    subspace_rate: float = 0.05
    """How far it is turned, from 0 to 0.5."""
    codec: StreamCodec = "none"
    """Form of what the boundary sends forward; all but "none" lose something."""
    gradient_codec: StreamCodec = "none"
    """The same backward."""
    stage_loss: float = 0.0
    """For experiments: the chance, drawn from run.seed, that a stage behind the first is lost with all of its workers
    after a step.
    """
    recovery: Literal["checkfree", "checkfree+", "average", "copy", "random", "checkpoint"] = "checkfree"
    """What a lost stage is made of: of its neighbours, by their gradients' norms ("checkfree"), with the ends exchanged
    in half of the microbatches ("checkfree+"), alike ("average"); of the one before ("copy"); drawn anew ("random"); or
    all stages go back ("checkpoint").
    """
    recovery_every: int = 50
    """Steps between the copies in memory that recovery = "checkpoint" goes back to."""
    together: bool = True
    """Virtual only: a replica's stages reach each other over world.inner_links; false, and where clusters are named:
    over world.links.
    """

    def __post_init__(self) -> None:
        for key in ("stages", "microbatches"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} = {getattr(self, key)}: choose 1 or more")
        in_flight(self.in_flight, 1, self.stages)  # refuses what it does not know
        self._check_routing()
        self._check_recovery()
        self._check_boundary()
        if self.routing == "ravnest":
            self._check_clusters()
        else:
            self._refuse_without("ravnest", "clusters", "stage_lr", "average_optimizer", "spares")
        if self.routing == "swarm":
            self._check_swarm()
        else:
            keys = ("peers", "consistency", "forward_deadline", "backward_deadline", "rebalance", "stage_lost")
            keys += ("delay_updates",)
            self._refuse_without("swarm", *keys)
        if self.stage_lost == "stop" and self.stage_patience != type(self).stage_patience:
            raise ValueError(
                f'stage_patience = {self.stage_patience} acts with stage_lost = "rebuild": set that, or leave it out'
            )
        if self.rebalance == "none":
            for key in ("rebalance_every", "hysteresis"):
                if (value := getattr(self, key)) != getattr(type(self), key):
                    raise ValueError(f'{key} = {value} acts with rebalance = "queue" or "throughput": set that')
        if self.stages == 1:
            self._refuse_idle_settings()
        if self.cut and len(self.cut) != self.stages - 1:
            raise ValueError(
                f"cut = {list(self.cut)}: {self.stages} stages begin at {self.stages - 1} blocks after the first; name "
                "as many, or leave it out"
            )

    def _check_routing(self) -> None:
        if self.routing != "skippipe":
            self._refuse_without("skippipe", "plan", "gradients")
            return
        if not self.plan:
            raise ValueError('routing = "skippipe" wants plan = "plan.json", a file of `isles pipeline plan`')
        if self.loss_at == "last":
            raise ValueError('loss_at = "last": with a plan the loss is computed at the origin; leave it out')
        if self.in_flight != "auto":
            raise ValueError(f"in_flight = {self.in_flight!r}: a plan says how many a node holds; leave it out")

    def _refuse_without(self, routing: str, *keys: str) -> None:
        for key in keys:
            if getattr(self, key) != getattr(type(self), key):
                written = as_typed(getattr(self, key))
                raise ValueError(f'{key} = {written} acts with routing = "{routing}" only: set that, or leave it out')

    def _check_swarm(self) -> None:
        if self.peers:
            if self.stages not in (1, len(self.peers)):
                raise ValueError(f"stages = {self.stages}: peers = {list(self.peers)} is {len(self.peers)} stages")
            object.__setattr__(self, "stages", len(self.peers))  # said, so that whoever asks sees stages
        if self.stages == 1:
            raise ValueError('stages = 1: with routing = "swarm" say stages, or peers = [3, 2]')
        if self.peers and min(self.peers) < 1:
            raise ValueError(f"peers = {list(self.peers)}: every stage needs at least 1 at the start")
        if self.delay_updates not in (0, 1):
            raise ValueError(f"delay_updates = {self.delay_updates}: choose 0, or 1 step")
        if not self.hysteresis >= 0:
            raise ValueError(f"hysteresis = {self.hysteresis}: choose 0 or more, such as 0.25")
        for key in ("forward_deadline", "backward_deadline", "rebalance_every"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} = {getattr(self, key)}: choose seconds above 0")
            if self.consistency == "strict" and "deadline" in key and getattr(self, key) != getattr(type(self), key):
                raise ValueError(
                    f'{key} = {getattr(self, key):g}: with consistency = "strict" no microbatch goes to another peer, '
                    "and world.pipeline_deadline ends the run; leave it out"
                )
        for key in ("loss_at", "order", "recompute", "together", "stage_loss", "subspace_update"):
            value = getattr(self, key)
            if value != getattr(type(self), key) and value != "last":
                raise ValueError(f'{key} = {as_typed(value)} does not go with routing = "swarm": leave it out')
        if self.stage_lost == "rebuild":
            self._check_rebuilding()

    def _check_rebuilding(self) -> None:
        if self.stages < 3:
            raise ValueError(
                f'stage_lost = "rebuild": of {self.stages} stages none has two neighbours that it could be made of; '
                'choose "stop", or 3 stages or more'
            )
        if boundary_name(self.boundary).has_layers:
            raise ValueError(
                f'stage_lost = "rebuild" with boundary = "{self.boundary}": a stage has learned layers that its '
                'neighbours do not have; choose "stop"'
            )
        if not 0 <= self.stage_patience < math.inf:
            raise ValueError(f"stage_patience = {self.stage_patience}: choose 0 seconds or more, such as 30")

    def _check_clusters(self) -> None:
        for key in ("loss_at", "boundary", "together"):
            if key == "together" and not self.clusters:
                continue
            value = getattr(self, key)
            if value != getattr(type(self), key) and value != "last":
                raise ValueError(f'{key} = {as_typed(value)} does not go with routing = "ravnest": leave it out')
        if self.spares < 0:
            raise ValueError(f"spares = {self.spares}: choose 0 or more")
        if self.in_flight == "all":
            raise ValueError(
                'in_flight = "all": with routing = "ravnest" a cluster never drains by itself; give a number'
            )
        if not self.clusters:
            if self.stages == 1:
                raise ValueError('stages = 1: with routing = "ravnest" say stages, or clusters = [[2, 4], [3], []]')
            return
        if self.cut:
            raise ValueError("cut and clusters say the same: leave cut out")
        most = max(map(len, self.clusters)) + 1
        if most == 1:
            raise ValueError('clusters of one stage each are replicas: leave routing out, and choose method "localsgd"')
        if self.stages not in (1, most):
            raise ValueError(f"stages = {self.stages}: the longest of clusters has {most}; leave it out")
        object.__setattr__(self, "stages", most)  # said, so that whoever asks sees stages

    def _check_boundary(self) -> None:
        kind = boundary_name(self.boundary).kind
        if kind != "subspace":
            for key in ("subspace", "subspace_blocks", "subspace_update"):
                if getattr(self, key) != getattr(type(self), key):
                    raise ValueError(
                        f'{key} = {as_typed(getattr(self, key))} acts with boundary = "subspace:16" and the like: '
                        "choose that, or leave it out"
                    )
        if self.subspace_blocks < 0:
            raise ValueError(f"subspace_blocks = {self.subspace_blocks}: choose 0 (all before the last stage) or more")
        if self.subspace_update < 0:
            raise ValueError(f"subspace_update = {self.subspace_update}: choose 0 (never) or more steps")
        if self.subspace_update and self.subspace != "coordinates":
            raise ValueError(
                f"subspace_update = {self.subspace_update}: only coordinates turn with their subspace; choose "
                'subspace = "coordinates", or 0'
            )
        if not 0 < self.subspace_rate <= 0.5:
            raise ValueError(f"subspace_rate = {self.subspace_rate}: choose a rate above 0, at most 0.5")
        if not self.subspace_update and self.subspace_rate != type(self).subspace_rate:
            raise ValueError(
                f"subspace_rate = {self.subspace_rate} acts with subspace_update: set that, or leave it out"
            )
        if boundary_name(self.boundary).is_one_way and self.where_loss == "origin":
            raise ValueError(
                f'boundary = "{self.boundary}": the loss is asked for at the origin, and what leaves the last stage '
                'does not fit through; choose "none" or "dct:0.75"'
            )

    @property
    def lossy(self) -> list[str]:
        """The settings that change what is computed, as they are written."""
        found = [("boundary", self.boundary)] if boundary_name(self.boundary).kind not in ("none", "subspace") else []
        found += [(key, getattr(self, key)) for key in ("codec", "gradient_codec") if getattr(self, key) != "none"]
        return [f'pipeline.{key} = "{value}"' for key, value in found]

    def _check_recovery(self) -> None:
        if not 0 <= self.stage_loss < 1:
            raise ValueError(f"stage_loss = {self.stage_loss}: choose a chance from 0 to below 1, such as 0.01")
        if self.recovery_every < 1:
            raise ValueError(f"recovery_every = {self.recovery_every}: choose 1 or more steps")
        if not self.stage_loss:
            if self.recovery != "checkfree":
                raise ValueError(f'recovery = "{self.recovery}" acts with stage_loss only: set that, or leave it out')
        elif self.loss_at == "last":
            raise ValueError(
                'loss_at = "last": the first stage is never lost, so it must hold what ends the stream; leave it out'
            )
        elif self.recovery == "checkfree+" and (self.routing != "fixed" or self.stages < 3):
            raise ValueError(
                'recovery = "checkfree+" exchanges stages of fixed routes: choose routing = "fixed" and 3 stages or '
                'more, or "checkfree"'
            )
        if self.recovery != "checkpoint" and self.recovery_every != 50:
            raise ValueError(f'recovery_every = {self.recovery_every} acts with recovery = "checkpoint" only')

    @property
    def where_loss(self) -> Literal["auto", "last", "origin"]:
        """`loss_at`, or the place where only that will do."""
        if self.routing == "swarm":
            return "last"
        return "origin" if self.routing == "skippipe" or self.stage_loss else self.loss_at

    @property
    def neighbours(self) -> int:
        """Workers in a row that reach each other over world.inner_links: the stages of a replica; with a plan, a
        swarm or clusters none, for their nodes lie where links say.
        """
        return self.stages if self.together and not self.clusters and self.routing not in ("skippipe", "swarm") else 1

    def _refuse_idle_settings(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "stages" and value != field.default:
                raise ValueError(
                    f"{field.name} = {as_typed(value)} acts on several stages only: set pipeline.stages, or leave it "
                    "out"
                )

"""The `[pipeline]` section: how a replica is cut in depth, and how its microbatches travel. Loads no torch.

[pipeline.swarm] swarm/config.py    [pipeline.ravnest] ravnest/config.py    [pipeline.boundary] boundaries/config.py
[pipeline.skippipe] [pipeline.recovery] here
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from isles.errors import demand
from isles.network.routing.orders import in_flight
from isles.pipeline.boundaries.config import BoundaryConfig
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.ravnest.config import RavnestConfig
from isles.pipeline.swarm.config import SwarmConfig
from isles.tables import refuse

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
    routing: Literal["fixed", "random", "skippipe", "swarm", "ravnest"] = "fixed"
    """Which way they go: "fixed" through their own replica's stages; "random" at every boundary to a replica drawn for
    each (NoLoCo), which keeps the replicas' stages alike and makes all replicas wait for each other in every step;
    "skippipe" by the paths of a plan, which leave out stages and exchange them; "swarm" at every boundary to a peer of
    the next stage chosen by its speed, where peers may be lost; "ravnest" through clusters of stages that update
    without waiting for each other, each microbatches times a step.
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

    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    ravnest: RavnestConfig = field(default_factory=RavnestConfig)
    skippipe: SkippipeConfig = field(default_factory=SkippipeConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    def __post_init__(self) -> None:
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
            mend = "swarm.peers = [3, 2]" if self.routing == "swarm" else "ravnest.clusters = [[2, 4], [3], []]"
            raise ValueError(f'stages = 1: with routing = "{self.routing}" say stages, or pipeline.{mend}')
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
        return "origin" if self.routing == "skippipe" or self.recovery.stage_loss else self.loss_at

    @property
    def neighbours(self) -> int:
        """Workers in a row that reach each other over world.virtual.inner_links: the stages of a replica; with a plan,
        a swarm or clusters none, for their nodes lie where links say.
        """
        apart = self.ravnest.clusters or self.routing in ("skippipe", "swarm") or not self.together
        return 1 if apart else self.stages

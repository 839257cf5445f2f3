"""The configuration of a run: one frozen dataclass a section, each beside its owner.

[model] isles.models.config    [data] isles.data.config    [inner] inner.py    [replicas] the method's own Config
[pipeline] isles.pipeline.config    [memory] isles.memory.config    [world] world.py    [run] here
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

from isles.base.errors import demand, unknown_name
from isles.base.imports import import_target
from isles.base.tables import refuse
from isles.data.config import DataConfig
from isles.memory.config import MemoryConfig
from isles.models.config import ModelConfig
from isles.models.sizes import Shape
from isles.network.links import Links, links
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.config import PipelineConfig
from isles.replicas.config import MethodConfig
from isles.training.config.inner import InnerConfig
from isles.training.config.world import WorldConfig

_KIND = "isles.training.kinds:kind_of"
"""What differs between kinds of worlds, imported where it is asked for: it imports what a configuration is for."""
_CONFLICTS = "isles.training.config.conflicts:refuse_conflicts"
"""What goes together, imported where anything may not."""
_LOGGERS = ("tensorboard", "wandb")  # isles.training.records.loggers holds what is behind the names


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, how often."""

    steps: int = 800
    """Inner steps a worker."""
    tokens: int = 0
    """Tokens of all workers together after which the run ends, with the step, or where workers come and go the round,
    in which they are reached; steps then follow from it. 0: steps says when.
    """
    priced_as: str = ""
    """Virtual only: time and bytes as of a model "1B", "1B, A100, 64k" or "1B, 2.5s"; see `plan.run_plan.priced`."""
    seed: int = 0
    """Seed of weights and data order, and of a method that draws (NoLoCo's pairs) unless `replicas.seed` is given."""
    start: str = ""
    """A finished run, model.safetensors or DCP folder whose weights training begins from, all else anew; "": drawn."""
    max_hours: float = 0.0
    """Hours after which a run ends as by SIGTERM, with a checkpoint, counted anew after a resume; 0: no limit."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    validate_every: int = 200
    """Steps between validations (0: only at the end)."""
    checkpoint_every: int | Literal["auto"] = "auto"
    """Steps between checkpoints (0: only when interrupted). "auto": one after the last step, for `isles resume --steps`
    (none on the virtual clock); with a lighthouse every 10 minutes, or every 5 % of the run if that is shorter, but
    once a minute at most.
    """
    keep_checkpoints: int = 2
    """How many of the newest stay (0: all; with several machines at least two, so that all have one in common)."""
    grace: float = 25.0
    """Seconds after SIGTERM or SIGHUP in which the workers agree on a step and save before they are ended; spot markets
    give 30 to 120.
    """
    loggers: tuple[str, ...] = ()
    """Tools that are fed with metrics.jsonl live, in RUN/tensorboard and RUN/wandb (offline): ["tensorboard", "wandb"];
    each is an extra of this package.
    """

    def __post_init__(self) -> None:
        demand(self, "steps log_every", lambda x: x >= 1, "choose 1 or more steps")
        demand(self, "tokens validate_every keep_checkpoints seed", lambda x: x >= 0, "choose 0 or more")
        demand(self, "checkpoint_every", lambda x: x == "auto" or x >= 0, 'choose 0 or more steps, or "auto"')
        demand(self, "grace", lambda x: 0 < x < math.inf, "choose a positive number of seconds")
        demand(self, "max_hours", lambda x: 0 <= x < math.inf, "choose 0 (no limit) or more hours")
        for name in self.loggers:
            if name not in _LOGGERS:
                raise ValueError(unknown_name("loggers", name, _LOGGERS))
        if len(set(self.loggers)) < len(self.loggers):
            raise ValueError(f"loggers = {list(self.loggers)}: name each one once")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run: its method, and a section a field, in the order in which they are written."""

    method: str
    """A name of `isles.METHODS` or package.module:Class."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    replicas: MethodConfig
    """That method's settings."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.run.priced_as and not self.world.is_simulated:
            raise ValueError('run.priced_as (--as) is of the virtual clock: set world.backend = "virtual"')
        import_target("conflicts", _CONFLICTS)(self)
        if self.pipeline.stages > 1:
            self._check_pipeline()
        if self.world.is_simulated and self.island == 1:
            mend = "acts within islands only: set world.inner, or stages that are together, or leave it out"
            refuse(self, mend, "world.virtual.inner_links", "world.virtual.shares_uplink")
        if self.world.virtual.shares_uplink:
            self.network.check(self.world.workers)

    @property
    def island(self) -> int:
        """Workers in a row that reach each other over world.virtual.inner_links: of a replica, or a stage of it."""
        return self.world.inner * self.pipeline.neighbours

    @property
    def network(self) -> Links:
        """Between islands, on the virtual clock."""
        made = links(self.world.virtual.links)
        return replace(made, devices=self.island) if self.world.virtual.shares_uplink else made

    @property
    def survives(self) -> bool:
        """Whether the workers that are left go on when others fail."""
        return self.replicas.survives or self._kind.has_peers

    @property
    def replicas_in_all(self) -> int:
        """Copies of the model that the workers make up."""
        return self._kind.replicas(self)

    @property
    def _kind(self) -> Any:
        return import_target("pipeline.routing", _KIND)(self.pipeline)

    def _check_boundary(self, shape: Shape) -> None:
        boundary = boundary_name(self.pipeline.boundary.kind)
        boundary.check_width(shape.d_model)
        if boundary.is_one_way and shape.tie_embeddings:
            raise ValueError(
                f'pipeline.boundary.kind = "{self.pipeline.boundary.kind}" and model.tie_embeddings = true: the stream '
                "must come home to the head, and what leaves the last stage does not fit through; choose "
                'model.tie_embeddings = false, or "dct:0.75"'
            )

    def _check_pipeline(self) -> None:
        stages, world = self.pipeline.stages, self.world
        if self.pipeline.is_grid and world.workers % (stages * world.inner):
            inside = f" of {world.inner} workers each" if world.inner > 1 else ""
            raise ValueError(
                f"pipeline.stages = {stages}: {world.workers} workers do not make whole replicas of {stages} stages"
                f"{inside}; choose a multiple of {stages * world.inner} as world.workers"
            )
        sequences = self.data.batch_size_per_worker(self._kind.check(self))
        if sequences % self.pipeline.microbatches:
            raise ValueError(
                f"pipeline.microbatches = {self.pipeline.microbatches} does not divide a replica's batch of "
                f"{sequences} sequences: choose a divisor, or another data.batch_size"
            )
        if self.model.own is None:
            self._check_boundary(self.model.shape())


ORDER = tuple(section.name for section in fields(Config) if section.name != "method")
"""The sections of a CONFIG.toml; `method` stands in [replicas]."""
SECTIONS: dict[str, Any] = {
    section.name: section.default_factory for section in fields(Config) if section.default_factory is not MISSING
}
"""The class of each section that is the same for all methods."""

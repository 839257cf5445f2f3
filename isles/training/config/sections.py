"""The configuration of a run: one frozen dataclass a section, each beside its owner.

[model] isles.models.config    [data] isles.data.config    [inner] inner.py    [replicas] the method's own Config
[memory] isles.memory.config    [world] [run] here
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from itertools import cycle, islice
from typing import Any, Literal

from isles.data.config import DataConfig
from isles.errors import unknown_name
from isles.imports import named
from isles.memory.config import MemoryConfig
from isles.models.config import ModelConfig
from isles.models.sizes import Shape
from isles.network.named import links
from isles.network.pauses import Pauses
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.config import PipelineConfig
from isles.replicas.config import MethodConfig
from isles.schema import BACKENDS, known_backend
from isles.training.config.inner import InnerConfig

_MOST_JITTER = 3.0  # beyond it one step in a thousand takes longer than all others together
_PAUSE = 60.0  # seconds
_LEAST_SILENCE = 30.0  # seconds
JoinState = Literal["full", "anchors"]
LEASE, _LEAST_LEASE, _MOST_LEASE = 3.0, 0.5, 60.0  # seconds
SILENCE = 60.0  # seconds
_ROUTINGS = {
    "skippipe": "isles.training.config.planned:check",
    "swarm": "isles.training.config.swarmed:check",
    "ravnest": "isles.training.config.clustered:check",
}
"""What goes with these routings, imported where one is chosen: check(Config) -> workers that read text. ValueError, one
line that names the key, for what does not.
"""
_LOGGERS = ("tensorboard", "wandb")  # isles.training.records.loggers holds what is behind the names


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Who trains, and over what."""

    workers: int = 4
    """All of them; replicas, unless inner is above 1. "auto", or left out: one a GPU of each machine, 4 without GPUs or
    on a simulated clock.
    """
    inner: int = 1
    """Workers of an island, which are one replica and share its batch; across islands the run's method exchanges, each
    worker its part.
    """
    inside: Literal["ddp", "fsdp"] = "ddp"
    """The method inside islands: ddp or fsdp."""
    backend: str = "distributed"
    """What the workers are: "distributed" starts real processes here that talk over gloo; "virtual" runs all workers in
    this process on a simulated network, with the same results.
    """
    threads: int = 0
    """Torch threads a worker; 1: the same bits on any machine. 0 or "auto": 1, but a share of the cores near its GPU
    where each worker of a machine has one of its own.
    """
    links: str = "home-fibre"
    """Virtual only: a preset of `isles.network.links`, a rate and a latency such as "40Mbit/s, 25ms", or a file of your
    own (`isles.network.own`).
    """
    inner_links: str = "lan"
    """Virtual only: the same inside islands."""
    step_seconds: float = 0.1
    """Virtual only: what an inner step is charged with."""
    step_factors: tuple[float, ...] = ()
    """Virtual only: factor on the step of worker r, the list repeated over all workers; [1.0, 1.0, 1.0, 2.0] makes
    every fourth half as fast; empty: all alike.
    """
    step_jitter: float = 0.0
    """Virtual only: sigma of a log-normal factor (mean 1) on every step."""
    pause_every: float = 0.0
    """Virtual only: mean seconds from a worker's return to its next pause, exponential; 0: nobody pauses."""
    pause_seconds: float = _PAUSE
    """Virtual only: mean length of a pause, exponential; NoLoCo with on_peer_failure = "solo" goes on without a paused
    partner after outer_deadline, all other methods wait.
    """
    drop_outer: float = 0.0
    """Probability that a worker's outer gradient of a round is dropped, drawn from run.seed: the mean is of those that
    came (also where one is not finite), the worker goes on from its own weights. 1: nothing is ever exchanged.
    """
    outer_deadline: float = 60.0
    """Longest wait for a peer's part of a round, seconds; raise it if workers differ much in speed."""
    pipeline_deadline: float = 75.0
    """Longest wait of a stage for another one's microbatch, seconds; raise it if stages are slow: the last waits for
    all others' first forward passes.
    """
    eval_deadline: float = 600.0
    """Longest wait for a peer in validation and at the end, seconds; raise it if one validates for minutes longer."""
    join_deadline: float = 300.0
    """Longest wait for the other machines at the start, and then for the workers to meet, seconds; raise it if they are
    started at different times.
    """
    silence: float = SILENCE
    """Seconds without a sign of life after which a worker or a machine counts as lost, 30 or more; raise it to ride out
    longer cuts of a line. Deadlines count from the last byte that moved.
    """
    lease: float = LEASE
    """Where workers join a lighthouse: seconds of silence after which one counts as gone, for it stands still or is cut
    off; one that is killed is missed at once. Raise it for lines that stand still longer.
    """
    max_members: int = 1024
    """Where workers join a lighthouse: how many may be there at once; whoever comes then is refused a seat."""
    join_state: JoinState = "full"
    """Where workers join a lighthouse: what a joiner is given, "full": all that its donor trains with; "anchors": the
    anchors and outer momenta alone, about a third of that for AdamW: its inner rate rises over two rounds.
    """
    slowest_link: float = 10e6
    """Bits per second; long transfers get five times what such a link would need, and where the system does not tell
    whether a line moves what one of 0.5 Mbit/s would need; lower it if a big model's peers are called late.
    """
    trust_ratio: float = 10.0
    """What a peer sends in a round may be so many times as large as such payloads usually are (a gradient of one step
    100 times that, and all in runs by a plan); more, or what is not finite, is refused. Raise it if honest workers
    differ that much.
    """

    def __post_init__(self) -> None:
        known_backend(self.backend)
        if not self.trust_ratio > 1:
            raise ValueError(f"trust_ratio = {self.trust_ratio}: choose more than 1, such as 10")
        for key, least in (("workers", 1), ("inner", 1), ("threads", 0), ("max_members", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} = {getattr(self, key)}: choose {least} or more")
        if self.workers % self.inner:
            raise ValueError(
                f"inner = {self.inner}: {self.workers} workers are no whole islands; choose a divisor of world.workers"
            )
        if self.inside != "ddp" and self.inner == 1:
            raise ValueError(f'inside = "{self.inside}" acts within islands only: set world.inner, or method = "fsdp"')
        if self.inner_links != "lan" and (self.inner == 1 or not self.is_simulated):
            raise ValueError(
                f"inner_links = {self.inner_links!r} acts within islands on the virtual clock only: set world.inner "
                'and world.backend = "virtual", or leave it out'
            )
        if not 0 < self.slowest_link < math.inf:
            raise ValueError(f"slowest_link = {self.slowest_link}: choose a positive rate in bits/s, such as 10e6")
        for key in ("outer_deadline", "pipeline_deadline", "eval_deadline", "join_deadline"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} = {getattr(self, key)}: choose a positive number of seconds")
        if not _LEAST_SILENCE <= self.silence < math.inf:
            raise ValueError(
                f"silence = {self.silence}: choose {_LEAST_SILENCE:g} seconds or more, for a full slow line can stand "
                "still for 16"
            )
        if not _LEAST_LEASE <= self.lease <= _MOST_LEASE:
            raise ValueError(f"lease = {self.lease}: choose {_LEAST_LEASE:g} to {_MOST_LEASE:g} seconds")
        for factor in self.step_factors:
            if not 0 < factor < math.inf:
                raise ValueError(f"step_factors: {factor}: choose positive factors, such as [1.0, 1.0, 2.0]")
        if not 0 <= self.step_jitter <= _MOST_JITTER:
            raise ValueError(f"step_jitter = {self.step_jitter}: choose 0 to {_MOST_JITTER:g}, such as 0.2")
        for key in ("step_seconds", "pause_every", "pause_seconds"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{key} = {getattr(self, key)}: choose 0 or more seconds")
        if self.pause_every and not self.pause_seconds:
            raise ValueError("pause_seconds = 0.0: choose how long a pause is, or pause_every = 0 for none")
        if self.pause_seconds != _PAUSE and not self.pause_every:
            raise ValueError(f"pause_seconds = {self.pause_seconds}: nobody pauses; choose pause_every, such as 600")
        if not 0 <= self.drop_outer <= 1:
            raise ValueError(f"drop_outer = {self.drop_outer}: choose a probability, 0 to 1")
        uneven = [key for key in ("step_factors", "step_jitter", "pause_every") if getattr(self, key)]
        if uneven and not self.is_simulated:
            mend = 'take it out, or set world.backend = "virtual"'
            raise ValueError(f"{uneven[0]} is of the virtual clock; real speeds and pauses are as they are: {mend}")
        networks = links(self.links), links(self.inner_links)  # refuses an unknown name
        if self.is_simulated:
            for network in networks[: 1 + (self.inner > 1)]:
                network.check(self.workers)

    @property
    def is_simulated(self) -> bool:
        """Whether messages and computing take the time of a model of them."""
        return BACKENDS[self.backend].is_simulated

    @property
    def has_processes(self) -> bool:
        """Whether every worker is a process of its own."""
        return BACKENDS[self.backend].has_processes

    @property
    def start_threads(self) -> int:
        """Torch threads that a worker begins with: `isles.training.cores` may add some."""
        return self.threads or 1

    @property
    def pauses(self) -> Pauses | None:
        """When workers of a virtual run are away."""
        return Pauses(every=self.pause_every, seconds=self.pause_seconds) if self.pause_every else None

    @property
    def islands(self) -> int:
        """Replicas: islands, or workers where each is one."""
        return self.workers // self.inner

    @property
    def factors(self) -> tuple[float, ...]:
        """Of every worker's step."""
        return tuple(islice(cycle(self.step_factors or (1.0,)), self.workers))


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
    """Virtual only: time and bytes as of a model "1B", "1B, A100, 64k" or "1B, 2.5s"; see `running.priced`."""
    seed: int = 0
    """Seed of weights and data order, and of a method that draws (NoLoCo's pairs) unless `replicas.seed` is given."""
    start: str = ""
    """A finished run (or its model.safetensors) whose weights training begins from, all else anew; "" draws them."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    validate_every: int = 200
    """Steps between validations (0: only at the end)."""
    checkpoint_every: int = 0
    """Steps between checkpoints (0: only when interrupted)."""
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
        for key in ("steps", "log_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} = {getattr(self, key)}: choose 1 or more steps")
        for key in ("tokens", "validate_every", "checkpoint_every", "keep_checkpoints", "seed"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} = {getattr(self, key)}: choose 0 or more")
        if not 0 < self.grace < math.inf:
            raise ValueError(f"grace = {self.grace}: choose a positive number of seconds")
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
        if self.pipeline.stages > 1:
            self._check_pipeline()

    @property
    def survives(self) -> bool:
        """Whether the workers that are left go on when others fail."""
        return self.replicas.survives or self.pipeline.routing in ("ravnest", "swarm")

    @property
    def replicas_in_all(self) -> int:
        """Copies of the model that the workers make up."""
        if self.pipeline.clusters:
            return len(self.pipeline.clusters)
        if self.pipeline.routing == "swarm":
            return 1
        return self.world.workers // (self.pipeline.stages * self.world.inner)

    def _check_boundary(self, shape: Shape) -> None:
        boundary = boundary_name(self.pipeline.boundary)
        boundary.check_width(shape.d_model)
        if boundary.is_one_way and shape.tie_embeddings:
            raise ValueError(
                f'pipeline.boundary = "{self.pipeline.boundary}" and model.tie_embeddings = true: the stream must come '
                "home to the head, and what leaves the last stage does not fit through; choose model.tie_embeddings = "
                'false, or "dct:0.75"'
            )

    def _check_pipeline(self) -> None:
        stages, world, routing = self.pipeline.stages, self.world, self.pipeline.routing
        if (
            not self.pipeline.clusters
            and routing not in ("skippipe", "swarm")
            and world.workers % (stages * world.inner)
        ):
            inside = f" of {world.inner} workers each" if world.inner > 1 else ""
            raise ValueError(
                f"pipeline.stages = {stages}: {world.workers} workers do not make whole replicas of {stages} stages"
                f"{inside}; choose a multiple of {stages * world.inner} as world.workers"
            )
        readers = self.replicas_in_all
        if routing in _ROUTINGS:
            readers = named(f"routing {routing}", _ROUTINGS[routing])(self)
        sequences = self.data.batch_size_per_worker(readers)
        if sequences % self.pipeline.microbatches:
            raise ValueError(
                f"pipeline.microbatches = {self.pipeline.microbatches} does not divide a replica's batch of "
                f"{sequences} sequences: choose a divisor, or another data.batch_size"
            )
        if self.pipeline.stage_loss and self.method not in ("none", "ddp"):
            raise ValueError(
                f'pipeline.stage_loss with replicas.method = "{self.method}": what it keeps of a stage would have to '
                'follow; choose "none" or "ddp"'
            )
        if self.model.own is None:
            self._check_boundary(self.model.shape())
        if self.inner.accumulation > 1:
            raise ValueError(
                f"inner.accumulation = {self.inner.accumulation}: with stages a batch is cut into microbatches anyway; "
                "set it to 1, and raise data.batch_size and pipeline.microbatches"
            )
        if self.model.autocast == "fp16":
            raise ValueError('model.autocast = "fp16" wants a gradient scaler; stages share none: choose "bf16"')
        if world.inside == "fsdp":
            raise ValueError('world.inside = "fsdp" gathers a whole model; inside a stage choose "ddp"')


ORDER = tuple(section.name for section in fields(Config) if section.name != "method")
"""The sections of a CONFIG.toml; `method` stands in [replicas]."""
SECTIONS: dict[str, Any] = {
    section.name: section.default_factory for section in fields(Config) if section.default_factory is not MISSING
}
"""The class of each section that is the same for all methods."""

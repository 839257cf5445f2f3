"""The plan of a run as a record, the same for every kind of world. None: not known, or not applicable there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from isles.base.parsing import parse_json
from isles.memory.plan import MemoryPlan
from isles.models import choose_device
from isles.network.exchange_plan import PlannedExchange, WorkerMemory
from isles.plan.replay import TimeAccount
from isles.replicas.exchange_schedule import Outline
from isles.training.config.sections import Config
from isles.training.config.trust import names_of

_SHOWN = ("sent", "lands", "fragment", "what", "groups", "bytes_sent")  # fields of an exchange in the JSON output


def device_of(config: Config) -> str:
    """The device on which workers compute; for "auto", the one that this machine has."""
    return choose_device(config.model).type if config.model.device == "auto" else config.model.device


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What a worker of one kind holds and sends.

    ranks: the workers of this kind. blocks: [first, stop) of the model's. memory: bytes at the fullest, with
    activations if `held` names them. versions: of the weights in memory, the newest included. microbatches: forward
    passes per step. forwards: the most forward passes in flight, waiting for their backward pass; saved: bytes of their
    saved inputs, not part of `memory`. step_bytes: bytes sent per step, in a fixed pipeline to other stages; the
    largest of unequal workers. average_bytes: sent in one average of clusters. seconds: of computing a step.
    """

    ranks: tuple[int, ...]
    parameters: int
    memory: WorkerMemory
    cluster: int | None = None
    stage: int | None = None
    blocks: tuple[int, int] | None = None
    versions: int | None = None
    microbatches: float | None = None
    forwards: int | None = None
    saved: int | None = None
    step_bytes: int | None = None
    average_bytes: int | None = None
    seconds: float | None = None


def stage_fillings(memory: Sequence[WorkerMemory]) -> list[WorkerPlan]:
    """Worker plans of a replica's stages, with their memory only. memory: of each stage."""
    return [WorkerPlan(ranks=(at,), stage=at, parameters=0, memory=of_stage) for at, of_stage in enumerate(memory)]


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """How a run's time divides into computing and waiting. Seconds; bits per second.

    account: of the whole run, mean over the workers; None: too much to replay. step: of an inner step, with waiting.
    round_wait: waiting per round, without waiting for stages. rate, latency: of the virtual backend's slowest link;
    None: the real network is not known. wanted: the upload rate at which a worker computes 95 % of the time; None: no
    rate is enough, or the workers are stages. reached: share of the throughput that the peers of a swarm's slowest
    stage have together.
    """

    account: TimeAccount | None
    step: float | None
    round_wait: float | None = None
    rate: float | None = None
    latency: float | None = None
    wanted: float | None = None
    reached: float | None = None

    @property
    def utilisation(self) -> float | None:
        """Share of the time that a worker computes."""
        return None if self.account is None else self.account.share

    @property
    def bubble(self) -> float | None:
        """Share of the time that a worker waits for other stages."""
        if self.account is None:
            return None
        total = self.account.computing + self.account.waiting
        return self.account.for_stages / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Whether the fullest worker fits its machine.

    device_bytes, host_bytes: what it needs; device_room, host_room: what the machine has (0 on the host: its RAM is the
    device). activations: part of device_bytes; None: not known. suggestions: settings, each of which would make it fit.
    """

    machine: str
    fits: bool
    activations: int | None
    device_bytes: int
    host_bytes: int
    device_room: float
    host_room: float
    suggestions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before it starts. Bytes are exact, with headers, and include those sent before the first step.

    placement: of the workers, as text. flops: of a token, forward and backward, of a worker's model; with stages, of
    the whole model. workers: without stages one entry, the worker that holds most. standby: number of standby workers.
    placed: memory plan of a worker. outline: of the worker that sends most. bytes_sent: by worker, in the whole run.
    between_stages: mean part of it that goes to other stages. stream_ratio: bytes of the full residual stream per byte
    that crosses. ddp_bytes: what a worker would send in data parallel. microbatch_bytes: of one microbatch in a swarm.
    swarm_bytes: sent by all peers per step if no peer is lost and no deadline passes. averages, segments: number of
    averages of clusters, and of segments. agreements: on the remaining workers, before validations that do not follow
    an average. step_seconds: of computing a step of a whole replica; with a plan of paths, from the start of a step to
    the end of its last task. time: None if nothing is sent or the step time is not known. startup: seconds until all
    workers have worker 0's weights. fit: None if the machine is not known.
    """

    config: Config
    placement: str
    parameters: int
    tokens_per_step: int
    workers: tuple[WorkerPlan, ...]
    standby: int = 0
    flops: int | None = None
    placed: MemoryPlan | None = None
    outline: Outline | None = None
    bytes_sent: tuple[int, ...] | None = None
    between_stages: float | None = None
    stream_ratio: float | None = None
    ddp_bytes: float | None = None
    microbatch_bytes: int | None = None
    swarm_bytes: int | None = None
    averages: int | None = None
    segments: int | None = None
    agreements: int | None = None
    step_seconds: float | None = None
    time: RunTime | None = None
    startup: float | None = None
    fit: MemoryFit | None = None
    notices: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return device_of(self.config)

    @property
    def size(self) -> int:
        """Number of workers, standby workers included."""
        return self.standby + sum(len(worker.ranks) for worker in self.workers)

    @property
    def fullest(self) -> WorkerPlan:
        return max(self.workers, key=lambda worker: worker.memory.peak)

    @property
    def is_staged(self) -> bool:
        """Whether replicas are cut into stages."""
        return self.workers[0].stage is not None

    @property
    def is_by_paths(self) -> bool:
        """Whether a plan of paths says which node does which microbatches."""
        return self.outline is not None and self.workers[0].microbatches is not None

    def as_json(self) -> dict[str, Any]:
        values, config = {field.name: _plain(getattr(self, field.name)) for field in fields(self)[1:]}, self.config
        named = {"method": config.method, "backend": config.world.backend, "steps": config.run.steps}
        return named | {"code": names_of(config), "device": self.device} | values


def _plain(value: Any) -> Any:
    if isinstance(value, MemoryPlan):
        return parse_json(value.to_json())
    if isinstance(value, PlannedExchange):
        return {key: _plain(getattr(value, key)) for key in _SHOWN}
    if is_dataclass(value):
        table = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return table | ({"peak_bytes": value.peak} if isinstance(value, WorkerMemory) else {})
    if isinstance(value, tuple):
        return value._asdict() if hasattr(value, "_asdict") else [_plain(item) for item in value]
    return value

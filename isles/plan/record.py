"""The plan of a run as a record, the same for every kind of world. None: not known, or there is no such thing there."""

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

_SHOWN = ("sent", "lands", "fragment", "what", "groups", "bytes_sent")  # of an exchange, for machines


def device_of(config: Config) -> str:
    """Where workers compute; for "auto", what this machine has."""
    return choose_device(config.model).type if config.model.device == "auto" else config.model.device


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What workers that are alike hold and send.

    ranks: of these. blocks: [first, stop) of the model's. memory: bytes at the peak; with activations where `held`
    names them. versions: of the weights that it holds, the newest one included. microbatches: of a step whose forward
    pass it does. forwards: most forward passes that wait for their backward pass; saved: bytes of their inputs, not in
    `memory`. step_bytes: that a worker sends in a step, in a fixed pipeline to other stages; the most of unequal ones.
    average_bytes: sent in an average of clusters. seconds: of computing a step.
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
    """What the workers of a replica's stages hold, without the rest. memory: of each stage."""
    return [WorkerPlan(ranks=(stage,), stage=stage, parameters=0, memory=one) for stage, one in enumerate(memory)]


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """How exchanging fits between the steps. Seconds; bits per second.

    account: of the whole run, a mean over the workers; None where there is too much to replay. step: of an inner step,
    all waiting included; round_wait: waiting a round, for other stages aside. rate, latency: of the virtual backend's
    slowest link; None where the real network is not known. wanted: the upload rate of a worker at which it computes 95
    % of the time; None: no rate is enough, or the workers are stages. reached: share of what the peers of a swarm's
    slowest stage can do together.
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
    """Whether the fullest worker fits its machine. Bytes that it needs, and that the machine has, of the device and of
    the host (0: its RAM is the device). activations: what of the device's they are; None: not known. suggestions:
    settings that each alone would make it fit.
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
    """A run before it is run. Bytes are exact, headers included, those before the first step too.

    placement: of the workers, in words. flops: of a token, forward and backward, at a worker or where there are
    stages in the whole model. workers: without stages one entry, of who holds most; standby: spare ones beside
    them. placed: the plan of a worker's memory, where there is one. outline: of the worker that sends
    most. bytes_sent: by worker, of the whole run; between_stages: what of that goes to other stages, on average;
    stream_ratio: how many times as much the whole stream would be; ddp_bytes: what data parallel would send, a worker.
    microbatch_bytes: of one in a swarm; swarm_bytes: that all peers send in a step, while nobody is lost and no
    deadline passes. averages, segments: of clusters, how many and over what; agreements: on who is left, before
    validations that do not follow one. step_seconds: of computing a step of a whole replica; by a plan of paths from a
    step's start to the end of its last task. time: where something is sent and the seconds of a step are known.
    startup: seconds until worker 0's weights are at all workers. fit: where the machine is known.
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
        """Workers, those that stand by among them."""
        return self.standby + sum(len(worker.ranks) for worker in self.workers)

    @property
    def fullest(self) -> WorkerPlan:
        return max(self.workers, key=lambda worker: worker.memory.peak)

    @property
    def is_staged(self) -> bool:
        """Whether no worker has a whole replica."""
        return self.workers[0].stage is not None

    @property
    def is_by_paths(self) -> bool:
        """Whether a plan of paths says which node does which microbatches."""
        return self.outline is not None and self.workers[0].microbatches is not None

    def as_json(self) -> dict[str, Any]:
        own, config = {field.name: _plain(getattr(self, field.name)) for field in fields(self)[1:]}, self.config
        named = {"method": config.method, "backend": config.world.backend, "steps": config.run.steps}
        return named | {"code": names_of(config), "device": self.device} | own


def _plain(value: Any) -> Any:
    if isinstance(value, MemoryPlan):
        return parse_json(value.to_json())
    if isinstance(value, PlannedExchange):
        return {key: _plain(getattr(value, key)) for key in _SHOWN}
    if is_dataclass(value):
        table = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return table | ({"peak_bytes": value.peak} if isinstance(value, WorkerMemory) else {})
    if isinstance(value, tuple):
        return value._asdict() if hasattr(value, "_asdict") else [_plain(one) for one in value]
    return value

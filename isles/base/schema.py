"""What a run writes, and on what it may run, in names that need no torch: trainer, launcher, report and command all
take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What the workers of a run are. How they are started: `isles.running.run`."""

    name: str
    """What a user writes as world.backend."""
    is_simulated: bool
    """Messages and computing take the time of a model of them, on a clock of its own."""
    has_processes: bool
    """Every worker is a process of its own: torch's own collectives, several machines and torchrun can be had."""


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name="distributed", is_simulated=False, has_processes=True),
        Backend(name="virtual", is_simulated=True, has_processes=False),
    )
}


def backend_of(config: Mapping[str, Any]) -> Backend:
    """Of the tables of a config.toml, which need not be a valid one; `distributed` where it says nothing of use."""
    world = config.get("world")
    name = world.get("backend") if isinstance(world, dict) else None
    return BACKENDS.get(str(name), BACKENDS["distributed"])


def known_backend(name: str) -> Backend:
    """ValueError for a name that stands for none."""
    if name not in BACKENDS:
        raise ValueError(f"backend = {name!r}: choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _total() -> Any:
    return field(metadata={"total": True})


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of metrics.jsonl, of one worker. Units: nats, tokens, bytes, seconds; totals are since the start of the
    run. Gauges of the method stand beside these keys.
    """

    step: int
    """Inner steps done."""
    worker: int
    loss: float
    """Mean over the steps since the line before."""
    lr: float
    tokens: int = _total()
    bytes_sent: int = _total()
    bytes_received: int = _total()
    blocked_seconds: float = _total()
    """Waited for others."""
    compute_seconds: float = _total()
    clock_seconds: float
    """Of the host's clock, or of the simulated one."""
    val_loss: float | None = None
    """Where the step is one of validation."""
    gradient_norm: float | None = None
    """2-norm of the last step's gradient before clipping; None without `inner.max_norm`."""
    tokens_per_second: float | None = None
    """Read by this worker in its steps since the line before, waits included; None: it reads none, as later stages."""
    mfu: float | None = None
    """On a GPU, as all that follows: 6 operations a parameter and token, over its bfloat16 peak; None: unknown, or a
    stage, or simulated.
    """
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_reserved_bytes: int | None = None


TASK_KINDS = {"F": "forward", "L": "loss", "B": "backward"}
"""What timeline.jsonl calls the tasks of a step of a pipeline."""

TOTALS = tuple(key.name for key in fields(Metrics) if key.metadata.get("total"))
"""Keys of a line that grow over the whole run."""
USAGE = ("tokens_per_second", "mfu", "memory_bytes", "memory_peak_bytes", "memory_reserved_bytes")
"""Keys of a line about how a worker computes."""
COURSE = ("lr", "gradient_norm", "tokens_per_second")
"""Keys of a line that the page shows by step."""


@dataclass(frozen=True, kw_only=True)
class SpreadMetrics:
    """A line of metrics.jsonl without a worker: it is about all of them."""

    step: int
    replica_std: float
    """Standard deviation between the replicas, by a sample of their weights."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """summary.json. Means are over workers; a loss is None without validation text."""

    isles_version: str
    method: str
    backend: str
    workers: int
    stages: int | None
    """Workers in a row that make up a replica; None, and left out, where every worker holds the whole model."""
    pipeline_bubble: float | None
    """Share of the time in which a worker waited for its pipeline; None, and left out, where there is none."""
    replicas: int | None
    """None, and left out, where every worker is one."""
    islands: int | None
    """None where every worker is a replica, or only cut into stages; then the key is left out."""
    bytes_across_per_worker: float | None
    """Sent across islands; None, and left out, where there are none."""
    steps: int
    tokens: int
    """Read by all workers."""
    parameters: int
    val_loss: float | None
    """Of the consolidated model."""
    val_loss_replicas: float | None
    """Mean over the replicas' own weights."""
    replica_std: float
    """Standard deviation between the replicas at the end."""
    bytes_sent_per_worker: float
    bytes_received_per_worker: float
    channels: Mapping[str, Mapping[str, float]]
    """By channel that something went over: bytes_sent and bytes_received a worker, and its blocked_seconds."""
    ddp_bytes_per_worker: float
    """What data parallel would have sent."""
    compute_seconds: float
    blocked_seconds: float
    compute_utilisation: float
    """Share of the time of both spent computing."""
    train_seconds: float
    """Of the slowest worker, on the host's clock."""
    wall_seconds: float
    """Start and end included."""
    virtual_seconds: float | None
    """Of the simulated clock; None where there is none."""
    seed: int
    corpus_sha256: str
    memory: Mapping[str, Any] | None = None
    """The plan of memory, with its peak and step beside those of the run; None, and left out, without one."""
    priced_as: str | None = None
    """The model, step and links that seconds are of by `run.priced_as`; else None, and left out, as is the next."""
    priced_bytes_per_worker: float | None = None

    def record(self) -> dict[str, Any]:
        absent = ("stages", "pipeline_bubble", "replicas", "islands", "bytes_across_per_worker", "memory", "priced_as")
        absent += ("priced_bytes_per_worker",)
        return {key: value for key, value in asdict(self).items() if key not in absent or value is not None}


@dataclass(frozen=True, kw_only=True)
class ElasticSummary:
    """What stands in summary.json besides where workers come and go."""

    goodput: float
    """Share of the time for which workers were there that they spent in inner steps whose work is in the model."""
    work_lost: float
    """Share of the computing whose work is in nobody's weights."""
    rounds: int
    """Of all workers."""
    rounds_alone: float
    """Share of the rounds without anybody else's work."""
    rounds_again: int
    """Exchanges that were tried again."""
    outcomes: Mapping[str, int]
    """Rounds by how their exchange ended: whole, late, alone, or the name of an error."""
    rounds_unassigned: int
    """Whose worker could not know which data is its own."""
    inner_steps: int
    inner_steps_counted: int
    """Whose work is in the model."""
    inner_steps_backlog: int
    """Of the data, that nobody has read for good."""
    inner_steps_repeated: int
    """Of the data, that were read twice."""
    joins: int
    losses: int
    """Connections that broke, of members that had not announced it."""
    steps_lost: int
    """Inner steps after the states from which the run began again when all workers were lost."""
    leaves: int
    views: int
    outages: int
    """Times that the lighthouse was started again."""
    state_transfers: int
    """States given to joiners."""
    state_transfer_bytes: int
    links: Mapping[str, Any] | None = None
    """Bytes that workers sent to each other direct and relayed; relayed_by_workers and relayed_here, what those that
    carry for others and the lighthouse count of these, with what frames and encryption add; pairs: by each worker of
    each peer the way, the round trip, and bytes sent and taken. Left out on a simulated network.
    """
    refused: list[dict[str, Any]] | None = None
    """By whom (-1: the lighthouse) of which member, why and how often; left out on a simulated network."""

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

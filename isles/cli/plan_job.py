"""What `isles plan` was asked for, as a `Job`: from numbers, from a GPU's name, from a run that has ended.

Each number is taken from its own option; where that is not given, from the run of --like. The step time may also come
from --gpu.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from isles.cli.doctor import rates_in_words
from isles.errors import unknown_name
from isles.launch import probe
from isles.launch.addresses import parse_address
from isles.launch.link import LinkLost
from isles.memory.parallel.decoder import decoder_like
from isles.memory.parallel.job import ParallelJob
from isles.models.config import ModelConfig
from isles.models.sizes import Shape, matrices, parameters
from isles.network.churn import Poisson, rate_of
from isles.network.links import Links
from isles.network.machines import machine
from isles.network.named import links as named
from isles.network.planner.hardware import gpu_bytes, step_seconds
from isles.network.planner.job import Job
from isles.network.planner.planner import Plan
from isles.network.units import parse_count, parse_latency, parse_rate, parse_seconds
from isles.pipeline.boundaries.lengths import PlannedBoundary
from isles.pipeline.planning import StagesJob, WorkerSplit, splits
from isles.report.rundir import read_run
from isles.report.units import format_seconds
from isles.tables import typed

_PARALLEL = ("--params", "--layers", "--workers", "--machine", "--per-host", "--sequence", "--step-tokens")
_LINKS = ("--links", "--bandwidth", "--inner-links")
_DRY = "isles train CONFIG.toml --dry-run --set pipeline.routing="
_PLANNED_ELSEWHERE = {
    "swarm": f"hangs on each peer's speed and line: {_DRY}swarm plays it, and says seconds, bytes and memory of each",
    "ravnest": "hangs on each node: isles ravnest plan NODES.toml forms its clusters and says what they do",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options as they were typed; None: not given."""

    params: str | None = None
    layers: int | None = None
    step_time: str | None = None
    gpu: str | None = None
    mfu: float | None = None
    workers: int | None = None
    like: str | None = None
    links: str | None = None
    bandwidth: str | None = None
    latency: str | None = None
    probe: str | None = None
    sync_every: int | None = None
    targets: str | None = None
    tokens: str | None = None
    step_tokens: str | None = None
    stages: str | None = None
    routing: str | None = None
    microbatches: int | None = None
    method: str | None = None
    inner_links: str | None = None
    boundary: str | None = None
    boundary_codec: str | None = None
    subspace_update: int | None = None
    churn: str | None = None
    machine: str | None = None
    per_host: int | None = None
    sequence: int | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None]


def churn_of(text: str) -> Poisson:
    """Of --churn. ValueError for what is no rate."""
    rate = rate_of(text)
    if rate is None:
        raise ValueError(f"--churn {text}: write a rate such as 10%/h; traces and pools: isles simulate --churn")
    return rate


def job_of(asked: Asked) -> tuple[Job, str]:
    """The job, and its network's name. ValueError that names what is missing or wrong."""
    known, shape = ({}, None) if asked.like is None else _of_run(asked.like)
    if asked.params is not None or asked.layers is not None:
        shape = None
    if asked.params is not None:
        known["--params"] = parse_count("--params", asked.params)
    if asked.layers is not None:
        known["--layers"] = asked.layers
    if asked.workers is not None:
        if "--workers" in known:  # each worker's share of a step stays as it was in that run
            known["--step-tokens"] *= asked.workers / known["--workers"]
        known["--workers"] = asked.workers
    if asked.step_tokens is not None:
        known["--step-tokens"] = parse_count("--step-tokens", asked.step_tokens)
    if asked.step_time is not None:
        known["--step-time"] = parse_seconds("--step-time", asked.step_time)
        if not known["--step-time"] > 0:
            raise ValueError(f"--step-time {asked.step_time}: choose a time above 0, such as 0.8 or 800ms")
    if asked.gpu is not None:
        known["--step-time"] = _on_gpu(asked, known)
    elif asked.mfu is not None:
        raise ValueError("--mfu is the share of a GPU's peak: give --gpu NAME with it")
    missing = [name for name in ("--params", "--layers", "--step-time", "--workers") if name not in known]
    known_network = (asked.links, asked.bandwidth, asked.probe) != (None, None, None)
    missing += [] if known_network else ["--links, --bandwidth or --probe"]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}; or give --preset NAME (isles plan --presets lists them)")
    network, name = network_of(asked)
    tokens = None if asked.tokens is None else parse_count("--tokens", asked.tokens)
    if tokens is None and asked.step_tokens is not None and asked.gpu is None:
        raise ValueError("--step-tokens: give --tokens too, the tokens of the whole run, for hours; or --gpu")
    if tokens is not None and "--step-tokens" not in known:
        raise ValueError("--tokens: give --step-tokens too, the tokens of a step of all workers, for hours")
    job = Job(
        parameters=known["--params"],
        layers=int(known["--layers"]),
        step_seconds=known["--step-time"],
        workers=int(known["--workers"]),
        links=network,
        tokens=tokens,
        matrices=None if shape is None else matrices(shape),
        step_tokens=None if tokens is None else known["--step-tokens"],
        device_bytes=None if asked.gpu is None else gpu_bytes(asked.gpu),
    )
    return job, name


def stages_of(asked: Asked, job: Job) -> tuple[StagesJob, list[WorkerSplit]]:
    """What is asked about replicas in stages, and the splits to plan. ValueError for what cannot be."""
    wanted = None
    if asked.stages != "auto":
        words = (asked.stages or "").split(",")
        if not all(word.isdigit() and int(word) for word in words):
            raise ValueError(f'--stages {asked.stages}: write "auto", or numbers with commas between, such as 2,4,8')
        wanted = [int(word) for word in words]
    if asked.routing in _PLANNED_ELSEWHERE:
        raise ValueError(f"--routing {asked.routing}: {_PLANNED_ELSEWHERE[asked.routing]}")
    if asked.routing not in (None, "fixed", "random"):
        raise ValueError(unknown_name("--routing", asked.routing, ("fixed", "random")))
    found = StagesJob(
        job=job,
        routing="random" if asked.routing == "random" else "fixed",
        microbatches=4 if asked.microbatches is None else asked.microbatches,
        method=asked.method or "diloco",
        every=100 if asked.sync_every is None else asked.sync_every,
        near=None if asked.inner_links is None else named(asked.inner_links),
        boundary=boundary_of(asked.boundary, asked.boundary_codec, asked.subspace_update or 0),
    )
    return found, splits(job.workers, job.layers, wanted)


def boundary_of(boundary: str | None, codec: str | None, turn_every: int = 0) -> PlannedBoundary:
    """What crosses between stages, as options name it. ValueError for names that there are not."""
    given = [f"--boundary {boundary}"] if boundary else []
    given += [f"--boundary-codec {codec}"] if codec else []
    given += [f"--subspace-update {turn_every}"] if turn_every else []
    both = codec or "none"
    try:
        return PlannedBoundary(boundary=boundary or "none", codec=both, gradient_codec=both, turn_every=turn_every)
    except ValueError as error:
        raise ValueError(f"{' '.join(given)}: {error}") from error


def config_of(job: Job, plan: Plan, network: str) -> str:
    """A CONFIG.toml for `isles train` with the plan's method; what the planner cannot know is left at its defaults."""
    settings = [part.split(" = ") for part in plan.way.settings.split(", ") if part]
    slowest = min(job.links.slowest_rate(job.workers), 1e12)
    lines = [
        f"# From isles plan: {network}, {100 * plan.utilisation:.1f} % of the time computing.",
        "# Add [model], [data], [inner] and [run] of your own: isles config shows all settings.",
        "[replicas]",
        f'method = "{plan.way.method}"',
        *([f"sync_every = {plan.every}"] if plan.way.rounds else []),
        *(f"{key} = {_toml(value)}" for key, value in settings),
        "",
        "[world]",
        f"workers = {job.workers}",
        f"slowest_link = {slowest:.0f}.0  # bits per second; deadlines follow it",
    ]
    return "\n".join(lines) + "\n"


def _toml(value: str) -> str:
    """A number as it is, a word in quotes."""
    return value if value.replace(".", "", 1).isdigit() else f'"{value}"'


def _of_run(folder: str) -> tuple[dict[str, float], Shape | None]:
    """What a run that has ended says of its steps, and the shape of its decoder; None: another model."""
    run = read_run(folder)
    if run.summary is None:
        raise ValueError(f"--like {folder}: this run has not ended, there is no summary.json; name one that has")
    values: dict[str, float] = {}
    for key in ("parameters", "workers", "steps", "tokens", "compute_seconds"):
        value = run.number(key)
        if not value or value < 0:
            raise ValueError(f"--like {folder}: its summary.json has no {key}; name another run, or give the numbers")
        values[key] = value
    known = {
        "--params": values["parameters"],
        "--workers": values["workers"],
        "--step-time": values["compute_seconds"] / values["steps"],
        "--step-tokens": values["tokens"] / values["steps"],
    }
    shape = _shape_of(run.config.get("model"), values["parameters"])
    return known | ({} if shape is None else {"--layers": shape.layers}), shape


def _shape_of(section: object, counted: float) -> Shape | None:
    """Of a run's [model]; None where that is of another model than the decoder with so many parameters."""
    if not isinstance(section, dict):
        return None
    try:
        model: ModelConfig = typed("model", ModelConfig, section)
    except ValueError:
        return None
    shape = model.shape() if model.own is None else None
    return shape if shape is not None and parameters(shape) == counted else None


def _on_gpu(asked: Asked, known: dict[str, float]) -> float:
    if asked.step_time is not None:
        raise ValueError("--gpu and --step-time both say how long a step takes: give one of them")
    missing = [name for name in ("--params", "--workers", "--step-tokens") if name not in known]
    if missing:
        raise ValueError(f"--gpu: also give {', '.join(missing)}, from which a step's operations follow")
    if not known["--workers"] > 0:
        raise ValueError(f"--workers {known['--workers']}: choose 2 or more")
    share = known["--step-tokens"] / known["--workers"]
    return step_seconds(asked.gpu or "", 0.4 if asked.mfu is None else asked.mfu, known["--params"], share)


def network_of(asked: Asked) -> tuple[Links, str]:
    """The network, and its name in words. ValueError for options that contradict each other."""
    if asked.links is not None:
        if asked.probe is not None:
            raise ValueError("--links and --probe both say what the network is: give one of them")
        if asked.bandwidth is not None or asked.latency is not None:
            raise ValueError("--links says bandwidth and latency: leave out --bandwidth and --latency")
        return named(asked.links), asked.links
    if asked.probe is not None:
        if asked.bandwidth is not None or asked.latency is not None:
            raise ValueError("--probe measures bandwidth and latency: leave out --bandwidth and --latency")
        return _measured(asked.probe)
    assert asked.bandwidth is not None
    seconds = parse_latency("--latency", asked.latency or 0.0)
    words = f"{asked.bandwidth} up" + (f", {asked.latency} one way" if asked.latency else "")
    return Links(bandwidth=parse_rate("--bandwidth", asked.bandwidth), latency=seconds), words


def _measured(peer: str) -> tuple[Links, str]:
    """A network whose lines all carry what the slower direction to `peer` (HOST:PORT) carries now. LinkLost where
    nobody answers there.
    """
    host, port = parse_address(peer, "--probe")
    try:
        found = probe.call(host, port)
    except LinkLost as error:
        raise LinkLost(f"--probe {peer}: {error}") from error
    latency = found.round_trip / 2
    words = f"measured to {host}: {rates_in_words(found)}, {format_seconds(latency)} one way"
    return Links(bandwidth=min(found.rate_out, found.rate_back), latency=latency), words


def parallel_job_of(asked: Asked) -> tuple[ParallelJob, str]:
    """The job, and its network's name. ValueError that names what is missing or wrong."""
    extra = [option for option in asked.given if option not in (*_PARALLEL, *_LINKS)]
    if extra:
        raise ValueError(f"--compare-parallel: leave out {', '.join(extra)}")
    needed = ("--params", "--layers", "--workers", "--machine", "--step-tokens")
    missing = [option for option in needed if option not in asked.given]
    missing += [] if asked.links or asked.bandwidth else ["--links or --bandwidth"]
    if missing:
        raise ValueError(f"--compare-parallel: missing: {', '.join(missing)}")
    assert asked.layers is not None and asked.workers is not None and asked.params and asked.step_tokens
    sequence, per_host = asked.sequence or 1024, asked.per_host or 1
    tokens = parse_count("--step-tokens", asked.step_tokens)
    if asked.layers < 1 or sequence < 1 or per_host < 1:
        raise ValueError("--layers, --sequence and --per-host: choose 1 or more")
    if tokens % sequence:
        raise ValueError(
            f"--step-tokens {asked.step_tokens}: {tokens:.0f} tokens are no whole number of sequences of {sequence}"
        )
    whole = machine(asked.machine or "")
    between, name = network_of(asked)
    near = None if asked.inner_links is None else named(asked.inner_links)
    job = ParallelJob(
        shape=decoder_like(parse_count("--params", asked.params), asked.layers, sequence),
        devices=asked.workers,
        per_host=per_host,
        machine=replace(whole, host_bytes=whole.host_bytes / per_host, host_update=whole.host_update / per_host),
        sequences=round(tokens / sequence),
        link=between.way_rate(0, 1) / 8,
        near=(between if near is None else near).way_rate(0, 1) / 8,
    )
    return job, name

"""`isles plan methods`: which method suits which network; `isles plan splits`: how workers are best divided into
replicas, stages and workers that share a stage.

Both are asked about a model, the time of its steps, workers and their network: from numbers, from a GPU's name, or from
a run that has ended.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isles.base.errors import unknown_name
from isles.base.tables import parse_value, read_toml, typed
from isles.cli.terminal import AsJson, OutFolder, alone, show
from isles.report.rundir import read_run
from isles.report.units import format_seconds

if TYPE_CHECKING:
    from isles.models.config import ModelConfig
    from isles.network.churn import Poisson
    from isles.network.machines import Machine
    from isles.plan.methods import MethodPlan
    from isles.plan.question import PlanQuestion

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="1.3B, or '1.3B, 24 layers'; the \\[model] of a CONFIG.toml; or a finished RUN, which has steps too.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="What a worker computes with: A100, or 'A100, 40%' of its peak; or how long a step takes: 800ms."
    ),
]
Sites = Annotated[
    int | None,
    typer.Option("--sites", "--workers", help="How many, each with its own line; of a RUN its workers."),
]
Network = Annotated[
    str, typer.Option(help="Between them: a preset, '500Mbit/s, 60ms', a .toml file, or probe:HOST:PORT, measured.")
]
Tokens = Annotated[str | None, typer.Option(help="Of the run, for hours; with --step-tokens.")]
StepTokens = Annotated[str | None, typer.Option(help="Tokens of one step of all workers together.")]
_USUAL_SHARE = 0.4  # of a GPU's peak
_SHAPE = 16 * 128**2  # parameters of a decoder 128 times as wide as deep: so many times its layers cubed
_PROBE = "probe:"


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What a model's own words say. step_seconds, step_tokens, workers: of a run that has ended."""

    model: ModelConfig
    parameters: float
    workers: float | None = None
    step_seconds: float | None = None
    step_tokens: float | None = None


def question_of(
    model: str,
    gpu: str | None,
    sites: int | None,
    links: str,
    tokens: str | None,
    step_tokens: str | None,
    *,
    devices: int = 1,
    inner_bandwidth: str | None = None,
    price_gb: float | None = None,
    price_hour: float | None = None,
) -> tuple[PlanQuestion, str]:
    """What is asked, and the network in words. ValueError that names what is missing or wrong."""
    from isles.network.machines import step_seconds, with_gpu
    from isles.network.units import parse_count, parse_rate, parse_seconds
    from isles.plan.question import PlanQuestion

    if devices < 1:
        raise ValueError(f"--devices {devices}: choose 1 or more")
    if inner_bandwidth is not None and devices == 1:
        raise ValueError("--inner-bandwidth is inside sites of several --devices: give those too, or leave it out")
    known = _known(model)
    count = known.workers if sites is None else sites * devices
    each_step = None if step_tokens is None else parse_count("--step-tokens", step_tokens)
    if each_step is None and known.step_tokens is not None and known.workers and count:
        each_step = known.step_tokens * count / known.workers  # each worker's share stays as it was in that run
    is_time = gpu is not None and gpu[:1] in "0123456789.-"
    missing = [] if count is not None else ["--sites"]
    missing += ["--gpu"] if gpu is None and known.step_seconds is None else []
    missing += ["--step-tokens"] if each_step is None and (tokens or (gpu and not is_time)) else []
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    assert count is not None
    if tokens is None and step_tokens is not None and (gpu is None or is_time):
        raise ValueError("--step-tokens: give --tokens too, the tokens of the whole run, for hours; or a --gpu by name")
    if count < 2:
        raise ValueError(f"--sites {sites}: choose 2 or more")
    seconds, here = known.step_seconds, None
    if is_time:
        seconds = parse_seconds("--gpu", gpu or "")
        if not seconds > 0:
            raise ValueError(f"--gpu {gpu}: choose a time above 0, such as 800ms")
    elif gpu is not None:
        name, share = _of_gpu(gpu)
        assert each_step is not None
        here = with_gpu(name)
        seconds = step_seconds(here, share, known.parameters, each_step / count)
    assert seconds is not None
    network, parts = _network(links)
    near = PlanQuestion.near
    if inner_bandwidth is not None:
        near = f"{parse_rate('--inner-bandwidth', inner_bandwidth) / 1e6:.9g}Mbit/s, 0ms"
    question = PlanQuestion(
        model=_as_fast(known.model, here),
        step_seconds=seconds,
        workers=int(count),
        network=network,
        devices=devices,
        near=near,
        tokens=None if tokens is None else parse_count("--tokens", tokens),
        step_tokens=each_step,
        machine=here,
        price_gb=price_gb,
        price_hour=price_hour,
    )
    return question, parts


def _as_fast(model: ModelConfig, here: Machine | None) -> ModelConfig:
    """`model` with products in the format whose peak a GPU's name stands for, unless it says another."""
    is_plain = model.autocast == "none" and model.dtype == "float32"
    return replace(model, autocast="bf16") if is_plain and here is not None else model


def model_of(text: str) -> ModelConfig:
    """The decoder that MODEL names. ValueError where there is none."""
    return _known(text).model


def _known(text: str) -> _Known:
    from isles.models.config import ModelConfig
    from isles.models.sizes import SIZES, parameters
    from isles.network.units import parse_count
    from isles.plan.question import decoder_of

    if text.endswith(".toml"):
        return _of_section(text, read_toml(text).get("model", {}))
    if "/" in text or Path(text).is_dir():
        return _of_run(text)
    count, comma, layers = text.partition(",")
    if not comma and text in SIZES:
        made = ModelConfig(size=text)
        return _Known(model=made, parameters=parameters(made.shape()))
    wanted = parse_count("MODEL", count.strip())
    parts = layers.split()
    if comma and not (parts and parts[0].isdigit() and parts[1:] in ([], ["layers"], ["layer"])):
        raise ValueError(f"MODEL {text}: write a number of layers behind the comma, such as '1.3B, 24 layers'")
    deep = int(parts[0]) if parts else max(1, round((wanted / _SHAPE) ** (1 / 3)))
    return _Known(model=decoder_of(wanted, deep), parameters=wanted)


def _of_section(name: str, section: Any) -> _Known:
    from isles.models.config import ModelConfig
    from isles.models.sizes import parameters

    made: ModelConfig = typed("model", ModelConfig, section)
    if made.own is not None:
        raise ValueError(f"MODEL {name}: its model is not a decoder of Isles' own; say how large it is, such as 1.3B")
    return _Known(model=made, parameters=parameters(made.shape()))


def _of_run(folder: str) -> _Known:
    """What a run that has ended says of its steps; its decoder, or one as large."""
    run = read_run(folder)
    if run.summary is None:
        raise ValueError(f"MODEL {folder}: this run has not ended, there is no summary.json; name one that has")
    values: dict[str, float] = {}
    for key in ("parameters", "workers", "steps", "tokens", "compute_seconds"):
        value = run.number(key)
        if not value or value < 0:
            raise ValueError(f"MODEL {folder}: its summary.json has no {key}; name another run, or give the numbers")
        values[key] = value
    made = None
    try:
        made = _of_section(folder, run.config.get("model", {}))
    except ValueError:
        pass  # another model than a decoder
    if made is None or made.parameters != values["parameters"]:
        made = _known(f"{values['parameters']:.0f}")
    return _Known(
        model=made.model,
        parameters=values["parameters"],
        workers=values["workers"],
        step_seconds=values["compute_seconds"] / values["steps"],
        step_tokens=values["tokens"] / values["steps"],
    )


def _of_gpu(text: str) -> tuple[str, float]:
    """(its name, the share of its peak that is reached)."""
    name, comma, share = text.partition(",")
    if not comma:
        return text, _USUAL_SHARE
    try:
        return name.strip(), float(share.strip().removesuffix("%")) / 100
    except ValueError:
        raise ValueError(f"--gpu {text}: write a share of its peak behind the comma, such as '{name}, 40%'") from None


def _network(links: str) -> tuple[str, str]:
    """As `world.virtual.links` takes it, and in words."""
    if not links.startswith(_PROBE):
        return links, links
    from isles.cli.doctor import format_rates
    from isles.comm.sockets.connection import LinkLost
    from isles.comm.tcp import parse_address
    from isles.launch import probe

    host, port = parse_address(links.removeprefix(_PROBE), "--links probe:")
    try:
        found = probe.call(host, port)
    except LinkLost as error:
        raise LinkLost(f"--links {links}: {error}") from error
    rate, latency = min(found.rate_out, found.rate_back), found.round_trip / 2
    parts = f"measured to {host}: {format_rates(found)}, {format_seconds(latency)} one way"
    return f"{rate / 1e6:.9g}Mbit/s, {1e3 * latency:.9g}ms", parts


_DRY = "isles train CONFIG.toml --dry-run --set pipeline.routing="
_ELSEWHERE = {
    "swarm": f"depends on each peer's speed and link: {_DRY}swarm simulates it: seconds, bytes and memory of each",
    "ravnest": "depends on each node: isles plan clusters NODES.toml forms the clusters and calculates them",
    "skippipe": "depends on each node's link: isles plan paths LINKS finds the route of each microbatch",
}


def plan_splits(
    model: Model,
    links: Network,
    tokens: Tokens = None,
    step_tokens: StepTokens = None,
    gpu: Gpu = None,
    workers: Sites = None,
    stages: Annotated[str, typer.Option(help="Of a replica: auto, or such as 2,4,8.")] = "auto",
    routing: Annotated[str, typer.Option(help="Ways of the microbatches: fixed or random.")] = "fixed",
    microbatches: Annotated[int, typer.Option(help="Of a replica's batch.")] = 4,
    method: Annotated[
        str, typer.Option(help="Between replicas, with its settings: 'diloco, sync_every = 50'.")
    ] = "diloco, sync_every = 100",
    inner_links: Annotated[str | None, typer.Option(help="Network inside a replica. Default: as between.")] = None,
    boundary: Annotated[
        str,
        typer.Option(
            help="What crosses between stages: dct:0.9, or keys of \\[pipeline.boundary] such as 'codec = int8'."
        ),
    ] = "none",
    json: AsJson = False,
    out: OutFolder = None,
) -> None:
    """Say how workers are best cut into replicas and stages: the step, bytes and memory of every split."""
    from isles.plan import splits
    from isles.report.sheets import splits_sheet

    if routing in _ELSEWHERE:
        raise ValueError(f"--routing {routing}: {_ELSEWHERE[routing]}")
    if routing not in ("fixed", "random"):
        raise ValueError(unknown_name("--routing", routing, ("fixed", "random")))
    name, between = keys("--method", "method", method)
    kind, crosses = keys("--boundary", "kind", boundary)
    numbers = stages.split(",")
    if stages != "auto" and not all(part.strip().isdigit() and int(part) for part in numbers):
        raise ValueError(f'--stages {stages}: write "auto", or numbers with commas between, such as 2,4,8')
    question, network = question_of(model, gpu, workers, links, tokens, step_tokens)
    asked = splits.SplitsQuestion(
        question=question,
        routing="random" if routing == "random" else "fixed",
        microbatches=microbatches,
        method=name or "diloco",
        replicas=between,
        near=inner_links,
        boundary=({} if kind is None else {"kind": kind}) | crosses,
    )
    found = splits.splits(
        question.workers, question.model.shape().layers, None if stages == "auto" else [int(part) for part in numbers]
    )
    with alone():
        show(splits_sheet(asked, splits.plan_splits(asked, found), network), json, out)


def keys(option: str, first: str, text: str) -> tuple[str | None, dict[str, Any]]:
    """(what stands first without a key, the keys behind it)."""
    name, found = None, {}
    for number, part in enumerate(text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            found[key] = parse_value(value)
        elif number:
            raise ValueError(f"{option} {text}: write {first}, key = value, ...")
        else:
            name = key
    return name, found


_TARGET = 0.9  # share of computing that is to be reached


def plan_methods(
    model: Model,
    links: Network,
    gpu: Gpu = None,
    sites: Sites = None,
    devices: Annotated[int, typer.Option(help="Of a site, which share its line and are one replica.")] = 1,
    inner_bandwidth: Annotated[
        str | None, typer.Option(help="Between them, as 400Gbit/s. Default: a local network.")
    ] = None,
    tokens: Tokens = None,
    step_tokens: StepTokens = None,
    method: Annotated[
        str, typer.Option(help="One alone, or package.module:Class; with its rounds: 'diloco, sync_every = 50'.")
    ] = "",
    churn: Annotated[str | None, typer.Option(metavar="RATE", help="Workers come and go, such as 10%/h.")] = None,
    price_gb: Annotated[float | None, typer.Option(help="Of a GB (10^9 bytes) to another site.")] = None,
    price_hour: Annotated[float | None, typer.Option(help="Of a device.")] = None,
    best: Annotated[
        Literal["hours", "bytes", "money"] | None, typer.Option(help="Order by this what reaches 90 % computing.")
    ] = None,
    json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write CSV, JSON, PNG, HTML, and the first line as run.toml, into this directory."),
    ] = None,
) -> None:
    """Say which method suits which network: time, bytes, memory and money of each, before a run."""
    from isles.plan import methods
    from isles.plan.question import candidates
    from isles.report.sheets import plan_sheet, with_churn

    rate = None if churn is None else _churn(churn)
    name, settings = keys("--method", "method", method)
    every = settings.pop("sync_every", None)
    if settings:
        raise ValueError(f"--method {method}: only sync_every is taken here; others: isles train CONFIG.toml --dry-run")
    question, network = question_of(
        model,
        gpu,
        sites,
        links,
        tokens,
        step_tokens,
        devices=devices,
        inner_bandwidth=inner_bandwidth,
        price_gb=price_gb,
        price_hour=price_hour,
    )
    with alone():
        table = methods.plan_methods(
            question, targets=(_TARGET,), every=every, among=candidates(name or None), grows=rate is not None, best=best
        )
        made = plan_sheet(question, table, network, target=_TARGET, pictures=out is not None)
    show(made if rate is None else with_churn(made, question, table.plans, rate), json, out)
    if out is not None:
        path = out / "run.toml"
        path.write_text(config_of(table.plans[0], network), encoding="utf-8")
        print(path, file=sys.stderr if json else sys.stdout)


def config_of(plan: MethodPlan, network: str) -> str:
    """A CONFIG.toml whose dry run plans the same. What the planner cannot know is left at its defaults."""
    import tomlkit

    from isles.models.sizes import parameters

    config, question = plan.config, plan.question
    decoder = question.model.shape()
    settings = {key: value for key, value in plan.candidate.replicas.items() if key != "method"}
    settings |= {"sync_every": plan.every} if hasattr(config.replicas, "sync_every") else {}
    steps = question.steps or 20 * plan.every
    replicas = {"method": plan.candidate.method, **settings}
    tables = question.tables(replicas, steps, config.world.virtual.step_seconds)
    tables["world"]["backend"] = config.world.backend
    tables["world"]["slowest_link"] = float(round(min(question.links.slowest_rate(question.workers), 1e12)))
    lines = [
        f"# From isles plan methods: {network}, {100 * plan.utilisation:.1f} % of the time computing.",
        f"# The model is a decoder of {parameters(decoder):,} parameters; give [data] and [inner] of your own. Real",
        '# workers: backend = "distributed", without [world.virtual].',
    ]
    return "\n".join(lines) + "\n" + tomlkit.dumps({name: table for name, table in tables.items() if table})


def _churn(text: str) -> Poisson:
    from isles.network.churn import rate_of

    rate = rate_of(text)
    if rate is None:
        raise ValueError(f"--churn {text}: write a rate such as 10%/h; traces and pools: isles simulate --churn")
    return rate

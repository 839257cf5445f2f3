"""What `isles plan methods` and `isles plan splits` are asked about: a model, the time of its steps, workers and their
network. From numbers, from a GPU's name, or from a run that has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isles.models.config import ModelConfig
    from isles.network.machines import Machine
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
    from isles.base.tables import read_toml
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
    from isles.base.tables import typed
    from isles.models.config import ModelConfig
    from isles.models.sizes import parameters

    made: ModelConfig = typed("model", ModelConfig, section)
    if made.own is not None:
        raise ValueError(f"MODEL {name}: its model is not a decoder of Isles' own; say how large it is, such as 1.3B")
    return _Known(model=made, parameters=parameters(made.shape()))


def _of_run(folder: str) -> _Known:
    """What a run that has ended says of its steps; its decoder, or one as large."""
    from isles.report.rundir import read_run

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
    from isles.report.units import format_seconds

    host, port = parse_address(links.removeprefix(_PROBE), "--links probe:")
    try:
        found = probe.call(host, port)
    except LinkLost as error:
        raise LinkLost(f"--links {links}: {error}") from error
    rate, latency = min(found.rate_out, found.rate_back), found.round_trip / 2
    parts = f"measured to {host}: {format_rates(found)}, {format_seconds(latency)} one way"
    return f"{rate / 1e6:.9g}Mbit/s, {1e3 * latency:.9g}ms", parts

"""`isles plan methods`: which method suits which network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isles.cli.plans import questions
from isles.cli.plans.splits import keys
from isles.cli.terminal import AsJson, alone, show

if TYPE_CHECKING:
    from isles.network.churn import Poisson
    from isles.plan.methods import MethodPlan

_TARGET = 0.9  # share of computing that is to be reached


def plan_methods(
    model: questions.Model,
    links: questions.Network,
    gpu: questions.Gpu = None,
    sites: questions.Sites = None,
    devices: Annotated[int, typer.Option(help="Of a site, which share its line and are one replica.")] = 1,
    inner_bandwidth: Annotated[
        str | None, typer.Option(help="Between them, as 400Gbit/s. Default: a local network.")
    ] = None,
    tokens: questions.Tokens = None,
    step_tokens: questions.StepTokens = None,
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
    from isles.report.sheets.methods import plan_sheet, with_churn

    rate = None if churn is None else _churn(churn)
    name, settings = keys("--method", "method", method)
    every = settings.pop("sync_every", None)
    if settings:
        raise ValueError(f"--method {method}: only sync_every is taken here; others: isles train CONFIG.toml --dry-run")
    question, network = questions.question_of(
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

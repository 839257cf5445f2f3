"""`isles tune`: settings of a method by a search on the virtual clock."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import is_dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.base.tables import parse_value
from isles.cli.terminal import ConfigFile, Progress, Set, end_in_order, print_table, takes_settings
from isles.report import write_report
from isles.report.comparison import ALONE, NEVER, complete, read_tuning, subtitle, trials_table
from isles.report.units import format_seconds
from isles.training.interrupts import Interrupts

if TYPE_CHECKING:
    from isles.replicas.config import Dimension
    from isles.training.config.sections import Config

_AT = ("tokens", "steps", "seconds")


@takes_settings
def tune(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="Or one-worker. Default: the configuration's.")] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION.KEY=LOW..HIGH|A,B,C",
            help="Search these settings alone (LOW..HIGH: on a logarithmic scale where LOW > 0); repeatable.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials in all.")] = 30,
    budget: Annotated[str | None, typer.Option(help="Begin no trial after this time, such as 20min.")] = None,
    at: Annotated[str, typer.Option(help="What all trials have alike: tokens, steps or seconds.")] = "tokens",
    seed: Annotated[int, typer.Option(help="Seed of the search and its runs; compare by others.")] = 1000,
    set_: Set = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps: see what comes out.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="New directory, or one to go on with. Default: runs/tune-METHOD-DATE-TIME.")
    ] = None,
) -> None:
    """Search for a method's settings by Optuna: inner rate and batch first, then its own.

    The same command with the same --out goes on where it stopped; two of them at once share the trials.
    """
    end_in_order()
    if at not in _AT or trials < 1:
        raise ValueError(f"--at {at} --trials {trials}: choose one of {', '.join(_AT)}, and 1 trial or more")
    from isles.cli.several import Study, Terms, one_worker
    from isles.cli.several import quick as quick_terms
    from isles.network.units import parse_seconds
    from isles.plan.run_plan import refuse
    from isles.running.run import launch
    from isles.training.config.reading import read_config

    ends = time.monotonic() + (parse_seconds("--budget", budget) if budget else math.inf)
    own = NEVER if method == ALONE else method
    flags = {**(quick_terms() if quick else {}), "world.backend": "virtual", "replicas.method": own}
    resolved = read_config(config, flags, set_ or [], shared=quick)
    resolved = one_worker(resolved) if method == ALONE else resolved
    if resolved.world.backend != "virtual":
        raise ValueError("isles tune is always on the virtual clock: take world.backend out")
    refuse(resolved)
    dimensions = [_dimension(one, resolved) for one in over or []]
    terms = Terms(config=resolved, at=at, seed=seed, trials=trials, over=dimensions)
    out = out or Path("runs") / f"tune-{resolved.method.replace(':', '.')}-{datetime.now():%Y%m%d-%H%M%S}"
    begun, done = time.monotonic(), 0

    def train(number: int, one: Config, folder: Path, on_metrics: Any) -> dict[str, Any]:
        nonlocal done
        left = f", {format_seconds((time.monotonic() - begun) / done * (trials - number))} left" if done else ""
        done += 1
        title = f"trial {number + 1} of {trials}{left}:"
        with Progress(title, one.world.workers, one.run.steps, plain=f"{title} ") as progress:

            def line(values: dict[str, Any]) -> None:
                progress.line(values)
                on_metrics(values)

            return launch(one, folder, line, lambda text: None)

    try:
        with Interrupts() as interrupts:
            Study(terms, out).work(lambda: interrupts.check() or time.monotonic() > ends, train)
    except KeyboardInterrupt:
        print(f"isles: stopped; the same command with --out {out} goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    study = read_tuning(out)
    print_table(trials_table(study))
    print(subtitle(study))
    if not complete(study):
        raise ValueError("no trial has ended: give a larger --budget, or a lower inner.lr")
    print(f"best    {out / 'best.toml'}", f"report  {write_report(out)}", sep="\n")


def _dimension(text: str, config: Config) -> Dimension:
    """Of --over."""
    from isles.cli.several import names
    from isles.replicas.config import Dimension

    key, equals, values = text.partition("=")
    try:
        start = attrgetter(key)(config)
    except AttributeError:
        start = config
    if not equals or is_dataclass(start):
        raise ValueError(f"--over {text}: write SECTION.KEY=LOW..HIGH or SECTION.KEY=A,B,C, of settings of this run")
    low, dots, high = values.partition("..")
    if not dots:
        choices = [parse_value(part) for part in names(values, f"--over {key}")]
        return Dimension(name=key, start=start if start in choices else choices[0], choices=choices)
    least, most = parse_value(low), parse_value(high)
    if not (isinstance(least, (int, float)) and isinstance(most, (int, float)) and least < most):
        raise ValueError(f"--over {text}: write two numbers, the lower one first, as in {key}=0.1..2")
    first = min(max(start, least), most)
    whole = isinstance(start, int)
    return Dimension(name=key, start=first, low=least, high=most, log=least > 0, whole=whole)

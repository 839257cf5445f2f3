"""`isles experts`: ensembles of models that are trained apart: HDEE and SMALLTALK LM."""

from __future__ import annotations

import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isles.experts.system import System

app = typer.Typer(
    help="Models that are trained apart and joined where they are used: HDEE and SMALLTALK LM.", no_args_is_help=True
)

Config = Annotated[str | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the built-in small run.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")]
Out = Annotated[Path | None, typer.Option(help="Directory, new or to go on in. Default: runs/SYSTEM-DATE-TIME.")]
Quick = Annotated[bool, typer.Option("--quick", help="The built-in run in a small form, about a minute.")]
JobNames = Annotated[
    list[str] | None, typer.Option("--job", metavar="NAME", help="Train this run alone, as on its machine; repeatable.")
]
Jobs = Annotated[bool, typer.Option("--jobs", help="List the runs and how far they are, and train nothing.")]


@app.command("hdee")
def hdee(
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    quick: Quick = False,
    job: JobNames = None,
    jobs: Jobs = False,
) -> None:
    """Train and judge HDEE ensembles: one expert a domain, unequal sizes and steps at one budget."""
    _run("hdee", config, set_ or [], out, quick, job or [], jobs)


@app.command("smalltalk")
def smalltalk(
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    quick: Quick = False,
    job: JobNames = None,
    jobs: Jobs = False,
) -> None:
    """Train and judge SMALLTALK LM: routers part the text, each expert trains alone on its share."""
    _run("smalltalk", config, set_ or [], out, quick, job or [], jobs)


@app.command("eval")
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="OUT|FOREST.json", help="What isles experts made.")],
    data: Annotated[str | None, typer.Option(help="Judge a forest on this text instead.")] = None,
    prior: Annotated[str, typer.Option(help="With FOREST.json: uniform, cached or updating.")] = "uniform",
    top_k: Annotated[int | None, typer.Option(help="With FOREST.json: so many experts of the prior.", min=1)] = None,
) -> None:
    """Judge again: a whole directory on its own domains, or one forest on a text."""
    from isles.cli.experts_show import print_forest, print_results

    if path.is_dir():
        if data is not None or top_k is not None or prior != "uniform":
            raise ValueError(f"--data, --prior and --top-k judge one forest: name a file of {path / 'forests'}")
        system = _opened(path)
        _refuse_undone(system)
        with _progress() as progress:
            results = system.evaluate(progress)
        print_results(results, path)
        return
    if data is None:
        raise ValueError(f"--data is missing: on which text is {path} to be judged?")
    print_forest(path, data, prior, top_k)


@app.command("generate")
def generate(
    forest: Annotated[Path, typer.Argument(metavar="FOREST.json", help="A file of OUT/forests.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many likeliest tokens (0: all).", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
) -> None:
    """Continue a prompt: HDEE by the mixed distribution, SMALLTALK by the one expert that the prompt is routed to."""
    from isles.experts.speaking import speaker
    from isles.models.generate import generate as sample

    voice = speaker(forest, prompt)
    ids = sample(
        voice.logits,
        voice.tokens,
        new_tokens=tokens,
        context=voice.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    print(prompt + voice.tokenizer.decode(list(ids)))
    print(voice.note, file=sys.stderr)


@app.command("config")
def config(system: Annotated[str, typer.Argument(metavar="hdee|smalltalk")]) -> None:
    """Print every setting of a system with its default and what it means, to start a CONFIG.toml from."""
    from isles.experts.border import template
    from isles.experts.systems import settings

    print(template(system, settings(system)), end="")


@app.command("plan")
def plan(
    system: Annotated[str, typer.Argument(metavar="hdee|smalltalk")],
    config: Config = None,
    set_: Set = None,
    quick: Quick = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Say what the experts will cost: the budget, FLOPs, and bytes between machines. Trains and writes nothing."""
    from isles.cli.experts_show import print_plan
    from isles.experts.border import read
    from isles.experts.systems import settings

    print_plan(read(system, settings(system), config, set_ or [], quick=quick), json)


def _run(
    name: str, config: str | None, assignments: list[str], out: Path | None, quick: bool, only: list[str], listing: bool
) -> None:
    from isles.cli.experts_show import print_jobs, print_results
    from isles.experts.border import read
    from isles.experts.systems import opened, settings
    from isles.training.launch import Interrupted

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asked = read(name, settings(name), config, assignments, quick=quick)
    out = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    system = opened(asked, out)
    if listing:
        print_jobs(system)
        return
    try:
        with _progress() as progress:
            done = system.train(progress, only)
            results = system.evaluate(progress) if done else None
    except (Interrupted, KeyboardInterrupt):
        words = ["isles", "experts", name, *([config] if config else []), *(["--quick"] if quick else [])]
        words += [part for word in assignments for part in ("--set", word)]
        words += [part for word in only for part in ("--job", word)]
        print(f"isles: stopped; go on with: {shlex.join([*words, '--out', str(out)])}", file=sys.stderr)
        raise typer.Exit(130) from None
    if results is None:
        print_jobs(system)
    else:
        print_results(results, out)


def _opened(out: Path) -> System[Any]:
    from isles.experts.border import kept
    from isles.experts.systems import SYSTEMS, opened

    return opened(kept(out, {name: own for name, (own, _) in SYSTEMS.items()}), out)


def _refuse_undone(system: System[Any]) -> None:
    undone = [name for name, (_, state) in system.jobs().items() if state != "done"]
    if undone:
        raise ValueError(
            f"{system.out}: {len(undone)} runs are not done, among them {undone[0]}; train them, or copy them there"
        )


def _progress() -> Any:
    from isles.cli.experts_show import Shown

    return Shown()

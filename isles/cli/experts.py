"""`isles experts`: ensembles of models that are trained apart, HDEE and SMALLTALK LM."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from isles.base.errors import notify_warnings
from isles.cli.terminal import AsJson, ConfigFile, Set, Trust, end_in_order, print_named

app = typer.Typer(
    help="Models that are trained apart and joined where they are used: HDEE and SMALLTALK LM.", no_args_is_help=True
)

Out = Annotated[Path | None, typer.Option(help="Directory, new or to go on in. Default: runs/SYSTEM-DATE-TIME.")]
Quick = Annotated[bool, typer.Option("--quick", help="The built-in run in a small form, about a minute.")]
JobNames = Annotated[
    list[str] | None, typer.Option("--job", metavar="NAME", help="Train this run alone, as on its machine; repeatable.")
]
AtOnceOption = Annotated[
    int, typer.Option("--at-once", metavar="N", help="Train so many runs at a time, each in a process.", min=1)
]
Jobs = Annotated[bool, typer.Option("--jobs", help="List the runs and how far they are, and train nothing.")]


@app.callback()
def _experts(context: typer.Context) -> None:
    context.with_resource(notify_warnings(lambda event: print(f"note: {event['notice']}", file=sys.stderr)))


def _system(system: str, what: str) -> None:
    """Add the command that makes experts of a system."""

    @app.command(system, help=what)
    def make(
        config: ConfigFile = None,
        set_: Set = None,
        out: Out = None,
        quick: Quick = False,
        job: JobNames = None,
        at_once: AtOnceOption = 1,
        jobs: Jobs = False,
    ) -> None:
        from isles.cli.experts_printer import Shown, print_jobs, print_results
        from isles.experts.planning import opened, settings
        from isles.experts.reading import read

        end_in_order()
        asked = read(system, settings(system), config, set_ or [], quick=quick)
        out = out or Path("runs") / f"{system}-{datetime.now():%Y%m%d-%H%M%S}"
        opened_system = opened(asked, out)
        if jobs:
            print_jobs(opened_system)
            return
        try:
            with Shown() as progress, notify_warnings(lambda event: progress.notice(event["notice"])):
                done = opened_system.train(progress, job or [], at_once)
                results = opened_system.evaluate(progress) if done else None
        except KeyboardInterrupt:
            again = ["isles", "experts", system, *([config] if config else []), *(["--quick"] if quick else [])]
            again += [part for text in set_ or [] for part in ("--set", text)]
            again += [part for text in job or [] for part in ("--job", text)]
            again += ["--at-once", str(at_once)] if at_once > 1 else []
            print(f"isles: stopped; go on with: {shlex.join([*again, '--out', str(out)])}", file=sys.stderr)
            raise typer.Exit(130) from None
        if results is None:
            print_jobs(opened_system)
        else:
            print_results(results, out)


_system("hdee", "Train and evaluate HDEE ensembles: one expert a domain, unequal sizes and steps at one budget.")
_system("smalltalk", "Train and evaluate SMALLTALK LM: routers part the text, each expert trains alone on its share.")


Prior = Annotated[
    str, typer.Option(help="What is believed before a text: uniform, cached, updating, or shares such as 0.2,0.8.")
]
Top = Annotated[int | None, typer.Option("--top-experts", help="So many experts of the prior (or weights).", min=1)]
Prefix = Annotated[
    int | None, typer.Option(help="Tokens from which a forest that routes chooses. Default: all it may.")
]
RouteOption = Annotated[
    str,
    typer.Option(help="once: one expert, by the prefix. growing: weights that are computed again as the text grows."),
]


@app.command("eval")
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="OUT|FOREST.json", help="What isles experts made.")],
    data: Annotated[str | None, typer.Option(help="Judge a forest on this text instead.")] = None,
    prior: Prior = "uniform",
    top_experts: Top = None,
    prefix: Prefix = None,
    route: RouteOption = "once",
    trust: Trust = False,
) -> None:
    """Judge again: a whole directory on its own domains, or one forest on a text."""
    from isles.cli.experts_printer import Shown, print_results
    from isles.experts.ensemble import Joining, evaluated_on
    from isles.experts.planning import SYSTEMS, opened
    from isles.experts.reading import read_saved

    joining = Joining(prior=prior, top=top_experts, prefix=prefix, route=route)  # type: ignore[arg-type]
    _trust(trust, path)
    if path.is_dir():
        if data is not None or joining != Joining():
            raise ValueError(f"options are for one forest: name a file of {path}/seed-N/forests, or leave them out")
        system = opened(read_saved(path, {name: own for name, (own, _) in SYSTEMS.items()}), path)
        undone = [name for name, (_, state) in system.jobs().items() if state != "done"]
        if undone:
            raise ValueError(
                f"{path}: {len(undone)} runs are not done, among them {undone[0]}; train them, or copy them there"
            )
        with Shown() as progress, notify_warnings(lambda event: progress.notice(event["notice"])):
            results = system.evaluate(progress)
        print_results(results, path)
        return
    if data is None:
        raise ValueError(f"--data is missing: on which text is {path} to be evaluated?")
    print_named(evaluated_on(path, data, joining))


@app.command("generate")
def generate(
    forest: Annotated[Path, typer.Argument(metavar="FOREST.json", help="A file of OUT/seed-N/forests.")],
    prompt: Annotated[list[str], typer.Option(help="Text to go on from; several are answered one after another.")],
    tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many likeliest tokens (0: all).", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    prior: Prior = "uniform",
    data: Annotated[str | None, typer.Option(help="With --prior cached: text of the domain, for the prior.")] = None,
    top_experts: Top = None,
    prefix: Prefix = None,
    route: RouteOption = "once",
    trust: Trust = False,
) -> None:
    """Continue prompts: HDEE by the mixed distribution, SMALLTALK by the one expert that a prompt is routed to."""
    import torch

    from isles.experts.ensemble import Joining, Speaker
    from isles.models.factory import generate as sample

    joining = Joining(prior=prior, top=top_experts, prefix=prefix, route=route)  # type: ignore[arg-type]
    _trust(trust, forest)
    speaker = Speaker(forest, joining, data)
    for text in prompt:
        voice = speaker.voice(text)
        settings = {"new_tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        ids = list(sample(voice.logits, voice.tokens, context=voice.context, **settings))
        print(text + speaker.tokenizer.decode(ids))
        print(voice.note, file=sys.stderr)
        speaker.listen(torch.cat([voice.tokens, torch.tensor(ids)]))


@app.command("forest")
def forest(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs with one tokenizer.")],
    out: Annotated[Path, typer.Option(metavar="FOREST.json", help="The file to write.")],
    trust: Trust = False,
) -> None:
    """Put finished runs together as a forest that mixes them, wherever they were trained."""
    from isles.experts.forest import Served, forest_of

    _trust(trust, *runs)
    made = forest_of(runs)
    Served.load(made.experts)  # one tokenizer, and models that can be read
    if out.exists():
        raise ValueError(f"--out {out}: is there already; name another file")
    made.save(out)
    print(f"{out}: {', '.join(member.name for member in made.experts)}")


@app.command("average")
def average(
    forest: Annotated[Path, typer.Argument(metavar="FOREST.json", help="Experts of one shape, from one seed.")],
    out: Annotated[Path, typer.Option(help="New directory: name it in run.start, isles eval or isles generate.")],
    data: Annotated[str | None, typer.Option(help="Text of a new domain: shares are the posterior on it.")] = None,
    shares: Annotated[str | None, typer.Option(help="Shares of the experts, such as 0.2,0.8.")] = None,
    trust: Trust = False,
) -> None:
    """Average the parameters of a forest's experts, to branch a new expert from (BTM)."""
    from isles.experts.ensemble import shares_on, write_average
    from isles.experts.forest import Forest, Served
    from isles.experts.routing import parse_prior

    _trust(trust, forest)
    served = Served.load(Forest.load(forest).experts)
    if shares is not None and data is None:
        found = parse_prior(shares, len(served)).exp().tolist()
    elif data is not None and shares is None:
        found = shares_on(served, replace(served.runs[0].config.data, path=data, mixture=None))
    else:
        raise ValueError("give either --data (shares by the posterior on that text) or --shares")
    write_average(served, found, out)
    print(f"{out}: " + ", ".join(f"{share:.3f} {name}" for name, share in zip(served.names, found, strict=True)))


@app.command("config")
def config(system: Annotated[str, typer.Argument(metavar="hdee|smalltalk")]) -> None:
    """Print every setting of a system with its default and what it means, to start a CONFIG.toml from."""
    from isles.experts.planning import settings
    from isles.experts.reading import template

    print(template(system, settings(system)), end="")


@app.command("plan")
def plan(
    system: Annotated[str, typer.Argument(metavar="hdee|smalltalk")],
    config: ConfigFile = None,
    set_: Set = None,
    quick: Quick = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Instead: SMALLTALK's own table of training, overheads and inference.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Say what the experts will cost: the budget, FLOPs, and bytes between machines. Trains and writes nothing."""
    from isles.cli.experts_printer import print_paper, print_plan
    from isles.experts.planning import settings
    from isles.experts.reading import read

    if paper:
        if system != "smalltalk" or config is not None or set_ or quick:
            raise ValueError("--paper is smalltalk's table as its paper has it: give it alone, or take it out")
        print_paper(json)
        return
    print_plan(read(system, settings(system), config, set_ or [], quick=quick), json)


def _trust(trust: bool, *paths: Path) -> None:
    """With --trust: what the runs of a forest, of a directory of experts, or these runs themselves name is imported
    from now on.
    """
    from isles.experts.forest import Forest
    from isles.training.config.trust import trust_runs

    for path in paths if trust else ():
        if path.is_dir():
            trust_runs(config.parent for config in path.rglob("config.toml"))
        else:
            trust_runs(member.run for member in Forest.load(path).experts)

"""`isles plan splits`: how workers are best divided into replicas, stages and workers that share a stage."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from isles.base.errors import unknown_name
from isles.cli.plans import questions
from isles.cli.terminal import AsJson, OutFolder, alone, show

_DRY = "isles train CONFIG.toml --dry-run --set pipeline.routing="
_ELSEWHERE = {
    "swarm": f"hangs on each peer's speed and line: {_DRY}swarm plays it, and says seconds, bytes and memory of each",
    "ravnest": "hangs on each node: isles plan clusters NODES.toml forms its clusters and says what they do",
    "skippipe": "hangs on each node's line: isles plan paths LINKS finds the way of each microbatch",
}


def plan_splits(
    model: questions.Model,
    links: questions.Network,
    tokens: questions.Tokens = None,
    step_tokens: questions.StepTokens = None,
    gpu: questions.Gpu = None,
    workers: questions.Sites = None,
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
    from isles.report.sheets.splits import splits_sheet

    if routing in _ELSEWHERE:
        raise ValueError(f"--routing {routing}: {_ELSEWHERE[routing]}")
    if routing not in ("fixed", "random"):
        raise ValueError(unknown_name("--routing", routing, ("fixed", "random")))
    name, between = keys("--method", "method", method)
    kind, crosses = keys("--boundary", "kind", boundary)
    numbers = stages.split(",")
    if stages != "auto" and not all(part.strip().isdigit() and int(part) for part in numbers):
        raise ValueError(f'--stages {stages}: write "auto", or numbers with commas between, such as 2,4,8')
    question, network = questions.question_of(model, gpu, workers, links, tokens, step_tokens)
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
    from isles.base.tables import parse_value

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

"""The commands of `isles plan`."""

from __future__ import annotations

import typer

from isles.cli.plans import checking, clusters, explain, memory, methods, parallel, paths, splits

app = typer.Typer(
    help="Plan a run before it starts: method, splits, memory, paths, clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("methods")(methods.plan_methods)
app.command("splits")(splits.plan_splits)
app.command("memory")(memory.plan_memory)
app.command("parallel")(parallel.plan_parallel)
app.command("paths")(paths.plan_paths)
app.command("check")(checking.check)
app.command("replan")(checking.replan)
app.command("clusters")(clusters.plan_clusters)
app.command("explain")(explain.explain)

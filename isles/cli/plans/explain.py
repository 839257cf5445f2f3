"""`isles plan explain`: the calculations of the papers, done again. Never loads torch."""

from __future__ import annotations

from typing import Annotated

import typer

from isles.cli.plans.showing import AsJson, OutFolder, show


def explain(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which; without it they are listed.")] = None,
    json: AsJson = False,
    out: OutFolder = None,
) -> None:
    """Redo a table or a figure of the papers: what stands behind it, and our numbers."""
    from isles.cli.table import print_named
    from isles.report.sheets.presets import presets, sheet

    if name is not None:
        show(sheet(name), json, out)
        return
    if json or out is not None:
        raise ValueError("missing: NAME; isles plan explain, alone, lists them")
    print_named(presets())

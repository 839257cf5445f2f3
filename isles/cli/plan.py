"""`isles plan`: what a run would cost, before paying for it. Never loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    preset: Annotated[str | None, typer.Option(help="A calculation that is ready; --presets lists them.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write CSV, JSON, PNG and HTML into this directory.")] = None,
) -> None:
    """Work out what links, methods and schedules cost."""
    import sys

    from isles.report.planning import presets as known
    from isles.report.planning import sheet

    if presets:
        if preset is not None or json or out is not None:
            raise ValueError("--presets lists what --preset takes: give it alone")
        width = max(map(len, known()))
        for name, what in known().items():
            print(f"{name:<{width}}  {what}")
        return
    if preset is None:
        raise ValueError(f"nothing to work out: give --preset NAME, one of {', '.join(known())}")
    made = sheet(preset)
    if json:
        from isles.report.sheet import as_json

        print(as_json(made))
    else:
        from isles.cli.table import print_table

        print(made.title, made.what, "", sep="\n")
        print_table(made.table)
        print()
        for note in made.notes:
            print(f"note: {note}")
    if out is not None:
        from isles.report.sheet import write_sheet

        for path in write_sheet(made, out):
            print(path, file=sys.stderr if json else sys.stdout)

"""`isles report RUN...`: write the page of finished or running runs, and of comparisons; the picture where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of isles compare or isles experts.")],
    png: Annotated[
        bool, typer.Option("--png", help="Also write report.png: the pictures of the page, for a mail or a slide.")
    ] = False,
) -> None:
    """Write report.html into each directory."""
    from isles.report import write_picture, write_report

    for run in runs:
        print(write_report(run))
        if png:
            print(write_picture(run))

"""`isles report RUN...`: write the page and the picture of finished or running runs, and of comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of isles compare or isles experts.")],
) -> None:
    """Write report.html and report.png into each directory."""
    from isles.report import write_picture, write_report

    for run in runs:
        print(write_report(run))
        print(write_picture(run))

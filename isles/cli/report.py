"""`isles report RUN...`: write the HTML page of finished or running runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(runs: Annotated[list[Path], typer.Argument(help="Run directories.")]) -> None:
    """Write report.html into each run directory."""
    from isles.report import write_report

    for run in runs:
        print(write_report(run))

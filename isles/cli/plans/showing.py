"""A sheet on the terminal, as JSON, or in files."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isles.report.sheet import Sheet

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]
OutFolder = Annotated[Path | None, typer.Option(help="Also write CSV, JSON, PNG and HTML into this directory.")]


def show(made: Sheet, json: bool, out: Path | None) -> None:
    """Print it. out: also write it into this directory."""
    if json:
        from isles.report.sheet import as_json

        print(as_json(made))
    else:
        from isles.cli.table import print_table

        print(made.title, made.subtitle, made.what, "", sep="\n")
        print_table(made.table)
        print()
        for note in made.notes:
            print(f"note: {note}")
    if out is not None:
        from isles.report.sheet import write_sheet

        for path in write_sheet(made, out):
            print(path, file=sys.stderr if json else sys.stdout)


@contextmanager
def alone() -> Iterator[None]:
    """Sketches are many small things, for which threads do not pay, and torch is not searched for garbage again and
    again.
    """
    from isles.modes import torch_threads

    gc.freeze()
    try:
        with torch_threads(1):
            yield
    finally:
        gc.unfreeze()

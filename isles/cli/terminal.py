"""What commands share: options, tables and sheets on the terminal, and signals before a run has begun."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.report.panels import Table

if TYPE_CHECKING:
    from isles.report.sheet import Sheet


def aligned(rows: Sequence[Sequence[str]], left_aligned: Container[int] = ()) -> list[str]:
    """Lines of a table: columns of `left_aligned` to the left, of numbers to the right. They are as wide as they are: a
    terminal that is too narrow wraps lines, which is better than cutting numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = range(len(widths))
    cells = (
        [row[at].ljust(widths[at]) if at in left_aligned else row[at].rjust(widths[at]) for at in columns]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]


def print_table(table: Table) -> None:
    """With its heads."""
    print("\n".join(aligned([table.heads, *table.rows], range(table.names))))


def print_named(rows: Mapping[str, object]) -> None:
    """A line for each name, with what it stands for."""
    width = max(map(len, rows))
    for name, what in rows.items():
        print(f"{name:<{width}}  {what}")


def _known(device: str | None) -> str | None:
    """ValueError where --device names none."""
    from isles.models.config import check_device

    check_device("auto" if device is None else device, "--device")
    return device


ConfigFile = Annotated[str | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded small run.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")]
InnerSteps = Annotated[int | None, typer.Option(help="Inner steps a worker.")]
Device = Annotated[str, typer.Option(callback=_known, help="auto, cpu, cuda or cuda:N.")]
OwnDevice = Annotated[str | None, typer.Option(callback=_known, help="auto, cpu, cuda or cuda:N. Default: the run's.")]
As = Annotated[str | None, typer.Option("--as", metavar="MODEL", help='Time and bytes as of "1B", or "1B, A100".')]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import and run what the run's config.toml names, though it was made elsewhere.")
]


def end_in_order() -> None:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), end the command by way of Python: no process stays behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]
OutFolder = Annotated[Path | None, typer.Option(help="Also write CSV, JSON, PNG and HTML into this directory.")]


def show(made: Sheet, json: bool, out: Path | None) -> None:
    """Print it. out: also write it into this directory."""
    if json:
        from isles.report.sheet import as_json

        print(as_json(made))
    else:
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
    from isles.base.modes import torch_threads

    gc.freeze()
    try:
        with torch_threads(1):
            yield
    finally:
        gc.unfreeze()

"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from isles.report.panels import Table


def aligned(rows: Sequence[Sequence[str]], words: Container[int] = ()) -> list[str]:
    """Lines of a table: columns of `words` to the left, of numbers to the right. They are as wide as they are: a
    terminal that is too narrow wraps lines, which is better than cutting numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = range(len(widths))
    cells = ([row[at].ljust(widths[at]) if at in words else row[at].rjust(widths[at]) for at in places] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def print_table(table: Table) -> None:
    """With its heads."""
    print("\n".join(aligned([table.heads, *table.rows], range(table.names))))


def print_named(rows: Mapping[str, object]) -> None:
    """A line for each name, with what it stands for."""
    width = max(map(len, rows))
    for name, what in rows.items():
        print(f"{name:<{width}}  {what}")

"""Tables in the terminal."""

from __future__ import annotations

from isles.report.panels import Table


def print_table(table: Table) -> None:
    """Aligned columns as they are: a terminal that is too narrow wraps lines, which is better than cutting numbers."""
    heads, rows, names = table.heads, table.rows, table.names
    widths = [max(len(row[index]) for row in (heads, *rows)) for index in range(len(heads))]
    for row in (heads, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row[:names], widths, strict=False)]
        print("  ".join([*cells, *map(str.rjust, row[names:], widths[names:])]).rstrip())

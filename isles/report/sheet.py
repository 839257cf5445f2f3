"""What a calculation has to show, before it is printed or written: a table, pictures, notes and the same for machines.

sheet -> NAME.csv (the table), NAME.json (`data`), NAME.png and NAME.html (table, pictures, notes)
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from isles.report import settled
from isles.report.page import document, section, wide_table
from isles.report.panels import Panel, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """name: of the files. table: numbers without units (those stand in the heads). what: a line about them. notes: what
    a reader must know to use the numbers. data: for machines.
    """

    name: str
    title: str
    subtitle: str
    table: Table
    what: str
    data: Mapping[str, Any]
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = ()


def as_json(sheet: Sheet) -> str:
    """`data` as text that any JSON parser takes (no NaN)."""
    return json.dumps(sheet.data, indent=1, allow_nan=False)


def as_csv(sheet: Sheet) -> str:
    """The table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([sheet.table.heads, *sheet.table.rows])
    return out.getvalue()


def as_page(sheet: Sheet) -> str:
    """A self-contained HTML page."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in sheet.notes)
    table = wide_table("Table", sheet.what, sheet.table)
    return document(sheet.title, sheet.subtitle, f"{notes}{''.join(map(section, sheet.panels))}{table}")


def write_sheet(sheet: Sheet, folder: Path) -> list[Path]:
    """Write all four files into `folder`, which is made if it is absent; loads matplotlib. ValueError where the folder
    cannot be made.
    """
    from isles.report.draw.png import picture

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made ({error.strerror}); name another directory with --out") from error
    drawn = picture(sheet.title, sheet.subtitle, sheet.panels, sheet.table)
    files = {
        "csv": as_csv(sheet).encode(),
        "json": (as_json(sheet) + "\n").encode(),
        "png": drawn,
        "html": as_page(sheet).encode(),
    }
    return [settled(folder / f"{sheet.name}.{ending}", data) for ending, data in files.items()]

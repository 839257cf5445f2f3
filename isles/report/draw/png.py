"""The panels of a report as one PNG: the page's own SVG, laid side by side and rendered by resvg in the light colours,
in a font that is installed with Isles, so that every machine makes the same picture.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from isles.report.draw.style import BOXES, LIGHT, STYLE
from isles.report.draw.svg import WIDTH, draw, text
from isles.report.panels import Panel, Table

_FONT = "Open Sans"
_LETTER, _TITLE = 7, 12  # pixels of a letter, at most on average, and of the title's: nothing here measures text
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # resvg would refuse all of it
_LINE, _GAP = 20, 30  # pixels of a line; around all, and between columns


def picture(heading: str, below: str, shown: Sequence[Panel], table: Table | None = None) -> bytes:
    """A PNG: the table if there is one, then the panels in two columns, each in the one that is shorter so far. As wide
    as the columns, or a wider table or heading. The same panels give the same bytes.
    """
    import fontpkg
    from resvg_py import svg_to_bytes

    columns = 1 if len(shown) == 1 else 2
    cells, width, height = _table(table) if table else ("", 0, 0)
    width = max(width, columns * (WIDTH + _GAP) - _GAP, _TITLE * len(heading))
    lines = textwrap.wrap(below, width // (_LETTER + 1))
    top = _LINE * (len(lines) + 1) + _GAP
    out = [text(0, 15, heading, "label title"), _at(0, top, cells)]
    out += [text(0, 17 + _LINE * number, line, "heading") for number, line in enumerate(lines, 1)]
    feet = [top + height + (_GAP if table else 0.0)] * columns
    for panel in shown:
        column = feet.index(min(feet))
        drawn, height = _panel(panel)
        out.append(_at(column * (WIDTH + _GAP), feet[column], drawn))
        feet[column] += height + _GAP
    box = f"{-_GAP} {-_GAP} {width + 2 * _GAP} {max(feet) + _GAP:.0f}"
    return svg_to_bytes(
        svg_string=f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{_NO_XML.sub("?", "".join(out))}</svg>',
        style_sheet=re.sub(r"var\(--(\w+)\)", lambda name: LIGHT[name[1]], STYLE),  # resvg knows no variables
        background=LIGHT["back"],
        font_files=[str(fontpkg.path(_FONT))],
        sans_serif_family=_FONT,
        skip_system_fonts=True,
    )


def _at(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x} {y})">{drawn}</g>'


def _panel(panel: Panel) -> tuple[str, float]:
    """Heading, legend and picture, and the height of all."""
    legend, height = _legend(panel.keys)
    drawn = draw(panel.picture) if panel.picture is not None else ""
    size = re.search(r' height="([\d.]+)"', drawn)
    parts = text(0, 14, panel.heading, "label heading"), _at(0, 26, legend), _at(0, 26 + height, drawn)
    return "".join(parts), 26 + height + (float(size[1]) if size else 0)


def _legend(keys: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """The keys behind each other, in as many lines as they need, and the height of those."""
    out, x, y = [], 0, 0
    for css, words in keys:
        width = 25 + _LETTER * len(words)
        if x and x + width > WIDTH:
            x, y = 0, y + _LINE
        if css in BOXES:
            swatch = f'<rect class="{css}" width="12" height="12"/>'
        elif css == "dot":
            swatch = f'<circle class="{css}" cx="8" cy="6" r="4"/>'
        else:
            swatch = f'<line class="{css}" x2="18" y1="6" y2="6"/>'
        out.append(_at(x, y, swatch + text(25, 10, words)))
        x += width + 15
    return "".join(out), y + _LINE if keys else 0


def _table(table: Table) -> tuple[str, int, int]:
    """The table, its width and its height."""
    widths = [_LETTER * max(map(len, column)) + 15 for column in zip(table.heads, *table.rows, strict=True)]
    out, x, y = [], 0, 0
    for row in (table.heads, *table.rows):
        x, y = 0, y + _LINE
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            x += width
            is_name = place < table.names
            out.append(text(x - width if is_name else x - 15, y - 6, cell, "label" if is_name else "label end"))
        out.append(f'<line class="grid" x2="{x - 15}" y1="{y}" y2="{y}"/>')
    return "".join(out), x, y

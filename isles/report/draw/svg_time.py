"""Bars and lanes of time, and grids of shaded cells, as inline SVG; colours as in `svg`."""

from __future__ import annotations

from html import escape

from isles.report.draw.style import STYLE
from isles.report.draw.svg import WIDTH, line_chart, linear
from isles.report.panels import Bars, Chart, Grid, Lanes, Picture
from isles.report.units import format_seconds

_INDENT = 84
_BAR_TEXT = 190  # pixels behind the longest bar
_LANE, _ROWS = 38, ((0, 20), (22, 8))  # a lane's pitch; each row's offset and thickness, pixels
_RIGHT = 16
_MARK = 7  # pixels of a mark's letter
_TOP, _CELL = 20, 30  # pixels above a grid, and of its largest cells


def draw(picture: Picture) -> str:
    """The `<svg>` of any picture."""
    if isinstance(picture, Chart):
        return line_chart(picture)
    if isinstance(picture, Grid):
        return grid(picture)
    return bars(picture) if isinstance(picture, Bars) else lanes(picture)


def bars(picture: Bars) -> str:
    """Bars on one scale, thinner where there are many."""
    longest = max(sum(seconds for _, seconds in bar.parts) for bar in picture.bars)
    pitch = 26 if len(picture.bars) <= 16 else 14
    scale = (WIDTH - _INDENT - _BAR_TEXT) / longest
    thick = pitch * 0.75
    out = [_svg(picture.title, pitch * len(picture.bars) + 8)]
    for index, bar in enumerate(picture.bars):
        y, x = 4 + index * pitch, float(_INDENT)
        out.append(f"<g><title>{escape(bar.hint)}</title>{_label(bar.label, y + thick / 2)}")
        for css, seconds in bar.parts:
            out.append(f'<rect class="{css}" x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="{thick}"/>')
            x += seconds * scale
        out.append(f'<text class="tick" x="{x + 8:.1f}" y="{y + thick / 2 + 4:.1f}">{escape(bar.text)}</text></g>')
    return "".join([*out, "</svg>"])


def lanes(picture: Lanes) -> str:
    """Lanes of two rows over a common axis of seconds."""
    width, height = WIDTH - _INDENT - _RIGHT, _LANE * len(picture.lanes)

    def x_at(seconds: float) -> float:
        return _INDENT + (seconds - picture.start) / (picture.end - picture.start) * width

    out = [_svg(picture.title, height + 44)]
    for tick in linear(picture.start, picture.end, 8, tight=True).ticks:
        x = f"{x_at(tick):.1f}"
        out.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        out.append(f'<text class="tick mid" x="{x}" y="{height + 18}">{tick:,.6g}</text>')
    middle = _INDENT + width / 2
    out.append(f'<text class="tick mid" x="{middle:.0f}" y="{height + 38}">{escape(picture.x_label)}</text>')
    for index, lane in enumerate(picture.lanes):
        out.append(_label(lane.label, index * _LANE + 4 + _ROWS[0][1] / 2))
        for piece in lane.segments:
            left, right = x_at(max(piece.start, picture.start)), x_at(min(piece.end, picture.end))
            offset, thick = _ROWS[piece.row]
            # Half a pixel is the least that can be seen; what took less is drawn wider than it was.
            out.append(
                f'<rect class="{piece.css}" x="{left:.1f}" y="{index * _LANE + 4 + offset}" '
                f'width="{max(right - left, 0.5):.1f}" height="{thick}">'
                f"<title>{escape(f'{piece.hint} {format_seconds(piece.end - piece.start)}')}</title></rect>"
            )
            if piece.mark and right - left > _MARK * len(piece.mark) + 3:
                y = index * _LANE + 4 + offset + thick / 2 + 4
                out.append(f'<text class="mark" x="{(left + right) / 2:.1f}" y="{y:.1f}">{escape(piece.mark)}</text>')
    return "".join([*out, "</svg>"])


def _svg(title: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'


def _label(text: str, middle: float) -> str:
    return f'<text class="tick end" x="{_INDENT - 8}" y="{middle + 4:.1f}">{escape(text)}</text>'


def alone(picture: Picture) -> str:
    """The picture as a file of its own, with the page's colours."""
    drawn = draw(picture).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return drawn.replace(">", f"><style>{escape(STYLE, quote=False)}</style>", 1) + "\n"


def grid(picture: Grid) -> str:
    """Rows go down, columns to the right; what stands out has a dot."""
    count = len(picture.labels)
    side = min(_CELL, (WIDTH - _INDENT) // max(count, 1))
    out = [_svg(picture.title, _TOP + side * count + 4)]
    for row, label in enumerate(picture.labels):
        middle = (row + 0.5) * side
        out.append(f'<text class="tick mid" x="{_INDENT + middle:.1f}" y="{_TOP - 6}">{escape(label.split()[0])}</text>')
        out.append(_label(label, _TOP + middle))
        for column, shade in enumerate(picture.shades[row]):
            if shade is None:
                continue
            x, y = _INDENT + column * side, _TOP + row * side
            dot = f'<circle class="dot" cx="{x + side / 2:.1f}" cy="{y + side / 2:.1f}" r="{side / 6:.1f}"/>'
            out.append(
                f'<g><title>{escape(picture.hints[row][column])}</title><rect class="transfer" x="{x}" y="{y}" '
                f'width="{side - 1}" height="{side - 1}" fill-opacity="{0.06 + 0.94 * shade:.2f}"/>'
                f"{dot if (row, column) in picture.marks else ''}</g>"
            )
    return "".join([*out, "</svg>"])

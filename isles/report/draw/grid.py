"""A grid of shaded cells as inline SVG; colours as in `svg`."""

from __future__ import annotations

from html import escape

from isles.report.draw.svg import WIDTH
from isles.report.panels import Grid

LEFT, TOP, LARGEST = 84, 20, 30  # pixels; the last: of a cell


def grid(picture: Grid) -> str:
    """Rows go down, columns to the right; what stands out has a dot."""
    count = len(picture.labels)
    side = min(LARGEST, (WIDTH - LEFT) // max(count, 1))
    out = [
        f'<svg viewBox="0 0 {WIDTH} {TOP + side * count + 4}" role="img" aria-label="{escape(picture.title)}">',
    ]
    for row, label in enumerate(picture.labels):
        middle = (row + 0.5) * side
        out.append(f'<text class="tick mid" x="{LEFT + middle:.1f}" y="{TOP - 6}">{escape(label.split()[0])}</text>')
        out.append(f'<text class="tick end" x="{LEFT - 8}" y="{TOP + middle + 4:.1f}">{escape(label)}</text>')
        for column, shade in enumerate(picture.shades[row]):
            if shade is None:
                continue
            x, y = LEFT + column * side, TOP + row * side
            dot = f'<circle class="dot" cx="{x + side / 2:.1f}" cy="{y + side / 2:.1f}" r="{side / 6:.1f}"/>'
            out.append(
                f'<g><title>{escape(picture.hints[row][column])}</title><rect class="transfer" x="{x}" y="{y}" '
                f'width="{side - 1}" height="{side - 1}" fill-opacity="{0.06 + 0.94 * shade:.2f}"/>'
                f"{dot if (row, column) in picture.marks else ''}</g>"
            )
    return "".join([*out, "</svg>"])

"""The page's style sheet: one set of colours for light, one for dark, chosen by the reader's system; `png` takes the
light ones.
"""

from __future__ import annotations

# Name of a colour: (light, dark).
_COLOURS = {
    "back": ("#ffffff", "#14181c"),
    "text": ("#1c2126", "#e4e8ec"),
    "soft": ("#5b6570", "#9aa5b1"),
    "grid": ("#e3e7eb", "#272e35"),
    "edge": ("#b9c1c9", "#4a545e"),
    "panel": ("#f5f7f9", "#1c2228"),
    "warn": ("#fff4d6", "#3a3118"),
    "worker": ("#7aa6d6", "#3f6d9e"),
    "mean": ("#1b5fae", "#7db8f5"),
    "dot": ("#c8501e", "#ff9466"),
    "ddp": ("#8a4fb0", "#c79be6"),
    "rate": ("#c8501e", "#ff9466"),
    "compute": ("#2b8a66", "#4fb58e"),
    "blocked": ("#e09a2b", "#e5a94a"),
    "away": ("#d3d8dd", "#343c44"),
    "transfer": ("#1b5fae", "#7db8f5"),
    "other": ("#9aa5b1", "#5b6570"),
    "series0": ("#1b5fae", "#7db8f5"),
    "series1": ("#c8501e", "#ff9466"),
    "series2": ("#2b8a66", "#4fb58e"),
    "series3": ("#8a4fb0", "#c79be6"),
    "series4": ("#a87b0a", "#e0b94a"),
    "series5": ("#c2326f", "#f58ab8"),
    "series6": ("#4a7f8c", "#86c3d1"),
    "series7": ("#6b6b6b", "#b5b5b5"),
}
LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
SERIES = [name for name in LIGHT if name.startswith("series")]
# Name of a line's look: (pixels, dashes).
LINES: dict[str, tuple[float, tuple[int, ...]]] = {
    "worker": (1.0, ()),
    "mean": (2.2, ()),
    "ddp": (2.0, (7, 5)),
    "rate": (1.6, (3, 3)),
    **dict.fromkeys(SERIES, (2.0, ())),
}
BOXES = ("compute", "blocked", "away", "transfer", "other")


def _variables(which: int) -> str:
    return " ".join(f"--{name}:{pair[which]};" for name, pair in _COLOURS.items())


def _line_rules() -> str:
    rules = []
    for name, (width, dashes) in LINES.items():
        dashed = f" stroke-dasharray:{' '.join(map(str, dashes))};" if dashes else ""
        rules.append(f"svg .{name} {{ stroke:var(--{name}); stroke-width:{width};{dashed} }}")
        look = "dashed" if dashes else "solid"
        rules.append(f".swatch.{name} {{ border-top:{max(width, 1.5):g}px {look} var(--{name}); }}")
    return "\n".join(rules)


def _box_rules() -> str:
    return "\n".join(
        f"svg .{name} {{ fill:var(--{name}); }} "
        f".swatch.{name} {{ width:.85em; height:.85em; border:0; border-radius:2px; background:var(--{name}); }}"
        for name in BOXES
    )


STYLE = f"""
:root {{ {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
* {{ box-sizing:border-box; }}
body {{ margin:0; background:var(--back); color:var(--text); font:16px/1.5 system-ui, sans-serif; }}
main {{ max-width:54rem; margin:0 auto; padding:1.5rem 1.25rem 3rem; }}
h1 {{ font-size:1.6rem; line-height:1.25; margin:0; overflow-wrap:anywhere; }}
h2 {{ font-size:1.1rem; margin:2.2rem 0 .4rem; }}
.sub {{ color:var(--soft); margin:.2rem 0 1rem; overflow-wrap:anywhere; }}
.note {{ background:var(--warn); padding:.5rem .8rem; border-radius:6px; margin:.5rem 0; }}
.cards {{ display:grid; grid-template-columns:repeat(auto-fit, minmax(10.5rem, 1fr)); gap:.75rem; margin:1rem 0 0; }}
.cards div {{ background:var(--panel); border-radius:8px; padding:.7rem .9rem; }}
.cards b {{ display:block; font-size:1.2rem; font-weight:600; }}
.cards span {{ color:var(--soft); font-size:.9rem; }}
figure {{ margin:0; overflow-x:auto; }}
svg {{ display:block; width:100%; min-width:34rem; height:auto; }}
figcaption {{ color:var(--soft); font-size:.9rem; margin-top:.3rem; }}
.legend {{ margin:0 0 .4rem; font-size:.9rem; color:var(--soft); }}
.key {{ margin-right:1.2rem; display:inline-block; }}
.swatch {{ display:inline-block; width:1.3em; height:0; margin-right:.45em; vertical-align:middle; }}
.swatch.dot {{ width:.65em; height:.65em; border:0; border-radius:50%; background:var(--dot); }}
svg polyline {{ fill:none; stroke-linejoin:round; }}
{_line_rules()}
{_box_rules()}
svg .worker {{ stroke-opacity:.75; }}
svg .dot {{ fill:var(--dot); stroke:var(--back); stroke-width:1; }}
svg .point {{ fill:currentColor; }}
svg .grid {{ stroke:var(--grid); }} svg .axis {{ stroke:var(--edge); }}
svg text {{ font:12px system-ui, sans-serif; fill:var(--soft); }}
svg .end {{ text-anchor:end; }} svg .mid {{ text-anchor:middle; }} svg .label {{ fill:var(--text); }}
svg .title {{ font-size:20px; }} svg .heading {{ font-size:15px; }}
svg .mark {{ text-anchor:middle; font-size:11px; fill:var(--back); pointer-events:none; }}
table {{ border-collapse:collapse; width:100%; font-size:.95rem; }}
th, td {{ text-align:left; font-weight:400; padding:.3rem .8rem .3rem 0; border-bottom:1px solid var(--grid); }}
th {{ color:var(--soft); width:45%; }} td {{ font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }}
td small {{ color:var(--soft); font-size:.88rem; margin-left:1.2rem; }}
pre {{ background:var(--panel); padding:.8rem 1rem; border-radius:8px; overflow-x:auto; font-size:.85rem; }}
summary {{ cursor:pointer; margin-top:1.5rem; }}
.scroll {{ overflow-x:auto; }}
table.wide {{ font-size:.85em; }}
table.wide td, table.wide th {{ white-space:nowrap; padding:.3rem 0 .3rem 1em; text-align:right; width:auto; }}
table.wide th {{ white-space:normal; vertical-align:bottom; }}
table.wide .name {{ text-align:left; }} table.wide .name:first-child {{ padding-left:0; }}
"""

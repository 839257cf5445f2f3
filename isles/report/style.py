"""The page's style sheet: one set of colours for light, one for dark, chosen by the reader's system."""

STYLE = """
:root { --back:#ffffff; --text:#1c2126; --soft:#5b6570; --grid:#e3e7eb; --edge:#b9c1c9; --panel:#f5f7f9;
  --worker:#7aa6d6; --mean:#1b5fae; --dot:#c8501e; --ddp:#8a4fb0; --compute:#2b8a66; --blocked:#e09a2b;
  --warn:#fff4d6; }
@media (prefers-color-scheme: dark) {
  :root { --back:#14181c; --text:#e4e8ec; --soft:#9aa5b1; --grid:#272e35; --edge:#4a545e; --panel:#1c2228;
    --worker:#3f6d9e; --mean:#7db8f5; --dot:#ff9466; --ddp:#c79be6; --compute:#4fb58e; --blocked:#e5a94a;
    --warn:#3a3118; }
}
* { box-sizing:border-box; }
body { margin:0; background:var(--back); color:var(--text); font:16px/1.5 system-ui, sans-serif; }
main { max-width:54rem; margin:0 auto; padding:1.5rem 1.25rem 3rem; }
h1 { font-size:1.6rem; line-height:1.25; margin:0; overflow-wrap:anywhere; }
h2 { font-size:1.1rem; margin:2.2rem 0 .4rem; }
.sub { color:var(--soft); margin:.2rem 0 1rem; overflow-wrap:anywhere; }
.note { background:var(--warn); padding:.5rem .8rem; border-radius:6px; margin:.5rem 0; }
.cards { display:grid; grid-template-columns:repeat(auto-fit, minmax(10.5rem, 1fr)); gap:.75rem; margin:1rem 0 0; }
.cards div { background:var(--panel); border-radius:8px; padding:.7rem .9rem; }
.cards b { display:block; font-size:1.2rem; font-weight:600; }
.cards span { color:var(--soft); font-size:.9rem; }
figure { margin:0; overflow-x:auto; }
svg { display:block; width:100%; min-width:34rem; height:auto; }
figcaption { color:var(--soft); font-size:.9rem; margin-top:.3rem; }
.legend { margin:0 0 .4rem; font-size:.9rem; color:var(--soft); }
.key { margin-right:1.2rem; white-space:nowrap; }
.swatch { display:inline-block; width:1.3em; height:0; margin-right:.45em; vertical-align:middle;
  border-top:3px solid; }
.swatch.worker { border-color:var(--worker); border-top-width:1.5px; } .swatch.mean { border-color:var(--mean); }
.swatch.ddp { border-color:var(--ddp); border-top-style:dashed; }
.swatch.dot { width:.65em; height:.65em; border:0; border-radius:50%; background:var(--dot); }
.swatch.compute, .swatch.blocked { width:.85em; height:.85em; border:0; border-radius:2px; background:var(--compute); }
.swatch.blocked { background:var(--blocked); }
svg polyline { fill:none; stroke-linejoin:round; }
svg .worker { stroke:var(--worker); stroke-width:1; stroke-opacity:.75; }
svg .mean { stroke:var(--mean); stroke-width:2.2; }
svg .ddp { stroke:var(--ddp); stroke-width:2; stroke-dasharray:7 5; }
svg .dot { fill:var(--dot); stroke:var(--back); stroke-width:1; }
svg .compute { fill:var(--compute); } svg .blocked { fill:var(--blocked); }
svg .grid { stroke:var(--grid); } svg .axis { stroke:var(--edge); }
svg text { font:12px system-ui, sans-serif; fill:var(--soft); }
svg .end { text-anchor:end; } svg .mid { text-anchor:middle; } svg .label { fill:var(--text); }
table { border-collapse:collapse; width:100%; font-size:.95rem; }
th, td { text-align:left; font-weight:400; padding:.3rem .8rem .3rem 0; border-bottom:1px solid var(--grid); }
th { color:var(--soft); width:45%; } td { font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
td small { color:var(--soft); font-size:.88rem; margin-left:1.2rem; }
pre { background:var(--panel); padding:.8rem 1rem; border-radius:8px; overflow-x:auto; font-size:.85rem; }
summary { cursor:pointer; margin-top:1.5rem; }
svg .series0 { stroke:#1b5fae; stroke-width:2; } .swatch.series0 { border-color:#1b5fae; }
svg .series1 { stroke:#c8501e; stroke-width:2; } .swatch.series1 { border-color:#c8501e; }
svg .series2 { stroke:#2b8a66; stroke-width:2; } .swatch.series2 { border-color:#2b8a66; }
svg .series3 { stroke:#8a4fb0; stroke-width:2; } .swatch.series3 { border-color:#8a4fb0; }
svg .series4 { stroke:#b8860b; stroke-width:2; } .swatch.series4 { border-color:#b8860b; }
svg .series5 { stroke:#c2326f; stroke-width:2; } .swatch.series5 { border-color:#c2326f; }
svg .series6 { stroke:#4a7f8c; stroke-width:2; } .swatch.series6 { border-color:#4a7f8c; }
svg .series7 { stroke:#6b6b6b; stroke-width:2; } .swatch.series7 { border-color:#6b6b6b; }
table.wide { font-size:.85em; }
table.wide td, table.wide th { white-space:nowrap; padding-right:1em; text-align:right; }
table.wide td:first-child, table.wide th:first-child { text-align:left; }
"""

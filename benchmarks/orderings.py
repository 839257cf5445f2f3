"""Do the methods come in the order that the papers report? Small runs, three seeds, one table.

    python -m benchmarks.orderings [--seeds 0,1,2] [--out FOLDER] [--json]

The runs are those of benchmarks/orderings.toml, on the virtual backend (its losses are those of real processes), with
outer learning rate 0.4 and momentum 0.9 for all. Numbers are validation losses of the consolidated model, nats a byte,
means over the seeds. Finished runs are written into FOLDER/losses.jsonl, and those that are there are not run again.
Exit code 1 if an ordering does not hold.

    streaming (tau 1, alpha 0.5) <= DiLoCo + 0.03          DiLoCo <= eager - 0.03
    eager <= delayed - 0.25, at the same outer rate        |4-bit floats - float32| <= 0.05, for each of the four
    eager < delayed at H = 5, 15 and 45 (Eager Updates, arXiv 2502.12996, figure 5)
    DiLoCoX (arXiv 2506.21263): carried progress costs at most 0.1, set aside (delayed) 0.25 more; rank 8 of 32 with
    error feedback at most 0.15, rank 2 at least 0.25 more than that; everything together at most 0.25
    DCT-DP (arXiv 2010.08899) with error feedback is at least 0.05 below DCT-DP without it
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks._measure import Row, report
from isles.running.run import launch
from isles.training.config.reading import read_config

SETTINGS = str(Path(__file__).with_suffix(".toml"))
OUTER = {"outer_lr": 0.4, "outer_momentum": 0.9}
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "streaming-diloco": {"layers_per_fragment": 1, "overlap_steps": 1, "merge_alpha": 0.5},
    "eager": {},
    "delayed": {},
}
_COMPRESSED = {"codec": "none", "start_compress": 0, "window": 0}
# Other settings of one method, by a name of their own: "method, what is set".
VARIANTS: dict[str, dict[str, Any]] = {
    "dilocox, dense, carry": {"rank": 0, "error_feedback": "none"},
    "dilocox, rank 8, no delay": {"rank": 8, "delay": "none", **_COMPRESSED},
    "dilocox, rank 2, no delay": {"rank": 2, "delay": "none", **_COMPRESSED},
    "dilocox, rank 8, int4, carry": {"rank": 8, **_COMPRESSED, "codec": "int4"},
}
# Methods that reduce gradients every step: no H, no outer step; tensors are small here, and are to be sparse anyway.
_DCT = {"sparsity": 0.99, "exclude_below": 256}
EVERY_STEP: dict[str, dict[str, Any]] = {
    "ddp": {},
    "dct-dp": _DCT,
    "dct-dp, no feedback": {**_DCT, "error_feedback": "none"},
    "ddp, rank 4": {"codec": "powersgd:4", "error_feedback": "local"},
}
ROUNDS = (5, 15, 45)  # values of H
USUAL = 15


class Cell(NamedTuple):
    """One line of the table."""

    method: str
    sync_every: int = USUAL
    codec: str = "none"

    @property
    def name(self) -> str:
        """As printed."""
        return (
            self.method
            + (f", H = {self.sync_every}" if self.sync_every != USUAL else "")
            + ("" if self.codec == "none" else f", {self.codec}")
        )


CELLS = [
    *(Cell(method, codec=codec) for method in METHODS for codec in ("none", "fp4")),
    *(Cell(method, H) for H in ROUNDS if H != USUAL for method in ("eager", "delayed")),
    *(Cell(name) for name in (*VARIANTS, *EVERY_STEP)),
]


def loss(cell: Cell, seed: int) -> float:
    """One run: the validation loss of its one model."""
    if cell.method in EVERY_STEP:
        settings = EVERY_STEP[cell.method]
    else:
        own = (METHODS | VARIANTS)[cell.method]
        settings = {"sync_every": cell.sync_every, "codec": cell.codec, **OUTER, **own}
    words = [f"replicas.{key}={value}" for key, value in settings.items()]
    config = read_config(SETTINGS, {"replicas.method": cell.method.partition(",")[0], "run.seed": seed}, words)
    with tempfile.TemporaryDirectory() as folder:
        return launch(config, Path(folder, "run"), lambda line: None, lambda notice: None)["val_loss"]


def losses(seeds: Sequence[int], out: Path) -> dict[Cell, list[float]]:
    """Of every cell and seed, those in `out` taken from there."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "losses.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(Cell(*line["cell"]), line["seed"]): line["loss"] for line in lines}
    for seed in seeds:
        for cell in CELLS:
            if (cell, seed) in known:
                continue
            known[cell, seed] = loss(cell, seed)
            print(f"{cell.name}, seed {seed}: {known[cell, seed]:.3f}", file=sys.stderr, flush=True)
            with file.open("a") as lines_file:
                lines_file.write(json.dumps({"cell": cell, "seed": seed, "loss": known[cell, seed]}) + "\n")
    return {cell: [known[cell, seed] for seed in seeds] for cell in CELLS}


def table(found: dict[Cell, list[float]]) -> list[Row]:
    """The losses, then what is claimed of them."""
    average = {cell: mean(values) for cell, values in found.items()}
    rows = [
        Row(cell.name, average[cell], "nats a byte", None, " / ".join(f"{value:.3f}" for value in found[cell]))
        for cell in CELLS
    ]

    def apart(name: str, one: Cell, other: Cell, limit: float) -> Row:
        return Row(name, average[one] - average[other], "nats a byte", ("<=", limit))

    diloco, streaming, eager, delayed = (Cell(method) for method in METHODS)
    rows += [
        apart("streaming - diloco", streaming, diloco, 0.03),
        apart("diloco - eager", diloco, eager, -0.03),
        apart("eager - delayed", eager, delayed, -0.25),
        *(apart(f"eager - delayed, H = {H}", Cell("eager", H), Cell("delayed", H), 0.0) for H in ROUNDS if H != USUAL),
    ]
    carry, eight, two, together = (Cell(name) for name in VARIANTS)
    rows += [
        apart("dilocox, carry - diloco", carry, diloco, 0.1),
        apart("dilocox, carry - delayed", carry, delayed, -0.25),
        apart("dilocox, rank 8 - diloco", eight, diloco, 0.15),
        apart("dilocox, rank 8 - rank 2", eight, two, -0.25),
        apart("dilocox, all - diloco", together, diloco, 0.25),
        apart("dct-dp - dct-dp, no feedback", Cell("dct-dp"), Cell("dct-dp, no feedback"), -0.05),
    ]
    for method in METHODS:
        off = abs(average[Cell(method, codec="fp4")] - average[Cell(method)])
        rows.append(Row(f"|fp4 - none|, {method}", off, "nats a byte", ("<=", 0.05)))
    return rows


def main() -> int:
    """Run what is missing and judge."""
    parser = argparse.ArgumentParser(description="Small runs that put the methods in order.")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas (default: 0,1,2)")
    parser.add_argument("--out", type=Path, help="where finished runs are remembered (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        found = losses(seeds, options.out or Path(folder))
    return report(table(found), options.json)


if __name__ == "__main__":
    sys.exit(main())

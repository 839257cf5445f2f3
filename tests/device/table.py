"""What crosses between host and device, and how often the host waits, by method: the table of docs/gpu.md.

python -m tests.device.table            # prints it
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isles
from isles.base.parsing import parse_json

ROOT = Path(__file__).parents[2]
IN_ONE_PROCESS = [name for name in isles.METHODS if name != "fsdp"]
"""On the virtual backend; fsdp wants a process for each worker."""
BFLOAT16 = ("diloco", "streaming-diloco")
"""Methods that are walked with such weights: landings that are copied, and that are mixed with the local weights."""
EVERY_STEP = ("ddp", "fsdp", "dct-dp", "demo")
STREAMING = ("streaming-diloco", "streaming-noloco")
"""Methods that send a part of the model in each step."""
_SECONDS = 900.0  # of the long walk, on a machine that does other things too

QUICK = (
    *("refusals", "counted", "own state", "shape", "islands", "between stages", "node's seconds"),
    *("machines", "measured", "lanes", "order native", "order diloco", "train stages"),
    *("method diloco", "counts ddp", "counts diloco", "counts streaming-diloco", "counts demo"),
)
"""Cases of the walk that `make test` takes: one method of each family. The long walk takes all others."""


def walk(*options: str) -> dict[str, Any]:
    """The rows of `tests.device.walk`. RuntimeError where it did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        done = subprocess.run(
            [sys.executable, "-m", "tests.device.walk", *options, str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode or not out.is_file():
            raise RuntimeError(f"the walk ended with {done.returncode}: {done.stderr[-3000:]}")
        return parse_json(out.read_text())


@dataclass(frozen=True)
class Crossing:
    """Of one worker, the most that one has. A plain step is one in which nothing is due (None: there is no such step);
    a round is all that is due in H steps. Sizes in bytes.
    """

    plain_waits: int | None
    plain_bytes: int | None
    down: int
    up: int
    copies: int
    waits: int


def crossing(name: str, row: dict[str, Any]) -> Crossing:
    """From a row of the walk, whose methods exchange after steps 3 and 6."""
    workers = [{int(step): counted for step, counted in counts.items()} for counts in row["counts"]]
    plain = () if name in (*EVERY_STEP, *STREAMING) else (4, 5, 7, 8)
    due = (8,) if name in EVERY_STEP else (6, 7, 8)

    def most(steps: tuple[int, ...], *keys: str) -> int:
        return max(sum(counts[step][key] for step in steps for key in keys) for counts in workers)

    return Crossing(
        plain_waits=max((most((step,), "waits") for step in plain), default=None),
        plain_bytes=max((most((step,), "to_host_bytes", "to_device_bytes") for step in plain), default=None),
        down=most(due, "to_host_bytes"),
        up=most(due, "to_device_bytes"),
        copies=most(due, "to_host", "to_device"),
        waits=most(due, "waits"),
    )


def crossed(rows: dict[str, Any], name: str) -> Crossing:
    """Of a method."""
    row = rows[f"counts {name}" if name in IN_ONE_PROCESS else f"method {name}"]
    if "error" in row:
        raise RuntimeError(row["error"])
    return crossing(name, row)


def table_row(rows: dict[str, Any], name: str) -> str:
    """Of the table, Markdown."""
    found, model = crossed(rows, name), rows["shape"]["bytes"]
    plain = ("-" if number is None else str(number) for number in (found.plain_waits, found.plain_bytes))
    sizes = (f"{number} B" if 0 < number < 100 else f"{number / model:.3g}" for number in (found.down, found.up))
    return "| " + " | ".join([name, *plain, *sizes, str(found.copies), str(found.waits)]) + " |"


if __name__ == "__main__":
    print("| method | plain step: waits | bytes | round: down | up | copies | waits |\n|---|---|---|---|---|---|---|")
    rows = walk() | walk("--long")
    print("\n".join(table_row(rows, name) for name in isles.METHODS))

"""A file of the links that `isles doctor` has measured between pairs of nodes, as `isles.network.links` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.base.durable import write_text
from isles.base.tables import read_toml

Cells = list[list[Any]]
_KEYS_OF_PAIRS = ("bandwidth", "latency", "jitter")


def write_pair(path: str, here: int, there: int, *, out: float, back: float, latency: float) -> list[tuple[int, int]]:
    """Write the measured link between two nodes, each way, into a file, which may be new; other entries stay.

    Unmeasured pairs are 0, and a file with such entries is refused as a network. out, back: bits per second from `here`
    to `there`, and from there. latency: seconds one way. Returns the pairs that are not measured yet. ValueError, one
    line that begins with the file's name, if the file holds something else than a matrix of pairs.
    """
    refuse_file(path)
    table = read_toml(path) if Path(path).exists() else {}
    known = len(table.get("bandwidth", ()))
    size = max(known, here + 1, there + 1)
    rates, waits = _grown(table.get("bandwidth", []), size), _grown(_waits(table, known), size)
    rates[here][there], rates[there][here] = _rate(out), _rate(back)
    waits[here][there] = waits[there][here] = f"{1e3 * latency:.6g}ms"
    lines = [f"bandwidth = {_written(rates)}", f"latency = {_written(waits)}"]
    if "jitter" in table:
        lines.append(f"jitter = {table['jitter']}")
    write_text(Path(path), "\n".join(lines) + "\n")
    return [(u, v) for u in range(size) for v in range(u + 1, size) if rates[u][v] == "0" or rates[v][u] == "0"]


def refuse_file(path: str) -> None:
    """ValueError as in `write_pair`, before anything is measured."""
    if not Path(path).parent.is_dir():
        raise ValueError(f"{path}: there is no folder {Path(path).parent}: make it, or name another file")
    if not Path(path).exists():
        return
    table = read_toml(path)
    rates, waits = table.get("bandwidth"), table.get("latency", 0)
    own = [rates, waits] if isinstance(waits, list) else [rates]
    if any(key not in _KEYS_OF_PAIRS for key in table) or not all(_is_square(one, rates) for one in own):
        raise ValueError(f"{path}: has no link of its own for each pair of nodes; name a new file, or one of pairs")


def _is_square(cells: Any, like: Any) -> bool:
    rows = isinstance(cells, list) and isinstance(like, list) and len(cells) == len(like)
    return rows and all(isinstance(row, list) and len(row) == len(cells) for row in cells)


def _waits(table: Mapping[str, Any], size: int) -> Cells:
    """The matrix of latencies; a single latency is expanded."""
    raw = table.get("latency", 0)
    if isinstance(raw, list):
        return raw
    return [[0 if source == target else raw for target in range(size)] for source in range(size)]


def _grown(cells: Cells, size: int) -> Cells:
    more = size - len(cells)
    return [[*row, *["0"] * more] for row in cells] + [["0"] * size for _ in range(more)]


def _rate(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e6:.6g}Mbit/s"


def _written(cells: Cells) -> str:
    rows = (", ".join(f'"{cell}"' if isinstance(cell, str) else str(cell) for cell in row) for row in cells)
    return "[\n" + "".join(f"  [{row}],\n" for row in rows) + "]"

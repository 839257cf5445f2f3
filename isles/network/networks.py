"""Networks by name: presets, "RATE, LATENCY", and a TOML file of one's own in one of two forms. The first form is also
written, from measured pairs.

    bandwidth = "40Mbit/s"            # up; one, a list with one for each link, or a matrix [source][target] of ranks
                                      # where each ordered pair has a link of its own (then no downlink, no uplinks)
    downlink = "250Mbit/s"            # the same forms; left out: wide enough
    latency = "25ms"                  # one way; one, or a matrix [source][target] of ranks
    jitter = 0.5                      # sigma of the log-normal factor on each latency
    uplinks = [0, 0, 1]               # the uplink of each rank; left out: each has its own

    jitter = 0.4
    [[site]]
    name = "Zurich"
    latitude = 47.4
    longitude = 8.5
    upload = "100Mbit/s"
    download = "1Gbit/s"
    workers = 2                       # they share the link; left out: 1

Rates without a unit are bits per second, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.base.durable import write_text
from isles.base.errors import unknown_name
from isles.base.tables import read_toml, typed
from isles.network.links import Links, PairRate, Rate
from isles.network.sites import WORLDWIDE, Site, connect
from isles.network.units import parse_latency, parse_rate

Amount = float | str
Cells = list[list[Any]]
_KEYS_OF_PAIRS = ("bandwidth", "latency", "jitter")


@dataclass(frozen=True, kw_only=True)
class _LinkTable:
    bandwidth: Amount | tuple[Amount, ...] | tuple[tuple[Amount, ...], ...]
    downlink: Amount | tuple[Amount, ...] | None = None
    latency: Amount | tuple[tuple[Amount, ...], ...] = 0.0
    jitter: float = 0.0
    uplinks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _SiteTable:
    name: str
    latitude: float
    longitude: float
    upload: Amount
    download: Amount = float("inf")
    workers: int = 1


def read_links(path: str) -> Links:
    """The network in the file. ValueError, one line that begins with `links = PATH:`, for anything that is wrong."""
    try:
        table = read_toml(path)
        return _from_sites(table) if "site" in table else _from_links(table)
    except ValueError as error:
        raise ValueError(f"links = {path}: {str(error).removeprefix(f'{path}: ')}") from None


def _from_links(table: Mapping[str, Any]) -> Links:
    made: _LinkTable = typed("links", _LinkTable, table)
    latency = made.latency
    return Links(
        bandwidth=_bandwidth(made.bandwidth),
        downlink=None if made.downlink is None else _rates("downlink", made.downlink),
        latency=[[parse_latency("latency", cell) for cell in row] for row in latency]
        if isinstance(latency, tuple)
        else parse_latency("latency", latency),
        jitter=made.jitter,
        uplinks=made.uplinks,
    )


def _from_sites(table: Mapping[str, Any]) -> Links:
    for key in table:
        if key not in ("site", "jitter"):
            raise ValueError(f"links.{key} does not go with [[site]]: a site has upload, download and a position")
    tables, jitter = table["site"], table.get("jitter", 0.0)
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ValueError("links.site: write [[site]] above each site's keys")
    if isinstance(jitter, bool) or not isinstance(jitter, (int, float)):
        raise ValueError(f"links.jitter = {jitter!r}: write a number, 0 or more")
    sites, workers = [], []
    for number, one in enumerate(tables, start=1):
        made: _SiteTable = typed(f"site {number}", _SiteTable, one)
        if made.workers < 1:
            raise ValueError(f"site {number}: workers = {made.workers}: choose 1 or more")
        sites.append(
            Site(
                name=made.name,
                latitude=made.latitude,
                longitude=made.longitude,
                upload=parse_rate(f"site {number}: upload", made.upload),
                download=_download(number, made.download),
            )
        )
        workers.append(made.workers)
    return connect(sites, workers, jitter=jitter)


def _bandwidth(raw: Amount | tuple[Amount, ...] | tuple[tuple[Amount, ...], ...]) -> Rate | PairRate:
    if not isinstance(raw, tuple) or not raw or not isinstance(raw[0], tuple):
        return _rates("bandwidth", raw)  # pyrefly: ignore[bad-argument-type]
    return [
        [math.inf if source == target else parse_rate("bandwidth", cell) for target, cell in enumerate(row)]
        for source, row in enumerate(raw)
        if isinstance(row, tuple)
    ]


def _rates(name: str, raw: Amount | tuple[Amount, ...]) -> float | list[float]:
    return [parse_rate(name, one) for one in raw] if isinstance(raw, tuple) else parse_rate(name, raw)


def _download(number: int, raw: float | str) -> float:
    """`inf`: wide enough for all that arrives, as where nothing is said."""
    return math.inf if raw in (math.inf, "inf") else parse_rate(f"site {number}: download", raw)


def write_pair(path: str, here: int, there: int, *, out: float, back: float, latency: float) -> list[tuple[int, int]]:
    """Write the link between two nodes, each way, into the file, which need not be there; what it says of others stays.
    A pair that nobody has measured yet stands at 0, with which the file is no network: whoever reads it is told.

    out, back: bits per second from `here` to `there`, and from there. latency: seconds one way. Returns the pairs that
    are still unknown. ValueError, one line that begins with the file's name, where that is no matrix of pairs.
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
    """ValueError as `write_pair`, before anything is measured."""
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
    """One latency for all is one for each."""
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


PRESETS: dict[str, Links] = {
    "lan": Links(bandwidth=1e9, latency=0.2e-3, jitter=0.1),  # a classroom: gigabit Ethernet, one switch
    "datacentres": Links(bandwidth=10e9, latency=30e-3, jitter=0.05),  # one continent, a leased path per worker
    "home-fibre": Links(bandwidth=300e6, latency=15e-3, jitter=0.3),  # upload rate of a symmetric consumer link
    # Upload is a small share of what is advertised.
    "home-cable": Links(bandwidth=40e6, latency=25e-3, jitter=0.5, downlink=500e6),
}
"""Round numbers of the right size for a first look; measure your own for a decision. Latencies are one way."""
ELSEWHERE = ("worldwide",)
"""Presets that are made from others' parts: volunteers in the twelve sites of `isles.network.sites`."""


def links(name: str) -> Links:
    """The preset called `name`; the network "40Mbit/s, 25ms", the rate of every uplink and the latency; or that in a
    file whose name ends in .toml (`isles.network.networks`).

    ValueError with the list of names, and the nearest one, when there is none; or with what is wrong.
    """
    rate, comma, latency = name.partition(",")
    if comma:
        bandwidth = parse_rate("links", rate.strip())
        return Links(bandwidth=bandwidth, latency=parse_latency("links", latency.strip()))
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".toml"):
        return read_links(name)
    if name in ELSEWHERE:
        return WORLDWIDE
    raise ValueError(
        unknown_name("links", name, [*PRESETS, *ELSEWHERE])
        + ", a rate and a latency such as '40Mbit/s, 25ms', or a .toml file of your own"
    )

"""What a message between two workers costs: rates of the uplink it leaves by and of the downlink it comes in by,
latency to the target, jitter of that latency.

    arrival of one alone = its bits / the slower of the two rates + latency(source, target) * factor

Or every ordered pair of workers has a link of its own: then `bandwidth` is a matrix. Several messages share a link
fairly (`isles.network.engine`). Messages between two ranks behind one uplink use it too, up and down. Units: bits per
second, seconds.

`Topology` says which link a message takes if workers in islands have other links inside than outside. Rank r is in
island r // island. Inside, a message leaves by the worker's own port at the rate and latency of `near`; to other
islands it leaves by the sender's uplink of `far` and arrives by the target's downlink.

Networks by name: presets, "RATE, LATENCY", and a TOML file in one of two forms. `measured_links` writes the first one.

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

Links between sites on the map: latency from distance, rates from each site's own link.

    latency = great circle x DETOUR / FIBRE + ACCESS        one way, seconds

`WORLD` is twelve sites where volunteers might live; the sources of its numbers are given beside them. They are of the
right size, not measured: measure your own links for a decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isles.base.errors import demand, unknown_name
from isles.base.tables import read_toml, typed
from isles.network.noise import LognormalSeries, lognormal
from isles.network.units import parse_latency, parse_rate

Rate = float | Sequence[float] | Callable[[int], float]
PairRate = Sequence[Sequence[float]]
Latency = float | Sequence[Sequence[float]] | Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The network between the workers of a run.

    bandwidth: bits per second of an uplink; one value for all, one per uplink, or a function of the uplink's number.
               `math.inf`: sending takes no time. A matrix [source][target]: a link of its own for each ordered pair,
               without uplinks and downlink; its diagonal does not count.
    latency:   seconds one way; one value, a matrix [source][target], or a function (source, target) -> seconds.
    jitter:    sigma of the log-normal factor on each message's latency (mean 1, see `isles.network.noise.lognormal`).
    uplinks:   for each rank the number of its uplink, counted from 0; None: each rank has its own. Ranks with the same
               number share its bandwidth fairly (one household, one data centre's egress), and its downlink.
    downlink:  bits per second towards the ranks of an uplink, in the forms of `bandwidth`; None: wide enough for all
               that arrives.
    devices:   of each site: so many consecutive ranks share an uplink, and all of the above is given by site instead of
               by rank; not with uplinks or a matrix of bandwidths.

    ValueError for a rate that is not positive, a negative or infinite latency, or a negative jitter.
    """

    bandwidth: Rate | PairRate
    latency: Latency = 0.0
    jitter: float = 0.0
    uplinks: Sequence[int] | None = None
    downlink: Rate | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        # Tuples, so that neither the caller's list nor an array can change the network of a run that has begun.
        if is_matrix(self.bandwidth):
            self._keep_pairs(self.bandwidth)  # pyrefly: ignore[bad-argument-type]
        for name in ("bandwidth", "downlink"):
            rates = getattr(self, name)
            if rates is None or callable(rates) or is_matrix(rates):
                continue
            if not isinstance(rates, (int, float)):
                object.__setattr__(self, name, rates := tuple(float(rate) for rate in rates))
            listed = (rates,) if isinstance(rates, (int, float)) else rates
            if not listed or not all(rate > 0 for rate in listed):
                raise ValueError(f"{name} must be above 0 bits per second, got {rates}")
        if not isinstance(self.latency, (int, float)) and not callable(self.latency):
            object.__setattr__(self, "latency", tuple(tuple(float(x) for x in row) for row in self.latency))
        if self.devices > 1 and (self.uplinks is not None or is_matrix(self.bandwidth)):
            raise ValueError("uplinks or a matrix already say who shares a link: leave devices out")
        if self.uplinks is not None:
            object.__setattr__(self, "uplinks", tuple(int(uplink) for uplink in self.uplinks))
        if isinstance(self.latency, (int, float)):
            _check_latency(self.latency)
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"jitter (sigma of the latency's factor) must be 0 or more, got {self.jitter}")

    def _keep_pairs(self, rates: PairRate) -> None:
        """Store the matrix as tuples, with infinite rates on its diagonal."""
        if self.uplinks is not None or self.downlink is not None:
            raise ValueError("bandwidth is a matrix, a link for each pair of workers: leave uplinks and downlink out")
        made = tuple(
            tuple(math.inf if source == target else float(rate) for target, rate in enumerate(row))
            for source, row in enumerate(rates)
        )
        if not all(rate > 0 for row in made for rate in row):
            raise ValueError("bandwidth must be above 0 bits per second from every worker to every other")
        object.__setattr__(self, "bandwidth", made)

    @property
    def pairs(self) -> tuple[tuple[float, ...], ...] | None:
        """Bits per second [source][target] if each ordered pair has a link of its own; else None."""
        return self.bandwidth if is_matrix(self.bandwidth) else None  # pyrefly: ignore[bad-return]

    def check(self, workers: int) -> None:
        """ValueError, naming the field, unless this network connects `workers` ranks."""
        if self.pairs is not None and any(len(row) != workers for row in (self.pairs, *self.pairs)):
            raise ValueError(f"bandwidth must be a matrix of {workers} x {workers} for {workers} workers")
        if self.uplinks is not None and len(self.uplinks) != workers:
            raise ValueError(f"uplinks names {len(self.uplinks)} ranks, there are {workers} workers")
        count = self.uplink_count(workers)
        if self.uplinks is not None and set(self.uplinks) != set(range(count)):
            raise ValueError(f"uplinks must be numbered 0..{count - 1} without gaps, got {sorted(set(self.uplinks))}")
        for name, rates in (("bandwidth", self.bandwidth), ("downlink", self.downlink)):
            if isinstance(rates, tuple) and not is_matrix(rates) and len(rates) != count:
                raise ValueError(f"{name} has {len(rates)} values, there are {count} uplinks")
            if callable(rates) and not all(rates(uplink) > 0 for uplink in range(min(count, _period(rates) or count))):
                raise ValueError(f"{name} must be above 0 bits per second for every uplink")
        sites = -(-workers // self.devices)
        if isinstance(self.latency, tuple) and any(len(row) != sites for row in (self.latency, *self.latency)):
            raise ValueError(f"latency must be a matrix of {sites} x {sites} for {workers} workers")
        if not isinstance(self.latency, (int, float)):
            period = _period(self.latency)
            ranks = range(workers) if period is None else range(min(workers, 2 * period * self.devices))
            for source in ranks:
                for target in ranks:
                    if source != target:
                        _check_latency(self.base_latency(source, target), f" from {source} to {target}")

    def link_count(self, workers: int) -> int:
        return self.uplink_count(workers) if self.pairs is None else workers * workers

    def link_of(self, source: int, target: int) -> int:
        """The number of the link by which a message leaves: its sender's uplink, or the pair's own."""
        return self.uplink_of(source) if self.pairs is None else source * len(self.pairs) + target

    def link_rate(self, link: int) -> float:
        """Bits per second of a link by its number."""
        return self.rate(link) if self.pairs is None else self.pairs[link // len(self.pairs)][link % len(self.pairs)]

    def way_rate(self, source: int, target: int) -> float:
        """Bits per second of a single message from `source` to `target`."""
        return min(self.link_rate(self.link_of(source, target)), self.down_rate(self.uplink_of(target)))

    def uplink_count(self, workers: int) -> int:
        return -(-workers // self.devices) if self.uplinks is None else max(self.uplinks) + 1

    def uplink_of(self, rank: int) -> int:
        return rank // self.devices if self.uplinks is None else self.uplinks[rank]

    def rate(self, uplink: int) -> float:
        """Bits per second of an uplink; with a link for each pair, the slowest of that worker's links."""
        return min(self.pairs[uplink]) if self.pairs is not None else _of(self.bandwidth, uplink)

    def down_rate(self, uplink: int) -> float:
        """Bits per second towards the ranks of an uplink."""
        return math.inf if self.downlink is None else _of(self.downlink, uplink)

    def base_latency(self, source: int, target: int) -> float:
        """Mean seconds from the last bit's leaving `source` to its arrival at `target`."""
        if isinstance(self.latency, (int, float)):
            return self.latency
        here, there = source // self.devices, target // self.devices
        return self.latency(here, there) if callable(self.latency) else self.latency[here][there]

    @property
    def period(self) -> int | None:
        """The number of ranks after which links and latencies repeat; None: they do not."""
        periods = [_period(part) for part in (self.bandwidth, self.downlink, self.latency)]
        known = [period for period in periods if period is not None]
        return self.devices * math.lcm(*known) if self.uplinks is None and len(known) == len(periods) else None

    def site_of(self, rank: int) -> int:
        """Ranks with the same number have the same latencies to others."""
        period = _period(self.latency)
        return rank if period is None else rank // self.devices % period

    def scaled(self, factor: float) -> Links:
        """The same network with links `factor` times as fast."""

        def scale(rates: Any) -> Any:
            if callable(rates):
                return lambda uplink: factor * rates(uplink)
            return [scale(rate) for rate in rates] if hasattr(rates, "__len__") else factor * rates

        return replace(
            self, bandwidth=scale(self.bandwidth), downlink=None if self.downlink is None else scale(self.downlink)
        )

    def slowest_rate(self, workers: int) -> float:
        """Bits per second of the slowest worker, up or down, while all that share its link are busy too."""
        sharing = Counter(map(self.uplink_of, range(workers)))
        return min(min(self.rate(link), self.down_rate(link)) / count for link, count in sharing.items())

    def longest_latency(self, workers: int) -> float:
        """Mean seconds of the longest latency between two of `workers` ranks; 0 for one."""
        if isinstance(self.latency, (int, float)):
            return self.latency if workers > 1 else 0.0
        ranks = range(min(workers, 2 * (self.period or workers)))
        ways = [(source, target) for source in ranks for target in ranks if source != target]
        return max((self.base_latency(source, target) for source, target in ways), default=0.0)

    def message_latency(self, source: int, target: int, *, number: int, seed: int) -> float:
        """Seconds of latency of the `number`-th message from `source` to `target`: a pure function of its arguments."""
        return self.base_latency(source, target) * lognormal(self.jitter, seed, source, target, number)

    def narrow_downlinks(self, workers: int) -> list[int]:
        """Uplinks (by number) whose downlink is slower than all possible senders together."""
        if self.downlink is None:
            return []
        rates = [self.rate(link) for link in range(self.uplink_count(workers))]
        behind = Counter(map(self.uplink_of, range(workers)))  # ranks that share a link send to each other too
        return [
            link
            for link in range(len(rates))
            if self.down_rate(link) < sum(rate for other, rate in enumerate(rates) if other != link or behind[link] > 1)
        ]


def is_matrix(rates: Any) -> bool:
    """Whether rates are given for pairs of workers."""
    return hasattr(rates, "__len__") and len(rates) > 0 and hasattr(rates[0], "__len__")


def _period(part: Any) -> int | None:
    """The number of ranks after which a field repeats."""
    return 1 if part is None or isinstance(part, (int, float)) else getattr(part, "period", None)


def _of(rates: Any, uplink: int) -> float:
    if isinstance(rates, (int, float)):
        return rates
    return rates(uplink) if callable(rates) else rates[uplink]


def _check_latency(seconds: float, where: str = "") -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"latency{where} must be 0 s or more and finite, got {seconds}")


class Topology:
    """The links of `workers` ranks: `rates` in bits per second, uplinks of `far` first, then ports inside islands.

    near: inside islands of `island` neighbours; None: as `far`. ValueError if the two do not fit so many workers.
    """

    def __init__(self, workers: int, far: Links, near: Links | None = None, island: int = 1) -> None:
        far.check(workers)
        if workers % island:
            raise ValueError(f"{workers} workers are not islands of {island}: choose a divisor")
        self.workers = workers
        self.far, self.near, self.island = far, far if near is None or island == 1 else near, island
        self.uplinks = far.link_count(workers)
        self.rates = [far.link_rate(link) for link in range(self.uplinks)]
        if self.near is not far:
            self.near.check(workers)
            if self.near.uplinks is not None or self.near.pairs is not None or self.near.narrow_downlinks(workers):
                raise ValueError(
                    "inner_links: inside an island every worker has a port of its own: leave uplinks and pairs out, "
                    "and take a downlink at least as fast as the uplink"
                )
            self.rates += [self.near.rate(self.near.uplink_of(rank)) for rank in range(workers)]

    def is_near(self, source: int, target: int) -> bool:
        """Whether a message between two ranks stays inside an island."""
        return self.near is not self.far and source // self.island == target // self.island

    def up(self, source: int, target: int) -> int:
        return self.uplinks + source if self.is_near(source, target) else self.far.link_of(source, target)

    def down(self, source: int, target: int) -> int | None:
        """The uplink whose downlink a message uses; None: the downlink is never a bottleneck."""
        return None if self.is_near(source, target) else self.far.uplink_of(target)

    def latency(self, source: int, target: int, *, number: int, seed: int) -> float:
        links = self.near if self.is_near(source, target) else self.far
        return links.message_latency(source, target, number=number, seed=seed)

    def latencies(self, source: int, target: int, seed: int) -> tuple[float, LognormalSeries]:
        """(mean seconds, factors by number) whose product is `latency`, for callers that need many numbers."""
        links = self.near if self.is_near(source, target) else self.far
        return links.base_latency(source, target), LognormalSeries(links.jitter, seed, source, target)


EARTH_KM = 6371.0
FIBRE = 204_000.0
"""Kilometres that light goes in a second in glass: 299,792 divided by a refractive index of 1.47."""
DETOUR = 1.5
"""Cables follow coasts, roads and exchanges, not the great circle."""
ACCESS = 10e-3
"""Seconds that both ends together add: home router, access network, first exchange. Some ms each is usual."""
NEXT_DOOR = 0.2e-3
"""Seconds between two workers behind one link: a switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """latitude, longitude: degrees, north and east positive. upload, download: bits per second that workers share."""

    name: str
    latitude: float
    longitude: float
    upload: float
    download: float = math.inf

    def __post_init__(self) -> None:
        if not -90 <= self.latitude <= 90 or not -180 <= self.longitude <= 180:
            raise ValueError(f"latitude = {self.latitude}, longitude = {self.longitude}: degrees, up to ±90 and ±180")
        demand(self, "upload download", lambda x: x > 0, "a rate must be above 0 bits per second")


def kilometres(one: Site, other: Site) -> float:
    """Along the great circle."""
    phi, psi = math.radians(one.latitude), math.radians(other.latitude)
    east = math.radians(other.longitude - one.longitude)
    half = math.sin((psi - phi) / 2) ** 2 + math.cos(phi) * math.cos(psi) * math.sin(east / 2) ** 2
    return 2 * EARTH_KM * math.asin(math.sqrt(half))


def latency(one: Site, other: Site) -> float:
    """Seconds one way between two links."""
    return kilometres(one, other) * DETOUR / FIBRE + ACCESS


def connect(sites: Sequence[Site], workers: Sequence[int], *, jitter: float = 0.0) -> Links:
    """The network of `workers[k]` ranks at `sites[k]`, which share its link; ranks in the order of the sites."""
    uplinks = [number for number, count in enumerate(workers) for _ in range(count)]
    return Links(
        bandwidth=[site.upload for site in sites],
        downlink=[site.download for site in sites],
        latency=[[NEXT_DOOR if a == b else latency(sites[a], sites[b]) for b in uplinks] for a in uplinks],
        jitter=jitter,
        uplinks=uplinks,
    )


def _site(name: str, latitude: float, longitude: float, upload: float, download: float) -> Site:
    return Site(name=name, latitude=latitude, longitude=longitude, upload=upload * 1e6, download=download * 1e6)


# Coordinates are those of the cities, to a tenth of a degree. Rates are our round numbers for an ordinary link of a
# household there, after the kind of link that is common: where fibre reaches most homes, upload comes near download
# (Seoul, Tokyo, Singapore, Mumbai, Sao Paulo, Johannesburg); over telephone wire (London, Frankfurt), cable television
# (New York, San Francisco, Warsaw) or a national plan (Sydney, 100 down and 20 up) it is a small part of it.
WORLD = (
    _site("Frankfurt", 50.1, 8.7, 40, 100),
    _site("New York", 40.7, -74.0, 35, 300),
    _site("Singapore", 1.4, 103.8, 300, 300),
    _site("Sao Paulo", -23.6, -46.6, 150, 300),
    _site("Tokyo", 35.7, 139.7, 300, 300),
    _site("London", 51.5, -0.1, 20, 80),
    _site("San Francisco", 37.8, -122.4, 35, 400),
    _site("Mumbai", 19.1, 72.9, 100, 100),
    _site("Sydney", -33.9, 151.2, 20, 100),
    _site("Johannesburg", -26.2, 28.0, 50, 50),
    _site("Seoul", 37.6, 127.0, 300, 300),
    _site("Warsaw", 52.2, 21.0, 50, 300),
)


class _BySite:
    """Numbers of the sites of `WORLD`, or of pairs of them, by ranks; see `Links.period`."""

    period = len(WORLD)

    def __init__(self, numbers: Sequence[Any]) -> None:
        self._numbers = numbers

    def __call__(self, *ranks: int) -> float:
        found: Any = self._numbers
        for rank in ranks:
            found = found[rank % self.period]
        return found


WORLDWIDE = Links(
    bandwidth=_BySite([site.upload for site in WORLD]),
    downlink=_BySite([site.download for site in WORLD]),
    latency=_BySite([[latency(one, other) for other in WORLD] for one in WORLD]),
    jitter=0.4,
)
"""Rank r lives in site r mod 12, on a link of its own."""


Amount = float | str


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
    """The rate; `inf`, the default: wide enough for all that arrives."""
    return math.inf if raw in (math.inf, "inf") else parse_rate(f"site {number}: download", raw)


PRESETS: dict[str, Links] = {
    "lan": Links(bandwidth=1e9, latency=0.2e-3, jitter=0.1),  # a classroom: gigabit Ethernet, one switch
    "datacentres": Links(bandwidth=10e9, latency=30e-3, jitter=0.05),  # one continent, a leased line per worker
    "home-fibre": Links(bandwidth=300e6, latency=15e-3, jitter=0.3),  # upload rate of a symmetric consumer link
    # Upload is a small share of what is advertised.
    "home-cable": Links(bandwidth=40e6, latency=25e-3, jitter=0.5, downlink=500e6),
    "worldwide": WORLDWIDE,
}
"""Round numbers of the right size for a first look; measure your own for a decision. Latencies are one way."""


def links(name: str) -> Links:
    """The preset called `name`; the network "40Mbit/s, 25ms", the rate of every uplink and the latency; or that in a
    file whose name ends in .toml (`isles.network.links`).

    ValueError for an unknown name, with the known ones and the nearest, or for an error in the file.
    """
    rate, comma, latency = name.partition(",")
    if comma:
        bandwidth = parse_rate("links", rate.strip())
        return Links(bandwidth=bandwidth, latency=parse_latency("links", latency.strip()))
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".toml"):
        return read_links(name)
    raise ValueError(
        unknown_name("links", name, PRESETS)
        + ", a rate and a latency such as '40Mbit/s, 25ms', or a .toml file of your own"
    )

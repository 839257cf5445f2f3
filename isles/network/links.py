"""What a message between two workers costs: rates of the uplink it leaves by and of the downlink it comes in by,
latency to the target, jitter of that latency.

    arrival of one alone = its bits / the slower of the two rates + latency(source, target) * factor

Or every ordered pair of workers has a link of its own, which nobody else uses: then `bandwidth` is a matrix. Several
messages share a link fairly (`isles.network.engine`). What two ranks behind one uplink send each other goes over it
too, up and down. Units: bits per second, seconds.

`Topology` says which link a message takes where workers in islands reach each other otherwise than the rest of the
world. Rank r is in island r // island. Inside, a message leaves by the worker's own port at the rate and latency of
`near`; to other islands by the uplink that `far` gives its sender, and comes in by the downlink of its target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isles.network.noise import LognormalSeries, lognormal

Rate = float | Sequence[float] | Callable[[int], float]
PairRate = Sequence[Sequence[float]]
Latency = float | Sequence[Sequence[float]] | Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The network between the workers of a run.

    bandwidth: bits per second of an uplink; one value for all, one per uplink, or a function of the uplink's number.
               `math.inf`: sending takes no time. A matrix [source][target]: a link of its own for each ordered pair,
               without uplinks and downlink; what stands from a worker to itself does not count.
    latency:   seconds one way; one value, a matrix [source][target], or a function (source, target) -> seconds.
    jitter:    sigma of the log-normal factor on each message's latency (mean 1, see `isles.network.noise.lognormal`).
    uplinks:   for each rank the number of its uplink, counted from 0; None: each rank has its own. Ranks with the same
               number share its bandwidth fairly (one household, one data centre's egress), and its downlink.
    downlink:  bits per second towards the ranks of an uplink, in the forms of `bandwidth`; None: wide enough for all
               that arrives.
    devices:   of each site: so many ranks in a row share an uplink, and the number of their site stands for theirs in
               all of the above; without uplinks and a matrix of bandwidths.

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
            raise ValueError("a network that names its uplinks or the links of pairs says itself who shares a link")
        if self.uplinks is not None:
            object.__setattr__(self, "uplinks", tuple(int(uplink) for uplink in self.uplinks))
        if isinstance(self.latency, (int, float)):
            _check_latency(self.latency)
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"jitter (sigma of the latency's factor) must be 0 or more, got {self.jitter}")

    def _keep_pairs(self, rates: PairRate) -> None:
        """The matrix as tuples, with endless rates from each worker to itself."""
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
        """Bits per second [source][target] where each ordered pair has a link of its own."""
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
        """Bits per second of a message from `source` to `target` that is alone."""
        return min(self.link_rate(self.link_of(source, target)), self.down_rate(self.uplink_of(target)))

    def uplink_count(self, workers: int) -> int:
        return -(-workers // self.devices) if self.uplinks is None else max(self.uplinks) + 1

    def uplink_of(self, rank: int) -> int:
        return rank // self.devices if self.uplinks is None else self.uplinks[rank]

    def rate(self, uplink: int) -> float:
        """Bits per second of an uplink; of a worker with a link to each other one the slowest of those."""
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
        """Ranks after which their links and latencies repeat themselves; None: they do not."""
        periods = [_period(part) for part in (self.bandwidth, self.downlink, self.latency)]
        known = [period for period in periods if period is not None]
        return self.devices * math.lcm(*known) if self.uplinks is None and len(known) == len(periods) else None

    def site_of(self, rank: int) -> int:
        """Ranks with the same number have the same latencies to others."""
        period = _period(self.latency)
        return rank if period is None else rank // self.devices % period

    def scaled(self, factor: float) -> Links:
        """The same network, its links so many times as fast."""

        def scale(rates: Any) -> Any:
            if callable(rates):
                return lambda uplink: factor * rates(uplink)
            return [scale(rate) for rate in rates] if hasattr(rates, "__len__") else factor * rates

        return replace(
            self, bandwidth=scale(self.bandwidth), downlink=None if self.downlink is None else scale(self.downlink)
        )

    def slowest_rate(self, workers: int) -> float:
        """Bits per second that the worker with the least has, up or down, if those that share its link are busy too."""
        sharing = Counter(map(self.uplink_of, range(workers)))
        return min(min(self.rate(link), self.down_rate(link)) / count for link, count in sharing.items())

    def longest_latency(self, workers: int) -> float:
        """Mean seconds of the longest way between two of `workers` ranks; 0 for one."""
        if isinstance(self.latency, (int, float)):
            return self.latency if workers > 1 else 0.0
        ranks = range(min(workers, 2 * (self.period or workers)))
        ways = [(source, target) for source in ranks for target in ranks if source != target]
        return max((self.base_latency(source, target) for source, target in ways), default=0.0)

    def message_latency(self, source: int, target: int, *, number: int, seed: int) -> float:
        """Seconds of latency of the `number`-th message from `source` to `target`: a pure function of its arguments."""
        return self.base_latency(source, target) * lognormal(self.jitter, seed, source, target, number)

    def narrow_downlinks(self, workers: int) -> list[int]:
        """Lines (numbers of uplinks) whose downlink is less than what all who may send to them can send at once."""
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
    """Ranks after which it repeats itself."""
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

    near: inside islands of `island` neighbours; None: as far. ValueError where the two do not fit so many workers.
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
                    "and take a downlink that keeps nobody waiting"
                )
            self.rates += [self.near.rate(self.near.uplink_of(rank)) for rank in range(workers)]

    def is_near(self, source: int, target: int) -> bool:
        """Whether the way between two ranks is that inside an island."""
        return self.near is not self.far and source // self.island == target // self.island

    def up(self, source: int, target: int) -> int:
        return self.uplinks + source if self.is_near(source, target) else self.far.link_of(source, target)

    def down(self, source: int, target: int) -> int | None:
        """The uplink whose downlink it comes in by; None: it keeps nobody waiting."""
        return None if self.is_near(source, target) else self.far.uplink_of(target)

    def latency(self, source: int, target: int, *, number: int, seed: int) -> float:
        links = self.near if self.is_near(source, target) else self.far
        return links.message_latency(source, target, number=number, seed=seed)

    def latencies(self, source: int, target: int, seed: int) -> tuple[float, LognormalSeries]:
        """(mean seconds, factors by number) whose product is `latency`, for who asks for many numbers."""
        links = self.near if self.is_near(source, target) else self.far
        return links.base_latency(source, target), LognormalSeries(links.jitter, seed, source, target)

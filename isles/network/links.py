"""What a message between two workers costs: rate of the uplink it leaves by, latency to the target, jitter of that
latency.

    arrival = end of service on the sender's uplink (`isles.network.uplink`) + latency(source, target) * factor

Units: bits per second, seconds. A link is described by its sender's side; the receiver's downlink is taken to be wide
enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.errors import unknown_name
from isles.network.noise import lognormal

Latency = float | Sequence[Sequence[float]] | Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The network between the workers of a run.

    bandwidth: bits per second of an uplink; one value for all, or one per uplink. `math.inf`: sending takes no time.
    latency:   seconds one way; one value, a matrix [source][target], or a function (source, target) -> seconds.
    jitter:    sigma of the log-normal factor on each message's latency (mean 1, see `isles.network.noise.lognormal`).
    uplinks:   for each rank the number of its uplink, counted from 0; None: each rank has its own. Ranks with the same
               number share its bandwidth fairly (one household, one data centre's egress).

    ValueError for a rate that is not positive, a negative or infinite latency, or a negative jitter.
    """

    bandwidth: float | Sequence[float]
    latency: Latency = 0.0
    jitter: float = 0.0
    uplinks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # Tuples, so that neither the caller's list nor an array can change the network of a run that has begun.
        if not isinstance(self.bandwidth, (int, float)):
            object.__setattr__(self, "bandwidth", tuple(float(rate) for rate in self.bandwidth))
        if not isinstance(self.latency, (int, float)) and not callable(self.latency):
            object.__setattr__(self, "latency", tuple(tuple(float(x) for x in row) for row in self.latency))
        if self.uplinks is not None:
            object.__setattr__(self, "uplinks", tuple(int(uplink) for uplink in self.uplinks))
        rates: Sequence[float] = (self.bandwidth,) if isinstance(self.bandwidth, (int, float)) else self.bandwidth
        if not rates or not all(rate > 0 for rate in rates):
            raise ValueError(f"bandwidth must be above 0 bits per second, got {self.bandwidth}")
        if isinstance(self.latency, (int, float)):
            _check_latency(self.latency)
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"jitter (sigma of the latency's factor) must be 0 or more, got {self.jitter}")

    def check(self, workers: int) -> None:
        """ValueError, naming the field, unless this network connects `workers` ranks."""
        if self.uplinks is not None and len(self.uplinks) != workers:
            raise ValueError(f"uplinks names {len(self.uplinks)} ranks, there are {workers} workers")
        count = self.uplink_count(workers)
        if self.uplinks is not None and set(self.uplinks) != set(range(count)):
            raise ValueError(f"uplinks must be numbered 0..{count - 1} without gaps, got {sorted(set(self.uplinks))}")
        if isinstance(self.bandwidth, tuple) and len(self.bandwidth) != count:
            raise ValueError(f"bandwidth has {len(self.bandwidth)} values, there are {count} uplinks")
        if isinstance(self.latency, tuple) and any(len(row) != workers for row in (self.latency, *self.latency)):
            raise ValueError(f"latency must be a matrix of {workers} x {workers} for {workers} workers")
        if not isinstance(self.latency, (int, float)):
            for source in range(workers):
                for target in range(workers):
                    if source != target:
                        _check_latency(self.base_latency(source, target), f" from {source} to {target}")

    def uplink_count(self, workers: int) -> int:
        """How many uplinks `workers` ranks have."""
        return workers if self.uplinks is None else max(self.uplinks) + 1

    def uplink_of(self, rank: int) -> int:
        """The number of the uplink by which `rank` sends."""
        return rank if self.uplinks is None else self.uplinks[rank]

    def rate(self, uplink: int) -> float:
        """Bits per second of an uplink."""
        return self.bandwidth if isinstance(self.bandwidth, (int, float)) else self.bandwidth[uplink]

    def base_latency(self, source: int, target: int) -> float:
        """Mean seconds from the last bit's leaving `source` to its arrival at `target`."""
        if isinstance(self.latency, (int, float)):
            return self.latency
        return self.latency(source, target) if callable(self.latency) else self.latency[source][target]

    def slowest_rate(self, workers: int) -> float:
        """Bits per second that the worker with the least has, if those that share its uplink send as well."""
        sharing = [self.uplink_of(rank) for rank in range(workers)]
        return min(self.rate(uplink) / sharing.count(uplink) for uplink in sharing)

    def longest_latency(self, workers: int) -> float:
        """Mean seconds of the longest way between two of `workers` ranks; 0 for one."""
        ways = [(source, target) for source in range(workers) for target in range(workers) if source != target]
        return max((self.base_latency(source, target) for source, target in ways), default=0.0)

    def message_latency(self, source: int, target: int, *, number: int, seed: int) -> float:
        """Seconds of latency of the `number`-th message from `source` to `target`: a pure function of its arguments."""
        return self.base_latency(source, target) * lognormal(self.jitter, seed, source, target, number)


def _check_latency(seconds: float, where: str = "") -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"latency{where} must be 0 s or more and finite, got {seconds}")


PRESETS: dict[str, Links] = {
    "lan": Links(bandwidth=1e9, latency=0.2e-3, jitter=0.1),  # a classroom: gigabit Ethernet, one switch
    "datacentres": Links(bandwidth=10e9, latency=30e-3, jitter=0.05),  # one continent, a leased path per worker
    "home-fibre": Links(bandwidth=300e6, latency=15e-3, jitter=0.3),  # upload rate of a symmetric consumer line
    "home-cable": Links(bandwidth=40e6, latency=25e-3, jitter=0.5),  # upload is a small share of what is advertised
}
"""Round numbers of the right size for a first look; measure your own for a decision. Latencies are one way."""


def links(name: str) -> Links:
    """The preset called `name`; ValueError with the list of names, and the nearest one, when there is none."""
    if name in PRESETS:
        return PRESETS[name]
    raise ValueError(unknown_name("links", name, PRESETS))

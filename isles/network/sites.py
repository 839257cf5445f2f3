"""Links between sites on the map: latency from distance, rates from each site's own link.

    latency = great circle x DETOUR / FIBRE + ACCESS        one way, seconds

`WORLD` is twelve sites where volunteers might live; what its numbers come from stands beside them. They are of the
right size, not measured: measure your own links for a decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isles.base.errors import demand
from isles.network.links import Links

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
    """The network of `workers[k]` ranks at `sites[k]`, who share its link; ranks in the order of the sites."""
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


class _Rate:
    """See `Links.period`."""

    period = len(WORLD)

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates

    def __call__(self, rank: int) -> float:
        return self._rates[rank % self.period]


class _Latency:
    """See `Links.period`."""

    period = len(WORLD)

    def __init__(self) -> None:
        self._between = [[latency(one, other) for other in WORLD] for one in WORLD]

    def __call__(self, source: int, target: int) -> float:
        return self._between[source % self.period][target % self.period]


WORLDWIDE = Links(
    bandwidth=_Rate([site.upload for site in WORLD]),
    downlink=_Rate([site.download for site in WORLD]),
    latency=_Latency(),
    jitter=0.4,
)
"""Rank r lives in site r mod 12, on a link of its own."""

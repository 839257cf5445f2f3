"""Networks by name: presets, and files of one's own."""

from __future__ import annotations

from isles.errors import unknown_name
from isles.network.links import Links
from isles.network.own import read_links
from isles.network.places import WORLDWIDE
from isles.network.units import parse_latency, parse_rate

PRESETS: dict[str, Links] = {
    "lan": Links(bandwidth=1e9, latency=0.2e-3, jitter=0.1),  # a classroom: gigabit Ethernet, one switch
    "datacentres": Links(bandwidth=10e9, latency=30e-3, jitter=0.05),  # one continent, a leased path per worker
    "home-fibre": Links(bandwidth=300e6, latency=15e-3, jitter=0.3),  # upload rate of a symmetric consumer line
    # Upload is a small share of what is advertised.
    "home-cable": Links(bandwidth=40e6, latency=25e-3, jitter=0.5, downlink=500e6),
}
"""Round numbers of the right size for a first look; measure your own for a decision. Latencies are one way."""
ELSEWHERE = ("worldwide",)
"""Presets that are made from others' parts: volunteers in the twelve places of `isles.network.places`."""


def links(name: str) -> Links:
    """The preset called `name`; the network "40Mbit/s, 25ms", the rate of every uplink and the latency; or that in a
    file whose name ends in .toml (`isles.network.own`).

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

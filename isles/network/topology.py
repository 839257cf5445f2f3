"""Which line a message takes, where workers in islands reach each other otherwise than the rest of the world.

Rank r is in island r // island. Inside, a message leaves by the worker's own port at the rate and latency of `near`;
to other islands by the uplink that `far` gives its sender, and comes in by the downlink of its target.
"""

from __future__ import annotations

from isles.network.links import Links
from isles.network.noise import LognormalSeries


class Topology:
    """The lines of `workers` ranks: `rates` in bits per second, uplinks of `far` first, then ports inside islands.

    near: inside islands of `island` neighbours; None: as far. ValueError where the two do not fit so many workers.
    """

    def __init__(self, workers: int, far: Links, near: Links | None = None, island: int = 1) -> None:
        far.check(workers)
        if workers % island:
            raise ValueError(f"{workers} workers are not islands of {island}: choose a divisor")
        self.workers = workers
        self.far, self.near, self.island = far, far if near is None or island == 1 else near, island
        self.uplinks = far.line_count(workers)
        self.rates = [far.line_rate(line) for line in range(self.uplinks)]
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
        """The line by which a message leaves."""
        return self.uplinks + source if self.is_near(source, target) else self.far.line_of(source, target)

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

"""What one collective costs: how many payloads pass the busiest link, and how many latencies follow each other.

    seconds = payloads * bits / rate + hops * latency

| collective | payloads | hops | what moves |
|---|---|---|---|
| ring | 2 (M-1)/M | 2 (M-1) | chunks go round twice, as partial sums, then complete: what the papers assume |
| two-shot | (1 + back) (M-1)/M | 2 | shards to their owners, means back to all: Isles' mean |
| all-gather | M - 1 | 1 | everybody's payload to everybody: Isles' mean where that is fewer bytes |
| pair | 1 | 1 | one payload each way at once: NoLoCo |

M: workers; back: bits of an averaged entry per bit of one sent (codecs may answer in another form).

`Collective` is for links that are all alike. The functions on `Lines` take each worker's own rates and latencies: where
everybody sends to all, a worker serves the others in turn, from
the one behind it on (of more than 256: as if it served the farthest last, and swaps are averaged over 64 partners).
Lines that several workers share are divided among them. No jitter, no time for arithmetic or packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isles.network.links import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """payloads: through the busiest link, one after another. hops: latencies one after another."""

    payloads: float
    hops: int

    def seconds(self, bits: float, rate: float, latency: float = 0.0) -> float:
        """Of a payload of `bits` over links of `rate` bits per second and `latency` seconds one way."""
        return self.payloads * bits / rate + self.hops * latency


def ring(workers: int) -> Collective:
    """A ring all-reduce."""
    _check(workers)
    return Collective(payloads=2 * (workers - 1) / workers, hops=2 * (workers - 1))


def two_shot(workers: int, back: float = 1.0) -> Collective:
    """All-to-all of shards, then all-gather of their means."""
    _check(workers)
    return Collective(payloads=(1 + back) * (workers - 1) / workers, hops=2 if workers > 1 else 0)


def all_gather(workers: int) -> Collective:
    """Everybody's whole payload to everybody."""
    _check(workers)
    return Collective(payloads=workers - 1, hops=1 if workers > 1 else 0)


def pair() -> Collective:
    """Two workers swap a payload; lines carry both ways at once."""
    return Collective(payloads=1, hops=1)


def library_mean(workers: int, back: float = 1.0) -> Collective:
    """The mean that `isles.comm.collectives.mean` takes: all-gather or two-shot, whichever is fewer bytes;
    all-gather if equal.
    """
    return all_gather(workers) if _gathers(workers, back) else two_shot(workers, back)


_MANY, _PARTNERS = 256, 64


@dataclass(frozen=True, eq=False)
class Lines:
    """What each of M workers has while all of them send. up, down: bits per second, (M,). latency: seconds one way,
    (M, M), [source, target], 0 to oneself.
    """

    up: np.ndarray
    down: np.ndarray
    latency: np.ndarray

    @staticmethod
    def of(links: Links, ranks: Sequence[int]) -> Lines:
        """Of `ranks`, in their order."""
        size = len(ranks)
        up = np.array([links.share(rank, ranks) for rank in ranks])
        down = np.array([links.down_share(rank, ranks) for rank in ranks])
        if isinstance(links.latency, (int, float)):
            same = np.full((size, size), float(links.latency))
            np.fill_diagonal(same, 0.0)
            return Lines(up, down, same)
        rows = [[0.0 if a == b else links.base_latency(a, b) for b in ranks] for a in ranks]
        return Lines(up, down, np.array(rows))

    @property
    def size(self) -> int:
        """M."""
        return len(self.up)

    @cached_property
    def farthest(self) -> np.ndarray:
        """Of each worker the longest latency to another, (M,)."""
        return self.latency.max(axis=1)

    @cached_property
    def partners(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each worker with its partners, or a sample of them: rates and latencies, (2, M, partners); first there,
        then back.
        """
        ahead = np.arange(1, self.size)
        ahead = ahead if self.size <= _MANY else ahead[np.linspace(0, self.size - 2, _PARTNERS).astype(int)]
        here = np.arange(self.size)[:, None]
        other = (here + ahead) % self.size
        rates = np.minimum(self.up[here], self.down[other]), np.minimum(self.up[other], self.down[here])
        return np.stack(rates), np.stack((self.latency[here, other], self.latency[other, here]))

    def scaled(self, factor: float) -> Lines:
        """With `factor` times the rates."""
        made = Lines(self.up * factor, self.down * factor, self.latency)
        if "farthest" in self.__dict__:
            made.__dict__["farthest"] = self.farthest
        if "partners" in self.__dict__:
            rates, latencies = self.partners
            made.__dict__["partners"] = rates * factor, latencies
        return made

    def messages(self, bits: float) -> np.ndarray:
        """Seconds that `bits` from one worker to another take, (M, M); 0 to oneself."""
        seconds = bits / np.minimum(self.up[:, None], self.down[None, :]) + self.latency
        np.fill_diagonal(seconds, 0.0)
        return seconds


def two_shot_seconds(lines: Lines, bits: float, back: float = 1.0) -> float:
    """All-to-all of shards, all-gather of their means; each worker goes on to the second when it has all of its own."""
    begin = np.zeros(lines.size)
    for share in (1.0, back):
        begin = _fan_out(lines, share * bits / lines.size, begin)
    return float(begin.max())


def all_gather_seconds(lines: Lines, bits: float) -> float:
    """Everybody's `bits` to everybody."""
    return float(_fan_out(lines, bits, np.zeros(lines.size)).max())


def mean_seconds(lines: Lines, bits: float, back: float = 1.0) -> float:
    """The mean that `isles.comm.collectives.mean` takes of `bits`."""
    return all_gather_seconds(lines, bits) if _gathers(lines.size, back) else two_shot_seconds(lines, bits, back)


def pair_seconds(lines: Lines, one: int, other: int, bits: float) -> float:
    """`one` and `other` (places in the lines) swap `bits` while everybody sends: until the slower direction is done."""
    seconds = lines.messages(bits)
    return float(max(seconds[one, other], seconds[other, one]))


def partner_seconds(lines: Lines, bits: float) -> float:
    """A swap of `bits` with a random partner, averaged over the partners, of the worker for whom that is longest: in
    time everybody has waited for it.
    """
    if lines.size == 1:
        return 0.0
    rates, latencies = lines.partners
    there, back = bits / rates + latencies
    return float(np.maximum(there, back).mean(axis=1).max())


def _fan_out(lines: Lines, bits: float, begin: np.ndarray) -> np.ndarray:
    """Everybody sends `bits` to each of the others from `begin` (M,) on, first to the one behind it: when each has got
    everything and has sent everything, (M,).
    """
    if lines.size == 1:
        return begin
    if lines.size > _MANY:  # a matrix of all pairs takes too long for what it adds
        return begin + (lines.size - 1) * bits / np.minimum(lines.up, lines.down) + lines.farthest
    here = np.arange(lines.size)
    turn = (here[None, :] - here[:, None]) % lines.size  # of a target with a source
    last = begin[:, None] + turn * (bits / lines.up)[:, None]
    arrived = last + lines.latency
    first = arrived - (bits / lines.up)[:, None]
    np.fill_diagonal(first, math.inf)
    np.fill_diagonal(arrived, 0.0)
    through = first.min(axis=0) + (lines.size - 1) * bits / lines.down
    return np.maximum.reduce([arrived.max(axis=0), through, last.max(axis=1)])


def _gathers(workers: int, back: float) -> bool:
    return workers <= 1 + back


def _check(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers = {workers}: choose 1 or more")

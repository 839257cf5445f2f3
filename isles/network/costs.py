"""What one collective costs: how many payloads pass the busiest link, and how many latencies follow each other.

    seconds = payloads * bits / rate + hops * latency

| collective | payloads | hops | what moves |
|---|---|---|---|
| ring | 2 (M-1)/M | 2 (M-1) | chunks go round twice, as partial sums, then complete: what the papers assume |
| tree | 2 ceil(log2 M) | 2 ceil(log2 M) | whole payloads up to a root and down again |
| two-shot | (1 + back) (M-1)/M | 2 | shards to their owners, means back to all: Isles' mean |
| all-gather | M - 1 | 1 | everybody's payload to everybody: Isles' mean where that is fewer bytes |
| pair | 1 | 1 | one payload each way at once: NoLoCo |

M: workers; back: bits of an averaged entry per bit of one sent (codecs may answer in another form).

`Collective` is for links that are all alike. The functions on `Links` take each worker's own rate and latencies: a step
of a ring ends when its slowest hop ends, a phase of the others when the slowest sender has served its farthest peer.
Uplinks that several workers share are divided among them. No jitter, no time for arithmetic or packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def tree(workers: int) -> Collective:
    """Whole payloads up a binary tree and down again."""
    _check(workers)
    depth = math.ceil(math.log2(workers))
    return Collective(payloads=2 * depth, hops=2 * depth)


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
    """The mean that `isles.comm.mean` takes: all-gather or two-shot, whichever is fewer bytes; all-gather if equal."""
    gather, shots = all_gather(workers), two_shot(workers, back)
    return gather if workers <= 1 + back else shots


def ring_seconds(links: Links, ranks: Sequence[int], bits: float) -> float:
    """A ring all-reduce of `bits` over `ranks`, in their order: 2 (M-1) steps, each as long as its slowest hop."""
    size = len(ranks)
    hops = [(rank, ranks[(place + 1) % size]) for place, rank in enumerate(ranks)]
    slowest = max(_message(links, ranks, hop, bits / size) for hop in hops) if size > 1 else 0.0
    return 2 * (size - 1) * slowest


def tree_seconds(links: Links, ranks: Sequence[int], bits: float) -> float:
    """Reduce to the first of `ranks` and broadcast: at each level pairs meet, and the slowest of them is waited for."""
    total, stride = 0.0, 1
    while stride < len(ranks):
        edges = [(ranks[p + stride], ranks[p]) for p in range(0, len(ranks) - stride, 2 * stride)]
        total += max(_message(links, ranks, edge, bits) for edge in edges)
        total += max(_message(links, ranks, edge[::-1], bits) for edge in edges)
        stride *= 2
    return total


def two_shot_seconds(links: Links, ranks: Sequence[int], bits: float, back: float = 1.0) -> float:
    """All-to-all of shards, all-gather of their means."""
    size = len(ranks)
    return sum(_fan_out(links, ranks, share * bits / size) for share in (1.0, back))


def all_gather_seconds(links: Links, ranks: Sequence[int], bits: float) -> float:
    """Everybody's `bits` to everybody."""
    return _fan_out(links, ranks, bits)


def pair_seconds(links: Links, ranks: Sequence[int], one: int, other: int, bits: float) -> float:
    """`one` and `other` swap `bits` while all of `ranks` send: until the slower direction is done."""
    return max(_message(links, ranks, hop, bits) for hop in ((one, other), (other, one)))


def _fan_out(links: Links, ranks: Sequence[int], bits: float) -> float:
    """Everybody sends `bits` to each of the others: until the last of them has arrived."""
    out = len(ranks) - 1
    phases = []
    for rank in ranks if out else ():
        peers = [peer for peer in ranks if peer != rank]
        sending, receiving = links.share(rank, ranks), links.down_share(rank, ranks)
        phases.append(out * bits / min(sending, receiving) + max(links.base_latency(rank, peer) for peer in peers))
    return max(phases, default=0.0)


def _message(links: Links, ranks: Sequence[int], hop: tuple[int, int], bits: float) -> float:
    source, target = hop
    rate = min(links.share(source, ranks), links.down_share(target, ranks))
    return bits / rate + links.base_latency(source, target)


def _check(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers = {workers}: choose 1 or more")

"""What one collective costs: how many payloads pass the busiest link, and how many latencies follow each other.

    seconds = payloads * bits / rate + hops * latency

| collective | payloads | hops | what moves |
|---|---|---|---|
| ring | 2 (M-1)/M | 2 (M-1) | chunks go round twice, as partial sums, then complete: what the papers assume |
| two-shot | (1 + back) (M-1)/M | 2 | shards to their owners, means back to all: Isles' mean |
| all-gather | M - 1 | 1 | everybody's payload to everybody: Isles' mean where that is fewer bytes |
| pair | 1 | 1 | one payload each way at once: NoLoCo |

M: workers; back: bits of an averaged entry per bit of one sent (codecs may answer in another form). For links that are
all alike.
"""

from __future__ import annotations

from dataclasses import dataclass

_HEADER = 32  # bytes beside a mean


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


def parallel_bytes(parameters: int, workers: int, steps: int) -> float:
    """Bytes that each sends, on average, where gradients are averaged as they are, in one piece a step: to the bit."""
    return steps * (2 * (workers - 1) * 4 * parameters + workers * (workers - 1) * _HEADER) / workers


def _check(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers = {workers}: choose 1 or more")

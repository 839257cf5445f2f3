"""Closed forms of virtual time, method by method; relative 1e-9.

Symbols: C seconds of computation a step, L latency, R bits per second of an uplink, V bits of a vector of all
parameters, h bits of a header, N workers. Messages of one worker leave by its uplink in the order of their sends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import isles
from benchmarks.virtual import apart as many_apart
from isles.comm.mesh import Mesh
from isles.replicas.parts.choices import RandomGroups
from tests.replicas.workers import Net, sgd, train_step, wrap

PARAMETERS = 1200  # divisible by 2, 3, 4
V, h = 32.0 * PARAMETERS, 256.0
START = 100.0  # virtual seconds at which all workers begin, well after the common start's messages


class Vector(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (PARAMETERS,)) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])


def clocks(
    workers: int,
    name: str,
    steps: int,
    links: isles.Links,
    C: float,
    sizes: tuple[int, ...] = (PARAMETERS,),
    speeds: list[float] | None = None,
    **options: Any,
) -> list[list[float]]:
    """Seconds since START after each step, worker by worker."""

    def worker(world: Mesh) -> list[float]:
        model = Vector(sizes)
        optimizer = wrap(world, name, model, sgd, **options)
        speed = speeds[world.rank] if speeds else 1.0
        world.transport.compute((START - world.transport.now()) / speed)
        log = []
        for _ in range(steps):
            sum(part.sum() for part in reversed(model.parts)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            log.append(world.transport.now() - START)
        return log

    return isles.run_virtual(worker, workers, links=links, step_seconds=C, speeds=speeds)


def exchange(N: int, R: float, L: float, vector: float = V) -> float:
    """Seconds of one mean among N workers with an uplink each."""
    if N == 1:
        return 0.0
    if N == 2:
        return (h + vector) / R + L
    shard = vector / N
    scatter = (N - 1) * (h + shard) / R + L  # headers go first, all on one uplink; the last shard arrives last
    gather = (N - 1) * shard / R + L
    return scatter + gather


def close(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


R, L, C = 2e5, 0.03, 0.2


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_ddp_with_one_bucket(N: int) -> None:
    """step = C + exchange: the only bucket is full when the backward pass ends."""
    for log in clocks(N, "ddp", 5, isles.Links(bandwidth=R, latency=L), C):
        for step, clock in enumerate(log, 1):
            assert clock == close(step * (C + exchange(N, R, L)))


@pytest.mark.parametrize("N", [2, 3, 4])
def test_ddp_hides_all_but_the_last_bucket(N: int) -> None:
    """Two buckets, the first filled by a share f of the gradient: it leaves after C (1 + 2 f) / 3. If it arrives before
    C, step = C + exchange of the second; if not, its bytes are still ahead of the second's on the uplink.
    """
    sizes = (240, 960)  # the first bucket holds the last parameter
    f, megabytes = 960 / 1200, 960 * 4 / 2**20
    first, second = V * f, V * (1 - f)
    fast = 2e6
    assert exchange(N, fast, L, first) < C * (2 / 3) * (1 - f) * 10  # seconds are small beside the pass below
    for log in clocks(N, "ddp", 4, isles.Links(bandwidth=fast, latency=L), 2.0, sizes, bucket_megabytes=megabytes):
        assert log == [close(step * (2.0 + exchange(N, fast, L, second))) for step in range(1, 5)]
    if N == 2:  # a swap: the second waits for the first's last bit
        begun = C * (1 + 2 * f) / 3
        gone = max(begun + (h + first) / R, C) + (h + second) / R
        for log in clocks(N, "ddp", 4, isles.Links(bandwidth=R, latency=L), C, sizes, bucket_megabytes=megabytes):
            assert log == [close(step * (gone + L)) for step in range(1, 5)]


@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["diloco", "localsgd"])
def test_diloco(N: int, name: str) -> None:
    """H steps, then one exchange."""
    for log in clocks(N, name, 9, isles.Links(bandwidth=R, latency=L), C):
        for step, clock in enumerate(log, 1):
            assert clock == close(step * C + (step // 3) * exchange(N, R, L))


def test_no_exchange_costs_no_time() -> None:
    """none: C a step."""
    for log in clocks(3, "none", 5, isles.Links(bandwidth=R, latency=L), C):
        assert log == [close(step * C) for step in range(1, 6)]


@pytest.mark.parametrize("N", [2, 4])
def test_noloco_without_prefetch(N: int) -> None:
    """Both vectors at the barrier, one behind the other: H C + 2 (h + V) / R + L a round."""
    for log in clocks(N, "noloco, no prefetch", 9, isles.Links(bandwidth=R, latency=L), C):
        for step, clock in enumerate(log, 1):
            assert clock == close(step * C + (step // 3) * (2 * (h + V) / R + L))


@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.parametrize("name", ["noloco, single vector", "noloco, theta only"])
def test_noloco_with_one_vector(N: int, name: str) -> None:
    """H C + (h + V) / R + L a round."""
    for log in clocks(N, name, 9, isles.Links(bandwidth=R, latency=L), C):
        for step, clock in enumerate(log, 1):
            assert clock == close(step * C + (step // 3) * exchange(2, R, L))


@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.parametrize(("rate", "latency"), [(R, L), (5e4, L), (R, 1.0), (4e4, 2.0)])
def test_noloco_with_prefetch(N: int, rate: float, latency: float) -> None:
    """Anchors leave when the round lands: the payload is gone max(H C, A) + A later, A = (h + V) / R, and arrives L
    later; hidden entirely where A <= H C. The first round has no anchors to send.
    """
    A = (h + V) / rate
    expected, landed = [], 0.0
    for step in range(1, 13):
        if step % 3:
            expected.append(landed + (step % 3) * C)
        else:
            ahead = A if step > 3 else 0.0
            landed += max(3 * C, ahead) + A + latency
            expected.append(landed)
    for log in clocks(N, "noloco", 12, isles.Links(bandwidth=rate, latency=latency), C):
        assert log == [close(clock) for clock in expected]
    hidden = A <= 3 * C
    assert hidden == (expected[-1] == close(4 * (3 * C + A + latency)))


def test_an_odd_world_s_solo_worker_does_not_wait() -> None:
    """N = 3: whoever is alone in a round pays nothing; a pair starts when its later member is there."""
    runs = clocks(3, "noloco, single vector", 12, isles.Links(bandwidth=R, latency=L), C)
    A = (h + V) / R
    landed = [0.0] * 3
    for round in range(1, 5):
        start = [clock + 3 * C for clock in landed]
        for position in range(3):
            members = RandomGroups(2, 0).members(round, 3, position)
            if len(members) == 1:
                landed[position] = start[position]
            else:  # its own last bit has left, and the partner's has arrived
                landed[position] = max(start[position] + A, sum(start[m] for m in members if m != position) + A + L)
        for position in range(3):
            assert runs[position][3 * round - 1] == close(landed[position])


@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco, single vector"])
def test_narrow_downlinks_rule(N: int, name: str) -> None:
    """Where less comes in than goes out: as if lines had that rate both ways."""
    narrow, every = isles.Links(bandwidth=R, latency=L, downlink=R / 4), 1 if name == "ddp" else 3
    members = 2 if name.startswith("noloco") else N
    for log in clocks(N, name, 6, narrow, C):
        assert log == [close(step * C + (step // every) * exchange(members, R / 4, L)) for step in range(1, 7)]


@pytest.mark.parametrize("N", [2, 4])
def test_a_shared_uplink_serves_all_flows_fairly(N: int) -> None:
    """One uplink for all N: equal flows end together, each at R / N."""
    shared = isles.Links(bandwidth=R, latency=L, uplinks=[0] * N)
    for name, seconds in {
        "ddp": exchange(N, R / N, L),
        "diloco": exchange(N, R / N, L),
        "noloco, single vector": exchange(2, R / N, L),
        "noloco, no prefetch": 2 * (h + V) / (R / N) + L,
    }.items():
        every = 1 if name == "ddp" else 3
        for log in clocks(N, name, 6, shared, C):
            assert log == [close(step * C + (step // every) * seconds) for step in range(1, 7)], name


def test_two_households() -> None:
    """Workers 0, 1 share one uplink and 2, 3 another of a tenth the rate. A worker's round ends when its own last bit
    has left and its partner's has arrived.
    """
    links = isles.Links(bandwidth=[R, R / 10], latency=L, uplinks=[0, 0, 1, 1])
    rates = [R / 2, R / 2, R / 20, R / 20]
    for seed, partner in ((next_seed((0, 2)), [2, 3, 0, 1]), (next_seed((0, 1)), [1, 0, 3, 2])):
        runs = clocks(4, "noloco, single vector", 3, links, C, seed=seed)
        for rank in range(4):
            gone, arrived = (h + V) / rates[rank], (h + V) / rates[partner[rank]] + L
            assert runs[rank][-1] == close(3 * C + max(gone, arrived))


def next_seed(pair: tuple[int, int]) -> int:
    """A seed whose first round has this pair among four."""
    return next(seed for seed in range(50) if RandomGroups(2, seed).members(1, 4, pair[0]) == pair)


@pytest.mark.parametrize("name", ["noloco", "noloco, no prefetch"])
def test_a_slow_worker_delays_only_its_partner(name: str) -> None:
    """One of 8 is 10 x slower: after its first round all but it and its partner stand where they stand without it."""
    links = isles.Links(bandwidth=R, latency=L, jitter=0.5)

    def ends(slow: bool) -> list[tuple[float, tuple[int, ...]]]:
        def worker(world: Mesh) -> tuple[float, tuple[int, ...]]:
            optimizer = wrap(world, name, Net())
            for step in range(1, 4):
                train_step(optimizer, world.rank, step)
            return world.transport.now(), optimizer.members(1)  # type: ignore[attr-defined]

        speeds = [10.0 if rank == 5 and slow else 1.0 for rank in range(8)]
        return isles.run_virtual(worker, 8, links=links, step_seconds=C, speeds=speeds)

    even, uneven = ends(False), ends(True)
    pair = even[5][1]
    for rank in range(8):
        if rank in pair:
            assert uneven[rank][0] > 30 * C > even[rank][0]
        else:
            assert uneven[rank] == even[rank]


def test_diloco_waits_for_the_slowest() -> None:
    """The other side of the same coin: a barrier of all."""
    links = isles.Links(bandwidth=R, latency=L)
    for log in clocks(4, "diloco", 6, links, C, speeds=[1.0, 1.0, 4.0, 1.0]):
        assert log[-1] >= 6 * 4 * C


@pytest.mark.long
def test_many_workers_are_deterministic_and_leave_no_thread() -> None:
    """One result whatever the slots, in a process of its own; memory grows by less than 9 MB a worker."""
    one, two = many_apart(32, 1, 4, 2, 16), many_apart(32, 2, 4, 2, 16)
    assert one["hash"] == two["hash"] and one["clock"] == two["clock"]
    assert one["parameters"] > 120_000
    for run in (one, two):
        assert run["threads_left"] == 0
        assert run["peak_gib"] < 0.45 + 32 * 0.009


@pytest.mark.long
def test_256_workers_fit() -> None:
    """256 workers of the 0.12 M-parameter model: under 3 GiB, no thread left, one result whatever the slots."""
    one, two = many_apart(256, 1, 4, 2, 128), many_apart(256, 2, 4, 2, 128)
    assert one["hash"] == two["hash"] and one["clock"] == two["clock"]
    for run in (one, two):
        assert run["peak_gib"] < 3.0
        assert run["threads_left"] == 0

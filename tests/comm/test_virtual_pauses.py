"""Workers that pause on the virtual clock: what they miss, what they find when they are back, and that others wait."""

from __future__ import annotations

import pytest
import torch

from isles.comm.errors import DeadlinePassed
from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualCluster
from isles.network.links import Links
from isles.network.pauses import Pauses

PAUSES = Pauses(every=5.0, seconds=2.0)
KBIT = Links(bandwidth=8000.0)
TAG = Tag("outer", 0)


def u8(size, value=0):
    return torch.full((size,), value, dtype=torch.uint8)


def first_pause(rank, seed):
    return PAUSES.of(rank, seed).between(0.0, 100.0)[0]


@pytest.mark.parametrize("slots", [1, 2])
def test_computing_stands_still_and_the_other_waits(slots):
    def worker(transport):
        def protocol():
            yield transport.send(1, u8(1000, 7), TAG)

        def receiving():
            out = u8(1000)
            yield transport.recv(0, out, TAG)
            return int(out[0]), transport.now()

        if transport.rank == 1:
            taken = transport.run(receiving(), "outer", 1e6).wait()
            return (*taken, transport.traffic["outer"].blocked_seconds, transport.away_seconds)
        transport.compute(40.0)
        clock, away = transport.now(), transport.away_seconds
        transport.run(protocol(), "outer", 1e6).wait()
        return clock, away, [span[2:] for span in transport.traffic.take_spans() if span.kind == "away"]

    (clock, away, spans), (value, at, blocked, missed) = VirtualCluster(
        2, links=KBIT, pauses=PAUSES, seed=1, slots=slots
    ).run(worker)
    pauses = PAUSES.of(0, 1).between(0.0, clock)
    assert len(pauses) > 3 and spans == pauses
    assert clock == pytest.approx(40.0 + away) and away == pytest.approx(sum(b - a for a, b in pauses))
    sent = PAUSES.of(1, 1).back(clock + 1.0)  # 1000 bytes at 1000 a second, noticed when the receiver is there
    assert (value, at, blocked, missed) == (7, sent, sent, 0.0)


def test_what_came_meanwhile_is_there_at_the_return_even_behind_its_deadline():
    """Worker 1 is away when its message comes, and when the deadlines of both its receives pass."""
    seed = next(seed for seed in range(100) if first_pause(0, seed)[0] > first_pause(1, seed)[1])
    leaves, back = first_pause(1, seed)
    middle = (leaves + back) / 2

    def worker(transport):
        def sending():
            yield transport.send(1, u8(1), TAG)

        def receiving(tag):
            yield transport.recv(0, u8(1), tag)
            return transport.now()

        if transport.rank == 0:
            transport.compute(leaves + 0.4 * (back - leaves))
            transport.run(sending(), "outer", 1e6).wait()
            return transport.compute(100.0)
        found = transport.run(receiving(TAG), "outer", middle)
        never = transport.run(receiving(Tag("outer", 1)), "outer", middle)
        with pytest.raises(DeadlinePassed):
            never.wait()
        return found.wait(), transport.now()

    fast = VirtualCluster(2, links=Links(bandwidth=8e9), pauses=PAUSES, seed=seed)
    assert fast.run(worker)[1] == (back, back)

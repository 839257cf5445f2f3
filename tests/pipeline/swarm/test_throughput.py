"""How fast a swarm of unequal peers is on the virtual clock: 3 stages of 3 peers, one of them 4 times as slow, latency
a fifth of a forward pass, 192 microbatches a step.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

import isles
from isles.pipeline.swarm.balancer import PeerBalancer
from tests.pipeline.swarm import peers
from tests.pipeline.swarm.peers import Setting

FORWARD, SLOW = 1.0, 4.0
LINKS = isles.Links(bandwidth=math.inf, latency=FORWARD / 5)
SETTING = Setting(microbatches=192, charged=True, steps=2, room=9, deadlines=(1e6, 1e6), patience=1e6)


def share(slow: int, step: int = 1) -> float:
    """Of the sum of the rates of the slowest stage, what is reached in a step. slow: the rank of the slow peer."""
    speeds = [SLOW if rank == slow else 1.0 for rank in range(9)]
    seconds = 9 * FORWARD  # of a microbatch, forward and backward through three stages
    took = isles.run_virtual(peers.timed, 9, links=LINKS, args=(SETTING,), step_seconds=seconds, speeds=speeds)
    rates = [sum(1 / (3 * FORWARD * speeds[3 * stage + place]) for place in range(3)) for stage in range(3)]
    return SETTING.microbatches / min(rates) / max(each[step] for each in took)


@pytest.mark.long
@pytest.mark.parametrize("slow", [3, *(pytest.param(rank, marks=pytest.mark.long) for rank in range(9) if rank != 3)])
def test_unequal_peers_reach_nine_tenths_of_the_sum_of_their_rates(slow: int) -> None:
    assert share(slow) >= 0.90


@pytest.mark.long
@pytest.mark.parametrize("slow", [3, 6])
def test_fixed_ways_wait_for_the_slow_peer(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(self: Any, samples: int = 1, *, besides: int | None = None) -> int:
        return sorted(self.peers)[self.column]

    made = PeerBalancer.__init__

    def begin(self: Any, seed: int = 0) -> None:
        made(self, seed)
        self.column = seed % 3

    monkeypatch.setattr(PeerBalancer, "__init__", begin)
    monkeypatch.setattr(PeerBalancer, "choose", fixed)
    assert share(slow) <= 0.40

"""Groups over real gloo processes: collectives, transfers under way together, the counts."""

from __future__ import annotations

import math

import pytest
import torch

import isles
from isles.comm.mesh import Mesh
from isles.comm.transport import Deadlines
from tests.comm import group_workers
from tests.gloo import run_gloo

SOON = Deadlines(control=20.0, outer=20.0)  # a stuck test ends before the patience of whoever runs it


def test_collectives_among_four() -> None:
    """Everyone's data in group order, for any dtype and order of ranks; a barrier holds; mistakes are refused."""
    ranks = run_gloo(group_workers.everyone_sends, 4, deadlines=SOON)
    order = [2, 0, 3, 1]
    for rank, connection_state in enumerate(ranks):
        assert connection_state["gathered"] == [[0, 0], [1, 1], [2, 4], [3, 9]] and connection_state["kinds"]
        assert connection_state["empty"] == [(0, 3)] * 4 and connection_state["strided"] == [
            [[float(r)]] * 2 for r in range(4)
        ]
        assert connection_state["swapped"] and connection_state["all to all"]
        assert (
            connection_state["positions"] == (order.index(rank), rank, 4)
            and connection_state["gathered in order"] == order
        )
        assert connection_state["pair"] == (((0, 1), 1 - rank) if rank < 2 else ((3, 2), 5 - rank))
        assert connection_state["alone"] == [rank]
        wanted = ["hold their maker", "every rank once", *["not another member"] * 3, "source 4", "not contiguous"]
        for text, want in zip(connection_state["refusals"], wanted, strict=True):
            assert want in text, (text, want)
    last_came = max(connection_state["barrier"][0] for connection_state in ranks)
    assert all(connection_state["barrier"][1] >= last_came for connection_state in ranks)


def test_broadcast_from_every_source_in_every_size() -> None:
    """The tree reaches everyone, for sizes 1 to 5 and any order of ranks."""
    assert run_gloo(group_workers.broadcasts, 5, deadlines=SOON) == [[]] * 5


def test_transfers_under_way_together() -> None:
    """They keep apart in program order, across groups and worlds, end in any order, and go on while nobody waits."""
    ranks = run_gloo(group_workers.at_once, 4, deadlines=SOON)
    for rank, connection_state in enumerate(ranks):
        assert connection_state["mixed up"] == []
        assert connection_state["progress"] == [True, True] and connection_state["not blocked"] == 0.0
        assert connection_state["means"] == ([1.5], [0.5 if rank < 2 else 2.5])
        assert connection_state["second world"] == [float(rank ^ 1)]
    assert ranks[0]["order"] == [22, False, 11, 11, True]


def test_counts_are_those_of_the_messages() -> None:
    """Bytes and messages of each verb by hand, on the channel asked for and no other."""
    ranks = run_gloo(group_workers.counted, 3, deadlines=SOON)
    for rank, connection_state in enumerate(ranks):
        assert connection_state["all_gather"] == connection_state["eval"] == (8000, 8000, 2, 2)
        assert connection_state["exchange"] == ((4000, 4000, 1, 1) if rank < 2 else (0, 0, 0, 0))
        # The tree from 1: 1 feeds 2 and 0.
        assert connection_state["broadcast"] == ((8000, 0, 2, 0) if rank == 1 else (0, 4000, 0, 1))
        # Shards of 334, 334, 332 entries: the own one gathered to two, the others' scattered.
        shards = [334, 334, 332]
        sent = 2 * (1000 - shards[rank]) + 2 * 2 * shards[rank] + 2 * 32
        received = 2 * 2 * shards[rank] + 2 * (1000 - shards[rank]) + 2 * 32
        assert connection_state["mean"] == (sent, received, 6, 6)


def test_a_protocols_error_belongs_to_whoever_waits() -> None:
    """Raised in the first step, after empty waits, or on the driver's thread; by every wait."""
    assert run_gloo(group_workers.failing, 2, deadlines=SOON) == [["'mine'"] * 6] * 2


def test_messages_leave_torchs_threads_alone() -> None:
    """The threads that wait for messages change neither the computation's nor new threads' number of threads."""
    assert isles.run_local(group_workers.threads_untouched, 2, threads=2) == [[2, 2, 2]] * 2


def test_reductions_take_as_many_threads_as_the_computation() -> None:
    """Also where it has taken more since the first message: a worker whose GPU has cores near it."""
    assert run_gloo(group_workers.threads_follow, 1) == [[1, 3]]


@pytest.mark.parametrize("size", [9, 12, 16, 17])
def test_all_gather_among_many(size: int) -> None:
    """Doubling: the same entries in the same order, the same bytes, but log2(size) messages and latencies."""

    def worker(world: Mesh) -> None:
        order = [(3 * position + 1) % size for position in range(size)]
        shuffled = world.world.among(order if size % 3 else list(range(size)))
        entry = torch.tensor([10.0 * world.rank, world.rank])
        before = world.transport.now()
        for turn in range(2):
            gathered = shuffled.all_gather(entry + turn, channel="eval")
            assert [x.tolist() for x in gathered] == [[10.0 * rank + turn, rank + turn] for rank in shuffled.ranks]
        counted = world.world.traffic["eval"]
        phases = math.ceil(math.log2(size))
        assert counted.bytes_sent == counted.bytes_received == 2 * (size - 1) * entry.nbytes
        assert counted.messages_sent == 2 * phases
        assert world.transport.now() - before == pytest.approx(2 * phases * 0.5)

    isles.run_virtual(worker, size, links=isles.Links(bandwidth=math.inf, latency=0.5))


def test_a_deadline_is_that_of_a_slow_link() -> None:
    """Five times what it is busy with the bytes for, or the channel's own where that is longer."""
    slow = Deadlines(outer=60.0, slowest_link=1e6)
    assert [slow.of("outer", nbytes) for nbytes in (0, 1_000_000, 3_000_000)] == [60.0, 60.0, 5 * 24.0]

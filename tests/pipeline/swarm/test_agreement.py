"""All who are left come to the same answer, whoever is lost at whichever message: of the agreement alone, and of that
of clusters, which is the same one. Every moment of one death is gone through, and of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest

import isles
from isles.comm.collectives.basic import all_gather
from isles.comm.collectives.message_queue import MessageQueue
from isles.comm.errors import CommError
from isles.comm.group import numbers
from isles.comm.mesh import Mesh
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import VOTE, PeerInbox
from isles.pipeline.ravnest.agreement import Attempt, ClusterAgreement, cluster_inbox
from isles.pipeline.ravnest.assignment import ClusterAssignment
from tests.pipeline.swarm import killing

LINES = isles.Links(bandwidth=1e7, latency=0.02, jitter=0.9)
"""Messages of different lines pass each other in any order."""
Answers = list[Any]


def alone(world: Mesh, agreements: int) -> Answers:
    """What each agreement comes to: what everybody says is its rank and the number of the agreement."""
    group = world.world.among(range(world.size), "pipeline")
    own = Agreement(PeerInbox(MessageQueue(group, run=1, lengths={VOTE: range(1 << 12)})), 1000.0, range(world.size))
    return [own.agree([10 * number + world.rank]) for number in range(agreements)]


def clustered(world: Mesh, times: int) -> Answers:
    """Who is whole each time, and what those of whole clusters have gathered of each other together."""
    seats = ClusterAssignment.of([()] * world.size, range(world.size))
    own = ClusterAgreement(cluster_inbox(world.world, 1, 1 << 10), world.world, seats)

    def attempt() -> Attempt[Answers]:
        group = own.messages.among(own.assignment.whole)
        found: Answers = [own.assignment.whole]

        def gather() -> Any:
            found.append((yield from all_gather(group.call(round=0), numbers(world.rank))))

        return Attempt(found, [gather()], 8)

    return [own.together(attempt) for _ in range(times)]


def check_alone(left: dict[int, Answers]) -> None:
    for number, values in enumerate(zip(*left.values(), strict=True)):
        assert all(one == values[0] for one in values), f"agreement {number}: {values}"
        assert all(vote == (10 * number + rank,) for rank, vote in values[0].items())
        assert {*left} <= values[0].keys()


def check_clusters(left: dict[int, Answers]) -> None:
    for whole, gathered in (one for own in left.values() for one in own):
        assert {*left} <= {*whole} and [int(each) for each in gathered] == whole
    for values in zip(*left.values(), strict=True):
        assert all(whole == values[0][0] for whole, _ in values)


def walk(worker: Callable[..., Answers], workers: int, deaths: Sequence[dict[int, int]]) -> int:
    """Run it with each of `deaths`; how many of them took place. AssertionError where those who are left differ."""
    took = 0
    for number, each in enumerate(deaths):
        done = killing.run(worker, workers, (2,), each, links=LINES, seed=number)
        left = {rank: one[0] for rank, one in enumerate(done) if one is not None}
        assert workers - len(each) <= len(left)
        took += len(left) == workers - len(each)
        (check_alone if worker is alone else check_clusters)(left)
    return took


def moments(worker: Callable[..., Answers], workers: int) -> int:
    """Messages that a worker sends or posts where nobody dies."""
    return min(count for _, count in killing.run(worker, workers, (2,), {}, links=LINES))


@pytest.mark.parametrize(
    ("worker", "stride"), [(alone, 1), (clustered, 3), pytest.param(clustered, 1, marks=pytest.mark.long)]
)
def test_whoever_dies_at_any_message_the_others_come_to_the_same(worker: Callable[..., Answers], stride: int) -> None:
    """stride: in each victim's life the first of so many messages, of the next one's the second, ..."""
    deaths = [{victim: at} for victim in range(3) for at in range(victim % stride, moments(worker, 3), stride)]
    assert walk(worker, 3, deaths) > 0.9 * len(deaths) > 30


@pytest.mark.parametrize(("worker", "stride"), [(alone, 7), pytest.param(clustered, 19, marks=pytest.mark.long)])
def test_two_die_at_any_two_messages(worker: Callable[..., Answers], stride: int) -> None:
    """Of four; every so many moments of each here."""
    last = moments(worker, 4)
    deaths = [
        {one: at, other: later}
        for one, other in combinations(range(4), 2)
        for at in range(3, last, stride)
        for later in range(at, last, stride)
    ]
    assert walk(worker, 4, deaths) > 0.8 * len(deaths) > 80


@pytest.mark.long
@pytest.mark.parametrize("worker", [alone, clustered])
def test_two_die_at_every_two_messages(worker: Callable[..., Answers]) -> None:
    last = moments(worker, 4)
    deaths = [{0: at, 2: later} for at in range(last) for later in range(last)]
    assert walk(worker, 4, deaths) > 0.8 * len(deaths) > 800


def decides_at_once(own: Agreement, values: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """After one round, of whom it has heard."""
    known = {own.me: tuple(values)}
    own._send_votes(1, known)
    for vote in own._collect_votes(1, len(values), set())[0].values():
        known |= vote
    own._send_votes(2, known, 1)
    return known


def counts_its_own(own: ClusterAgreement, values: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """What it has done itself counts, whatever the others have."""
    return {position: vote if not vote else tuple(values) for position, vote in _AGREE(own, values).items()}


_AGREE = ClusterAgreement._agree


@pytest.mark.parametrize(
    ("worker", "where", "what", "mutant"),
    [
        (alone, Agreement, "_flood", decides_at_once),
        (clustered, Agreement, "_flood", decides_at_once),
        (clustered, ClusterAgreement, "_agree", counts_its_own),
    ],
)
def test_a_mutant_is_caught(
    worker: Callable[..., Answers], where: type, what: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = [{victim: at} for victim in range(3) for at in range(moments(worker, 3))]
    monkeypatch.setattr(where, what, mutant)
    with pytest.raises((AssertionError, CommError)):
        walk(worker, 3, deaths)

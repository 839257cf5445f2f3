"""Nodes that come and leave: what they tell, who takes whose place, and what cannot be said."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import isles
from isles.comm.collectives.message_queue import MessageHeader
from isles.comm.errors import PeerLost
from isles.comm.group import numbers
from isles.comm.mesh import Mesh
from isles.network.clusters import (
    NO_FIGURES,
    ClusterGrowth,
    ClusterNode,
    ModelLoad,
    decode_node,
    encode_node,
    form_clusters,
    is_encoded_node,
)
from isles.pipeline.peers.inbox import ASK, MAX_JOINERS, VOTE
from isles.pipeline.ravnest.agreement import (
    ClusterAgreement,
    ClusterWelcome,
    admit_joiners,
    cluster_inbox,
    request_admission,
)
from isles.pipeline.ravnest.assignment import ClusterAssignment

LOAD = ModelLoad(flops=(1e9,) * 4, weights=(1e6,) * 4, saved=(1e5,) * 4, stream=1e4)
GROWTH = ClusterGrowth(LOAD)


def node(memory: float, speed: float = 1e9) -> ClusterNode:
    return ClusterNode(name="", memory=memory, speed=speed, bandwidth=1e8, latency=0.02)


def test_what_a_node_tells_is_heard_within_a_share_of_a_percent() -> None:
    draw = random.Random(1)
    for _ in range(100):
        own = ClusterNode(
            name="worker 7",
            memory=draw.uniform(1e3, 1e12),
            speed=draw.uniform(1e6, 1e15),
            bandwidth=draw.uniform(1e5, 1e11),
            latency=draw.choice([0.0, draw.uniform(1e-6, 1.0)]),
        )
        number = encode_node(own)
        made = decode_node(number, "worker 7")
        assert is_encoded_node(number) and made is not None
        for key in ("memory", "speed", "bandwidth", "latency"):
            assert getattr(made, key) == pytest.approx(getattr(own, key), rel=1e-3)
    assert decode_node(NO_FIGURES, "") is None and is_encoded_node(NO_FIGURES)
    assert not any(map(is_encoded_node, (0, -1, 2, 1 << 61, (1 << 62) + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_seats_over_all_that_can_happen(seed: int) -> None:
    """Nobody serves twice; who leaves has a successor, or is gone; the last whole cluster stays; all who know of the
    same come to the same.
    """
    draw, latest = random.Random(seed), 6
    assignment = ClusterAssignment.of([[2], [1, 3], []], range(6))
    growth = ClusterGrowth(LOAD, spares=draw.choice([0, 1]))
    for _ in range(30):
        lost = [draw.choice(assignment.clusters[number]) for number in assignment.whole[1:] if draw.random() < 0.2]
        lost += [position for position in assignment.standby if draw.random() < 0.1]
        assignment = assignment.without(lost)
        came = {
            latest + n: draw.choice([NO_FIGURES, encode_node(node(draw.uniform(2e6, 4e7)))])
            for n in range(draw.randint(0, 2))
        }
        latest += len(came)
        leaving = [position for position in assignment.living if draw.random() < 0.1]
        before = assignment.with_joiners(came, leaving)
        assignment = before.repaired(growth)
        assert assignment == before.repaired(growth)
        named = [position for cluster in assignment.clusters for position in cluster] + [*assignment.standby]
        assert len(set(named)) == len(named) and assignment.whole
        assert [len(cuts) + 1 for cuts in assignment.cuts] == list(map(len, assignment.clusters))
        for source, taker in assignment.handovers:
            assert (
                source in before.leaving
                and assignment.trains(taker)
                and assignment.holder(*assignment.coordinates_of(taker)) == source
            )  # type: ignore[misc]
            assert taker not in before.leaving and source in assignment.living
            torn = assignment.without([taker])
            assert torn.coordinates_of(source) == assignment.coordinates_of(taker) and torn.trains(source)
            assert not assignment.without([source]).trains(taker)
        retained = [
            position
            for number in assignment.whole
            for position in assignment.clusters[number]
            if position in assignment.leaving
        ]
        assert not retained or len(assignment.whole) == 1
        assignment = assignment.with_loaded(assignment.complete)
        assert not assignment.handovers and not set(assignment.living) & assignment.lost
        again = ClusterAssignment.of_plain(assignment.to_plain(), latest)
        assert again == assignment
        fewer = assignment.renumbered(assignment.living)
        assert fewer.living == list(range(len(assignment.living))) and len(fewer.clusters) == len(assignment.whole)


def test_what_are_no_seats_is_refused() -> None:
    good = ClusterAssignment.of([[2], []], range(4)).with_joiners({4: NO_FIGURES}, [1]).to_plain()
    assert ClusterAssignment.of_plain(good, 5).to_plain() == good
    bad: list[Any] = [
        None, [], [good], good[:-1], [[[0, 0], [2]], *good[1:]], [[[0, 9], [2]], *good[1:]],
        [good[0], [[2], [1]], *good[2:]], [*good[:4], [7], *good[5:]], [*good[:5], [[4, 2]], good[6]],
        [[[0, "1"], [2]], *good[1:]], [[[0, True], [2]], *good[1:]],
    ]  # fmt: skip
    for plain in bad:
        with pytest.raises(ValueError, match="no assignment of clusters"):
            ClusterAssignment.of_plain(plain, 5)


def test_a_new_cluster_holds_the_model_and_spares_stay() -> None:
    small = node(0.6 * LOAD.least)
    (three,) = form_clusters([small] * 3, LOAD)  # two have too little
    assignment = ClusterAssignment.of([[2], [1]], range(4))
    grown = assignment.with_joiners(dict.fromkeys((4, 5, 6), encode_node(small)), ()).repaired(GROWTH)
    assert grown.clusters[2:] == (tuple(4 + number for number in three.nodes),) and grown.cuts[2] == three.split.cuts
    assert grown.out == {2} and grown.with_loaded([2]).whole == [0, 1, 2]
    assert assignment.with_joiners(dict.fromkeys((4, 5), encode_node(small)), ()).repaired(GROWTH).standby == (4, 5)
    assert assignment.with_joiners(dict.fromkeys((4, 5, 6), NO_FIGURES), ()).repaired(GROWTH).clusters[2:] == ((4, 5),)
    keeping = ClusterGrowth(LOAD, spares=2)
    assert assignment.with_joiners(dict.fromkeys((4, 5, 6), NO_FIGURES), ()).repaired(keeping).standby == (4, 5, 6)
    limited = ClusterGrowth(LOAD, most=2)
    assert assignment.with_joiners(dict.fromkeys((4, 5), NO_FIGURES), ()).repaired(limited).standby == (4, 5)
    tiny = assignment.with_joiners({4: encode_node(node(1e5)), 5: NO_FIGURES}, ()).without([0])
    assert tiny.repaired(GROWTH).clusters[0] == (5, 1)  # the first has not the memory for the place


def begun(world: Mesh, assignment: ClusterAssignment, run: int = 5) -> ClusterAgreement:
    return ClusterAgreement(cluster_inbox(world.world, run, 1 << 10), world.world, assignment, GROWTH)


def agree(world: Mesh, how: str) -> Any:
    """Three agree twice; the last one says what cannot be, the second time."""
    agreement = begun(world, ClusterAssignment.of([[1], []], range(3)))
    agreement.settle()
    queue = agreement.inbox.queue
    if world.rank == 2:
        lost, leaves, told = 1 << 60 if how == "who" else 0, 7 if how == "leaves" else 0, -5 if how == "told" else 0
        rows = [1, told] + [0] * (2 * MAX_JOINERS - 2) if told else [0] * (2 * MAX_JOINERS)
        word = numbers(2, lost, leaves, *rows, *([0] if how == "long" else []))
        for other in (0, 1):
            queue.send(other, MessageHeader(VOTE, 0, agreement.inbox.epoch + 1, 1), word.view(torch.uint8))
        queue.settle()
        return None
    try:
        agreement.settle()
    except PeerLost as error:
        return str(error)
    return agreement.assignment, dict(queue.refused)


@pytest.mark.parametrize("how", ["long", "leaves", "who", "told"])
def test_a_word_that_cannot_be_costs_its_sender_its_seat_and_nothing_else(how: str) -> None:
    left = isles.run_virtual(agree, 3, args=(how,))[:2]
    assert left[0] == left[1]
    assignment, refused = left[0]
    assert refused == {2: 1} and assignment.lost == {2} and assignment.whole == [0]


def knock(world: Mesh, how: str) -> Any:
    """Two are at work; others come, of whom the first says what cannot be."""
    inbox = cluster_inbox(world.world, 5 if world.rank != 2 or how != "run" else 6, 1 << 10)
    if world.rank >= 2:
        world.transport.compute(1.0)
    if world.rank == 2:
        body = {"long": torch.ones(9, dtype=torch.uint8), "numbers": torch.tensor([2]).view(torch.uint8)}
        sent = body.get(how, torch.tensor([NO_FIGURES]).view(torch.uint8))
        for other in (0, 1):
            inbox.queue.send(other, MessageHeader(ASK, 0), sent)
        world.transport.compute(9.0)
        return None
    if world.rank == 3:
        welcome = request_admission(inbox, range(2), NO_FIGURES)
        assert welcome is not None
        return welcome.epoch, welcome.assignment.standby, dict(welcome.facts)
    agreement = ClusterAgreement(inbox, world.world, ClusterAssignment.of([[1]], range(2)), GROWTH)
    world.transport.compute(2.0)
    agreement.settle()
    comers = admit_joiners(agreement, {"step": 4})
    world.transport.compute(3.0)
    return comers, dict(inbox.queue.refused)


@pytest.mark.parametrize("how", ["run", "long", "numbers"])
def test_who_says_hello_in_a_way_that_cannot_be_stays_out(how: str) -> None:
    first, second, _, third = isles.run_virtual(knock, 4, args=(how,))
    assert first == second == ([3], {2: 1})
    assert third == (1, (3,), {"step": 4})


SEATS = b"[[[0,1]],[[2]],[],[],[],[],[]]"


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"[1,[],{}]", b"[-1,%s,{}]" % SEATS, b"[1,%s,[]]" % SEATS, b'[1,%s,{"a":"1"}]' % SEATS]
)
def test_what_is_no_welcome_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        ClusterWelcome.unpacked(torch.frombuffer(bytearray(body), dtype=torch.uint8), 4)
    good = torch.frombuffer(bytearray(b'[1,%s,{"a":1}]' % SEATS), dtype=torch.uint8)
    assert ClusterWelcome.unpacked(good, 4).facts == {"a": 1}

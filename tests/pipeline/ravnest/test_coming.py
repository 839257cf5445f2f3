"""Nodes that come and leave: what they tell, who takes whose place, and what cannot be said."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import isles
from isles.comm.collectives.message_queue import MailNote
from isles.comm.errors import PeerLost
from isles.comm.group import numbers
from isles.comm.mesh import Mesh
from isles.network.clusters.cuts import ModelLoad
from isles.network.clusters.formation import ClusterGrowth, form_clusters
from isles.network.clusters.nodes import SILENT, ClusterNode, heard, is_told, told
from isles.pipeline.peers.inbox import ASK, COMERS, WORD
from isles.pipeline.ravnest.agreement import ClusterAgreement, ClusterWelcome, ask_in, cluster_post, let_in
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
        number = told(own)
        made = heard(number, "worker 7")
        assert is_told(number) and made is not None
        for key in ("memory", "speed", "bandwidth", "latency"):
            assert getattr(made, key) == pytest.approx(getattr(own, key), rel=1e-3)
    assert heard(SILENT, "") is None and is_told(SILENT)
    assert not any(map(is_told, (0, -1, 2, 1 << 61, (1 << 62) + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_seats_over_all_that_can_happen(seed: int) -> None:
    """Nobody serves twice; who leaves has a successor, or is gone; the last whole cluster stays; all who know of the
    same come to the same.
    """
    draw, latest = random.Random(seed), 6
    seats = ClusterAssignment.of([[2], [1, 3], []], range(6))
    growth = ClusterGrowth(LOAD, spares=draw.choice([0, 1]))
    for _ in range(30):
        lost = [draw.choice(seats.clusters[number]) for number in seats.whole[1:] if draw.random() < 0.2]
        lost += [position for position in seats.waiting if draw.random() < 0.1]
        seats = seats.without(lost)
        came = {
            latest + n: draw.choice([SILENT, told(node(draw.uniform(2e6, 4e7)))]) for n in range(draw.randint(0, 2))
        }
        latest += len(came)
        leaving = [position for position in seats.living if draw.random() < 0.1]
        before = seats.met(came, leaving)
        seats = before.mended(growth)
        assert seats == before.mended(growth)
        named = [position for cluster in seats.clusters for position in cluster] + [*seats.waiting]
        assert len(set(named)) == len(named) and seats.whole
        assert [len(cuts) + 1 for cuts in seats.cuts] == list(map(len, seats.clusters))
        for giver, taker in seats.handed:
            assert giver in before.leaving and seats.trains(taker) and seats.holder(*seats.place(taker)) == giver  # type: ignore[misc]
            assert taker not in before.leaving and giver in seats.living
            torn = seats.without([taker])
            assert torn.place(giver) == seats.place(taker) and torn.trains(giver)
            assert not seats.without([giver]).trains(taker)
        kept = [position for number in seats.whole for position in seats.clusters[number] if position in seats.leaving]
        assert not kept or len(seats.whole) == 1
        seats = seats.joined(seats.complete)
        assert not seats.handed and not set(seats.living) & seats.lost
        again = ClusterAssignment.of_plain(seats.to_plain(), latest)
        assert again == seats
        fewer = seats.renumbered(seats.living)
        assert fewer.living == list(range(len(seats.living))) and len(fewer.clusters) == len(seats.whole)


def test_what_are_no_seats_is_refused() -> None:
    good = ClusterAssignment.of([[2], []], range(4)).met({4: SILENT}, [1]).to_plain()
    assert ClusterAssignment.of_plain(good, 5).to_plain() == good
    bad: list[Any] = [
        None, [], [good], good[:-1], [[[0, 0], [2]], *good[1:]], [[[0, 9], [2]], *good[1:]],
        [good[0], [[2], [1]], *good[2:]], [*good[:4], [7], *good[5:]], [*good[:5], [[4, 2]], good[6]],
        [[[0, "1"], [2]], *good[1:]], [[[0, True], [2]], *good[1:]],
    ]  # fmt: skip
    for plain in bad:
        with pytest.raises(ValueError, match="no seats of clusters"):
            ClusterAssignment.of_plain(plain, 5)


def test_a_new_cluster_holds_the_model_and_spares_stay() -> None:
    small = node(0.6 * LOAD.least)
    (three,) = form_clusters([small] * 3, LOAD)  # two have too little
    seats = ClusterAssignment.of([[2], [1]], range(4))
    grown = seats.met(dict.fromkeys((4, 5, 6), told(small)), ()).mended(GROWTH)
    assert grown.clusters[2:] == (tuple(4 + number for number in three.nodes),) and grown.cuts[2] == three.split.cuts
    assert grown.out == {2} and grown.joined([2]).whole == [0, 1, 2]
    assert seats.met(dict.fromkeys((4, 5), told(small)), ()).mended(GROWTH).waiting == (4, 5)
    assert seats.met(dict.fromkeys((4, 5, 6), SILENT), ()).mended(GROWTH).clusters[2:] == ((4, 5),)
    keeping = ClusterGrowth(LOAD, spares=2)
    assert seats.met(dict.fromkeys((4, 5, 6), SILENT), ()).mended(keeping).waiting == (4, 5, 6)
    limited = ClusterGrowth(LOAD, most=2)
    assert seats.met(dict.fromkeys((4, 5), SILENT), ()).mended(limited).waiting == (4, 5)
    tiny = seats.met({4: told(node(1e5)), 5: SILENT}, ()).without([0])
    assert tiny.mended(GROWTH).clusters[0] == (5, 1)  # the first has not the memory for the place


def begun(world: Mesh, seats: ClusterAssignment, run: int = 5) -> ClusterAgreement:
    return ClusterAgreement(cluster_post(world.world, run, 1 << 10), world.world, seats, GROWTH)


def agree(world: Mesh, how: str) -> Any:
    """Three agree twice; the last one says what cannot be, the second time."""
    agreement = begun(world, ClusterAssignment.of([[1], []], range(3)))
    agreement.settle()
    mail = agreement.post.mail
    if world.rank == 2:
        lost, leaves, told = 1 << 60 if how == "who" else 0, 7 if how == "leaves" else 0, -5 if how == "told" else 0
        rows = [1, told] + [0] * (2 * COMERS - 2) if told else [0] * (2 * COMERS)
        word = numbers(2, lost, leaves, *rows, *([0] if how == "long" else []))
        for other in (0, 1):
            mail.send(other, MailNote(WORD, 0, agreement.post.turn + 1, 1), word.view(torch.uint8))
        mail.settle()
        return None
    try:
        agreement.settle()
    except PeerLost as error:
        return str(error)
    return agreement.seats, dict(mail.refused)


@pytest.mark.parametrize("how", ["long", "leaves", "who", "told"])
def test_a_word_that_cannot_be_costs_its_sender_its_seat_and_nothing_else(how: str) -> None:
    left = isles.run_virtual(agree, 3, args=(how,))[:2]
    assert left[0] == left[1]
    seats, refused = left[0]
    assert refused == {2: 1} and seats.lost == {2} and seats.whole == [0]


def knock(world: Mesh, how: str) -> Any:
    """Two are at work; others come, of whom the first says what cannot be."""
    post = cluster_post(world.world, 5 if world.rank != 2 or how != "run" else 6, 1 << 10)
    if world.rank >= 2:
        world.transport.compute(1.0)
    if world.rank == 2:
        body = {"long": torch.ones(9, dtype=torch.uint8), "numbers": torch.tensor([2]).view(torch.uint8)}
        sent = body.get(how, torch.tensor([SILENT]).view(torch.uint8))
        for other in (0, 1):
            post.mail.send(other, MailNote(ASK, 0), sent)
        world.transport.compute(9.0)
        return None
    if world.rank == 3:
        welcome = ask_in(post, range(2), SILENT)
        assert welcome is not None
        return welcome.turn, welcome.seats.waiting, dict(welcome.facts)
    agreement = ClusterAgreement(post, world.world, ClusterAssignment.of([[1]], range(2)), GROWTH)
    world.transport.compute(2.0)
    agreement.settle()
    comers = let_in(agreement, {"step": 4})
    world.transport.compute(3.0)
    return comers, dict(post.mail.refused)


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

"""Buffers and checkpoints: when memory may be used again, and runs that continue as if never stopped."""

import json

import pytest
import torch

from isles.comm.group import Group
from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualCluster
from isles.network.links import Links

slots = pytest.mark.parametrize("slots", [1, 2])


def u8(size, value=0):
    return torch.full((size,), value, dtype=torch.uint8)


@slots
@pytest.mark.parametrize("posted", [0.0, 1.0, 1.5, 9.0])
@pytest.mark.parametrize("named", [True, False])
def test_the_buffer_may_be_reused_once_the_send_is_done(posted, named, slots):
    # Gone at 1 s, arrives at 2 s; the receive is posted before, at, between and after these.
    def worker(transport):
        tag = Tag("outer", 0)
        if transport.rank == 0:
            data = u8(1000, 7)

            def protocol():
                yield transport.send(1, data, tag)
                data.fill_(99)
                return transport.now()

            return transport.run(protocol(), "outer", 60.0).wait()
        transport.compute(posted)

        def protocol():
            out = u8(1000)
            yield transport.recv(0 if named else None, out, tag)
            return out.unique().tolist(), transport.now()

        return transport.run(protocol(), "outer", 60.0).wait()

    links = Links(bandwidth=8000.0, latency=1.0)
    assert VirtualCluster(2, links=links, slots=slots).run(worker) == [1.0, ([7], max(2.0, posted))]


@slots
@pytest.mark.parametrize("first", [0.0, 1.5, 2.5, 20.0])
def test_messages_under_one_tag_keep_their_order(first, slots):
    # Receives under one tag may outnumber or lag behind what is on its way. At 1.5 s the oldest message is gone without
    # a receive, and the next is still on the uplink.
    def worker(transport):
        tag = Tag("control", -1, 4, 1)

        def posts():
            yield [transport.send(1, u8(1000, number), tag) for number in range(6)]

        def take(peer):
            out = u8(1000)
            yield transport.recv(peer, out, tag)
            return int(out[0])

        if transport.rank == 0:
            return transport.run(posts(), "control", 60.0).wait()
        transport.compute(first)
        connection_state = [transport.run(take(0), "control", 60.0) for _ in range(2)]
        for peer, pause in [(None, 0.7), (0, 2.2), (None, 0.0), (0, 0.0)]:
            transport.compute(pause)
            connection_state.append(transport.run(take(peer), "control", 60.0))
            connection_state[-1].wait()
        return [transfer.wait() for transfer in connection_state]

    links = Links(bandwidth=8000.0, latency=1.3)
    assert VirtualCluster(2, links=links, slots=slots).run(worker)[1] == list(range(6))


def test_what_has_ended_is_forgotten():
    def worker(transport):
        def swap(number):
            works = [transport.recv(1 - transport.rank, u8(8), Tag("outer", number))]
            works.append(transport.send(1 - transport.rank, u8(8), Tag("outer", number)))
            yield works

        for number in range(2000):
            transport.run(swap(number), "outer", 1e6).wait()
        wire, timeline = transport._wire, transport._scheduler.timeline
        return len(timeline._heap) < 1000, len(wire._coming) <= 1, len(wire._posted) <= 1, len(wire._arrived) <= 1

    assert VirtualCluster(2, links="lan").run(worker) == [(True, True, True, True)] * 2


def test_work_is_done_when_sent_or_arrived():
    def worker(transport):
        data, tag = u8(1000), Tag("outer", 0)
        work = transport.send(1, data, tag) if transport.rank == 0 else transport.recv(None, data, tag)
        connection_state = []
        for _ in range(5):
            connection_state.append((work.done(), work.peer))
            transport.compute(0.5)
        return connection_state

    sent, received = VirtualCluster(2, links=Links(bandwidth=8000.0, latency=1.0)).run(worker)
    assert sent == [(False, 1)] * 2 + [(True, 1)] * 3
    assert received == [(False, None)] * 4 + [(True, 0)]


LINKS = Links(bandwidth=8e4, latency=0.2, jitter=0.8)
OPTIONS = {"links": LINKS, "compute_jitter": 0.3, "seed": 11, "speeds": [1.0, 1.3, 0.8, 1.1]}


def rounds(transport, first, last):
    """Rounds with changing partners; returns the moments at which each ended."""
    log = []
    for number in range(first, last):
        peer = transport.rank ^ (1 + number % 3)

        def swap(peer=peer, number=number):
            out = u8(900)
            for phase in range(2):
                tag = Tag("outer", number, 0, phase)
                yield [transport.recv(peer, out, tag), transport.send(peer, u8(900, number), tag)]
            return transport.now()

        transfer = transport.run(swap(), "outer", 60.0)
        transport.compute(0.3)
        log.append((transfer.wait(), transport.now()))
    return log


@slots
@pytest.mark.parametrize("cut", [1, 4, 7])
def test_a_checkpoint_continues_to_the_bit(cut, slots):
    whole = VirtualCluster(4, **OPTIONS).run(lambda transport: (rounds(transport, 0, 10), transport.state_dict()))

    def begin(transport):
        return rounds(transport, 0, cut), json.dumps(transport.state_dict())

    begun = VirtualCluster(4, slots=slots, **OPTIONS).run(begin)

    def resume(transport):
        transport.load_state_dict(json.loads(begun[transport.rank][1]))
        return rounds(transport, cut, 10), transport.state_dict()

    resumed = VirtualCluster(4, slots=slots, **OPTIONS).run(resume)
    for rank in range(4):
        assert begun[rank][0] + resumed[rank][0] == whole[rank][0]
        assert resumed[rank][1] == whole[rank][1]


def test_messages_from_before_a_checkpoint_are_not_overtaken():
    def worker(transport):
        def one():
            verb = transport.send if transport.rank == 0 else transport.recv
            yield verb(1 - transport.rank, u8(8), Tag("outer", 0))

        state = transport.state_dict()
        transport.load_state_dict({**state, "latest": [[1, "outer", 50.0]] if transport.rank == 0 else []})
        transport.run(one(), "outer", 60.0).wait()
        return transport.now(), transport.state_dict()["latest"]

    assert VirtualCluster(2, links=Links(bandwidth=64.0)).run(worker) == [(1.0, [[1, "outer", 50.0]]), (50.0, [])]


def test_clocks_only_move_forward():
    """As the host's do: an earlier state is gone on from now."""

    def worker(transport):
        state = transport.state_dict()
        transport.load_state_dict({**state, "clock": 2.0, "computed": 7})
        assert transport.now() == 2.0
        transport.load_state_dict(state)
        return transport.now(), transport.state_dict()["computed"]

    assert VirtualCluster(1, links="lan").run(worker) == [(2.0, 0)]


def test_no_checkpoint_amid_a_transfer():
    def worker(transport):
        def protocol():
            yield transport.recv(1 - transport.rank, u8(8), Tag("outer", 0))

        if transport.rank == 0:
            transport.run(protocol(), "outer", 60.0)
            transport.state_dict()

    with pytest.raises(RuntimeError, match="settle"):
        VirtualCluster(2, links="lan").run(worker)


@slots
def test_groups_work_over_it(slots):
    def worker(transport):
        world = Group(transport, tuple(range(4)))
        gathered = world.all_gather(torch.tensor([float(transport.rank)]))
        data = torch.full((5,), float(transport.rank))
        world.broadcast(data, source=2)
        world.barrier()
        return torch.cat(gathered).tolist(), data.tolist(), world.traffic.total("bytes_sent")

    results = VirtualCluster(4, links="home-cable", slots=slots).run(worker)
    assert [result[:2] for result in results] == [([0, 1, 2, 3], [2.0] * 5)] * 4
    assert all(result[2] > 0 for result in results)

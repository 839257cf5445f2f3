"""The virtual clock: what messages and computation take, to closed forms."""

from dataclasses import replace

import pytest
import torch

from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualCluster
from isles.network.links import Links

KBIT = Links(bandwidth=8000.0)  # 1000 bytes a second
KBIT_LATE = Links(bandwidth=8000.0, latency=0.25)
slots = pytest.mark.parametrize("slots", [1, 2])


def near(seconds):
    return pytest.approx(seconds, rel=1e-9)


def u8(size, value=0):
    return torch.full((size,), value, dtype=torch.uint8)


def sending(transport, peer, size, tag, value=1):
    yield transport.send(peer, u8(size, value), tag)
    return transport.now()


def receiving(transport, peer, size, tag):
    out = u8(size)
    work = transport.recv(peer, out, tag)
    yield work
    return transport.now(), work.peer, out.unique().tolist()


def start_send(transport, peer, size, tag, value=1):
    return transport.run(sending(transport, peer, size, tag, value), tag.channel, 1e6)


def start_recv(transport, peer, size, tag):
    return transport.run(receiving(transport, peer, size, tag), tag.channel, 1e6)


@slots
def test_one_message_takes_service_then_latency(slots):
    def worker(transport):
        if transport.rank == 0:
            return start_send(transport, 1, 500, Tag("outer", 0)).wait(), transport.now()
        return start_recv(transport, 0, 500, Tag("outer", 0)).wait(), transport.now()

    links = Links(bandwidth=8000.0, latency=[[0, 0.25], [9, 0]])
    sent, received = VirtualCluster(2, links=links, slots=slots).run(worker)
    assert sent == (near(0.5), near(0.5))
    assert received == ((near(0.75), 0, [1]), near(0.75))


def test_messages_of_one_channel_follow_each_other_and_channels_share():
    def worker(transport, channels):
        tags = [Tag(channel, 0, 0, phase) for phase, channel in enumerate(channels)]
        begin = start_send if transport.rank == 0 else start_recv
        transfers = [
            begin(transport, 1 - transport.rank, size, tag) for size, tag in zip((1000, 3000), tags, strict=True)
        ]
        return [transfer.wait() for transfer in transfers]

    fifo = VirtualCluster(2, links=KBIT).run(lambda transport: worker(transport, ("outer", "outer")))
    assert fifo[0] == [near(1.0), near(4.0)]
    assert [at for at, _, _ in fifo[1]] == [near(1.0), near(4.0)]
    shared = VirtualCluster(2, links=KBIT).run(lambda transport: worker(transport, ("outer", "pipeline")))
    assert shared[0] == [near(2.0), near(4.0)]


def test_ranks_behind_one_uplink_share_it():
    def worker(transport):
        tag = Tag("outer", 0)
        if transport.rank < 2:
            transport.compute(float(transport.rank))  # rank 1 begins a second later
            return start_send(transport, 2 + transport.rank, 2000, tag).wait()
        return start_recv(transport, transport.rank - 2, 2000, tag).wait()[0]

    shared = Links(bandwidth=8000.0, uplinks=[0, 0, 1, 2])
    # Rank 0 alone for 1 s, then half the rate: 3 s. Rank 1 has 1000 bytes left by then: 4 s.
    assert VirtualCluster(4, links=shared).run(worker) == [near(3.0), near(4.0), near(3.0), near(4.0)]
    assert VirtualCluster(4, links=KBIT).run(worker) == [near(2.0), near(3.0), near(2.0), near(3.0)]


@slots
def test_a_message_alone_takes_the_slower_of_two_links(slots):
    """4000 bits: gone after 0.5 s; through the downlink in 1 s from its first bit on, and a second one behind it."""

    def worker(transport):
        begin = start_send if transport.rank == 0 else start_recv
        both = [begin(transport, 1 - transport.rank, 500, Tag("outer", number)) for number in range(2)]
        return [transfer.wait() for transfer in both]

    links = Links(bandwidth=8000.0, latency=0.25, downlink=4000.0)
    sent, received = VirtualCluster(2, links=links, slots=slots).run(worker)
    assert sent == [near(0.5), near(1.0)]
    assert [at for at, _, _ in received] == [near(1.25), near(2.25)]
    for wide in (8000.0, 1e9):  # to the bit as without a downlink
        runs = [VirtualCluster(2, links=one).run(worker) for one in (replace(links, downlink=wide), KBIT_LATE)]
        assert runs[0] == runs[1]


def test_a_quick_downlink_does_not_outrun_the_latency():
    """8000 bits: the last one leaves the uplink after 1 s and comes after 2; the downlink, which others could fill, is
    through with it before.
    """

    def worker(transport):
        begin = {0: start_send, 1: start_recv}.get(transport.rank)
        return begin and begin(transport, 1 - transport.rank, 1000, Tag("outer", 0)).wait()

    links = Links(bandwidth=8000.0, latency=1.0, downlink=12_000.0)
    assert VirtualCluster(3, links=links).run(worker)[1][0] == near(2.0)


def test_messages_that_come_together_share_the_downlink():
    """8000 bits from each of 1, 2, 3; 3 begins a second later. 1 and 2 at 6000 a second each, then all at 4000 until
    these are through at 1.5 s; what is left of 3, 6000 bits, has the 12,000 to itself: through at 2 s, when its last
    bit has just left. Worker 4 on a line of 500 a second keeps to that, however free the downlink.
    """

    def worker(transport):
        if transport.rank:
            transport.compute(1.0 if transport.rank == 3 else 0.0)
            return start_send(transport, 0, 1000, Tag("outer", 0)).wait()
        return [start_recv(transport, peer, 1000, Tag("outer", 0)).wait() for peer in range(1, transport.size)]

    links = Links(bandwidth=8000.0, latency=0.25, downlink=12_000.0)
    times = [at for at, _, _ in VirtualCluster(4, links=links).run(worker)[0]]
    assert times == [near(1.75), near(1.75), near(2.25)]
    slow = Links(bandwidth=[8000.0, 8000.0, 500.0], latency=0.25, downlink=8000.0)
    times = [at for at, _, _ in VirtualCluster(3, links=slow).run(worker)[0]]
    assert times == [near(2.25), near(16.25)]  # not in turn: 1 shares with 2 until both have had their bits


def test_a_link_shares_its_downlink():
    def worker(transport):
        if transport.rank < 2:
            return start_recv(transport, transport.rank + 2, 1000, Tag("outer", 0)).wait()[0]
        return start_send(transport, transport.rank - 2, 1000, Tag("outer", 0)).wait()

    household = Links(bandwidth=8000.0, downlink=8000.0, uplinks=[0, 0, 1, 2])
    assert VirtualCluster(4, links=household).run(worker) == [near(2.0), near(2.0), near(1.0), near(1.0)]


@slots
@pytest.mark.parametrize("early", ["receive", "send"])
def test_receive_may_be_posted_before_or_after_the_message(early, slots):
    def worker(transport):
        if (transport.rank == 0) == (early == "receive"):
            transport.compute(5.0)
        begin = start_send if transport.rank == 0 else start_recv
        result = begin(
            transport, 1 - transport.rank, 1000, Tag("outer", 3), *([9] if transport.rank == 0 else [])
        ).wait()
        return result, transport.traffic["outer"].blocked_seconds

    (sent, sender_blocked), (received, receiver_blocked) = VirtualCluster(2, links=KBIT, slots=slots).run(worker)
    if early == "receive":
        assert (sent, sender_blocked) == (near(6.0), near(1.0))
        assert (received, receiver_blocked) == ((near(6.0), 0, [9]), near(6.0))
    else:
        assert (sent, sender_blocked) == (near(1.0), near(1.0))
        assert (received, receiver_blocked) == ((near(5.0), 0, [9]), 0.0)


@slots
@pytest.mark.parametrize("posted", ["before", "after"])
def test_from_anyone_takes_the_earliest_arrival_then_the_lower_rank(posted, slots):
    tag = Tag("pipeline", 1, 2, 3)

    def worker(transport):
        if transport.rank:
            transport.compute({1: 2.0, 2: 1.0, 3: 1.0}[transport.rank])
            start_send(transport, 0, 1000, tag, transport.rank).wait()
            return None
        transport.compute(10.0 if posted == "after" else 0.0)
        return [start_recv(transport, None, 1000, tag).wait() for _ in range(3)]

    received = VirtualCluster(4, links=KBIT, slots=slots).run(worker)[0]
    assert [(peer, values) for _, peer, values in received] == [(2, [2]), (3, [3]), (1, [1])]
    assert [at for at, _, _ in received] == [near(t) for t in ([2, 2, 3] if posted == "before" else [10, 10, 10])]


@slots
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 7.0])
def test_phases_run_behind_the_computation(slots, seconds):
    # Three phases of 1 s each way around; waiting ends at max(compute, transfer).
    def worker(transport):
        peer = 1 - transport.rank

        def three_phases():
            connection_state = []
            for phase in range(3):
                out = u8(1000)
                yield [
                    transport.recv(peer, out, Tag("outer", 0, 0, phase)),
                    transport.send(peer, u8(1000, phase), Tag("outer", 0, 0, phase)),
                ]
                connection_state.append((transport.now(), int(out[0])))
            return connection_state

        transfer = transport.run(three_phases(), "outer", 100.0)
        transport.compute(seconds)
        done = transfer.done()
        return transfer.wait(), transport.now(), transport.traffic["outer"].blocked_seconds, done

    for connection_state, now, blocked, done in VirtualCluster(2, links=KBIT, slots=slots).run(worker):
        assert connection_state == [(near(1.0), 0), (near(2.0), 1), (near(3.0), 2)]
        assert now == near(max(seconds, 3.0))
        assert blocked == near(max(3.0 - seconds, 0.0))
        assert done == (seconds >= 3.0)


def test_compute_is_charged_with_speed_and_seeded_jitter():
    def worker(transport):
        charged = []
        for _ in range(200):
            before = transport.now()
            transport.compute(transport.step_seconds)
            charged.append(transport.now() - before)
        assert transport.now() == near(transport.compute_seconds) == near(sum(charged))
        return charged

    def cluster(**options):
        return VirtualCluster(2, links=KBIT, step_seconds=0.5, speeds=[1.0, 3.0], **options).run(worker)

    assert cluster() == [[near(0.5)] * 200, [near(1.5)] * 200]
    jittery = cluster(compute_jitter=0.3, seed=4)
    assert jittery == cluster(compute_jitter=0.3, seed=4) == cluster(compute_jitter=0.3, seed=4, slots=2)
    assert jittery != cluster(compute_jitter=0.3, seed=5)
    assert len(set(jittery[0])) == 200 and jittery[1] != [3 * seconds for seconds in jittery[0]]
    assert sum(jittery[0]) / 200 == pytest.approx(0.5, rel=0.1)


def test_nothing_to_wait_for_ends_at_once():
    def worker(transport):
        def protocol():
            yield []
            return "result"

        transfer = transport.run(protocol(), "control", 1.0)
        assert transfer.done()
        return transfer.wait(), transfer.wait(), transport.now()

    assert VirtualCluster(1, links="lan").run(worker) == [("result", "result", 0.0)]


def test_instant_links_keep_the_order_of_ranks():
    def worker(transport):
        if transport.rank:
            start_send(transport, 0, 8, Tag("control", 0)).wait()
            return None
        return [start_recv(transport, None, 8, Tag("control", 0)).wait()[:2] for _ in range(3)]

    assert VirtualCluster(4, links=Links(bandwidth=float("inf"))).run(worker)[0] == [(0.0, 1), (0.0, 2), (0.0, 3)]


def test_what_does_not_fit_is_refused():
    for options, word in [
        ({"workers": 0}, "workers"),
        ({"workers": 2, "slots": 0}, "slots"),
        ({"workers": 2, "speeds": [1.0]}, "speeds"),
        ({"workers": 2, "speeds": [1.0, 0.0]}, "speeds"),
        ({"workers": 2, "step_seconds": -1.0}, "step_seconds"),
        ({"workers": 2, "links": "lann"}, "did you mean 'lan'"),
    ]:
        with pytest.raises(ValueError, match=word):
            VirtualCluster(options.pop("workers"), **{"links": "lan", **options})
    with pytest.raises(ValueError, match="0 s or more"):
        VirtualCluster(1, links="lan").run(lambda transport: transport.compute(-1.0))

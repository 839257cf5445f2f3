"""Lost workers, deadlines and mistakes: who is told what, and at which virtual time."""

import math
import signal
import threading

import pytest
import torch

from isles.comm.errors import CommError, DeadlinePassed, Malformed, PeerLost, PeerSilent, RoundClosed
from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualCluster
from isles.network.links import Links

KBIT = Links(bandwidth=8000.0)  # 1000 bytes a second
OUTER, EVAL = Tag("outer", 0), Tag("eval", 0)
slots = pytest.mark.parametrize("slots", [1, 2])


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def u8(size, value=0):
    return torch.full((size,), value, dtype=torch.uint8)


def send(transport, peer, tag=OUTER, size=1000, deadline=1e6):
    def protocol():
        yield transport.send(peer, u8(size, 1), tag)

    return transport.run(protocol(), tag.channel, deadline)


def recv(transport, peer, tag=OUTER, size=1000, deadline=1e6):
    def protocol():
        out = u8(size)
        yield transport.recv(peer, out, tag)
        return int(out[0])

    return transport.run(protocol(), tag.channel, deadline)


@slots
@pytest.mark.parametrize("ends", ["raise", "return"])
def test_waiting_for_a_worker_that_ends_is_reported_at_once(ends, slots):
    def worker(transport):
        if transport.rank == 1:
            transport.compute(2.0)
            if ends == "raise":
                raise KeyError("broken")
            return "early"
        if transport.rank >= 2:  # a pair that has nothing to do with it
            transfer = (send if transport.rank == 2 else recv)(transport, 5 - transport.rank, size=5000)
            return transfer.wait(), transport.now()
        with pytest.raises(PeerLost) as reported:
            recv(transport, 1).wait()
        assert reported.value.rank == 1 and transport.now() == 2.0
        with pytest.raises(PeerLost):  # and from then on without waiting, in both directions
            recv(transport, 1, EVAL).wait()
        with pytest.raises(PeerLost):
            send(transport, 1).wait()
        return transport.now(), transport.traffic["outer"].blocked_seconds

    results = VirtualCluster(4, links=KBIT, slots=slots).run(worker, return_errors=True)
    assert results[0] == (2.0, 2.0)
    assert repr(results[1]) == ("KeyError('broken')" if ends == "raise" else "'early'")
    assert results[2:] == [(None, 5.0), (1, 5.0)]


@slots
def test_what_was_sent_before_the_end_is_delivered(slots):
    def worker(transport):
        if transport.rank == 1:
            for number in range(2):
                transport.run(iter_send(transport, number), "outer", 1e6)
            return None
        waiting = [recv(transport, 1, Tag("outer", number)) for number in (0, 1, 2)]
        results = [waiting[0].wait(), waiting[1].wait(), transport.now()]
        with pytest.raises(PeerLost):
            waiting[2].wait()
        return results

    def iter_send(transport, number):
        yield transport.send(0, u8(1000, 5 + number), Tag("outer", number))

    assert VirtualCluster(2, links=KBIT, slots=slots).run(worker)[0] == [5, 6, 2.0]


@slots
def test_the_first_error_in_virtual_time_is_raised_not_its_consequences(slots):
    def worker(transport):
        if transport.rank == 0:
            recv(transport, 2).wait()  # PeerLost at the same moment, of a lower rank
        transport.compute({1: 9.0, 2: 3.0}[transport.rank])
        raise ValueError(f"mistake of {transport.rank}")

    cluster = VirtualCluster(3, links=KBIT, slots=slots)
    with pytest.raises(ValueError, match="mistake of 2") as reported:
        cluster.run(worker)
    assert reported.value.__notes__ == ["in virtual worker 2 at 3 s"]
    errors = cluster.run(worker, return_errors=True)
    assert [type(error) for error in errors] == [PeerLost, ValueError, ValueError]


def test_a_protocol_may_survive_a_lost_peer():
    def worker(transport):
        if transport.rank == 1:
            return None
        if transport.rank == 2:
            return send(transport, 0).wait()

        def protocol():
            lost, out = [], u8(1000)
            works = [transport.recv(1, u8(1000), OUTER), transport.recv(2, out, OUTER)]
            while works:
                try:
                    yield works
                    break
                except PeerLost as error:
                    lost.append(error.rank)
                    works = [work for work in works if work.peer != error.rank]
            return lost, int(out[0])

        return transport.run(protocol(), "outer", 1e6).wait()

    assert VirtualCluster(3, links=KBIT).run(worker)[0] == ([1], 1)


def test_from_anyone_when_nobody_is_left():
    def worker(transport):
        if transport.rank:
            return send(transport, 0).wait() if transport.rank == 2 else None
        first, second = recv(transport, None), recv(transport, None)
        assert first.wait() == 1
        with pytest.raises(PeerLost):
            second.wait()
        return transport.now()

    assert VirtualCluster(3, links=KBIT).run(worker)[0] == 1.0


@slots
def test_deadlines_pass_in_virtual_time_and_harm_no_other_transfer(slots):
    def worker(transport):
        peer = 1 - transport.rank
        if transport.rank:
            transport.compute(7.0)  # rank 0 waits for 3 s
            return send(transport, peer).wait(), send(transport, peer, EVAL).wait(), transport.now()
        closed, out = [], u8(1000)

        def protocol():
            try:
                yield transport.recv(peer, out, OUTER)
            finally:
                closed.append(transport.now())

        transport.compute(1.0)
        late = transport.run(protocol(), "outer", 3.0)
        other = recv(transport, peer, EVAL)
        with pytest.raises(DeadlinePassed) as reported:
            late.wait()
        assert (reported.value.peer, reported.value.channel, reported.value.seconds) == (1, "outer", 3.0)
        assert closed == [transport.now()] == [4.0] and late.done()
        with pytest.raises(DeadlinePassed):
            late.wait()
        result = other.wait()
        assert not out.any()  # the late message went nowhere: the owner may use the memory again
        return result, transport.now(), transport.traffic["outer"].blocked_seconds

    results = VirtualCluster(2, links=KBIT, slots=slots).run(worker)
    assert results == [(1, 9.0, 3.0), (None, None, 9.0)]


def test_a_deadline_counts_from_the_start_and_an_arrival_at_it_is_in_time():
    def worker(transport, deadline):
        if transport.rank:
            return send(transport, 0).wait()
        transfer = recv(transport, 1, deadline=deadline)
        transport.compute(5.0)
        return transfer.wait(), transport.now()

    assert VirtualCluster(2, links=KBIT).run(lambda transport: worker(transport, 1.0))[0] == (1, 5.0)
    with pytest.raises(DeadlinePassed):
        VirtualCluster(2, links=KBIT).run(lambda transport: worker(transport, 0.999))


def test_a_deadline_for_anyone_names_nobody():
    def worker(transport):
        if transport.rank:
            return transport.compute(9.0) or transport.traffic
        return recv(transport, None, deadline=2.0).wait()

    error = VirtualCluster(2, links=KBIT).run(worker, return_errors=True)[0]
    assert isinstance(error, DeadlinePassed) and error.peer == -1


def test_waiting_in_a_circle_without_deadlines_is_a_deadlock_not_a_hang():
    def worker(transport):
        return recv(transport, (transport.rank + 1) % 3, deadline=math.inf).wait()

    with pytest.raises(CommError, match="deadlock: workers 0, 1, 2"):
        VirtualCluster(3, links=KBIT).run(worker)


@slots
def test_sizes_that_differ_are_reported_to_the_receiver(slots):
    def worker(transport):
        if transport.rank:
            return send(transport, 0, size=10).wait()
        return recv(transport, 1, size=11).wait()

    error, sent = VirtualCluster(2, links=KBIT, slots=slots).run(worker, return_errors=True)
    assert isinstance(error, Malformed) and error.peer == 1 and "10 bytes" in str(error) and "11 bytes" in str(error)
    assert sent is None


def test_a_protocols_own_error_is_raised_by_wait_only():
    def worker(transport):
        def broken():
            yield transport.recv(1 - transport.rank, u8(8), OUTER)
            raise RuntimeError("in the second step")

        transfer = transport.run(broken(), "outer", 10.0)
        send(transport, 1 - transport.rank, size=8).wait()
        with pytest.raises(RuntimeError, match="second step"):
            transfer.wait()
        return transport.now()

    assert VirtualCluster(2, links=KBIT).run(worker) == [0.008, 0.008]


def test_transfers_of_a_worker_that_ends_are_closed():
    closed = []

    def worker(transport):
        def protocol():
            try:
                yield transport.recv(1, u8(8), OUTER)
            finally:
                closed.append(transport.rank)

        if transport.rank == 0:
            transport.run(protocol(), "outer", 10.0)
        else:
            transport.compute(1.0)

    VirtualCluster(2, links=KBIT).run(worker)
    assert closed == [0]


def test_transport_calls_inside_a_protocol_belong_to_its_event():
    def worker(transport):
        peer = 1 - transport.rank

        def inner(at):
            assert transport.now() == at
            yield transport.send(peer, u8(1000), Tag("eval", 1))

        def outer():
            yield transport.send(peer, u8(1000), OUTER)
            work = transport.recv(peer, u8(1000), OUTER)  # arrived a moment ago, or at this one
            nested = transport.run(inner(transport.now()), "eval", 10.0)
            assert not nested.done()
            yield [work, transport.recv(peer, u8(1000), Tag("eval", 1))]
            return work.done(), nested.done(), transport.now()

        transfer = transport.run(outer(), "outer", 10.0)
        transport.compute(0.5)
        return transfer.wait()

    assert VirtualCluster(2, links=KBIT).run(worker) == [(True, True, 2.0)] * 2


@slots
def test_ctrl_c_ends_every_worker(slots):
    def worker(transport):
        if transport.rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                transport.compute(1.0)
        try:
            recv(transport, 0, deadline=math.inf).wait()
        except Exception:  # a worker that catches everything must end as well
            pytest.fail("the stop is not an ordinary exception")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup, and shells' jobs, have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            VirtualCluster(3, links=KBIT, slots=slots).run(worker)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_inside_the_machinery_ends_the_run(monkeypatch):
    from isles.comm.virtual.wire import VirtualWire

    monkeypatch.setattr(VirtualWire, "arrived", lambda *_: 1 / 0)

    def worker(transport):
        return send(transport, 1).wait() if transport.rank == 0 else recv(transport, 0).wait()

    with pytest.raises(ZeroDivisionError):
        VirtualCluster(3, links=KBIT).run(worker)


FAR = Links(bandwidth=8000.0, latency=2.0)


def ended_at(transfer, kind, transport):
    """When a wait is told that it is in vain."""
    with pytest.raises(kind):
        transfer.wait()
    return transport.now()


def test_who_sends_to_a_closed_round_gets_an_error_a_latency_after_it_came():
    """A message of 1 s on the line and 2 s of way, before the round is over or behind it, and 2 s back."""

    def worker(transport):
        old, new = Tag("outer", 3), Tag("outer", 4)
        if transport.rank == 2:
            transport.compute(10.0)
            transport.over("outer", 3)
            transport.compute(20.0)
            send(transport, 0, new).wait()
            return [recv(transport, 0, new).wait()]
        transport.compute([0.0, 20.0][transport.rank])
        send(transport, 2, old)
        ends = [ended_at(recv(transport, 2, old), RoundClosed, transport)]
        if transport.rank == 0:  # in the next round it is waited for
            send(transport, 2, new)
            ends.append(recv(transport, 2, new).wait())
        return ends

    # Worker 0's came at 3 s and waited; worker 1's comes at 23 s.
    assert VirtualCluster(3, links=FAR).run(worker) == [[12.0, 1], [25.0], [1]]


def test_nobody_waits_in_an_attempt_of_before():
    """Neither where it waits already, nor where it begins to later; in the attempt that has begun it does."""

    def worker(transport):
        if transport.rank == 1:
            send(transport, 0, Tag("outer", 1, attempt=1)).wait()
            transport.compute(10.0)
            return None
        first, other = recv(transport, 1, Tag("outer", 1)), recv(transport, 1, Tag("outer", 2))
        with transport._worker:
            transport._wire.again(0, Tag("outer", 1, attempt=1))
        assert ended_at(first, RoundClosed, transport) == 0.0
        assert ended_at(recv(transport, 1, Tag("outer", 1)), RoundClosed, transport) == 0.0
        assert recv(transport, 1, Tag("outer", 1, attempt=1)).wait() == 1 and not other.done()
        return transport.now()

    assert VirtualCluster(2, links=FAR).run(worker)[0] == 3.0


def test_whoever_stands_still_for_somebody_doubts_and_may_give_up():
    """After a second, and four times a second from then on; about those alone that it waits for."""
    doubts = []

    def worker(transport):
        if transport.rank:
            transport.compute(100.0)
            return None

        def suspect(peer):
            doubts.append((peer, transport.now()))
            if len(doubts) == 3:
                transport._wire.end(0, lambda peer, _: peer == 1, PeerSilent)

        transport.suspect = suspect
        send(transport, 2)
        transport.compute(0.5)
        return ended_at(recv(transport, 1), PeerSilent, transport)

    assert VirtualCluster(3, links=FAR).run(worker)[0] == 2.0
    assert doubts == [(1, 1.5), (1, 1.75), (1, 2.0)]

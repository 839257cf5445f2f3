"""Order: one event order and one result, whatever the host does and however many threads compute at once."""

import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualCluster
from isles.network.links import Links

JITTERY = Links(bandwidth=[4e4, 8e4, 1e5], latency=0.05, jitter=1.0, uplinks=[0, 1, 1, 2, 2])
NARROW = replace(JITTERY, downlink=[7e4, 3e4, 1e4])


def pattern(seed, nap=0.0):
    """A random program of five workers: pairs at random moments, reports to rank 0, transfers behind computing."""
    plan = random.Random(seed)
    rounds = []
    for _ in range(6):
        order = plan.sample(range(5), 5)
        rounds.append({order[0]: order[1], order[1]: order[0], order[2]: order[3], order[3]: order[2]})
    sizes = [plan.randrange(1, 4000) for _ in rounds]

    def worker(transport):
        mine = random.Random(f"{seed} {transport.rank}")
        host = random.Random()  # naps differ from run to run: only the host's timing may feel them
        log, waiting = [], []

        def swap(peer, number):
            data, out = (
                torch.full((sizes[number],), transport.rank, dtype=torch.uint8),
                torch.zeros(sizes[number], dtype=torch.uint8),
            )
            for phase in range(2):
                tag = Tag("outer", number, 0, phase)
                transport.traffic.sent("outer", data.numel())
                yield [transport.recv(peer, out, tag), transport.send(peer, data, tag)]
                data = out + data  # a buffer is read once its message is done
            return number, transport.now(), int(data.sum())

        def report(number):
            tag = Tag("control", number)
            if transport.rank:
                yield transport.send(0, torch.full((64,), transport.rank, dtype=torch.uint8), tag)
                return transport.now()
            connection_state = []
            for _ in range(4):
                out = torch.zeros(64, dtype=torch.uint8)
                work = transport.recv(None, out, tag)
                yield work
                connection_state.append((work.peer, int(out[0]), transport.now()))
            return connection_state

        for number, pairs in enumerate(rounds):
            transport.compute(mine.choice([0.0, 0.1, mine.random()]))
            if nap:
                time.sleep(host.random() * nap)
            if transport.rank in pairs:
                waiting.append(transport.run(swap(pairs[transport.rank], number), "outer", 1e3))
            waiting.append(transport.run(report(number), "control", 1e3))
            if mine.random() < 0.5:
                log.append((transport.now(), waiting.pop(mine.randrange(len(waiting))).wait()))
            log.append(
                (transport.now(), [transfer.done() for transfer in waiting], transport.traffic["outer"].bytes_sent)
            )
        log += [(transfer.wait(), transport.now()) for transfer in waiting]
        return log, transport.state_dict(), transport.traffic.state_dict()

    return worker


@pytest.mark.parametrize(("links", "seed"), [*((JITTERY, s) for s in range(9)), *((NARROW, s) for s in range(4))])
def test_results_do_not_depend_on_slots(links, seed):
    def results(slots, nap=0.0):
        cluster = VirtualCluster(5, links=links, compute_jitter=0.2, slots=slots, seed=seed, speeds=[1, 1, 1.5, 1, 2])
        return cluster.run(pattern(seed, nap))

    once = results(1)
    assert once == results(1) == results(2) == results(3, nap=0.002)


def test_seed_changes_jitter_only():
    def clocks(seed, links):
        return [result[1]["clock"] for result in VirtualCluster(5, links=links, seed=seed).run(pattern(0))]

    assert clocks(1, JITTERY) != clocks(2, JITTERY)
    calm = Links(bandwidth=8e4, latency=0.05)
    assert clocks(1, calm) == clocks(2, calm)


@pytest.mark.parametrize("slots", [1, 2])
def test_jitter_never_lets_a_message_overtake(slots):
    def worker(transport):
        def posts():
            yield [transport.send(1, torch.zeros(1, dtype=torch.uint8), Tag("outer", number)) for number in range(60)]

        def take(number):
            yield transport.recv(0, torch.zeros(1, dtype=torch.uint8), Tag("outer", number))
            return transport.now()

        if transport.rank == 0:
            return transport.run(posts(), "outer", 1e3).wait()
        return [transfer.wait() for transfer in [transport.run(take(n), "outer", 1e3) for n in reversed(range(60))]][
            ::-1
        ]

    wild = Links(bandwidth=8e3, latency=1.0, jitter=2.0)
    arrivals = VirtualCluster(2, links=wild, slots=slots).run(worker)[1]
    assert arrivals == sorted(arrivals)
    alone = [0.001 * (n + 1) + wild.message_latency(0, 1, number=n, seed=0) for n in range(60)]
    assert arrivals != pytest.approx(sorted(alone))
    in_order = [max(alone[: n + 1]) for n in range(60)]
    assert arrivals == pytest.approx(in_order, rel=1e-9)
    free, through = 0.0, []
    for first in in_order:  # each takes 2 ms of the downlink, and begins 1 ms before its last bit would be there
        free = max(first - 0.001, free) + 0.002
        through.append(free)
    narrow = VirtualCluster(2, links=replace(wild, downlink=4e3), slots=slots).run(worker)[1]
    assert narrow == pytest.approx(through, rel=1e-9)


def test_one_slot_runs_one_thread_and_two_run_two():
    def most_at_once(slots):
        inside, most, lock = [0], [0], threading.Lock()

        def worker(transport):
            for _ in range(5):
                transport.compute(1.0)
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0.002)
                with lock:
                    inside[0] -= 1
                assert transport.traffic is not None  # a call that takes a turn

        VirtualCluster(4, links="lan", slots=slots).run(worker)
        return most[0]

    assert most_at_once(1) == 1
    assert most_at_once(2) == 2


def test_charging_computation_lets_others_go_on():
    # Rank 0 computes, and has said so: rank 1, whose call came first in host time, need not wait for the end of it.
    went_on = threading.Event()

    def worker(transport):
        if transport.rank == 0:
            time.sleep(0.05)
            transport.compute(10.0)
            return went_on.wait(10.0)
        assert transport.traffic is not None  # a call that takes a turn
        return went_on.set()

    assert VirtualCluster(2, links="lan", slots=2).run(worker) == [True, None]


def test_with_one_slot_the_global_generator_is_each_workers_own():
    def worker(transport):
        torch.manual_seed(transport.rank)
        drawn = []
        for _ in range(5):
            drawn.append(torch.rand(3).tolist())
            transport.compute(1.0 + transport.rank)
            assert transport.traffic is not None  # others run meanwhile
        return drawn

    def alone(rank):
        torch.manual_seed(rank)
        return [torch.rand(3).tolist() for _ in range(5)]

    torch.manual_seed(77)
    before = torch.get_rng_state()
    results = VirtualCluster(3, links="lan").run(worker)
    assert torch.equal(torch.get_rng_state(), before)
    assert results == [alone(rank) for rank in range(3)]


def test_protocols_step_in_torchs_default_modes():
    # Rank 1's protocol goes on while rank 0's thread evaluates without gradients: its tensors must not feel that.
    def worker(transport):
        def send():
            yield transport.send(1, torch.ones(4, dtype=torch.uint8), Tag("outer", 0))

        def recv():
            out = torch.zeros(4, dtype=torch.uint8)
            yield transport.recv(0, out, Tag("outer", 0))
            return torch.is_grad_enabled(), torch.ones(2).is_inference(), torch.is_autocast_enabled("cpu")

        if transport.rank:
            return transport.run(recv(), "outer", 10.0).wait()
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            transport.run(send(), "outer", 10.0).wait()
            transport.compute(5.0)
            assert transport.traffic is not None
        return None

    assert VirtualCluster(2, links="lan").run(worker)[1] == (True, False, False)


def test_many_workers_pair_up():
    def worker(transport):
        data, out = torch.full((64,), transport.rank % 256, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)

        def swap(peer, number):
            yield [transport.recv(peer, out, Tag("outer", number)), transport.send(peer, data, Tag("outer", number))]
            return int(out[0]) == peer % 256

        for number in range(8):
            transport.compute(1.0)
            assert transport.run(swap(transport.rank ^ (1 << number), number), "outer", 60.0).wait()
        return transport.now()

    clocks = VirtualCluster(256, links="home-fibre", compute_jitter=0.2).run(worker)
    assert len(set(clocks)) > 100 and 8 < min(clocks) < max(clocks) < 16


def test_workers_that_compute_at_once_share_torchs_generator():
    """Of two slots: who draws, draws on from the seed that another one has set last."""
    met = threading.Barrier(2)

    def worker(transport):
        for rank in range(2):
            if transport.rank == rank:
                torch.manual_seed(rank)
            met.wait(10)
        return None if transport.rank else float(torch.rand(()))

    torch.manual_seed(1)
    drawn = float(torch.rand(()))
    assert VirtualCluster(2, links="lan", slots=2).run(worker)[0] == drawn

"""The replay of a step: closed forms, conservation laws, and the virtual backend's clock."""

import itertools
import math
import random

import pytest
import torch

from isles.comm.transport import Deadlines
from isles.comm.virtual.cluster import run_virtual
from isles.network.links import Links, Topology, links
from isles.network.routing.events import AtOnce, Route, fixed_routes, in_flight, orders, random_routes, visited
from isles.network.routing.replay import (
    Delays,
    LinkWire,
    Sizes,
    TaskSeconds,
    bytes_sent,
    first_come,
    in_order,
    replay,
)
from tests.network.routing.instances import held_by

GRID = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4), range(1, 9)))


def alike(workers, forward=1.0, loss=0.0, backward=2.0):
    return TaskSeconds(forward=[forward] * workers, loss=[loss] * workers, backward=[backward] * workers)


@pytest.mark.parametrize("kind", ["1f1b", "auto", "all"])
def test_step_without_latency_takes_the_closed_form(kind):
    for stages, replicas, microbatches in GRID:
        for routes in (
            fixed_routes(replicas, stages, microbatches, home=False),
            random_routes(replicas, stages, microbatches, home=False, seed=1, step=3),
        ):
            limits = in_flight(kind, replicas, stages)
            made = orders(routes, limits)
            played = replay(routes, alike(stages * replicas), AtOnce(), in_order(made))
            assert played.makespan == (microbatches + stages - 1) * 3.0
            bubble = (stages - 1) / (microbatches + stages - 1)
            assert all(share == pytest.approx(bubble, abs=1e-12) for share in played.bubbles.values())
            assert all(held <= limits.get(worker, microbatches) for worker, held in held_by(played).items())


def test_one_microbatch_takes_its_round_trip():
    seconds = TaskSeconds(forward=[1.0, 2.0, 4.0], loss=[0.5, 9.0, 0.25], backward=[3.0, 5.0, 7.0])
    delays = [[0.0, 10.0, 20.0], [30.0, 0.0, 40.0], [50.0, 60.0, 0.0]]
    last, home = Route(0, (0, 2, 1), home=False), Route(0, (0, 2, 1), home=True)
    played = replay([last], seconds, Delays(delays), first_come)
    assert played.makespan == (1 + 20 + 4 + 60) + (2 + 9 + 5) + 40 + 7 + 50 + 3
    played = replay([home], seconds, Delays(delays), first_come)
    assert played.makespan == (1 + 20 + 4 + 60) + 2 + 30 + 0.5 + 10 + 5 + 40 + 7 + 50 + 3


def test_a_pause_keeps_the_worker_and_not_the_message():
    routes = [Route(0, (0, 1), True), Route(1, (0, 1), True)]
    played = replay(routes, alike(2, loss=0.5), AtOnce(), first_come, pause=lambda task: 0.25)
    starts = {(span.worker, span.task): span.start for span in played.spans}
    assert starts[0, ("F", 1, 0)] == 1.25 and starts[1, ("F", 0, 1)] == 1.0


def random_case(rng):
    workers = rng.randint(2, 6)
    routes, last = [], {}
    for microbatch in range(rng.randint(1, 10)):
        origin = rng.randrange(2)
        others = [worker for worker in range(workers) if worker != origin]
        visits = (origin, *rng.sample(others, rng.randint(0, len(others))))
        routes.append(Route(microbatch, visits, rng.random() < 0.5, last.get(origin) if rng.random() < 0.3 else None))
        last[origin] = microbatch
    seconds = TaskSeconds(**{k: [rng.uniform(0.1, 1) for _ in range(workers)] for k in ("forward", "loss", "backward")})
    return workers, routes, seconds


def test_conservation():
    rng = random.Random(1)
    for _ in range(60):
        workers, routes, seconds = random_case(rng)
        delays = [[rng.uniform(0, 2) for _ in range(workers)] for _ in range(workers)]
        made = orders(routes, {})
        for queue in (in_order(made), first_come):
            played = replay(routes, seconds, Delays(delays), queue)
            tasks = [span.task for span in played.spans]
            assert len(set(tasks)) == len(tasks) == sum(len(list(route.tasks())) for route in routes)
            for worker in range(workers):  # nobody does two tasks at once
                mine = sorted(span[2:] for span in played.spans if span.worker == worker)
                assert all(one[1] <= other[0] for one, other in itertools.pairwise(mine))
                assert held_by(played).get(worker, 0) <= visited(routes)[worker]
            assert played.makespan >= max(played.busy.values())
            for route in routes:  # every task begins a message after the one before it ended
                spans = [next(span for span in played.spans if span.task == task) for task in route.tasks()]
                for one, other in itertools.pairwise(spans):
                    delay = 0.0 if one.worker == other.worker else delays[one.worker][other.worker]
                    assert other.start >= one.end + delay


def test_memory_is_respected_and_too_little_of_it_is_named():
    routes = [Route(m, (0, 1), True) for m in range(6)]
    delays = [[0.0, 1.0], [1.0, 0.0]]
    for room in (1, 2, 3):
        played = replay(routes, alike(2, loss=0.25), Delays(delays), first_come, room={0: room})
        assert held_by(played)[0] == room
    crossing = [Route(0, (0, 2, 3), True), Route(1, (1, 3, 2), True)]
    with pytest.raises(ValueError, match="microbatch 0 waits for room at worker 3, which keeps microbatch 1"):
        replay(crossing, alike(4), Delays([[1.0] * 4] * 4), first_come, room={2: 1, 3: 1})


def test_bytes_by_worker():
    sizes = Sizes(forward=100, home=70, backward=11)
    assert bytes_sent([Route(0, (0, 1, 2), False)], sizes) == {0: 100, 1: 111, 2: 11}
    assert bytes_sent([Route(0, (0, 1, 2), True)], sizes) == {0: 111, 1: 111, 2: 81}
    assert not bytes_sent([Route(0, (0,), True), Route(1, (3,), False)], sizes)


# The virtual backend: workers that follow their lists, with messages of those lengths and charged computation


def follower(world, routes, lists, sizes, seconds, ranks, which):
    position = ranks.index(world.rank) if world.rank in ranks else None
    if position is None:
        return 0.0
    by_number = {route.microbatch: route for route in routes}
    group = world.world.among(ranks, "pipeline")

    def message(microbatch, task, source, target, send):
        call = group.call("pipeline", round=microbatch)
        phase = {"F": 0, "L": 1, "B": 2}[task.kind] * 16 + task.hop
        buffer = torch.zeros(sizes.of(task), dtype=torch.uint8)
        return call.send(target, buffer, phase) if send else call.recv(source, buffer, phase)

    def wait(work):
        yield work

    sent = []
    for task in lists.get(position, ()):
        route = by_number[task.microbatch]
        whole = list(route.tasks())
        place = whole.index(task)
        if place and (source := route.worker(whole[place - 1])) != position:
            group.start(wait(message(task.microbatch, task, source, position, False)), "pipeline", 1e6).wait()
        at_last = task.kind == "F" and task.hop == route.last and not route.home
        charged = {"F": seconds.forward, "L": seconds.loss, "B": seconds.backward}[task.kind][position]
        world.transport.compute(charged + (seconds.loss[position] if at_last else 0.0))
        following = route.following(task)
        if following is not None and (target := route.worker(following)) != position:
            sent.append(message(task.microbatch, following, position, target, True))
    now = world.transport.now()
    group.start(wait(sent), "pipeline", 1e6).wait()
    return now


NETWORKS = {
    "cable": links("home-cable"),
    "worldwide": links("worldwide"),
    "shared": Links(bandwidth=[3e5, 1e6], latency=0.02, uplinks=[0, 0, 0, 1, 1, 1]),
    "narrow": Links(bandwidth=1e6, downlink=[3e5, 4e5, 5e5], latency=0.05, uplinks=[0, 0, 1, 1, 2, 2]),
    "pairs": Links(bandwidth=[[1e5 * (1 + u + 7 * v % 5) for v in range(6)] for u in range(6)], latency=0.03),
    "latency": Links(bandwidth=math.inf, latency=[[0.3 * abs(u - v) ** 0.5 for v in range(6)] for u in range(6)]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_replay_over_links_is_the_virtual_clock(name):
    rng = random.Random(name)
    for case in range(3):
        if case < 2:
            kind = random_routes(3, 2, 3, home=bool(case), seed=4, step=case)
            routes, ranks = kind, [5, 3, 1, 0, 2, 4] if case else list(range(6))
        else:
            _, routes, _ = random_case(random.Random(f"{name} routes"))
            ranks = list(range(6))
        seconds = TaskSeconds(
            **{k: [rng.uniform(0.01, 0.2) for _ in range(6)] for k in ("forward", "loss", "backward")}
        )
        sizes = Sizes(forward=rng.randint(2000, 9000), home=rng.randint(2000, 9000), backward=rng.randint(2000, 9000))
        lists = orders(routes, {})
        for island, near in ((1, None), (2, links("lan"))):
            network = NETWORKS[name]
            clocks = run_virtual(
                follower,
                6,
                args=(routes, lists, sizes, seconds, ranks, case),
                links=network,
                inner=island,
                inner_links=near or "lan",
                compute_jitter=0.0,
                seed=9,
                deadlines=Deadlines(),
            )
            wire = LinkWire(Topology(6, network, near, island), sizes, ranks, seed=9)
            played = replay(routes, seconds, wire, in_order(lists))
            assert played.makespan == pytest.approx(max(clocks), rel=0, abs=1e-9)

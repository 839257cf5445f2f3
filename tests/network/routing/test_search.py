"""The planner: closed forms, exhaustive search on tiny problems, and what must hold for every plan."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from benchmarks._reference import paths_of
from isles.network.links import Links, Topology, links
from isles.network.routing.plan import broken_rules, delays_of
from isles.network.routing.problem import (
    BestPaths,
    PathRules,
    RoutingCosts,
    RoutingProblem,
    legal_orders,
    lower_bounds,
    replay_paths,
    replay_shared,
    routes_of,
)
from isles.network.routing.replay import LinkWire, Sizes
from isles.network.routing.search import (
    SearchEffort,
    Stopwatch,
    assign,
    blind,
    routing_strategies,
    with_collisions,
    without_collisions,
)
from tests.network.routing.instances import drawn, held_by, reference

QUICK = SearchEffort(moves=1500)


def legal_paths(problem, origin):
    orders = legal_orders(len(problem.stages), problem.path_length, problem.rules)
    return [
        (origin, *nodes)
        for order in orders
        for nodes in itertools.product(*(problem.stages[stage] for stage in order[1:]))
    ]


def every_plan(problem):
    choices = [legal_paths(problem, origin) for origin, _ in problem.slots]
    for paths in itertools.product(*choices):
        made = dict(zip(problem.slots, paths, strict=True))
        if not broken_rules(problem, made):
            yield made


def slowest_alone(problem, paths):
    return max(slot * problem.forward[origin] + problem.round_trip(path) for (origin, slot), path in paths.items())


@pytest.mark.parametrize("seed", range(5))
def test_a_microbatch_alone_takes_the_closed_form(seed):
    problem = drawn(seed, (2, 3, 2, 2), path_length=3, memory=1, waves=1)
    for origin in problem.origins:
        for path in legal_paths(problem, origin):
            played = replay_paths(problem, {(origin, 0): path})
            assert played.makespan == pytest.approx(problem.round_trip(path), rel=0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_best_path_is_that_of_brute_force(seed):
    problem, rng = drawn(seed, (2, 2, 3, 2, 2), path_length=4), random.Random(seed)
    best = BestPaths(problem)
    for origin in problem.origins:
        full = set(rng.sample(range(2, 11), 3))
        expected = min(
            (problem.round_trip(path), path) for path in legal_paths(problem, origin) if not full & set(path)
        )
        seconds, path = best.of(origin, full)
        assert seconds == pytest.approx(expected[0], abs=1e-12)
        assert problem.round_trip(path) == pytest.approx(expected[0], abs=1e-12) and not full & set(path)
    assert best.of(0, range(2, 11)) is None


def test_a_plan_over_latencies_alone_is_the_same_over_links():
    for seed in range(5):
        problem = drawn(seed, (2, 3, 3), path_length=3)
        paths = blind(problem, seed)
        network = Links(bandwidth=math.inf, latency=problem.delays)
        wire = LinkWire(Topology(problem.nodes, network), Sizes(forward=9, home=9, backward=9))
        assert replay_shared(problem, routes_of(paths, problem.waves), [wire])[0].makespan == pytest.approx(
            replay_paths(problem, paths).makespan, abs=1e-9
        )


@pytest.mark.parametrize("costs", [RoutingCosts(), RoutingCosts(rest=0.13, rest_at_origin=0.09)])
def test_stopwatch_is_the_replay(costs):
    for seed in range(20):
        problem = drawn(seed, (3, 2, 2, 3), path_length=3, waves=3, costs=costs)
        paths = blind(problem, seed)
        assert not broken_rules(problem, paths)
        assert Stopwatch(problem)(list(paths.values()))[0] == replay_paths(problem, paths).makespan


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_tiny_problems_against_exhaustive_search(seed, length):
    one = drawn(seed, path_length=length, memory=1)
    plans = list(every_plan(one))
    assert slowest_alone(one, without_collisions(one, QUICK, seed)) == pytest.approx(
        min(slowest_alone(one, plan) for plan in plans)
    )
    two = drawn(seed, path_length=length, memory=2)
    stopwatch = Stopwatch(two)
    least = min(stopwatch(list(plan.values()))[0] for plan in every_plan(two))
    found = with_collisions(two, QUICK, without_collisions(two, QUICK, seed), seed)
    assert replay_paths(two, found).makespan == pytest.approx(least)
    assert max(lower_bounds(two).values()) <= least


def test_every_plan_is_legal_conserves_and_stays_above_the_bounds():
    rng = random.Random(3)
    for case in range(12):
        sizes = (rng.randint(1, 3), *(rng.randint(2, 4) for _ in range(rng.randint(2, 5))))
        length = rng.randint(1, len(sizes))
        problem = drawn(case, sizes, path_length=length, memory=rng.randint(1, 3), waves=rng.randint(1, 3))
        visits = len(problem.slots) * (length - 1)
        if visits > 0.8 * problem.memory * sum(sizes[1:]):
            continue
        try:
            found = routing_strategies(problem, SearchEffort(moves=300), case)
        except ValueError as error:
            assert "no legal paths" in str(error)
            continue
        for strategy in found:
            played = strategy.played
            assert len({span.task for span in played.spans}) == len(played.spans)
            assert {span.task.microbatch for span in played.spans} == set(range(problem.microbatches))
            for worker in range(problem.nodes):
                mine = sorted(span[2:] for span in played.spans if span.worker == worker)
                assert all(one[1] <= other[0] for one, other in itertools.pairwise(mine))
                assert held_by(played).get(worker, 0) <= problem.memory
            assert played.makespan >= max(played.busy.values())
            if strategy.paths is not None:
                assert not broken_rules(problem, strategy.paths)
                assert played.makespan >= max(lower_bounds(problem).values()) - 1e-9
                hops = 2 * length if length > 1 else 0
                assert (
                    sum(strategy.sent(Sizes(forward=10, home=10, backward=10)).values())
                    == 10 * hops * problem.microbatches
                )
        assert found[3].played.makespan <= found[2].played.makespan


def test_the_same_seed_gives_the_same_plan():
    problem = drawn(0, (2, 3, 3), path_length=2)
    once, again = (routing_strategies(problem, QUICK, seed=4) for _ in range(2))
    assert [strategy.paths for strategy in once] == [strategy.paths for strategy in again]
    assert blind(problem, 1) != blind(problem, 2)


def test_all_strategies_are_equal_where_all_links_are():
    count = 9
    delays = tuple(tuple(0.0 if u == v else 0.5 for v in range(count)) for u in range(count))
    problem = RoutingProblem(
        stages=((0, 1, 2), (3, 4, 5), (6, 7, 8)), delays=delays, forward=(0.4,) * count, path_length=3, memory=1
    )
    found = routing_strategies(replace(problem, rules=PathRules(swaps=0)), QUICK)
    assert len({round(strategy.played.makespan, 9) for strategy in found}) == 1


def test_a_slow_node_gets_fewer_visits():
    even = drawn(1, (2, 4, 4), path_length=2, slowest=0.2001)
    slow = replace(
        even, forward=tuple(4 * seconds if node == 3 else seconds for node, seconds in enumerate(even.forward))
    )
    visits = []
    for problem in (even, slow):
        plan = routing_strategies(problem, QUICK)[-1].paths
        visits.append(sum(3 in path for path in plan.values()))
    assert visits[1] < max(visits[0], 1)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"memory": 0}, "memory = 0: choose 1 or more"),
        ({"waves": 0}, "waves = 0"),
        ({"path_length": 4}, "path_length = 4: there are 3 stages, choose 1 to 3"),
        ({"path_length": 0}, "path_length = 0"),
        ({"forward": (1.0,) * 5}, "forward must be 6 times above 0 s"),
        ({"stages": ((0, 1), (2, 2), (4, 5))}, "stages must name the nodes"),
        ({"delays": ((0.0,) * 6,) * 5}, "delays must be a matrix of 6 x 6"),
        ({"delays": ((float("inf"),) * 6,) * 6}, "delays must be 0 s or more and finite"),
    ],
)
def test_bad_problems_are_one_line(change, reported):
    with pytest.raises(ValueError, match=reported):
        replace(drawn(0), **change)
    with pytest.raises(ValueError, match="moves = 0"):
        SearchEffort(moves=0)
    with pytest.raises(ValueError, match="time_budget_s = 0"):
        SearchEffort(seconds=0)


def test_too_many_origins_are_reported():
    with pytest.raises(ValueError, match="no legal paths: 8 slots need 16 places at later stages and find 4"):
        blind(drawn(0, (4, 1, 1), path_length=3))


def test_the_checker_names_every_rule():
    problem = drawn(0, (2, 2, 2, 2, 2, 2), path_length=3, memory=1)
    good = blind(problem)
    assert not broken_rules(problem, good)
    cases = [
        ({(0, 0): (0, 2, 4), (1, 0): (1, 2, 5)}, "node 2 is on the paths of 2 slots: it holds 1"),
        ({**good, (0, 0): (1, 2, 4)}, "origin 0, slot 0 begins at node 1: a path begins at its origin"),
        ({**good, (0, 0): (0, 2)}, "origin 0, slot 0 runs 2 stages: path_length is 3"),
        ({**good, (0, 0): (0, 2, 3)}, "origin 0, slot 0 runs stage 1 twice"),
        ({**good, (0, 0): (0, 6, 2)}, "origin 0, slot 0 swaps stages 2 apart, at most 1 is allowed"),
        ({**good, (0, 0): (0, 10, 2)}, "origin 0, slot 0 jumps from stage 0 to 5, at most 4 is allowed"),
        ({**good, (0, 0): (0, 2, 12)}, "origin 0, slot 0 visits node 12: nodes are numbered 0 to 11"),
        ({(0, 0): good[0, 0]}, "origin 1, slot 0 has no path"),
        ({**good, (2, 0): (2, 4)}, "origin 2, slot 0: node 2 is not in stage 0"),
        ({**good, (0, 1): good[0, 0]}, "origin 0, slot 1: slots are numbered 0 to 0"),
    ]
    for paths, reported in cases:
        assert reported in broken_rules(problem, paths)
    crowded = {(origin, 0): (origin, 2 + origin, 4) for origin in (0, 1)}
    assert broken_rules(problem, crowded) == ["node 4 is on the paths of 2 slots: it holds 1"]
    full = drawn(0, (3, 1, 1), path_length=2, memory=1)
    paths = {(origin, 0): (origin, 3) for origin in range(3)}
    assert "stage 1 is on the paths of 3 slots: its 1 nodes hold 1" in broken_rules(full, paths)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_forty_two_nodes_around_the_world(seed):
    sizes = (7, 5, 5, 5, 5, 5, 5, 5)
    delays = delays_of(links("worldwide"), 42, 4e6, 0.05)
    stages = assign(sizes, delays, [1.0] * 42, seed=seed, seconds=20)
    problem = RoutingProblem(stages=stages, delays=delays, forward=(1.0,) * 42, path_length=6)
    plan = routing_strategies(problem, SearchEffort(moves=5000), seed)[-1]
    assert not broken_rules(problem, plan.paths)
    assert plan.played.makespan <= 1.6 * max(lower_bounds(problem).values())


# The authors' instances, where their file is at hand


@pytest.mark.parametrize("name", ["instance_shipped", "instance_head_defaults"])
def test_paths_of_the_reference(name):
    problem, instance = reference(name)
    message = instance["makespan_s"]
    if name == "instance_shipped":
        for key, within in (("paths_ca_one_per_origin", 1e-9), ("paths_random", 1e-9)):
            paths = paths_of(problem, instance[key])
            assert not broken_rules(problem, paths)
            kind = "ca" if "ca" in key else "random"
            assert replay_paths(problem, paths).makespan == pytest.approx(message[kind], abs=within)
        unaware = paths_of(problem, instance["paths_nonca_key_origin_index_times_3_plus_slot"])
        assert replay_paths(problem, unaware).makespan == pytest.approx(message["nonca"], rel=0.03)
        trips = {0: 7.903968, 3: 8.837493, 4: 10.926276, 10: 8.447529, 11: 15.141895}
        best = BestPaths(problem)
        assert {origin: round(best.of(origin)[0], 6) for origin in problem.origins} == trips
        assert len(legal_paths(problem, 0)) == 594
    else:
        paths = paths_of(problem, instance["paths_ca"])
        assert broken_rules(problem, paths) == ["node 4 is on the paths of 4 slots: it holds 3"]


def test_own_plans_of_the_reference():
    wanted = {"instance_shipped": (33.32, 34.4), "instance_head_defaults": (0.91 * 78.694, 80.0)}
    for name, (most, unaware) in wanted.items():
        problem, _ = reference(name)
        whole, _, without, plan = routing_strategies(problem, SearchEffort(moves=3000))
        assert plan.played.makespan <= most and without.played.makespan <= unaware
        assert not broken_rules(problem, plan.paths)
        assert plan.played.makespan <= 0.45 * whole.played.makespan  # the paper: up to 55 % shorter

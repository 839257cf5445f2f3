"""Nodes to stages: pairings, tours and the genetic search against brute force."""

import itertools
import random

import pytest

from isles.network.routing.search import Scores, aligned, assign, bottleneck
from tests.network.routing.instances import drawn, reference


def test_bottleneck_pairing_against_all_pairings():
    rng = random.Random(0)
    for _ in range(60):
        rows, columns = rng.randint(1, 4), rng.randint(1, 4)
        costs = [[rng.choice([1.0, 2.0, rng.random()]) for _ in range(columns)] for _ in range(rows)]
        if rows <= columns:
            ways = [list(zip(range(rows), p, strict=True)) for p in itertools.permutations(range(columns), rows)]
        else:
            ways = [list(zip(p, range(columns), strict=True)) for p in itertools.permutations(range(rows), columns)]
        least = min(max(costs[r][c] for r, c in way) for way in ways)
        worst, pairs = bottleneck(costs)
        assert worst == least == max(costs[r][c] for r, c in pairs)
        assert len(pairs) == min(rows, columns) == len({r for r, _ in pairs}) == len({c for _, c in pairs})


@pytest.mark.parametrize("seed", range(4))
def test_tour_against_all_orders(seed):
    problem = drawn(seed, (2, 1, 3, 2, 2), path_length=3)
    score = Scores(problem.delays, problem.forward)
    length, order = score.tour(problem.stages)

    def pairing(one, other):
        return bottleneck([[problem.delays[u][v] + problem.forward[u] for v in other] for u in one])[0]

    def along(tour):
        return sum(pairing(problem.stages[a], problem.stages[b]) for a, b in zip(tour, (*tour[1:], 0), strict=True))

    tours = [(0, *rest) for rest in itertools.permutations(range(1, 5))]
    assert length == pytest.approx(min(map(along, tours))) and along(order) == pytest.approx(length)
    inside = max(problem.delays[u][v] for stage in problem.stages for u in stage for v in stage)
    assert score(problem.stages) == pytest.approx(inside + 2 * length)


def test_small_assignments_are_the_best():
    for seed in range(3):
        problem = drawn(seed, (2, 2, 2))
        score = Scores(problem.delays, problem.forward)
        everything = [
            tuple(tuple(sorted(order[k : k + 2])) for k in (0, 2, 4)) for order in itertools.permutations(range(6))
        ]
        made = assign((2, 2, 2), problem.delays, problem.forward, seed=seed)
        assert score(made) == pytest.approx(min(map(score, everything)))
        assert sorted(node for stage in made for node in stage) == list(range(6))
        assert made == assign((2, 2, 2), problem.delays, problem.forward, seed=seed)


def test_full_pipelines_are_as_many_as_the_smallest_stage_has_nodes():
    problem = drawn(0, (3, 2, 4))
    lines = aligned(problem.stages, problem.delays, problem.forward)
    assert len(lines) == 2 and all([problem.stage_of[node] for node in line] == [0, 1, 2] for line in lines)
    assert len({node for line in lines for node in line}) == 6


def test_refusals():
    problem = drawn(0)
    with pytest.raises(ValueError, match="stages of 2, 2 nodes are 4: there are 6 nodes"):
        assign((2, 2), problem.delays, problem.forward)
    eleven = drawn(0, (1,) * 11)
    with pytest.raises(ValueError, match="11 stages: nodes are assigned to at most 10; give the nodes of each stage"):
        assign((1,) * 11, eleven.delays, eleven.forward)


@pytest.mark.long
@pytest.mark.parametrize("name", ["instance_shipped", "instance_head_defaults"])
def test_own_assignment_of_the_reference(name):
    problem, instance = reference(name)
    score = Scores(problem.delays, problem.forward)
    assert score(problem.stages) <= instance["ga_score"] + 1e-9
    assert score(assign((5, 3, 3, 3, 3, 3), problem.delays, problem.forward)) <= instance["ga_score"]

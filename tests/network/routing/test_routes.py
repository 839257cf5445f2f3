"""Routes: what the two functions give, and what is refused."""

import itertools
from collections import Counter

import pytest

from isles.network.routing.events import (
    Route,
    Task,
    check_routes,
    fixed_routes,
    permutation,
    position,
    random_routes,
    visited,
)


def test_fixed_routes_stay_in_their_replica():
    routes = fixed_routes(2, 3, 2, home=False)
    assert [route.visits for route in routes] == [(0, 1, 2), (3, 4, 5), (0, 1, 2), (3, 4, 5)]
    assert [route.microbatch for route in routes] == [0, 1, 2, 3]
    check_routes(routes, 6)


def test_random_routes_take_every_worker_once_for_each_u():
    for replicas, stages, step in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4), range(3)):
        routes = random_routes(replicas, stages, 4, home=True, seed=5, step=step)
        check_routes(routes, replicas * stages)
        for u in range(4):
            column = routes[u * replicas : (u + 1) * replicas]
            assert [route.origin for route in column] == [position(a, 0, stages) for a in range(replicas)]
            for stage in range(stages):
                there = sorted(route.visits[stage] for route in column)
                assert there == [position(a, stage, stages) for a in range(replicas)]
        assert set(visited(routes).values()) == {4}


def test_random_routes_hang_on_seed_step_microbatch_and_boundary_alone():
    given = {"seed": 3, "step": 10, "microbatch": 2, "boundary": 1}
    assert permutation(8, **given) == [6, 1, 3, 5, 0, 2, 7, 4]  # all machines and versions must agree
    for key in given:
        assert permutation(8, **{**given, key: given[key] + 1}) != permutation(8, **given)
    again = random_routes(4, 3, 2, home=False, seed=1, step=7)
    assert again == random_routes(4, 3, 2, home=False, seed=1, step=7)
    assert again != random_routes(4, 3, 2, home=False, seed=1, step=8)


def test_permutations_are_even():
    seen = Counter(tuple(permutation(3, seed=0, step=step, microbatch=0, boundary=0)) for step in range(6000))
    assert len(seen) == 6 and all(850 < count < 1150 for count in seen.values())  # 1000 +- 29 each


def test_tasks_of_a_route():
    assert list(Route(4, (7, 2), home=False).tasks()) == [
        Task("F", 4, 0),
        Task("F", 4, 1),
        Task("B", 4, 1),
        Task("B", 4, 0),
    ]
    home = Route(4, (7, 2), home=True)
    assert list(home.tasks()) == [
        Task("F", 4, 0),
        Task("F", 4, 1),
        Task("L", 4, 1),
        Task("B", 4, 1),
        Task("B", 4, 0),
    ]
    assert [home.worker(task) for task in home.tasks()] == [7, 2, 7, 2, 7]


@pytest.mark.parametrize(
    ("routes", "reported"),
    [
        ([Route(-1, (0,), False)], "numbered from 0"),
        ([Route(0, (0,), False), Route(0, (1,), False)], "microbatch 0 is there twice"),
        ([Route(0, (), False)], "visits 0 workers: choose 1 to 16"),
        ([Route(0, tuple(range(17)), False)], "visits 17 workers"),
        ([Route(0, (0, 6), False)], "visits worker 6: workers are numbered 0 to 5"),
        ([Route(0, (0, -1), False)], "visits worker -1"),
        ([Route(1, (0,), True, after=0)], "after microbatch 0, which has no route"),
        ([Route(0, (0,), True, after=1), Route(1, (0,), True)], "must come after a smaller number"),
        ([Route(0, (0,), True), Route(1, (1,), True, after=0)], "both must have one origin"),
    ],
)
def test_bad_routes_are_one_line(routes, reported):
    with pytest.raises(ValueError, match=reported) as error:
        check_routes(routes, 6)
    assert "\n" not in str(error.value) and "microbatch" in str(error.value)

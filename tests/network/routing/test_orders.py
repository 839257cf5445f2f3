"""Orders: known schedules, conservation, and the refusal of routes that cannot finish."""

import itertools
import random

import pytest

from isles.network.routing.events import AtOnce, Route, fixed_routes, in_flight, orders
from isles.network.routing.replay import TaskSeconds, in_order, replay
from tests.network.routing.instances import held_by


def words(tasks):
    return " ".join(f"{task.kind}{task.microbatch}" for task in tasks)


def test_one_forward_one_backward():
    made = orders(fixed_routes(1, 4, 5, home=False), in_flight("1f1b", 1, 4))
    assert words(made[0]) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert words(made[1]) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert words(made[2]) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert words(made[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_without_a_limit_forwards_fill_the_wait():
    made = orders(fixed_routes(1, 3, 4, home=False), in_flight("all", 1, 3))
    assert words(made[0]) == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_loss_at_home():
    made = orders(fixed_routes(1, 2, 1, home=True), {})
    assert words(made[0]) == "F0 L0 B0" and words(made[1]) == "F0 B0"


def random_set(rng, workers, most):
    """Routes with skips, swaps and second visits, some after others."""
    routes, last = [], {}
    for microbatch in range(rng.randint(1, most)):
        origin = rng.randrange(2)
        visits = (origin, *(rng.randrange(workers) for _ in range(rng.randint(0, 4))))
        after = last.get(origin) if rng.random() < 0.5 else None
        routes.append(Route(microbatch, visits, rng.random() < 0.5, after))
        last[origin] = microbatch
    return routes


def test_everything_is_done_once_in_a_legal_order():
    rng = random.Random(0)
    for _ in range(100):
        routes = random_set(rng, 5, 8)
        room = {} if rng.random() < 0.5 else {worker: rng.randint(3, 5) for worker in range(5)}
        try:
            made = orders(routes, room)
        except ValueError as error:
            assert "cannot finish" in str(error)
            continue
        assert sorted(task for tasks in made.values() for task in tasks) == sorted(
            task for route in routes for task in route.tasks()
        )
        # Any real times can follow the lists: the replay with other seconds ends, and keeps to the limits.
        seconds = TaskSeconds(**{kind: [rng.random() for _ in range(5)] for kind in ("forward", "loss", "backward")})
        played = replay(routes, seconds, AtOnce(), in_order(made), room=room)
        assert all(held <= room.get(worker, 99) for worker, held in held_by(played).items())
        done = {(span.worker, span.task): span for span in played.spans}
        for route in routes:
            spans = [done[route.worker(task), task] for task in route.tasks()]
            assert all(one.end <= other.start for one, other in itertools.pairwise(spans))
            if route.after is not None:
                before = [span for span in played.spans if span.task.microbatch == route.after]
                assert max(span.end for span in before) <= spans[0].start


def test_limits_of_columns():
    assert in_flight("1f1b", 2, 3) == {0: 3, 1: 2, 2: 1, 3: 3, 4: 2, 5: 1}
    assert in_flight("auto", 1, 3) == {0: 5, 1: 4, 2: 3}
    assert in_flight("all", 2, 2) == {} and in_flight(2, 1, 2) == {0: 2, 1: 2}
    for bad in (0, "most"):
        with pytest.raises(ValueError, match="in_flight"):
            in_flight(bad, 1, 2)


def test_who_waits_for_whom_is_named():
    routes = [Route(0, (0, 2, 3), True), Route(1, (1, 3, 2), True)]
    with pytest.raises(ValueError) as reported:
        orders(routes, {2: 1, 3: 1})
    assert str(reported.value) == (
        "the routes cannot finish: microbatch 0 waits for room at worker 3, which keeps microbatch 1; microbatch 1 "
        "waits for room at worker 2, which keeps microbatch 0. Allow more in_flight"
    )
    orders(routes, {2: 2, 3: 2})
    with pytest.raises(ValueError, match="microbatch 0 waits for room at worker 1, which keeps microbatch 0"):
        orders([Route(0, (1, 2, 1), False)], {1: 1})
    with pytest.raises(ValueError, match="in_flight of worker 1 is 0"):
        orders([Route(0, (1,), False)], {1: 0})


def test_lists_of_other_routes_are_refused_not_waited_for():
    made = orders(fixed_routes(1, 2, 2, home=False), {})
    made[1].reverse()
    seconds = TaskSeconds(forward=[1, 1], loss=[0, 0], backward=[2, 2])
    with pytest.raises(ValueError, match="waits for its turn at worker 1, where the backward of microbatch 1 comes"):
        replay(fixed_routes(1, 2, 2, home=False), seconds, AtOnce(), in_order(made))

"""What every worker of a pipeline does, in which order: the same lists at every worker, from the routes alone.

A list schedule in made-up times, forward 1, loss 1/4, backward 2, on a wire that takes no time: whoever is free does a
backward or a loss if one is there, else the forward of the smallest microbatch. One legal execution makes these lists,
so nobody who follows them can wait for ever, whatever the real times are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isles.errors import unknown_name
from isles.network.routing.events import AtOnce, Ranked, StepPlay, orders_of
from isles.network.routing.routes import Route, Task, check_routes, position

UNITS = {"F": 1.0, "L": 0.25, "B": 2.0}
"""Powers of two, so that equal moments of the schedule are equal numbers."""
_SLACK = 2


def orders(routes: Sequence[Route], in_flight: Mapping[int, int]) -> dict[int, list[Task]]:
    """The tasks of each worker that a route visits, by its position, in the order in which it does them.

    in_flight: forwards without their backward that a worker holds at most, by position; none given: any number.

    ValueError for routes that are none, and, naming who waits for whom, for those that cannot finish with so few.
    """
    check_routes(routes)
    for worker, most in in_flight.items():
        if most < 1:
            raise ValueError(f"in_flight of worker {worker} is {most}: a worker must hold at least 1 forward")
    try:
        spans = StepPlay(
            routes,
            queue=lambda worker: Ranked(lambda time, task: (task.microbatch, task.hop)),
            wire=AtOnce(),
            seconds=lambda worker, task: UNITS[task.kind],
            room=in_flight,
        ).run()
    except ValueError as error:
        raise ValueError(f"{error}. Allow more in_flight") from None
    return orders_of(spans)


def in_flight(setting: int | str, replicas: int, stages: int) -> dict[int, int]:
    """The `in_flight` of `orders` for `replicas` columns of `stages` workers.

    setting: "1f1b", stages - stage, which is the least that keeps all busy where messages take no time; "auto", two
    more, so that they stay busy over slow links; "all", no limit (GPipe); or a number for all.
    """
    if isinstance(setting, int):
        if setting < 1:
            raise ValueError(f"in_flight = {setting}: a worker must hold at least 1 forward")
        most = [setting] * stages
    elif setting == "all":
        return {}
    elif setting in ("1f1b", "auto"):
        most = [stages - stage + (_SLACK if setting == "auto" else 0) for stage in range(stages)]
    else:
        raise ValueError(unknown_name("in_flight", setting, ("auto", "1f1b", "all")) + ", or a number")
    return {position(replica, stage, stages): most[stage] for replica in range(replicas) for stage in range(stages)}

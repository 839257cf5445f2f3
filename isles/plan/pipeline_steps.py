"""What the workers of a pipeline do in a step of a planned run: tasks, messages between stages, the norm's exchange.

The order of the tasks is that of `isles.network.routing.events`, which the executor follows; messages go over the same
links as the exchanges between replicas, so both wait for each other as they do on the virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from isles.network.exchange_plan import MessagePattern, gathered
from isles.network.routing.events import Kind, Route, Task, orders
from isles.network.routing.replay import Sizes, TaskSeconds, bytes_sent, seconds_of

ANSWER = 8
"""Bytes of a stage's part of the gradient's norm."""


_MOST_STEPS = 8  # cached steps: workers may be at different ones


class PlannedTask(NamedTuple):
    """A task at one worker.

    kind: forward, loss or backward. share: of an inner step's computing. begins, ends: (the other worker's rank, the
    message's key) of the message that it needs and of the one that it sends; None: no message. nbytes: of the sent one.
    rest: share of computing after the message has left.
    """

    kind: Kind
    share: float
    begins: tuple[int, Hashable] | None
    ends: tuple[int, Hashable] | None
    nbytes: int
    rest: float = 0.0


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A typical step of staged replicas without an exchange between replicas. seconds: of a step. computed, for_stages:
    parts of it, by worker.
    """

    seconds: float
    computed: tuple[float, ...]
    for_stages: tuple[float, ...]


TasksByRank = dict[int, list[PlannedTask]]


@dataclass(frozen=True, kw_only=True)
class StagedSteps:
    """Steps of replicas cut into stages.

    routes: by step, from 1. most_in_flight: forwards that each position may hold, as in `orders`. shares: of an inner
    step's computing, by position. sizes: of the messages. columns: for each index inside a stage, the rank at each
    position; position = replica x stages + stage. exchanges_norm: whether the stages of a replica exchange their
    gradient norm after their tasks. listed: the tasks of each position, in order; None: `orders` makes them from the
    routes. rest: share of computing after a task has sent its result. With a plan of paths, all nodes together count as
    the `stages` of one replica.
    """

    routes: Callable[[int], Sequence[Route]]
    most_in_flight: Mapping[int, int]
    shares: TaskSeconds
    sizes: Sizes
    columns: Sequence[Sequence[int]]
    stages: int
    exchanges_norm: bool
    listed: Mapping[int, Sequence[Task]] | None = None
    rest: Callable[[Task], float] = lambda task: 0.0
    _of_step: dict[int, tuple[Sequence[Route], TasksByRank]] = field(default_factory=dict)

    @property
    def computed(self) -> tuple[float, ...]:
        """Share of an inner step's computing at each rank."""
        tasks = self._tasks(1)
        return tuple(sum(task.share + task.rest for task in tasks[rank]) for rank in sorted(tasks))

    def tasks(self, rank: int, step: int) -> Sequence[PlannedTask]:
        """The tasks of worker `rank` in that step, in order."""
        return self._tasks(step)[rank]

    def peers(self, rank: int) -> tuple[tuple[int, ...], MessagePattern] | None:
        """The workers that exchange a gradient norm with `rank`, itself included, and the pattern; None: no
        exchange.
        """
        if not self.exchanges_norm:
            return None
        column = next(column for column in self.columns if rank in column)
        first = column.index(rank) // self.stages * self.stages
        return tuple(sorted(column[first : first + self.stages])), gathered(ANSWER, self.stages)

    def sent(self, step: int = 1) -> list[int]:
        """Bytes that each rank sends to other stages in a step, without the norm's."""
        by_position, total = bytes_sent(tuple(self.routes(step)), self.sizes), [0] * sum(map(len, self.columns))
        for column in self.columns:
            for position, rank in enumerate(column):
                total[rank] = by_position[position]
        return total

    @property
    def messages(self) -> int:
        """Number of messages of a step, of all workers."""
        between = sum(task.ends is not None for tasks in self._tasks(1).values() for task in tasks)
        asked = gathered(ANSWER, self.stages).messages(self.stages) if self.exchanges_norm else 0
        return between + asked * sum(len(column) // self.stages for column in self.columns)

    def _tasks(self, step: int) -> TasksByRank:
        if step not in self._of_step:
            routes = tuple(self.routes(step))
            cached = next((tasks for known, tasks in self._of_step.values() if known == routes), None)
            if len(self._of_step) > _MOST_STEPS:
                del self._of_step[min(self._of_step)]
            self._of_step[step] = routes, self._tasks_of(routes) if cached is None else cached
        return self._of_step[step][1]

    def _tasks_of(self, routes: Sequence[Route]) -> TasksByRank:
        by_number = {route.microbatch: route for route in routes}
        before = {following: task for route in routes for task in route.tasks() if (following := route.following(task))}
        listed = orders(routes, self.most_in_flight) if self.listed is None else self.listed
        by_rank: TasksByRank = {}
        for column in self.columns:
            for position, tasks in listed.items():
                by_rank[column[position]] = [
                    self._planned(column, position, task, before.get(task), by_number[task.microbatch])
                    for task in tasks
                ]
        return by_rank

    def _planned(
        self, column: Sequence[int], position: int, task: Task, before: Task | None, route: Route
    ) -> PlannedTask:
        source = position if before is None else route.worker(before)
        following = route.following(task)
        target = position if following is None else route.worker(following)
        return PlannedTask(
            kind=task.kind,
            share=seconds_of(self.shares, route, position, task),
            begins=None if source == position else (column[source], task),
            ends=None if target == position else (column[target], following),
            nbytes=0 if following is None else self.sizes.of(following),
            rest=self.rest(task),
        )

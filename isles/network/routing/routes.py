"""A step of a pipeline is a set of routes, one for each microbatch: which workers it visits, in which order.

A route with n visits is these tasks, each at the end of the one before it:

    F 0 -> F 1 -> ... -> F n-1 -> B n-1 -> ... -> B 0               loss at the last visit (part of F n-1)
    F 0 -> F 1 -> ... -> F n-1 -> L -> B n-1 -> ... -> B 0          home: the origin, visits[0], computes the loss

F: forward, B: backward, L: the loss and its gradient. The worker of F k keeps what B k needs until that is done. Fixed
pipelines, random ones (NoLoCo, arXiv 2506.10911 section 3.1) and plans are functions that return routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from isles.network.noise import hash64

MOST_VISITS = 16
"""Of a route: four bits of a message's address count its hops."""

Kind = Literal["F", "L", "B"]


class Task(NamedTuple):
    """What a worker does in one go. hop: the index in the route's visits, of L that of the last visit."""

    kind: Kind
    microbatch: int
    hop: int


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one microbatch.

    microbatch: its number in the step, 0 or more.
    visits:     positions of workers in the pipeline's group, in the order of execution; the first is the origin, which
                has the tokens.
    home:       the loss is computed at the origin; else at the last visit.
    after:      the microbatch, with the same origin and a smaller number, whose backward must have ended before this
                one starts; None: it starts at once.
    """

    microbatch: int
    visits: tuple[int, ...]
    home: bool
    after: int | None = None

    @property
    def origin(self) -> int:
        return self.visits[0]

    @property
    def last(self) -> int:
        return len(self.visits) - 1

    def worker(self, task: Task) -> int:
        return self.visits[0] if task.kind == "L" else self.visits[task.hop]

    def following(self, task: Task) -> Task | None:
        """The task that begins with what `task` made; None after the last one."""
        kind, microbatch, hop = task
        if kind == "L" or (kind == "F" and hop == self.last and not self.home):
            return Task("B", microbatch, self.last)
        if kind == "B":
            return Task("B", microbatch, hop - 1) if hop else None
        return Task("F", microbatch, hop + 1) if hop < self.last else Task("L", microbatch, hop)

    def tasks(self) -> Iterator[Task]:
        task: Task | None = Task("F", self.microbatch, 0)
        while task is not None:
            yield task
            task = self.following(task)


def check_routes(routes: Sequence[Route], workers: int | None = None) -> None:
    """ValueError, one line that names the microbatch, for routes that cannot be those of one step; workers: how many
    positions there are, where that is known.
    """
    origins: dict[int, int] = {}
    for route in routes:
        name = f"the route of microbatch {route.microbatch}"
        if route.microbatch < 0:
            raise ValueError(f"{name}: microbatches are numbered from 0")
        if route.microbatch in origins:
            raise ValueError(f"{name} is there twice: a microbatch has one route")
        if not 1 <= len(route.visits) <= MOST_VISITS:
            raise ValueError(f"{name} visits {len(route.visits)} workers: choose 1 to {MOST_VISITS}")
        for position in route.visits:
            if position < 0 or (workers is not None and position >= workers):
                known = "from 0" if workers is None else f"0 to {workers - 1}"
                raise ValueError(f"{name} visits worker {position}: workers are numbered {known}")
        origins[route.microbatch] = route.origin
    for route in routes:
        name = f"the route of microbatch {route.microbatch}"
        if route.after is None:
            continue
        if route.after not in origins:
            raise ValueError(f"{name} comes after microbatch {route.after}, which has no route in this step")
        if route.after >= route.microbatch:
            raise ValueError(f"{name} comes after microbatch {route.after}: it must come after a smaller number")
        if origins[route.after] != route.origin:
            raise ValueError(
                f"{name} starts at worker {route.origin} after microbatch {route.after}, which ends at worker "
                f"{origins[route.after]}: both must have one origin"
            )


def position(replica: int, stage: int, stages: int) -> int:
    """Where stage `stage` of a replica stands in the pipeline's group: replica after replica."""
    return replica * stages + stage


def fixed_routes(replicas: int, stages: int, microbatches: int, *, home: bool) -> list[Route]:
    """Every replica's microbatches go through its own stages.

    Args:
        replicas, stages: of the pipeline.
        microbatches: of each replica; number u of replica a is u * replicas + a.
        home: the loss is computed at the origin.
    """
    return [
        Route(u * replicas + a, tuple(position(a, stage, stages) for stage in range(stages)), home)
        for u in range(microbatches)
        for a in range(replicas)
    ]


def random_routes(replicas: int, stages: int, microbatches: int, *, home: bool, seed: int, step: int) -> list[Route]:
    """At every boundary s of every u, stage s of replica a sends to stage s + 1 of replica `permutation(...)[a]`, so
    each worker gets each u exactly once. The same at every worker that calls it.

    Args:
        replicas, stages, microbatches, home: as in `fixed_routes`.
        seed: of the permutations.
        step: counted from 1.
    """
    routes = []
    for u in range(microbatches):
        ways = [[a] for a in range(replicas)]  # the replica of each visit
        for boundary in range(stages - 1):
            to = permutation(replicas, seed=seed, step=step, microbatch=u, boundary=boundary)
            for way in ways:
                way.append(to[way[-1]])
        for a, way in enumerate(ways):
            visits = tuple(position(replica, stage, stages) for stage, replica in enumerate(way))
            routes.append(Route(u * replicas + a, visits, home))
    return routes


def permutation(size: int, *, seed: int, step: int, microbatch: int, boundary: int) -> list[int]:
    """A permutation of `size` replicas, a pure function of its arguments: ranks in order of hashes."""
    return sorted(range(size), key=lambda replica: (hash64(seed, step, microbatch, boundary, replica), replica))


def visited(routes: Sequence[Route]) -> Counter[int]:
    """How many forwards each worker does."""
    return Counter(worker for route in routes for worker in route.visits)

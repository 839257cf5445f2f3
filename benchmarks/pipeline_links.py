"""Seconds of a pipelined step over slow links that differ, measured against the replay of its orders.

    python -m benchmarks.pipeline_links [--steps 5] [--json]

Six machines as network namespaces, one cable each; to every other machine a token bucket of its own (`tc htb`, filters
by address) at 8, 16 or 40 Mbit/s, drawn from a seed. Two replicas of three stages, four microbatches each, loss at the
origin; messages of 256 kB. Computation is paced by sleep (60 ms forward, 20 ms loss, 120 ms backward), so that six
machines fit on any processor. Two sets of routes, eight microbatches each:

    fixed, random, two visits    a third of the stages skipped in the last; predicted by a replay over the lines
    full, blind, skippipe        the planner's strategies for these links: all stages; paths of two of three stages that
                                 know nothing of the network; the plan. Predicted by the planner's own seconds

Exit code 1 if a median is not within a tenth of the prediction (0.15 of the planner's), or the ways of a set come in
another order than predicted. Linux and root.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks._machines import CABLE, Machine, _run, machines, unavailable
from benchmarks._measure import Row, report
from benchmarks._stage import play
from isles.comm.mesh import Mesh
from isles.models.stages import Stage
from isles.network.links import Links, Topology
from isles.network.routing.events import Route, Task, fixed_routes, orders, orders_of, random_routes
from isles.network.routing.plan import delays_of
from isles.network.routing.problem import RoutingCosts, RoutingProblem
from isles.network.routing.replay import LinkWire, Sizes, TaskSeconds, in_order, replay
from isles.network.routing.search import SearchEffort, routing_strategies
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.executor import Executor, Ways
from isles.pipeline.wire import StageForm

REPLICAS, STAGES, MICROBATCHES = 2, 3, 4
MACHINES = REPLICAS * STAGES
FORWARD, LOSS, BACKWARD = 0.06, 0.02, 0.12  # seconds
WIDTH, LENGTH = 1024, 64
FORM = StageForm(sequences=1, length=LENGTH, vocab=256, dtype=torch.float32, boundary=FullStream(WIDTH))
FRAME = 1514 / 1448  # bytes on the cable for each byte sent, headers of Ethernet, IP and TCP included
BURST = 16 * 1024  # bytes that a bucket lets pass at once


class _Sleepy(torch.autograd.Function):
    """The stream as it is, and its gradient as it is, some seconds later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(BACKWARD)
        return gradient, None


class ThreadEngine(nn.Module):
    """What an executor takes for a stage, with nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, targets: Tensor | None = None, *, enter: bool = False, leave: bool = False,
                through: bool = True) -> Tensor:  # fmt: skip
        if enter:
            x = self.scale.expand(len(x), LENGTH, WIDTH)
        if through:
            return _Sleepy.apply(x, FORWARD)  # type: ignore[no-any-return]
        time.sleep(LOSS)
        return (x * self.scale).mean()


@dataclass(frozen=True)
class Given:
    """The same routes in every step."""

    given: tuple[Route, ...]

    def routes(self, step: int) -> Sequence[Route]:
        return self.given


@dataclass(frozen=True, kw_only=True)
class Way:
    """Routes, every machine's tasks in their order, seconds of a step by a prediction, how far from that it may be."""

    routes: tuple[Route, ...]
    tasks: Mapping[int, Sequence[Task]]
    foreseen: float
    bound: float


def routed() -> dict[str, Way]:
    """Ways that are given."""
    fixed = fixed_routes(REPLICAS, STAGES, MICROBATCHES, home=True)
    skipping = [
        Route(route.microbatch, (route.origin, route.visits[1 + number // REPLICAS % 2]), home=True)
        for number, route in enumerate(fixed)
    ]
    drawn = random_routes(REPLICAS, STAGES, MICROBATCHES, home=True, seed=0, step=1)
    found = {}
    for name, routes in (("fixed", fixed), ("random", drawn), ("two visits", skipping)):
        tasks = orders(routes, {})
        found[name] = Way(routes=tuple(routes), tasks=tasks, foreseen=predicted(routes, tasks), bound=0.10)
    return found


def planned() -> dict[str, Way]:
    """The planner's, for nodes that hold two microbatches, in two waves."""
    network, counts = links(), range(0, MACHINES, REPLICAS)
    problem = RoutingProblem(
        stages=tuple(tuple(range(first, first + REPLICAS)) for first in counts),
        delays=delays_of(network, MACHINES, FORM.nbytes(Task("F", 0, 0))),
        forward=(FORWARD,) * MACHINES,
        path_length=STAGES - 1,
        memory=2,
        waves=MICROBATCHES // 2,
        costs=RoutingCosts(loss=LOSS / FORWARD, backward=BACKWARD / FORWARD),
    )
    found = {one.name: one for one in routing_strategies(problem, SearchEffort(moves=2000))}
    return {
        name: Way(
            routes=tuple(found[own].routes),
            tasks=orders_of(found[own].played.spans),
            foreseen=found[own].played.makespan,
            bound=0.15,
        )
        for name, own in (("full", "full"), ("blind", "random"), ("skippipe", "with"))
    }


def links() -> Links:
    """The network, headers on the cable taken off its rates."""
    return Links(bandwidth=[[rate / FRAME for rate in row] for row in rates()])


def rates() -> list[list[float]]:
    """Bits per second between every two machines."""
    draw = random.Random(3)
    return [[draw.choice([8e6, 16e6, 40e6]) for _ in range(MACHINES)] for _ in range(MACHINES)]


def predicted(routes: Sequence[Route], tasks: Mapping[int, Sequence[Task]]) -> float:
    """Seconds of a step by the replay over the lines."""
    sizes = Sizes(**{name: FORM.nbytes(Task(kind, 0, 0)) for name, kind in _KINDS.items()})
    seconds = TaskSeconds(forward=[FORWARD] * MACHINES, loss=[LOSS] * MACHINES, backward=[BACKWARD] * MACHINES)
    wire = LinkWire(Topology(MACHINES, links()), sizes)
    return replay(routes, seconds, wire, in_order(tasks)).makespan


_KINDS = {"forward": "F", "home": "L", "backward": "B"}


def worker(world: Mesh, steps: int) -> dict[str, list[float]]:
    """Seconds of each step, by ways."""
    group, taken = world.world.among(range(MACHINES), "pipeline"), {}
    text = torch.zeros(1, LENGTH + 1, dtype=torch.int64)
    number = 0
    for name, way in (routed() | planned()).items():
        run = Executor(cast(Stage, ThreadEngine()), group, Given(way.routes), FORM, MICROBATCHES, Ways(tasks=way.tasks))
        own = {route.microbatch: text for route in way.routes if route.origin == world.rank}
        taken[name] = []
        for _ in range(steps):
            number += 1
            world.world.barrier()
            begun = time.perf_counter()
            run.step(number, own)
            taken[name].append(time.perf_counter() - begun)
    return taken


def narrow(cast_: Sequence[Machine]) -> None:
    """A token bucket for each destination, on every machine."""
    for here, row in zip(cast_, rates(), strict=True):
        tc = ("tc", "-n", here.name)
        on = ("dev", CABLE)
        _run(*tc, "qdisc", "replace", *on, "root", "handle", "1:", "htb", "default", "99")
        _run(*tc, "class", "add", *on, "parent", "1:", "classid", "1:99", "htb", "rate", "1gbit", "quantum", "60000")
        for number, (there, rate) in enumerate(zip(cast_, row, strict=True), 10):
            if there is here:
                continue
            _run(*tc, "class", "add", *on, "parent", "1:", "classid", f"1:{number}", "htb", "rate", f"{rate:.0f}bit",
                 "burst", str(BURST), "cburst", str(BURST), "quantum", "60000")  # fmt: skip
            _run(*tc, "filter", "add", *on, "protocol", "ip", "parent", "1:", "prio", "1", "u32", "match", "ip", "dst",
                 f"{there.address}/32", "flowid", f"1:{number}")  # fmt: skip


def rows(steps: int) -> list[Row]:
    """Measured over predicted, and whether the order is that of the predictions."""
    with machines(MACHINES) as six:
        narrow(six)
        told = play(six, "benchmarks.pipeline_links:worker", {"steps": steps}, seconds=400)
    return [row for ways in (routed(), planned()) for row in compared(ways, told)]


def compared(ways: Mapping[str, Way], told: Sequence[Mapping[str, Sequence[float]]]) -> list[Row]:
    """Of one set. told: seconds of the steps by way, of each machine."""
    made, measured = [], {}
    for name, way in ways.items():
        measured[name] = median(max(step) for step in zip(*(one[name] for one in told), strict=True))
        ratio = measured[name] / way.foreseen
        words = f"{measured[name]:.3f} s measured, {way.foreseen:.3f} s predicted; ratio {ratio:.3f}"
        words += f"; over the lines {predicted(way.routes, way.tasks):.3f} s"
        made.append(Row(f"{name}: apart", abs(ratio - 1), "", ("<=", way.bound), words))
    swapped = sorted(measured, key=measured.__getitem__) != sorted(ways, key=lambda name: ways[name].foreseen)
    name = f"{', '.join(ways)}: in another order than predicted"
    return [*made, Row(name, float(swapped), "", ("<=", 0.0))]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Pipelined steps over slow links.")
    parser.add_argument("--steps", type=int, default=5, help="of each kind of routes")
    parser.add_argument("--json", action="store_true", help="print JSON, nothing else")
    asked = parser.parse_args()
    if reason := unavailable():
        print(f"not measured: {reason}")
        return 0
    return report(rows(asked.steps), asked.json)


if __name__ == "__main__":
    sys.exit(main())

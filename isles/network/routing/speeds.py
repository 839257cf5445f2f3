"""How long each node of a plan takes for a forward: said in seconds, by the machines that they are, or
corrected by the seconds that a run took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from isles.network.machines import machine
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.units import parse_count, parse_seconds


def forward_seconds(
    nodes: int, *, forward: str | None, hardware: str | None, operations: str | None, factors: str | None
) -> tuple[float, ...]:
    """Seconds of a forward of one microbatch, by node. Arguments are the words of `isles pipeline plan`.

    forward:    seconds, for all or for each node, with commas between.
    hardware:   in its place machines, by name or file (`isles.network.machines`), which do so many `operations` in a
                forward, at the share of their peak that they reach.
    factors:    how many times as long each takes, given out in turn, as `world.step_factors`.

    ValueError, one line that names the option, for what cannot be.
    """
    if (forward is None) == (hardware is None):
        raise ValueError("how long does a node take? give --forward SECONDS or --hardware NAMES, one of the two")
    if (operations is None) != (hardware is None):
        raise ValueError("--hardware and --operations belong together: of which machines, and of how much work")
    if forward is not None:
        seconds = _spread("--forward", [parse_seconds("--forward", word) for word in forward.split(",")], nodes)
    else:
        assert hardware is not None and operations is not None
        work = parse_count("--operations", operations)
        try:
            each = [machine(word.strip()).seconds(work) for word in hardware.split(",")]
        except ValueError as error:
            raise ValueError(f"--hardware {hardware}: {error}") from None
        seconds = _spread("--hardware", each, nodes)
    slower = [1.0] if factors is None else [_factor(word) for word in factors.split(",")]
    return tuple(one * factor for one, factor in zip(seconds, islice(cycle(slower), nodes), strict=True))


def planned_computing(plan: PipelinePlan) -> dict[int, float]:
    """Seconds of a step in which each node that is visited computes or rests."""
    problem = plan.problem
    seconds: dict[int, float] = {}
    for worker, task, start, end in replay_paths(problem, plan.paths).spans:
        seconds[worker] = seconds.get(worker, 0.0) + end - start + problem.rest(task)
    return seconds


def speed_factors(plan: PipelinePlan, measured: Mapping[int, float]) -> tuple[float, ...]:
    """How many times as long as planned each node takes. measured: seconds of computing in a step, by node; a node that
    is not visited, or not measured, is taken to be as planned.
    """
    planned = planned_computing(plan)
    return tuple(
        measured[node] / planned[node] if node in planned and node in measured else 1.0
        for node in range(plan.problem.nodes)
    )


def _spread(option: str, values: Sequence[float], nodes: int) -> Sequence[float]:
    if len(values) not in (1, nodes):
        raise ValueError(f"{option} has {len(values)} values: give one, or one for each of {nodes} nodes")
    return values if len(values) == nodes else [values[0]] * nodes


def _factor(word: str) -> float:
    try:
        factor = float(word)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"--step-factors {word}: choose numbers above 0, such as 1,1,4")
    return factor

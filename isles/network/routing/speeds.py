"""The numbers that a plan of paths starts from: each node's forward seconds (given, by machine, or corrected by a
measured run), seconds of a message between every two nodes, and a fingerprint of the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import median

from isles.network.links import Links
from isles.network.machines import machine
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.units import parse_count, parse_latency


def forward_seconds(nodes: int, task: str) -> tuple[float, ...]:
    """Seconds of a forward of one microbatch, by node.

    Args:
        nodes: How many there are.
        task: The words of `isles plan paths --task`, for all nodes or for each, with commas between: times such as
            "440ms"; or the operations of a forward and machines that do them at the share of their peak that they
            reach, each so many times as slow, such as "1.2T on A100-40,RTX 3060*4".

    Raises:
        ValueError: One line that names the option.
    """
    work, on, names = task.partition(" on ")
    if on:
        operations = parse_count("--task", work.strip())
        return _spread([_on_machine(entry.strip(), operations) for entry in names.split(",")], nodes)
    seconds = [parse_latency("--task", entry.strip()) for entry in task.split(",")]
    if not all(one > 0 for one in seconds):
        raise ValueError(f"--task {task}: choose times above 0, such as 440ms")
    return _spread(seconds, nodes)


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


def _spread(values: Sequence[float], nodes: int) -> tuple[float, ...]:
    if len(values) not in (1, nodes):
        raise ValueError(f"--task has {len(values)} values: give one, or one for each of {nodes} nodes")
    return tuple(values) if len(values) == nodes else (values[0],) * nodes


def _on_machine(entry: str, operations: float) -> float:
    name, slower, factor = entry.partition("*")
    try:
        times = float(factor) if slower else 1.0
    except ValueError:
        times = 0.0
    if not 0 < times < float("inf"):
        raise ValueError(f"--task {entry}: write how many times as slow the machine is, above 0, such as A100-40*4")
    try:
        return times * machine(name.strip()).seconds(operations)
    except ValueError as error:
        raise ValueError(f"--task {entry}: {error}") from None


_SLIP = 50
"""Times the median from which on a way is probably a slip of whoever wrote the table."""


def delays_of(links: Links, nodes: int, nbytes: float, overhead: float = 0.0) -> tuple[tuple[float, ...], ...]:
    """[source][target]: seconds of a message of `nbytes` that is alone on the way, its mean latency and `overhead` (the
    copies at both ends) included; 0 from a node to itself. ValueError where `links` do not connect so many.
    """
    links.check(nodes)
    return tuple(
        tuple(
            0.0
            if source == target
            else links.base_latency(source, target) + 8 * nbytes / links.way_rate(source, target) + overhead
            for target in range(nodes)
        )
        for source in range(nodes)
    )


def slips(delays: tuple[tuple[float, ...], ...]) -> list[str]:
    """A line for each way that takes over 50 times as long as the median one."""
    ways = {(u, v): delay for u, row in enumerate(delays) for v, delay in enumerate(row) if u != v}
    usual = median(ways.values()) if ways else 0.0
    return [
        f"the way from {u} to {v} takes {delay:.3g} s, {delay / usual:.0f} times the median: check the table"
        for (u, v), delay in ways.items()
        if delay > _SLIP * usual
    ]


def fingerprint(links: Links, nodes: int) -> str:
    """Sixteen letters that tell whether two networks are the same: rates and latencies of all ways, what is shared."""
    ways = [(source, target) for source in range(nodes) for target in range(nodes) if source != target]
    known = {
        "ways": [[links.way_rate(*way), links.base_latency(*way)] for way in ways],
        "lines": [links.link_of(*way) for way in ways],
        "jitter": links.jitter,
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

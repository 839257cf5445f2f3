"""A plan of paths as a JSON file with all that a run and a replay need, and checks whether a run can use it.

Also the numbers that it starts from: each node's forward seconds (given, by machine, or corrected by a measured run),
seconds of a message between every two nodes, and a fingerprint of the network.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path as File
from statistics import fmean, median
from typing import Any, ClassVar

from isles.base.parsing import parse_json
from isles.base.tables import typed
from isles.network.links import Links, Topology
from isles.network.machines import machine
from isles.network.routing.events import Route
from isles.network.routing.problem import (
    PathRules,
    Paths,
    RoutingCosts,
    RoutingProblem,
    faults,
    replay_paths,
    replay_shared,
    routes_of,
)
from isles.network.routing.replay import LinkWire, Replay, Sizes
from isles.network.units import parse_count, parse_latency

FORM = "isles plan paths 1"


@dataclass(frozen=True, kw_only=True)
class PlanNetwork:
    """Links that messages share.

    Args:
        links: with rates and latencies as numbers, see `plan_network`.
        sizes: bytes of the messages.
        overhead: seconds of each beside its link.
    """

    DRAWS: ClassVar[int] = 16
    """Number of steps to average over if latencies vary."""

    links: Links
    sizes: Sizes
    overhead: float = 0.0

    def replays(self, problem: RoutingProblem, routes: Sequence[Route]) -> list[Replay]:
        """Replays of a step of `routes`; several if latencies vary."""
        draws = self.DRAWS if self.links.jitter else 1
        topology = Topology(problem.nodes, self.links)
        wires = [LinkWire(topology, self.sizes, seed=seed, overhead=self.overhead) for seed in range(draws)]
        return replay_shared(problem, routes, wires)


def plan_network(links: Links, nodes: int, sizes: Sizes, overhead: float = 0.0) -> PlanNetwork:
    """`links` as they are written to a plan: every rate and latency a number.

    Args:
        links: between the nodes.
        nodes: how many.
        sizes: bytes of the messages.
        overhead: seconds of each message beside its link.
    """

    def rates(of: Callable[[int], float]) -> tuple[float, ...]:
        return tuple(min(of(uplink), _ENDLESS) for uplink in range(links.uplink_count(nodes)))

    pairs = links.pairs and tuple(tuple(min(rate, _ENDLESS) for rate in row) for row in links.pairs)
    latency = tuple(
        tuple(0.0 if source == target else float(links.base_latency(source, target)) for target in range(nodes))
        for source in range(nodes)
    )
    plain = replace(
        links,
        bandwidth=pairs or rates(links.rate),
        latency=latency,
        downlink=None if links.downlink is None else rates(links.down_rate),
    )
    return PlanNetwork(links=plain, sizes=sizes, overhead=overhead)


_ENDLESS = 1e300
"""Bits per second that stand for an infinite rate: JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Paths for the slots of a problem, which a run takes as `pipeline.skippipe.plan`.

    Args:
        problem: the nodes.
        paths: by slot, nodes in the order of execution.
        links: the `fingerprint` of the network that they are made for.
        cuts: the first block of every stage but the first; None: as the run cuts by itself.
        network: the links; None: each message takes the problem's delay, as if no other used the links.
    """

    problem: RoutingProblem
    paths: Paths
    links: str
    cuts: tuple[int, ...] | None = None
    network: PlanNetwork | None = None

    @property
    def routes(self) -> list[Route]:
        return routes_of(self.paths, self.problem.waves)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step, by a replay on shared links; the mean if latencies vary."""
        if self.network is None:
            return replay_paths(self.problem, self.paths).makespan
        return fmean(step.makespan for step in self.network.replays(self.problem, self.routes))

    def refuse(
        self, *, links: str | None = None, workers: int | None = None, cuts: Sequence[int] | None = None
    ) -> None:
        """ValueError, one line, if the plan was made for something else; None is not compared."""
        if workers is not None and workers != self.problem.nodes:
            raise ValueError(f"the plan is for {self.problem.nodes} workers, there are {workers}: plan again")
        if links is not None and links != self.links:
            raise ValueError(f"the plan was made for other links ({self.links}, these are {links}): plan again")
        if cuts is not None and self.cuts is not None and tuple(cuts) != self.cuts:
            raise ValueError(
                f"the plan cuts the model before blocks {_listed(self.cuts)}, the run before {_listed(cuts)}: set "
                "pipeline.cut to the plan's or plan again"
            )


def as_json(plan: PipelinePlan) -> str:
    """The file's text."""
    problem = plan.problem
    played = replay_paths(problem, plan.paths)
    made = {
        "form": FORM,
        "links": plan.links,
        "stages": problem.stages,
        "cuts": plan.cuts,
        "path_length": problem.path_length,
        "memory": problem.memory,
        "waves": problem.waves,
        "paths": [{"origin": slot[0], "slot": slot[1], "nodes": path} for slot, path in plan.paths.items()],
        "expected": {"step_seconds": plan.step_seconds, "busy_seconds": [played.busy[v] for v in sorted(played.busy)]},
        "costs": asdict(problem.costs),
        "rules": asdict(problem.rules),
        "forward_seconds": problem.forward,
        "delay_seconds": problem.delays,
        "network": None if plan.network is None else _network_table(plan.network),
    }
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in made.items())
    return f"{{\n{rows}\n}}\n"


def _network_table(network: PlanNetwork) -> dict[str, Any]:
    links = network.links
    table = {key: getattr(links, key) for key in ("bandwidth", "latency", "jitter", "uplinks", "downlink")}
    if links.pairs is not None:  # infinite on the diagonal
        table["bandwidth"] = [[rate if math.isfinite(rate) else 0.0 for rate in row] for row in links.pairs]
    return {**table, "bytes": asdict(network.sizes), "overhead_seconds": network.overhead}


@dataclass(frozen=True, kw_only=True)
class _Network:
    bandwidth: tuple[float, ...] | tuple[tuple[float, ...], ...]
    latency: tuple[tuple[float, ...], ...]
    bytes: Sizes
    jitter: float = 0.0
    uplinks: tuple[int, ...] | None = None
    downlink: tuple[float, ...] | None = None
    overhead_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Path:
    origin: int
    slot: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Expected:
    step_seconds: float
    busy_seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Written:
    form: str
    links: str
    stages: tuple[tuple[int, ...], ...]
    path_length: int
    memory: int
    waves: int
    paths: tuple[_Path, ...]
    expected: _Expected
    forward_seconds: tuple[float, ...]
    delay_seconds: tuple[tuple[float, ...], ...]
    costs: RoutingCosts = field(default_factory=RoutingCosts)
    rules: PathRules = field(default_factory=PathRules)
    cuts: tuple[int, ...] | None = None
    network: _Network | None = None


def read_plan(path: str | File) -> PipelinePlan:
    """The plan in a file.

    Args:
        path: of a file that `isles plan paths` wrote.

    Raises:
        ValueError: one line that begins with the file's name, for a malformed file, and for a plan that breaks a rule
            or whose replay takes another time than the file says.
    """
    plan, expected_seconds = read_unchecked(path)
    wrong = complaints(plan, expected_seconds)
    if wrong:
        more = f" (and {len(wrong) - 1} more: isles plan check)" if len(wrong) > 1 else ""
        raise ValueError(f"{path}: {wrong[0]}{more}")
    return plan


def read_unchecked(path: str | File) -> tuple[PipelinePlan, float]:
    """(plan, expected seconds of a step) of a file, valid or not. ValueError if it holds no plan."""
    try:
        return _plan(_table(File(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def complaints(plan: PipelinePlan, expected_seconds: float) -> list[str]:
    """The rules that a plan breaks; or that a step does not take the seconds that the file says."""
    broken = broken_rules(plan.problem, plan.paths)
    if broken:
        return broken
    takes = plan.step_seconds
    if math.isclose(takes, expected_seconds, rel_tol=1e-9):
        return []
    return [f"a step of these paths takes {takes:.6g} s, expected.step_seconds says {expected_seconds:.6g}: plan again"]


def _table(path: File) -> Mapping[str, Any]:
    try:
        table = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); name a plan of `isles plan paths`") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(table, dict) or table.get("form") != FORM:
        raise ValueError(f'is no plan: its "form" must be {FORM!r}')
    return table


def _plan(table: Mapping[str, Any]) -> tuple[PipelinePlan, float]:
    written: _Written = typed("plan", _Written, table)
    problem = RoutingProblem(
        stages=written.stages,
        delays=written.delay_seconds,
        forward=written.forward_seconds,
        path_length=written.path_length,
        memory=written.memory,
        waves=written.waves,
        costs=written.costs,
        rules=written.rules,
    )
    paths = {(one.origin, one.slot): one.nodes for one in written.paths}
    if len(paths) < len(written.paths):
        raise ValueError("a slot has two paths: each has one")
    network = None if written.network is None else _network(written.network, problem.nodes)
    plan = PipelinePlan(problem=problem, paths=paths, links=written.links, cuts=written.cuts, network=network)
    return plan, written.expected.step_seconds


def _network(written: _Network, nodes: int) -> PlanNetwork:
    links = Links(
        bandwidth=written.bandwidth,
        latency=written.latency,
        jitter=written.jitter,
        uplinks=written.uplinks,
        downlink=written.downlink,
    )
    links.check(nodes)
    return plan_network(links, nodes, written.bytes, written.overhead_seconds)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def broken_rules(problem: RoutingProblem, paths: Paths) -> list[str]:
    """One line for each rule that `paths` break; nothing for a legal plan.

    Each slot of each origin has one path, which begins there, runs `path_length` stages in a legal order, and no node
    is on the paths of more slots than it holds.
    """
    return [*_slots(problem, paths), *_orders(problem, paths), *_loads(problem, paths)]


def _slots(problem: RoutingProblem, paths: Paths) -> Iterator[str]:
    for slot in problem.slots:
        if slot not in paths:
            yield f"origin {slot[0]}, slot {slot[1]} has no path"
    for origin, number in paths:
        if origin not in problem.origins:
            yield f"origin {origin}, slot {number}: node {origin} is not in stage 0"
        elif not 0 <= number < problem.memory:
            yield f"origin {origin}, slot {number}: slots are numbered 0 to {problem.memory - 1}"


def _orders(problem: RoutingProblem, paths: Paths) -> Iterator[str]:
    for (origin, number), path in paths.items():
        name = f"origin {origin}, slot {number}"
        strange = [node for node in path if not 0 <= node < problem.nodes]
        if strange:
            yield f"{name} visits node {strange[0]}: nodes are numbered 0 to {problem.nodes - 1}"
            continue
        if path[:1] != (origin,):
            yield f"{name} begins at node {path[0] if path else 'none'}: a path begins at its origin"
        if len(path) != problem.path_length:
            yield f"{name} runs {len(path)} stages: path_length is {problem.path_length}"
        for fault in faults([problem.stage_of[node] for node in path], problem.rules):
            yield f"{name} {fault}"


def _loads(problem: RoutingProblem, paths: Paths) -> Iterator[str]:
    loads = Counter(node for path in paths.values() for node in path if 0 <= node < problem.nodes)
    for number, stage in enumerate(problem.stages):
        slots, room = sum(loads[node] for node in stage), len(stage) * problem.memory
        if slots > room:
            yield f"stage {number} is on the paths of {slots} slots: its {len(stage)} nodes hold {room}"
        for node in stage:
            if loads[node] > problem.memory:
                yield f"node {node} is on the paths of {loads[node]} slots: it holds {problem.memory}"


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
    """Seconds per step in which each visited node computes or rests."""
    problem = plan.problem
    seconds: dict[int, float] = {}
    for worker, task, start, end in replay_paths(problem, plan.paths).spans:
        seconds[worker] = seconds.get(worker, 0.0) + end - start + problem.rest(task)
    return seconds


def speed_factors(plan: PipelinePlan, measured: Mapping[int, float]) -> tuple[float, ...]:
    """The factor by which each node is slower than planned. measured: seconds of computing per step, by node; a node
    that is not visited or not measured has factor 1.
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
"""A latency of so many times the median is probably a mistake in the table."""


def delays_of(links: Links, nodes: int, nbytes: float, overhead: float = 0.0) -> tuple[tuple[float, ...], ...]:
    """[source][target]: seconds of a single message of `nbytes`, with its mean latency and `overhead` (the copies at
    both ends); 0 on the diagonal. ValueError if `links` do not connect so many nodes.
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
    """A line for each connection that takes over 50 times as long as the median one."""
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

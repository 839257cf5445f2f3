"""Search for the fastest memory plan that fits.

    all fits         everything stays on the device, if that costs 1 % at most
    equal units      counts of each choice: sorted by bound, simulated, then refined
    unequal units    an integer program with several weights
    few units        also families of plans, and neighbours of the best plans, which differ in one unit or pair
    always           the simple plans that people use (`floors`), so the result is never slower than one of those

The simulation (`lanes`) ranks all plans; bounds only exclude plans from it. The result does not depend on the speed of
this machine: the same question has the same answer.

Equal units differ only in when they are needed. So a plan is a set of counts (how many units use each tier and each
kind of activations) and two orders. The search rates all counts at once by the load of the busiest lane and by the
bytes that stay on the device. It simulates only the promising ones.

For unequal units, an integer program chooses a placement per unit that minimises the load of the busiest lane:

    minimise  T + weights x lanes   with   T >= load of every lane,  one choice a unit,  bytes at every task <= budget

The program does not model stalls. So its optimum is a bound and the start of the search, not the plan. HiGHS solves it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from isles.memory.config import Update
from isles.memory.costs import (
    ACTIVATIONS,
    TIERS,
    Activations,
    MemoryTier,
    Placement,
    Profile,
    UnitTime,
    disk_bytes,
    ends_seconds,
    ends_update,
    host_bytes,
    least_peak,
    tail,
    tiers_of,
    unit_cost,
    unit_time,
)
from isles.memory.lanes import Deadlock, LaneRun, LaneTimeline
from isles.memory.plan import InfeasibleBudget, MemoryPlan, choices, digests
from isles.network.machines import Machine

_SOFT = 0.15  # share of the other lanes' load that ranks plans of one bound


class Counts(NamedTuple):
    """Numbers of units. device: all on the device. moved: nothing on the device between passes; all other units have
    their optimizer on the host. stored: moved units with states on disk. saved, swapped: units whose activations are
    saved or swapped; the others recompute. order: of the tiers. mixed: order of swapped and recomputing units.
    """

    device: int
    moved: int
    stored: int
    order: int
    saved: int
    swapped: int
    mixed: int


def expand(units: int, counts: Counts, near: MemoryTier = "host") -> tuple[Placement, ...]:
    """The plan of these counts. near: tier of the moved units that are not stored. The last units, whose backward pass
    comes first, save their activations.
    """
    moved: list[MemoryTier] = [*["disk"] * counts.stored, *[near] * (counts.moved - counts.stored)]  # type: ignore[bad-assignment]
    device: list[MemoryTier] = ["device"] * counts.device
    optimizer: list[MemoryTier] = ["optimizer"] * (units - counts.device - counts.moved)
    tiers = ([*device, *moved, *optimizer], [*device, *optimizer, *moved], [*moved, *device, *optimizer])[counts.order]
    unsaved = units - counts.saved
    swap: list[Activations] = ["swap"] * counts.swapped
    recompute: list[Activations] = ["recompute"] * (unsaved - counts.swapped)
    spread: list[Activations] = [
        "swap" if (i + 1) * counts.swapped // unsaved > i * counts.swapped // unsaved else "recompute"
        for i in range(unsaved)
    ]
    first = (spread, [*swap, *recompute], [*recompute, *swap])[counts.mixed]
    keep: list[Activations] = ["keep"] * counts.saved
    return tuple(Placement(tier, activations) for tier, activations in zip(tiers, [*first, *keep], strict=True))


def ranked(
    profile: Profile,
    options: Sequence[Placement],
    loads: np.ndarray,
    fixed: Sequence[float],
    *,
    budget: float,
    host: float,
) -> Iterator[tuple[float, Counts]]:
    """Yield counts, the most promising first, each with a lower bound on the seconds of its step.

    options: must include device and keep. loads: seconds of a unit per step, by option (rows) and lane (columns).
    fixed: seconds of each lane outside the units. budget, host: bytes on the device and on the host.
    """
    unit, units = profile.units[0], len(profile.units)
    row = {one: index for index, one in enumerate(options)}
    tiers, activations = {one.tier for one in options}, {one.activations for one in options}
    grid = np.array([(a, b) for a in range(units + 1) for b in range(units + 1 - a)])
    device, moved = (np.repeat(grid[:, column], len(grid)) for column in (0, 1))
    saved, swapped = (np.tile(grid[:, column], len(grid)) for column in (0, 1))
    good = np.ones(len(device), bool)
    near: MemoryTier = "file" if "file" in tiers else "host"
    if not tiers & {near, "disk"}:
        good &= moved == 0
    if "optimizer" not in tiers:
        good &= device + moved == units
    if "swap" not in activations:
        good &= swapped == 0
    if "recompute" not in activations:
        good &= saved + swapped == units
    device, moved, saved, swapped = (number[good] for number in (device, moved, saved, swapped))
    remade, hosted = units - saved - swapped, units - device - moved

    costs = {tier: unit_cost(unit, Placement(tier, "keep")) for tier in tiers}
    host_of = {tier: cost.host for tier, cost in costs.items()}
    stored = np.zeros_like(moved)
    if "disk" in tiers:  # as few as the host's memory allows, because the disk is slow
        need = hosted * host_of.get("optimizer", 0) + swapped * unit.resident.saved - host
        each = max(host_of.get("host", 0) - host_of["disk"], 1)
        stored = np.clip(np.ceil((need + moved * host_of.get("host", 0)) / each), 0, moved).astype(int)
        if "host" not in tiers:
            stored = moved

    # The load of a pair of choices is the load of (device, keep) plus what each choice adds to it.
    base = loads[row[Placement("device", "keep")]]
    totals = np.tile(np.asarray(fixed, float) + units * base, (len(device), 1))
    for tier, count in (("optimizer", hosted), (near, moved - stored), ("disk", stored)):
        if tier in tiers:
            totals += _times(count, loads[row[Placement(tier, "keep")]] - base)  # type: ignore[arg-type]
    for one, count in (("swap", swapped), ("recompute", remade)):
        if one in activations:
            totals += _times(count, loads[row[Placement("device", one)]] - base)  # type: ignore[arg-type]
    bound = totals.max(axis=1)

    shared_input = profile.units[-1].shared_input  # costs nothing if the unit before keeps it
    stays = profile.base + device * costs["device"].resident
    stays = stays + saved * (unit.resident.saved - shared_input) + remade * (unit.boundary - shared_input)
    if "optimizer" in tiers:
        stays = stays + hosted * costs["optimizer"].resident
    with np.errstate(invalid="ignore"):
        soft = np.where(np.isfinite(bound), bound + _SOFT * (totals.sum(axis=1) - bound), np.inf)
    order = np.flatnonzero((stays <= budget) & np.isfinite(bound))
    for index in order[np.argsort(soft[order], kind="stable")]:
        numbers = (device[index], moved[index], stored[index], 0, saved[index], swapped[index], 0)
        yield float(bound[index]), Counts(*(int(number) for number in numbers))


def _times(count: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """count x seconds, with 0 x infinity = 0."""
    with np.errstate(invalid="ignore"):
        return np.where(count[:, None] == 0, 0.0, count[:, None] * seconds[None, :])


def neighbours(counts: Counts) -> Iterator[Counts]:
    """Yield counts that differ slightly from `counts`."""
    for more, other in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1), (2, 0), (-2, 0)):
        yield counts._replace(device=counts.device + more, moved=counts.moved + other)
    for more, other in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)):
        yield counts._replace(saved=counts.saved + more, swapped=counts.swapped + other)
    for more, other in ((1, -1), (-1, 1)):
        yield counts._replace(device=counts.device + more, saved=counts.saved + other)
    for more in (1, -1):
        yield counts._replace(stored=counts.stored + more)
    for number in range(3):
        yield counts._replace(order=number)
        yield counts._replace(mixed=number)


def possible(units: int, counts: Counts) -> bool:
    """Whether `counts` are valid for this number of units."""
    return (
        min(counts.device, counts.moved, counts.saved, counts.swapped, counts.stored) >= 0
        and counts.device + counts.moved <= units
        and counts.saved + counts.swapped <= units
        and counts.stored <= counts.moved
    )


def lane_loads(profile: Profile, options: Sequence[Placement], machine: Machine, accumulation: int) -> np.ndarray:
    """Seconds of a step on (device, up, down, host, read, write): axes unit, option, lane."""
    times_by_unit = [[unit_time(unit, one, machine) for one in options] for unit in profile.units]
    filed = [one.tier == "file" for one in options]
    return np.array(
        [[_load(times, accumulation, far) for times, far in zip(row, filed, strict=True)] for row in times_by_unit]
    )


def _load(times: UnitTime, batches: int, filed: bool) -> tuple[float, ...]:
    return (
        batches * (times.forward + times.backward) + times.update,
        batches * ((0.0 if filed else 2 * times.slot) + times.swap_up) + times.refresh,
        batches * (times.swap_down + (0.0 if filed else times.gradients)),
        times.host,
        times.read + (batches * 2 * times.slot if filed else 0.0),
        times.write + (batches * times.gradients if filed else 0.0),
    )


_NODES = 300  # limit on branch-and-bound nodes; a limit in seconds would make plans depend on this machine's load
_GAP = 2e-3
_TIE = 1e-4  # weight of all lanes' loads, so that the program prefers less traffic among equal plans


def solve(
    profile: Profile,
    options: Sequence[Placement],
    loads: np.ndarray,
    fixed: Sequence[float],
    *,
    budget: float,
    host: float,
    weights: Sequence[float] | None = None,
) -> tuple[tuple[Placement, ...] | None, float]:
    """Solve the integer program: (plan or None, lower bound on T or -inf). weights: of the lanes' loads in the goal;
    with them there is no bound.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    units, count = len(profile.units), len(options)
    variables = units * count + 1
    flat = loads.reshape(units * count, -1)
    usable = np.isfinite(flat).all(axis=1)
    flat = np.where(np.isfinite(flat), flat, 0.0)
    memory, stays = _memory(profile, options)

    limits: list[tuple[np.ndarray, float, float]] = []  # (coefficients of the variables, minimum, maximum) of a sum
    for unit in range(units):
        row = np.zeros(variables)
        row[unit * count : (unit + 1) * count] = 1
        limits.append((row, 1.0, 1.0))
    for lane in range(flat.shape[1]):
        limits.append((np.append(flat[:, lane], -1.0), -np.inf, -fixed[lane]))
    scale = max(budget, 1.0)
    for taken, beside in zip(memory, stays, strict=True):
        limits.append((np.append(taken / scale, 0.0), -np.inf, (budget - beside) / scale))
    if np.isfinite(host):
        hosts = [unit_cost(unit, one).host for unit in profile.units for one in options]
        limits.append((np.append(np.array(hosts) / max(host, 1.0), 0.0), -np.inf, 1.0 if host else 0.0))
    rows, low, high = zip(*limits, strict=True)
    goal = np.append(_TIE * flat.sum(axis=1), 1.0)
    if weights is not None:
        goal[:-1] += flat @ np.asarray(weights, float)
    solution = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(variables - 1), 0),
        bounds=Bounds(np.zeros(variables), np.append(usable.astype(float), np.inf)),
        options={"node_limit": _NODES, "mip_rel_gap": _GAP},
    )
    bound = -np.inf
    if weights is None and solution.mip_dual_bound is not None:
        bound = float(solution.mip_dual_bound) / (1 + _TIE * flat.shape[1])  # a lane's tie term is at most _TIE * T
    if solution.x is None:
        return None, bound
    chosen = solution.x[:-1].reshape(units, count).argmax(axis=1)
    return tuple(options[int(index)] for index in chosen), bound


def _memory(profile: Profile, options: Sequence[Placement]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes on the device at every task of a step's first batch: for each unit and option, and outside the units."""
    units, count = len(profile.units), len(options)
    ends = profile.ends
    taken = np.zeros((2 * units + 2, units * count))
    top, bottom = units, 2 * units + 1
    for unit, unit_profile in enumerate(profile.units):
        backward = 2 * units - unit
        for index, option in enumerate(options):
            cost, column = unit_cost(unit_profile, option), unit * count + index
            # Already on the device, if the unit before keeps it.
            shared_input = 0 if option.activations == "swap" else unit_profile.shared_input
            saved = cost.forward - cost.forward_end - cost.swap - shared_input
            taken[:, column] += cost.resident
            taken[unit, column] += cost.slot + cost.forward - shared_input
            taken[unit + 1 : backward, column] += saved
            taken[top + 1 : backward, column] -= cost.casts_end
            taken[backward, column] += saved - cost.casts_end + cost.slot + cost.swap + cost.backward + cost.gradients
            if cost.on_device:
                taken[backward + 1 :, column] += cost.gradients
    stays = np.full(2 * units + 2, float(profile.base))
    stays[top:] += ends.carried
    stays[top] += ends.top + ends.top_gradients
    stays[top + 1 :] += ends.top_gradients
    stays[bottom] += ends.bottom + ends.bottom_gradients
    return taken, stays


METHODS: dict[str, tuple[tuple[MemoryTier, ...], tuple[Activations, ...]]] = {
    "auto": (TIERS, ACTIVATIONS),
    "autohete": (("device", "optimizer", "host"), ("keep", "recompute")),
    "karma": (("device",), ACTIVATIONS),
    "checkpoint": (("device",), ("keep", "recompute")),
}
"""The tiers and the kinds of activations that each method may use."""


_FEW = 8  # up to this many units, the search tries all neighbours
_TRIED = 60  # counts to simulate before refining
_TRIED_FEW = 150  # the same, for few units
_SCANNED = 20_000  # counts to rate
_STARTS = 3
_CLIMB_STEPS = 20  # the most steps of a hill climb
_CLIMB_STEPS_OF_MANY, _NEIGHBOURS = 3, 20  # with more units than _FEW: the most steps, and simulations in each
# Weights of (device, up, down, host, read, write) in the program's goal, because full lanes cause stalls.
_WEIGHTS = (
    None,
    (0.0, 0.1, 0.1, 0.2, 0.0, 0.0),
    (0.5, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.5, 0.5, 1.0, 0.0, 0.0),
    (0.3, 0.3, 0.3, 0.3, 0.0, 0.0),
)
_SIMPLER = 1.01  # factor on the step time that keeping everything on the device may cost
_MOST = 2.0**60  # bytes that stand for an infinite budget
_TIGHT = 1.002  # factor on the step time that using less memory may cost


class Search:
    """A search for the fastest plan (`run`): the question, and the plans that were simulated.

    method: a key of `METHODS`. budget, host, disk: bytes of the device, of the host and of files; None: all that the
    machine has. update: whether updates on the host wait for all gradients ("exact") or begin as gradients arrive
    ("early"). accumulation: batches per step.

    loads, fixed: seconds on each lane, of every unit by choice, and of what no choice changes. seconds: of each
    simulated plan; infinite for a plan that would get stuck.
    """

    def __init__(
        self,
        profile: Profile,
        machine: Machine,
        *,
        method: str = "auto",
        budget: float | None = None,
        host: float | None = None,
        disk: float | None = None,
        update: Update = "exact",
        accumulation: int = 1,
    ) -> None:
        self.profile, self.machine, self.method = profile, machine, method
        self.budget = machine.device_bytes if budget is None else budget
        self.host = machine.host_bytes if host is None else max(host, 0.0)
        self.disk = machine.disk_bytes if disk is None else disk
        self.update: Update = update
        self.accumulation = accumulation
        tiers, activations = METHODS[method]
        available = tiers_of(machine, self.disk)
        self.options = choices([one for one in tiers if one in available], activations)
        self.near: MemoryTier = "host" if "host" in available else "file"
        self.index = {one: number for number, one in enumerate(self.options)}
        self.loads = lane_loads(profile, self.options, machine, accumulation)
        device = accumulation * ends_seconds(profile, machine) + ends_update(profile, machine)
        self.fixed = (device, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.units = len(profile.units)
        self.seconds: dict[tuple[Placement, ...], float] = {}

    def fits(self, plan: Sequence[Placement]) -> bool:
        """Whether the plan stays within every budget, without prefetching."""
        return (
            least_peak(self.profile, plan, self.accumulation) <= self.budget
            and host_bytes(self.profile, plan) <= self.host
            and disk_bytes(self.profile, plan) <= self.disk
        )

    def bound(self, plan: Sequence[Placement]) -> float:
        """A lower bound on the step: the load of its busiest lane, if slots are fetched for every pass."""
        rows = self.loads[np.arange(self.units), [self.index[one] for one in plan]]
        return float((rows.sum(axis=0) + self.fixed).max())

    def timeline(self, plan: tuple[Placement, ...], budget: float) -> LaneTimeline:
        """Simulate a step with `budget` bytes of the device. Deadlock if they are too few."""
        return LaneRun(
            self.profile,
            plan,
            self.machine,
            budget=budget,
            update=self.update,
            accumulation=self.accumulation,
        ).play()

    def time(self, plan: tuple[Placement, ...], budget: float | None = None) -> float:
        if budget is None and plan in self.seconds:
            return self.seconds[plan]
        try:
            seconds = self.timeline(plan, self.budget if budget is None else budget).step
        except Deadlock:
            seconds = math.inf
        if budget is None:
            self.seconds[plan] = seconds
        return seconds

    def first(self, plans: Iterable[tuple[Placement, ...]], most: int, below: float = math.inf) -> None:
        """Simulate plans that fit, by bound, until no other can beat the best, or `most` have been simulated."""
        good = sorted(
            ((self.bound(plan), number, plan) for number, plan in enumerate(plans) if plan not in self.seconds),
            key=lambda entry: entry[:2],
        )
        fastest, tried = min([below, *self.seconds.values()]), 0
        for bound, _, plan in good:
            if bound >= fastest or tried >= most:
                return
            if math.isfinite(bound) and self.fits(plan):
                fastest, tried = min(fastest, self.time(plan)), tried + 1

    def run(self) -> MemoryPlan:
        """Find the fastest plan. If no plan fits, InfeasibleBudget with the smallest budgets that work."""
        floors = {name: self._fastest(plans) for name, plans in self.floors().items()}
        # A bound for all plans: every unit's cheapest choice on the device's lane, which never idles.
        bound = float(self.loads[:, :, 0].min(axis=1).sum() + self.fixed[0])
        alike = len({replace(unit, name="", shared_input=0) for unit in self.profile.units}) == 1
        whole = (Placement("device", "keep"),) * self.units
        if self.fits(whole) and self.time(whole) <= bound * _SIMPLER:
            return self._made(whole, bound, floors)
        if alike:
            self._by_counts(_TRIED_FEW if self.units <= _FEW else _TRIED)
        if not alike or self.units <= _FEW:
            bound = max(bound, self._by_program())
        if self.units <= _FEW:
            self.first(self._family(), _TRIED_FEW)
        if not alike or self.units <= _FEW:
            fastest = sorted(self.seconds, key=lambda plan: self.seconds[plan])
            for plan in fastest[: _STARTS if self.units <= _FEW else 1]:
                self._climb(plan)
        finite = {plan: seconds for plan, seconds in self.seconds.items() if math.isfinite(seconds)}
        if not finite:
            raise infeasible(self)
        fastest_plan = min(finite, key=lambda plan: finite[plan])
        if finite.get(whole, math.inf) <= finite[fastest_plan] * _SIMPLER:
            fastest_plan = whole  # updates on the host would save too little to be worth the traffic
        return self._made(fastest_plan, bound, floors)

    def exhaustive(self) -> tuple[tuple[Placement, ...], float]:
        """The optimum over all options ^ units plans, for tests."""
        self.first(itertools.product(self.options, repeat=self.units), 10**9)
        fastest = min(self.seconds, key=lambda plan: self.seconds[plan])
        return fastest, self.seconds[fastest]

    def floors(self) -> dict[str, list[tuple[Placement, ...]]]:
        """The simple plans that people use, if the method has their choices."""
        units = self.units
        counts = range(units + 1)
        plans_by_name: dict[str, list[tuple[Placement, ...]]] = {
            "all on the device": [(Placement("device", "keep"),) * units],
            "recompute all": [(Placement("device", "recompute"),) * units],
            "keep the last, recompute": [tail("device", "recompute", units, saved) for saved in counts],
            "capacity swap": [tail("device", "swap", units, saved) for saved in counts],
            "optimizer on the host": [(Placement("optimizer", one),) * units for one in ("recompute", "keep")],
            "all on the host": [(Placement("host", "recompute"),) * units],
            "all on the host, swap": [(Placement("host", "swap"),) * units],
            "on disk": [(Placement(tier, "recompute"),) * units for tier in ("disk", "file")],
        }
        known = set(self.options)
        return {name: [plan for plan in plans if known.issuperset(plan)] for name, plans in plans_by_name.items()}

    def _fastest(self, plans: Sequence[tuple[Placement, ...]]) -> float | None:
        usable = [plan for plan in plans if math.isfinite(self.bound(plan)) and self.fits(plan)]
        times = [self.time(plan) for plan in usable[-3:]]  # among plans with a saved tail, the longest tails that fit
        return min([seconds for seconds in times if math.isfinite(seconds)], default=None)

    def _by_counts(self, most: int) -> None:
        fastest, tried, best = min(self.seconds.values(), default=math.inf), 0, None
        counted = ranked(self.profile, self.options, self.loads[0], self.fixed, budget=self.budget, host=self.host)
        for bound, counts in itertools.islice(counted, _SCANNED):
            if tried >= most:
                break
            plan = expand(self.units, counts, self.near)
            if bound >= fastest or not self.fits(plan):
                continue
            seconds = self.time(plan)
            tried += 1
            if seconds < fastest:
                fastest, best = seconds, counts
        while best is not None:
            start, best = best, None
            for counts in neighbours(start):
                if not possible(self.units, counts):
                    continue
                plan = expand(self.units, counts, self.near)
                if plan in self.seconds or not self.index.keys() >= set(plan):
                    continue
                if self.bound(plan) < fastest and self.fits(plan) and self.time(plan) < fastest * (1 - 1e-9):
                    fastest, best = self.seconds[plan], counts

    def _by_program(self) -> float:
        """Simulate the integer program's plans as starting points. Returns its largest lower bound on the seconds."""
        bound = 0.0
        for weights in _WEIGHTS if self.units <= _FEW else _WEIGHTS[:3]:
            plan, dual = solve(
                self.profile, self.options, self.loads, self.fixed, budget=self.budget, host=self.host, weights=weights
            )
            bound = max(bound, dual)
            if plan is not None and self.fits(plan):
                self.time(plan)
        return bound

    def _family(self) -> Iterator[tuple[Placement, ...]]:
        """Yield the plans of all counts in all orders."""
        tiers, seen = {one.tier for one in self.options}, set()
        pairs = [(a, b) for a in range(self.units + 1) for b in range(self.units + 1 - a)]
        for (device, moved), (saved, swapped) in itertools.product(pairs, pairs):
            for order, mixed, stored in itertools.product(range(3), range(3), {0, moved if "disk" in tiers else 0}):
                plan = expand(self.units, Counts(device, moved, stored, order, saved, swapped, mixed), self.near)
                if plan not in seen and self.index.keys() >= set(plan):
                    seen.add(plan)
                    yield plan

    def _climb(self, plan: tuple[Placement, ...]) -> None:
        """Move to the fastest neighbour (one unit's choice changed, or two swapped) while it is faster."""
        most, steps = (10**9, _CLIMB_STEPS) if self.units <= _FEW else (_NEIGHBOURS, _CLIMB_STEPS_OF_MANY)
        for _ in range(steps):
            before = self.time(plan)
            near = list(self._near(plan))
            self.first(near, most, below=before)
            faster = [(self.seconds[other], number) for number, other in enumerate(near) if other in self.seconds]
            if not faster or min(faster)[0] >= before * (1 - 1e-9):
                return
            plan = near[min(faster)[1]]

    def _near(self, plan: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
        for unit in range(self.units):
            for option in self.options:
                if option != plan[unit]:
                    yield (*plan[:unit], option, *plan[unit + 1 :])
        for a, b in itertools.combinations(range(self.units), 2):
            if plan[a] != plan[b]:
                near = list(plan)
                near[a], near[b] = near[b], near[a]
                yield tuple(near)

    # The answer

    def _made(self, plan: tuple[Placement, ...], bound: float, floors: dict[str, float | None]) -> MemoryPlan:
        peak = self._tightest(plan)
        timeline = self.timeline(plan, peak)
        return MemoryPlan(
            placements=plan,
            names=tuple(unit.name for unit in self.profile.units),
            method=self.method,
            update=self.update,
            accumulation=self.accumulation,
            budget=int(min(self.budget, _MOST)),
            peak=peak,
            step=timeline.step,
            bound=min(bound, timeline.step),
            busy=dict(timeline.busy.items()),
            host_bytes=host_bytes(self.profile, plan),
            disk_bytes=disk_bytes(self.profile, plan),
            floors=floors,
            made_for=digests(self.profile, self.machine),
            machine=self.machine.name,
        )

    def _tightest(self, plan: tuple[Placement, ...]) -> int:
        """The least memory with which the step is as short. With more memory, prefetching gains nothing."""
        low, high = least_peak(self.profile, plan, self.accumulation), int(min(self.budget, _MOST))
        allowed = self.seconds[plan] * _TIGHT
        if self.time(plan, low) <= allowed:
            return low
        while high - low > 0.02 * high:
            middle = (low + high) // 2
            if self.time(plan, middle) <= allowed:
                high = middle
            else:
                low = middle
        return high


def infeasible(tried: Search) -> InfeasibleBudget:
    """The error that names the budgets that are too small, and the smallest that work."""
    small = smallest(tried)
    device, host = least_peak(tried.profile, small, tried.accumulation), host_bytes(tried.profile, small)
    disk = disk_bytes(tried.profile, small)
    parts, beside = [], "" if not 0 < tried.host <= 1e14 else f" beside {tried.host / 2**30:.3g}GiB of the host"
    beside += f" beside the {tried.disk:.0f} bytes that memory.disk has" if 0 < tried.disk <= 1e14 else ""
    if device > tried.budget:
        parts.append(
            f"memory.device_budget = {tried.budget / 2**30:.3g}GiB is too small: the least that works{beside} is "
            f"{device} bytes ({device / 2**30:.3g}GiB)"
        )
    if host > tried.host:
        parts.append(
            f"memory.host_budget leaves {tried.host / 2**30:.3g}GiB: {host} bytes ({host / 2**30:.3g}GiB) are needed"
        )
    if disk > tried.disk:
        parts.append(f"{disk} bytes of disk are needed")
    wide = sum(unit.weights for unit in tried.profile.units) > 2 * tried.profile.params
    advice = (
        "; choose that, "
        + ('model.dtype = "bfloat16", ' if wide else "")
        + "or a smaller batch"
        + ("" if tried.method == "auto" else ', or method = "auto"')
    )
    return InfeasibleBudget(" and ".join(parts or ["no plan fits"]) + advice, device_bytes=device, host_bytes=host)


def smallest(tried: Search) -> tuple[Placement, ...]:
    """A plan with a small peak, within host and disk if possible. Starts from the best uniform plan, and improves it
    unit by unit.
    """

    def size(plan: tuple[Placement, ...]) -> tuple[float, float]:
        over_host = max(host_bytes(tried.profile, plan) - tried.host, 0)
        over_disk = max(disk_bytes(tried.profile, plan) - tried.disk, 0)
        return over_host + over_disk, least_peak(tried.profile, plan, tried.accumulation)

    usable = [option for option in tried.options if math.isfinite(tried.bound((option,) * tried.units))]
    plan = min(((option,) * tried.units for option in usable), key=size)
    for unit in range(tried.units):
        near = [(*plan[:unit], option, *plan[unit + 1 :]) for option in usable]
        plan = min([plan, *near], key=size)
    return plan

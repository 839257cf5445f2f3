"""The fastest plan that fits, as far as it can be found.

    equal units      counts of each choice (`searching.counts`), by bound, simulated, then refined
    unequal units    an integer program (`searching.linear`) with several weights
    all fits         all of it stays on the device, if that costs 1 % at most
    few units        families and neighbours of the best plans besides, one unit or pair at a time
    always           the simple plans that people use (`floors`), so that no plan is slower than one of those

Everything is ranked by the simulation (`lanes`), whose seconds count; bounds only say what need not be simulated.
Nothing here depends on how fast this machine is: the same question has the same answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from isles.memory.costs import Placement, disk_bytes, host_bytes, least_peak, tail
from isles.memory.plan import InfeasibleBudget, MemoryPlan, digests
from isles.memory.searching.counts import Counts, expand, neighbours, possible, ranked
from isles.memory.searching.linear import solve
from isles.memory.searching.trials import METHODS as METHODS
from isles.memory.searching.trials import PlanTrials

_FEW = 8  # units whose neighbours are all tried
_TRIED = 60  # counts that are simulated before refining; of few units, more
_TRIED_FEW = 150
_SCANNED = 20_000  # counts that are looked at
_STARTS = 3
_CLIMBS = 20
_CLIMBED, _CLIMBS_OF_MANY = 20, 3  # plans a climb simulates, and how often it climbs, where there are many units
# Of (device, up, down, host, read, write) in the goal of the integer program: stalls follow from lanes that are full.
_WEIGHTS = (
    None,
    (0.0, 0.1, 0.1, 0.2, 0.0, 0.0),
    (0.5, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.5, 0.5, 1.0, 0.0, 0.0),
    (0.3, 0.3, 0.3, 0.3, 0.0, 0.0),
)
_SIMPLER = 1.01  # how much longer a step may take if all of it stays on the device
_MOST = 2.0**60  # bytes, where a budget is infinite
_TIGHT = 1.002  # how much longer a step may take on less memory


class Search(PlanTrials):
    """The ways to look for the fastest plan of a question, of which `run` takes those that fit it."""

    def run(self) -> MemoryPlan:
        """The fastest plan found. InfeasibleBudget, with the smallest budgets that work, where no plan fits."""
        floors = {name: self._fastest(plans) for name, plans in self.floors().items()}
        # Seconds that no plan of any size beats: every unit's cheapest choice on the device's lane, never idle.
        bound = float(self.loads[:, :, 0].min(axis=1).sum() + self.fixed[0])
        alike = len({replace(unit, name="", given=0) for unit in self.profile.units}) == 1
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
        found = min(finite, key=lambda plan: finite[plan])
        if finite.get(whole, math.inf) <= finite[found] * _SIMPLER:
            found = whole  # updates on the host might save the device a moment: not worth a link
        return self._made(found, bound, floors)

    def exhaustive(self) -> tuple[tuple[Placement, ...], float]:
        """The optimum over all plans, for tests: options ^ units of them."""
        self.first(itertools.product(self.options, repeat=self.units), 10**9)
        found = min(self.seconds, key=lambda plan: self.seconds[plan])
        return found, self.seconds[found]

    def floors(self) -> dict[str, list[tuple[Placement, ...]]]:
        """Simple plans that people use, as far as the method has their choices."""
        units = self.units
        counts = range(units + 1)
        every: dict[str, list[tuple[Placement, ...]]] = {
            "all on the device": [(Placement("device", "keep"),) * units],
            "recompute all": [(Placement("device", "recompute"),) * units],
            "keep the last, recompute": [tail("device", "recompute", units, kept) for kept in counts],
            "capacity swap": [tail("device", "swap", units, kept) for kept in counts],
            "optimizer on the host": [(Placement("optimizer", one),) * units for one in ("recompute", "keep")],
            "all on the host": [(Placement("host", "recompute"),) * units],
            "all on the host, swap": [(Placement("host", "swap"),) * units],
            "on disk": [(Placement(place, "recompute"),) * units for place in ("disk", "file")],
        }
        known = set(self.options)
        return {name: [plan for plan in plans if known.issuperset(plan)] for name, plans in every.items()}

    def _fastest(self, plans: Sequence[tuple[Placement, ...]]) -> float | None:
        usable = [plan for plan in plans if math.isfinite(self.bound(plan)) and self.fits(plan)]
        seconds = [self.time(plan) for plan in usable[-3:]]  # of those with a kept tail, the longest tails that fit
        return min([one for one in seconds if math.isfinite(one)], default=None)

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
        """Starts of the integer program; the bound of the one without weights."""
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
        """Every count in every order."""
        places, seen = {one.place for one in self.options}, set()
        pairs = [(a, b) for a in range(self.units + 1) for b in range(self.units + 1 - a)]
        for (device, moved), (kept, swapped) in itertools.product(pairs, pairs):
            for order, mixed, stored in itertools.product(range(3), range(3), {0, moved if "disk" in places else 0}):
                plan = expand(self.units, Counts(device, moved, stored, order, kept, swapped, mixed), self.near)
                if plan not in seen and self.index.keys() >= set(plan):
                    seen.add(plan)
                    yield plan

    def _climb(self, plan: tuple[Placement, ...]) -> None:
        """To the best neighbour, as long as there is a faster one: another choice for a unit, or two units' swapped."""
        most, climbs = (10**9, _CLIMBS) if self.units <= _FEW else (_CLIMBED, _CLIMBS_OF_MANY)
        for _ in range(climbs):
            before = self.time(plan)
            near = list(self._near(plan))
            self.first(near, most, below=before)
            faster = [(self.seconds[one], number) for number, one in enumerate(near) if one in self.seconds]
            if not faster or min(faster)[0] >= before * (1 - 1e-9):
                return
            plan = near[min(faster)[1]]

    def _near(self, plan: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
        for unit in range(self.units):
            for one in self.options:
                if one != plan[unit]:
                    yield (*plan[:unit], one, *plan[unit + 1 :])
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
        """The least memory on which the step is as short: what is fetched ahead of need gains nothing beyond it."""
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


def infeasible(tried: PlanTrials) -> InfeasibleBudget:
    """Which budgets are too small, and what the least would be."""
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


def smallest(tried: PlanTrials) -> tuple[Placement, ...]:
    """A plan with as small a peak as can be found: from the uniform ones, unit by unit, within host and disk where
    that is possible.
    """

    def size(plan: tuple[Placement, ...]) -> tuple[float, float]:
        over_host = max(host_bytes(tried.profile, plan) - tried.host, 0)
        over_disk = max(disk_bytes(tried.profile, plan) - tried.disk, 0)
        return over_host + over_disk, least_peak(tried.profile, plan, tried.accumulation)

    usable = [one for one in tried.options if math.isfinite(tried.bound((one,) * tried.units))]
    plan = min(((one,) * tried.units for one in usable), key=size)
    for unit in range(tried.units):
        near = [(*plan[:unit], one, *plan[unit + 1 :]) for one in usable]
        plan = min([plan, *near], key=size)
    return plan

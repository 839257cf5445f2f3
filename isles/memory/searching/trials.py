"""One question about memory - a model, a machine, budgets - and every plan that was tried for it.

A plan's seconds are the simulation's (`lanes`); its bound is the load of its busiest lane, and says only what need not
be simulated. Nothing here depends on how fast this machine is: the same question has the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from isles.memory.config import Update
from isles.memory.costs import (
    ACTIVATIONS,
    PLACES,
    Activations,
    Placement,
    Profile,
    UnitPlace,
    disk_bytes,
    ends_seconds,
    ends_update,
    host_bytes,
    least_peak,
    places_of,
)
from isles.memory.lanes import Deadlock, LaneRun, LaneTimeline
from isles.memory.plan import choices
from isles.memory.searching.counts import lane_loads
from isles.network.machines import Machine

METHODS: dict[str, tuple[tuple[UnitPlace, ...], tuple[Activations, ...]]] = {
    "auto": (PLACES, ACTIVATIONS),
    "autohete": (("device", "optimizer", "host"), ("keep", "recompute")),
    "karma": (("device",), ACTIVATIONS),
    "checkpoint": (("device",), ("keep", "recompute")),
}
"""By method, where a unit's weights may be, and what may happen to its activations."""


class PlanTrials:
    """method: a key of `METHODS`. budget, host, disk: bytes of the device, of the host and of files; None: all that the
    machine has. update: whether updates on the host wait for all gradients ("exact") or begin as these come ("early").
    accumulation: batches a step.

    loads, fixed: seconds on each lane, of every unit by choice and of what no choice changes. seconds: of each plan
    that was simulated, infinite where one would get stuck.
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
        places, activations = METHODS[method]
        there = places_of(machine, self.disk)
        self.options = choices([one for one in places if one in there], activations)
        self.near: UnitPlace = "host" if "host" in there else "file"
        self.index = {one: number for number, one in enumerate(self.options)}
        self.loads = lane_loads(profile, self.options, machine, accumulation)
        device = accumulation * ends_seconds(profile, machine) + ends_update(profile, machine)
        self.fixed = (device, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.units = len(profile.units)
        self.seconds: dict[tuple[Placement, ...], float] = {}

    def fits(self, plan: Sequence[Placement]) -> bool:
        """Within every budget, without fetching ahead."""
        return (
            least_peak(self.profile, plan, self.accumulation) <= self.budget
            and host_bytes(self.profile, plan) <= self.host
            and disk_bytes(self.profile, plan) <= self.disk
        )

    def bound(self, plan: Sequence[Placement]) -> float:
        """No step is shorter than the load of its busiest lane (slots are taken to come up for every pass)."""
        rows = self.loads[np.arange(self.units), [self.index[one] for one in plan]]
        return float((rows.sum(axis=0) + self.fixed).max())

    def timeline(self, plan: tuple[Placement, ...], budget: float) -> LaneTimeline:
        """Its step, with so many bytes of the device. Deadlock where they are too few."""
        return LaneRun(
            self.profile,
            plan,
            self.machine,
            budget=budget,
            update=self.update,
            accumulation=self.accumulation,
        ).play()

    def time(self, plan: tuple[Placement, ...], budget: float | None = None) -> float:
        """Seconds of its step."""
        if budget is None and plan in self.seconds:
            return self.seconds[plan]
        try:
            found = self.timeline(plan, self.budget if budget is None else budget).step
        except Deadlock:
            found = math.inf
        if budget is None:
            self.seconds[plan] = found
        return found

    def first(self, plans: Iterable[tuple[Placement, ...]], most: int, below: float = math.inf) -> None:
        """Simulate those that fit, by their bound, until none can be faster than the best, or `most` were."""
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

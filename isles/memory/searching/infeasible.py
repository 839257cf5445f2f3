"""What a person is told when no plan of memory fits, and the plan that needs least."""

from __future__ import annotations

import math

from isles.memory.costs import Placement, disk_bytes, host_bytes, least_peak
from isles.memory.plan import InfeasibleBudget
from isles.memory.searching.trials import PlanTrials


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
    advice = "; choose that, or a smaller batch" + ("" if tried.method == "auto" else ', or method = "auto"')
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

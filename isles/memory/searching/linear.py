"""Plans of unequal units by an integer program: a choice for each, within the memory at every moment of a step, at the
least load of the busiest lane.

    minimise  T + weights x lanes   with   T >= load of every lane,  one choice a unit,  bytes at every task <= budget

It knows no stalls, so its optimum is where the search begins and a bound, not the plan. HiGHS solves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isles.memory.costs import Placement, Profile, unit_cost

_NODES = 300  # of the branch and bound; a limit in seconds would make plans depend on the load of this machine
_GAP = 2e-3
_TIE = 1e-4  # weight of all lanes' loads, so that of equal plans the one with less traffic is taken


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
    """The plan (None where there is none) and a bound on T (-inf where it has none). weights: of the lanes' loads in
    the goal, which makes the bound no bound.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    units, count = len(profile.units), len(options)
    variables = units * count + 1
    flat = loads.reshape(units * count, -1)
    usable = np.isfinite(flat).all(axis=1)
    flat = np.where(np.isfinite(flat), flat, 0.0)
    memory, stays = _memory(profile, options)

    limits: list[tuple[np.ndarray, float, float]] = []  # (factors of the variables, least, most) of their sum
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
    found = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(variables - 1), 0),
        bounds=Bounds(np.zeros(variables), np.append(usable.astype(float), np.inf)),
        options={"node_limit": _NODES, "mip_rel_gap": _GAP},
    )
    bound = -np.inf
    if weights is None and found.mip_dual_bound is not None:
        bound = float(found.mip_dual_bound) / (1 + _TIE * flat.shape[1])  # the tie's part is at most that of T
    if found.x is None:
        return None, bound
    chosen = found.x[:-1].reshape(units, count).argmax(axis=1)
    return tuple(options[int(index)] for index in chosen), bound


def _memory(profile: Profile, options: Sequence[Placement]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes on the device at every task of a step's first batch: of each unit and option, and beside the units."""
    units, count = len(profile.units), len(options)
    ends = profile.ends
    taken = np.zeros((2 * units + 2, units * count))
    top, bottom = units, 2 * units + 1
    for unit, one in enumerate(profile.units):
        backward = 2 * units - unit
        for index, option in enumerate(options):
            cost, column = unit_cost(one, option), unit * count + index
            given = 0 if option.activations == "swap" else one.given  # there already, if the unit before keeps it
            held = cost.forward - cost.forward_end - cost.swap - given
            taken[:, column] += cost.resident
            taken[unit, column] += cost.slot + cost.forward - given
            taken[unit + 1 : backward, column] += held
            taken[top + 1 : backward, column] -= cost.casts_end
            taken[backward, column] += held - cost.casts_end + cost.slot + cost.swap + cost.backward + cost.gradients
            if cost.on_device:
                taken[backward + 1 :, column] += cost.gradients
    stays = np.full(2 * units + 2, float(profile.base))
    stays[top:] += ends.carried
    stays[top] += ends.top + ends.top_gradients
    stays[top + 1 :] += ends.top_gradients
    stays[bottom] += ends.bottom + ends.bottom_gradients
    return taken, stays

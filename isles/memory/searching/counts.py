"""Plans of equal units by counts: how many of them have which place and which activations, and in what order.

Units that are alike differ only in when they are needed, so a plan is four numbers and two orders. All of them are
weighed at once by the load of the busiest lane and by what stays on the device; only the promising are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from isles.memory.costs import Activations, Placement, Profile, UnitPlace, UnitTime, unit_cost, unit_time
from isles.network.machines import Machine

_SOFT = 0.15  # share of the other lanes' load that ranks plans of one bound


class Counts(NamedTuple):
    """device, moved: units with all on the device, and with nothing there between passes; the others' optimizer is on
    the host. stored: of the moved, those with states on disk. order: of the places, see `expand`. kept, swapped: the
    others recompute. mixed: how swapped and recomputed ones lie among each other.
    """

    device: int
    moved: int
    stored: int
    order: int
    kept: int
    swapped: int
    mixed: int


def expand(units: int, counts: Counts, near: UnitPlace = "host") -> tuple[Placement, ...]:
    """The plan of these counts. near: where those that move and are not stored wait. Kept activations are those of the
    last units, whose backward pass comes first.
    """
    moved: list[UnitPlace] = [*["disk"] * counts.stored, *[near] * (counts.moved - counts.stored)]  # type: ignore[bad-assignment]
    device: list[UnitPlace] = ["device"] * counts.device
    optimizer: list[UnitPlace] = ["optimizer"] * (units - counts.device - counts.moved)
    places = ([*device, *moved, *optimizer], [*device, *optimizer, *moved], [*moved, *device, *optimizer])[counts.order]
    rest = units - counts.kept
    swap: list[Activations] = ["swap"] * counts.swapped
    remake: list[Activations] = ["recompute"] * (rest - counts.swapped)
    spread: list[Activations] = [
        "swap" if (i + 1) * counts.swapped // rest > i * counts.swapped // rest else "recompute" for i in range(rest)
    ]
    first = (spread, [*swap, *remake], [*remake, *swap])[counts.mixed]
    keep: list[Activations] = ["keep"] * counts.kept
    return tuple(Placement(place, one) for place, one in zip(places, [*first, *keep], strict=True))


def ranked(
    profile: Profile,
    options: Sequence[Placement],
    loads: np.ndarray,
    fixed: Sequence[float],
    *,
    budget: float,
    host: float,
) -> Iterator[tuple[float, Counts]]:
    """Counts in the order in which they are worth a try, with a bound on their step. `options` hold device and keep.

    loads: seconds of each lane (columns) for each option (rows), of one unit and step. fixed: of each lane, beside the
    units. budget, host: bytes on the device and on the host.
    """
    unit, units = profile.units[0], len(profile.units)
    row = {one: index for index, one in enumerate(options)}
    places, activations = {one.place for one in options}, {one.activations for one in options}
    grid = np.array([(a, b) for a in range(units + 1) for b in range(units + 1 - a)])
    device, moved = (np.repeat(grid[:, column], len(grid)) for column in (0, 1))
    kept, swapped = (np.tile(grid[:, column], len(grid)) for column in (0, 1))
    good = np.ones(len(device), bool)
    near: UnitPlace = "file" if "file" in places else "host"
    if not places & {near, "disk"}:
        good &= moved == 0
    if "optimizer" not in places:
        good &= device + moved == units
    if "swap" not in activations:
        good &= swapped == 0
    if "recompute" not in activations:
        good &= kept + swapped == units
    device, moved, kept, swapped = (number[good] for number in (device, moved, kept, swapped))
    remade, hosted = units - kept - swapped, units - device - moved

    costs = {place: unit_cost(unit, Placement(place, "keep")) for place in places}
    host_of = {place: cost.host for place, cost in costs.items()}
    stored = np.zeros_like(moved)
    if "disk" in places:  # as few as the host's memory allows, for the disk is slow
        need = hosted * host_of.get("optimizer", 0) + swapped * unit.resident.saved - host
        each = max(host_of.get("host", 0) - host_of["disk"], 1)
        stored = np.clip(np.ceil((need + moved * host_of.get("host", 0)) / each), 0, moved).astype(int)
        if "host" not in places:
            stored = moved

    # The load of a pair of choices is the sum of what each of them adds to (device, keep).
    base = loads[row[Placement("device", "keep")]]
    totals = np.tile(np.asarray(fixed, float) + units * base, (len(device), 1))
    for place, count in (("optimizer", hosted), (near, moved - stored), ("disk", stored)):
        if place in places:
            totals += _times(count, loads[row[Placement(place, "keep")]] - base)  # type: ignore[arg-type]
    for one, count in (("swap", swapped), ("recompute", remade)):
        if one in activations:
            totals += _times(count, loads[row[Placement("device", one)]] - base)  # type: ignore[arg-type]
    bound = totals.max(axis=1)

    given = profile.units[-1].given  # those after a unit that keeps it have it for nothing
    stays = profile.base + device * costs["device"].resident
    stays = stays + kept * (unit.resident.saved - given) + remade * (unit.boundary - given)
    if "optimizer" in places:
        stays = stays + hosted * costs["optimizer"].resident
    with np.errstate(invalid="ignore"):
        soft = np.where(np.isfinite(bound), bound + _SOFT * (totals.sum(axis=1) - bound), np.inf)
    order = np.flatnonzero((stays <= budget) & np.isfinite(bound))
    for index in order[np.argsort(soft[order], kind="stable")]:
        numbers = (device[index], moved[index], stored[index], 0, kept[index], swapped[index], 0)
        yield float(bound[index]), Counts(*(int(number) for number in numbers))


def _times(count: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """count x seconds, where none of something infinite is nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(count[:, None] == 0, 0.0, count[:, None] * seconds[None, :])


def neighbours(counts: Counts) -> Iterator[Counts]:
    """Counts that differ a little."""
    for more, other in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1), (2, 0), (-2, 0)):
        yield counts._replace(device=counts.device + more, moved=counts.moved + other)
    for more, other in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)):
        yield counts._replace(kept=counts.kept + more, swapped=counts.swapped + other)
    for more, other in ((1, -1), (-1, 1)):
        yield counts._replace(device=counts.device + more, kept=counts.kept + other)
    for more in (1, -1):
        yield counts._replace(stored=counts.stored + more)
    for number in range(3):
        yield counts._replace(order=number)
        yield counts._replace(mixed=number)


def possible(units: int, counts: Counts) -> bool:
    """Whether there are so many units."""
    return (
        min(counts.device, counts.moved, counts.kept, counts.swapped, counts.stored) >= 0
        and counts.device + counts.moved <= units
        and counts.kept + counts.swapped <= units
        and counts.stored <= counts.moved
    )


def lane_loads(profile: Profile, options: Sequence[Placement], machine: Machine, accumulation: int) -> np.ndarray:
    """Seconds of a step on (device, up, down, host, read, write): axes unit, option, lane."""
    every = [[unit_time(unit, one, machine) for one in options] for unit in profile.units]
    filed = [one.place == "file" for one in options]
    return np.array([[_load(times, accumulation, far) for times, far in zip(row, filed, strict=True)] for row in every])


def _load(times: UnitTime, batches: int, filed: bool) -> tuple[float, ...]:
    return (
        batches * (times.forward + times.backward) + times.update,
        batches * ((0.0 if filed else 2 * times.slot) + times.swap_up) + times.refresh,
        batches * (times.swap_down + (0.0 if filed else times.gradients)),
        times.host,
        times.read + (batches * 2 * times.slot if filed else 0.0),
        times.write + (batches * times.gradients if filed else 0.0),
    )

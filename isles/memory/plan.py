"""A memory plan: the placement of every unit, its costs, and the model, batch and machine that it was made for.

A plan is data. It can be written as JSON and read back, shown as a table, and drawn as a trace for chrome://tracing or
ui.perfetto.dev. `PlanMismatch` refuses to run it with another model, batch or machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from isles.base.parsing import parse_json
from isles.memory.config import Update
from isles.memory.costs import ACTIVATIONS, CODES, TIERS, Placement, Profile, unit_cost
from isles.memory.lanes import LANES, LaneTimeline
from isles.network.machines import Machine

_FORMAT = 1


class InfeasibleBudget(ValueError):
    """No plan fits. device_bytes, host_bytes: the least that any plan of the method needs."""

    def __init__(self, message: str, *, device_bytes: int, host_bytes: int) -> None:
        super().__init__(message)
        self.device_bytes, self.host_bytes = device_bytes, host_bytes


class PlanMismatch(ValueError):
    """A plan was made for another model, batch or machine."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The result of `search.Search`.

    placements: of every unit, in the order of the forward pass; names: of the units. peak: bytes that the run stays
    within; budget: bytes that it was allowed. step: simulated seconds of a step. bound: lower bound on the seconds of
    all plans of the method, from the load of the busiest lane. busy: seconds per step that each lane works. host_bytes,
    disk_bytes: bytes on host and disk. floors: seconds of simple plans; None: the plan does not fit. made_for: digests
    of the model, the batch and the machine. machine: its name; "": the plan was made without one. shared: number of
    ddp workers, each of which keeps and updates the host states of 1/shared of every unit.
    """

    placements: tuple[Placement, ...]
    names: tuple[str, ...]
    method: str
    update: Update
    accumulation: int
    budget: int
    peak: int
    step: float
    bound: float
    busy: Mapping[str, float]
    host_bytes: int
    disk_bytes: int
    floors: Mapping[str, float | None] = field(default_factory=dict)
    made_for: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    shared: int = 1

    @property
    def gap(self) -> float:
        """The step's excess over the bound, as a share: the plan is at most this much slower than the fastest."""
        return self.step / self.bound - 1 if self.bound else 0.0

    @property
    def short(self) -> str:
        """Runs of equal choices, such as 4xDK 8xOR."""
        runs: list[tuple[int, str]] = []
        for placement in self.placements:
            if runs and runs[-1][1] == placement.short:
                runs[-1] = (runs[-1][0] + 1, placement.short)
            else:
                runs.append((1, placement.short))
        return " ".join(f"{count}x{code}" for count, code in runs)

    def check(self, profile: Profile, machine: Machine | None = None) -> None:
        """Raise PlanMismatch if the model, the batch, or the machine (if given) differs from the plan's."""
        advice = {
            "model": "make a plan for this model, or run the plan's",
            "batch": "plan again with this batch, its tokens and its number format",
            "machine": "plan again for this machine",
        }
        for key, digest in digests(profile, machine).items():
            planned = self.made_for.get(key)
            if planned is not None and planned != digest:
                raise PlanMismatch(f"memory.plan was made for another {key}: {advice[key]}")
        if len(self.placements) != len(profile.units):
            raise PlanMismatch(
                f"memory.plan has {len(self.placements)} units, the model {len(profile.units)}: {advice['model']}"
            )

    def to_json(self) -> str:
        table = asdict(self) | {"format": _FORMAT, "placements": [astuple(placement) for placement in self.placements]}
        return json.dumps(table, indent=1)


def from_json(text: str, source: str = "memory.plan") -> MemoryPlan:
    """Parse a plan. The ValueError for an invalid plan is one line that begins with `source`."""
    try:
        table = parse_json(text)
        if table.pop("format") != _FORMAT:
            raise ValueError(
                "it was written by another version of isles; make it again with `isles plan memory --json`"
            )
        placements = tuple(Placement(tier, activations) for tier, activations in table.pop("placements"))
        if any(placement.tier not in TIERS or placement.activations not in ACTIVATIONS for placement in placements):
            raise ValueError("a choice is none of this version's; make it again with `isles plan memory --json`")
        return MemoryPlan(placements=placements, **(table | {"names": tuple(table["names"])}))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: no plan of memory ({error}); make one with `isles plan memory --json`") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def digests(profile: Profile, machine: Machine | None) -> dict[str, str]:
    """Digests of the model, the batch and the machine of a plan. They leave out measured seconds, which vary."""
    units = [(unit.params, unit.weights, unit.states) for unit in profile.units]
    saved = [
        (unit.moved, unit.resident.saved, unit.device_copy.saved, unit.boundary, unit.resident.casts)
        for unit in profile.units
    ]
    by_name = {
        "model": _digest((units, profile.ends.params, profile.ends.weights, profile.ends.states)),
        "batch": _digest((saved, profile.batch, profile.tokens, profile.autocast)),
    }
    return by_name if machine is None else by_name | {"machine": _digest(astuple(replace(machine, name="")))}


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def why(placement: Placement) -> str:
    """The choice in words."""
    tier = {
        "device": "all on the device",
        "optimizer": "states on the host, updated there",
        "host": "weights and states on the host, brought for each pass",
        "disk": "weights on the host, states on disk",
        "file": "weights, gradients and states on disk",
    }[placement.tier]
    activations = {"keep": "saved", "swap": "swapped to the host", "recompute": "recomputed in the backward pass"}
    return f"{tier}; activations {activations[placement.activations]}"


def table(plan: MemoryPlan, profile: Profile) -> list[dict[str, Any]]:
    """One row per unit: its placement, the bytes on the device between its passes, and the bytes moved in a step."""
    rows = []
    for unit, placement in zip(profile.units, plan.placements, strict=True):
        cost = unit_cost(unit, placement)
        fetched, sent = 2 * cost.fetched * plan.accumulation, 0 if cost.on_device else cost.sent
        up = cost.refreshed + cost.swap * plan.accumulation + (0 if cost.filed else fetched)
        down = (cost.swap + (0 if cost.filed else sent)) * plan.accumulation
        rows.append(
            {
                "unit": unit.name,
                "tier": CODES[placement.tier],
                "activations": CODES[placement.activations],
                "device": cost.resident + (cost.gradients if cost.on_device else 0),
                "saved": cost.backward_end - cost.backward,
                "up": up,
                "down": down,
                "host": cost.host,
                "disk": cost.disk,
                "read": cost.read + (fetched if cost.filed else 0),
                "written": cost.written + (sent if cost.filed else 0),
                "why": why(placement),
            }
        )
    return rows


def trace(timeline: LaneTimeline) -> str:
    """The timeline in Chrome's trace format, one row per lane."""
    rows = {name: number for number, name in enumerate(LANES)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in rows.items()
    ]
    spans = [
        {"ph": "X", "pid": 0, "tid": rows[lane], "ts": start * 1e6, "dur": seconds * 1e6, "name": name}
        for lane, start, seconds, name in timeline.spans
    ]
    return json.dumps({"traceEvents": names + spans})


def choices(tiers: Iterable[str], activations: Sequence[str]) -> tuple[Placement, ...]:
    """All pairs of a tier and a kind of activations."""
    return tuple(Placement(tier, kind) for tier in tiers for kind in activations)  # type: ignore[arg-type]

"""A plan of memory: what is chosen for every unit, what it takes, and what it was made for.

A plan is data: it is written as JSON, read back, shown as a table, and drawn as a trace for chrome://tracing or
ui.perfetto.dev. `PlanMismatch` refuses to run it with another model, batch or machine than it was made for.
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
    """No plan fits. device_bytes, host_bytes: the least that some plan of the method needs."""

    def __init__(self, message: str, *, device_bytes: int, host_bytes: int) -> None:
        super().__init__(message)
        self.device_bytes, self.host_bytes = device_bytes, host_bytes


class PlanMismatch(ValueError):
    """A plan that was made for something else than what is to run."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What `search.Search` found.

    placements: a choice for every unit, in the order of the forward pass; names: of the units. peak: bytes that the run
    keeps within; budget: bytes that it might have taken. step: seconds of one, simulated. bound: no plan of the method
    is faster, by the load of the busiest lane. busy: seconds of a step that each lane works. host_bytes, disk_bytes:
    beside the device. floors: seconds of simple plans, None where one does not fit. made_for: digests of the model, the
    batch and the machine. machine: its name; "" for a plan that was made without one. shared: workers of
    ddp that each keep and update the host states of 1/shared of every unit.
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
        """How much longer than the bound the step is at most, as a share."""
        return self.step / self.bound - 1 if self.bound else 0.0

    @property
    def short(self) -> str:
        """Runs of equal choices, such as 4xDK 8xOR."""
        runs: list[tuple[int, str]] = []
        for one in self.placements:
            if runs and runs[-1][1] == one.short:
                runs[-1] = (runs[-1][0] + 1, one.short)
            else:
                runs.append((1, one.short))
        return " ".join(f"{count}x{what}" for count, what in runs)

    def check(self, profile: Profile, machine: Machine | None = None) -> None:
        """PlanMismatch where the model, the batch, or the machine (if one is given) is another than the plan's."""
        mends = {
            "model": "make a plan for this model, or run the plan's",
            "batch": "plan again with this batch, its tokens and its number format",
            "machine": "plan again for this machine",
        }
        for key, digest in digests(profile, machine).items():
            planned = self.made_for.get(key)
            if planned is not None and planned != digest:
                raise PlanMismatch(f"memory.plan was made for another {key}: {mends[key]}")
        if len(self.placements) != len(profile.units):
            raise PlanMismatch(
                f"memory.plan has {len(self.placements)} units, the model {len(profile.units)}: {mends['model']}"
            )

    def to_json(self) -> str:
        table = asdict(self) | {"format": _FORMAT, "placements": [astuple(one) for one in self.placements]}
        return json.dumps(table, indent=1)


def from_json(text: str, source: str = "memory.plan") -> MemoryPlan:
    """The plan in the text. ValueError, one line that begins with `source`, where it is none."""
    try:
        table = parse_json(text)
        if table.pop("format") != _FORMAT:
            raise ValueError(
                "it was written by another version of isles; make it again with `isles plan memory --json`"
            )
        placements = tuple(Placement(tier, activations) for tier, activations in table.pop("placements"))
        if any(one.tier not in TIERS or one.activations not in ACTIVATIONS for one in placements):
            raise ValueError("a choice is none of this version's; make it again with `isles plan memory --json`")
        return MemoryPlan(placements=placements, **(table | {"names": tuple(table["names"])}))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: no plan of memory ({error}); make one with `isles plan memory --json`") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def digests(profile: Profile, machine: Machine | None) -> dict[str, str]:
    """What a plan is made for. Measured seconds are left out: they differ from one measurement to the next."""
    units = [(unit.params, unit.weights, unit.states) for unit in profile.units]
    saved = [
        (unit.moved, unit.resident.saved, unit.device_copy.saved, unit.boundary, unit.resident.casts)
        for unit in profile.units
    ]
    made = {
        "model": _digest((units, profile.ends.params, profile.ends.weights, profile.ends.states)),
        "batch": _digest((saved, profile.batch, profile.tokens, profile.autocast)),
    }
    return made if machine is None else made | {"machine": _digest(astuple(replace(machine, name="")))}


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
    """A row a unit: what is chosen, the bytes on the device between its passes, and what moves in a step."""
    rows = []
    for unit, one in zip(profile.units, plan.placements, strict=True):
        cost = unit_cost(unit, one)
        fetched, sent = 2 * cost.fetched * plan.accumulation, 0 if cost.on_device else cost.sent
        up = cost.refreshed + cost.swap * plan.accumulation + (0 if cost.filed else fetched)
        down = (cost.swap + (0 if cost.filed else sent)) * plan.accumulation
        rows.append(
            {
                "unit": unit.name,
                "tier": CODES[one.tier],
                "activations": CODES[one.activations],
                "device": cost.resident + (cost.gradients if cost.on_device else 0),
                "saved": cost.backward_end - cost.backward,
                "up": up,
                "down": down,
                "host": cost.host,
                "disk": cost.disk,
                "read": cost.read + (fetched if cost.filed else 0),
                "written": cost.written + (sent if cost.filed else 0),
                "why": why(one),
            }
        )
    return rows


def trace(timeline: LaneTimeline) -> str:
    """The timeline in Chrome's trace format, a row a lane."""
    rows = {name: number for number, name in enumerate(LANES)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in rows.items()
    ]
    spans = [
        {"ph": "X", "pid": 0, "tid": rows[lane], "ts": start * 1e6, "dur": seconds * 1e6, "name": what}
        for lane, start, seconds, what in timeline.spans
    ]
    return json.dumps({"traceEvents": names + spans})


def choices(tiers: Iterable[str], activations: Sequence[str]) -> tuple[Placement, ...]:
    """Every pair of the two."""
    return tuple(Placement(tier, one) for tier in tiers for one in activations)  # type: ignore[arg-type]

"""Made-up models for the planner: blocks of random size on a machine whose device holds a part of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from isles.memory.costs import Ends, Passes, Placement, Profile, Transient, UnitProfile, least_peak
from isles.memory.lanes import LaneRun
from isles.network.machines import MACHINES, Machine

NOTHING = Ends(
    params=0,
    weights=0,
    states=0,
    buffers=0,
    before=0,
    top=0,
    bottom=0,
    top_gradients=0,
    bottom_gradients=0,
    carried=0,
    flops=0.0,
)


def block(rng: random.Random, name: str) -> UnitProfile:
    """50M to 300M parameters in mixed precision (2 bytes of weight and gradient, 12 of state), 0.2 to 2 GiB saved."""
    params, forward = int(rng.uniform(50e6, 300e6)), rng.uniform(0.01, 0.05)
    saved = int(rng.uniform(0.2, 2.0) * 2**30)
    boundary, working = int(saved * rng.uniform(0.02, 0.1)), int(saved * rng.uniform(0.1, 0.5))
    passes = Passes(
        saved=saved,
        casts=0,
        keep=Transient(saved // 10, working),
        recompute=Transient(saved // 10, saved - boundary + working),
    )
    return UnitProfile(
        name=name,
        params=params,
        weights=2 * params,
        states=12 * params,
        moved=2 * params,
        boundary=boundary,
        resident=passes,
        device_copy=passes,
        flops=1.0,
        forward=forward,
        backward=2 * forward,
    )


def uniform(profile: Profile, tier: str, activations: str) -> tuple[Placement, ...]:
    return (Placement(tier, activations),) * len(profile.units)  # type: ignore[arg-type]


def instance(
    rng: random.Random, count: int, *, equal: bool, tight: tuple[float, float] = (0.05, 0.8)
) -> tuple[Profile, Machine]:
    """A model of `count` blocks, and a device that holds a share in `tight` of what is between the least and all."""
    first = block(rng, "0")
    units = [first, *(replace(first, name=str(k)) if equal else block(rng, str(k)) for k in range(1, count))]
    made = Profile(model="made up", units=tuple(units), ends=NOTHING, stream=0, batch=1, tokens=1, autocast="none")
    full, least = (
        least_peak(made, uniform(made, "device", "keep")),
        least_peak(made, uniform(made, "host", "recompute")),
    )
    link = rng.choice([6e9, 12e9, 22e9, 50e9])
    machine = replace(
        MACHINES["A100-40"],
        device_bytes=least + (full - least) * rng.uniform(*tight),
        up=link,
        down=link,
        up_both=link,
        down_both=link,
        host_update=rng.choice([0.5e9, 2e9, 5e9]),
        device_rate=1.5e12,
        host_bytes=1e15,
        disk_read=2e9,
        disk_write=1.5e9,
        disk_bytes=1e15,
    )
    return made, machine


def activations_instance(rng: random.Random, count: int, *, equal: bool) -> tuple[Profile, Machine]:
    """As `instance`, where activations alone decide: 0 to 70 % of what lies between recomputing and keeping all."""
    made, machine = instance(rng, count, equal=equal)
    least, full = (least_peak(made, uniform(made, "device", one)) for one in ("recompute", "keep"))
    return made, replace(machine, device_bytes=least + (full - least) * rng.uniform(0.0, 0.7))


def priority_gains(update: str) -> list[float]:
    """Simulated first come / priority of 40 models of 12 blocks whose optimizer is on the host, on machines on which
    each lane takes about as long as the device.
    """
    rng, gains = random.Random(3), []
    for _ in range(40):
        made, machine = instance(rng, 12, equal=True)
        unit = made.units[0]
        device, moved = 12 * 4 * unit.forward, 12 * unit.moved
        up, down = (moved / (device * rng.uniform(0.3, 1.0)) for _ in range(2))
        host = 12 * unit.params / (device * rng.uniform(0.4, 1.1))
        machine = replace(machine, up=up, down=down, up_both=up, down_both=down, host_update=host)
        plan = uniform(made, "optimizer", "recompute")
        first, ours = (
            LaneRun(made, plan, machine, budget=math.inf, update=update, first_come=come).play().step  # type: ignore[arg-type]
            for come in (True, False)
        )
        gains.append(first / ours)
    return gains

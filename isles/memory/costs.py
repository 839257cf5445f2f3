"""The costs of a model's blocks: bytes on the device and on the host, and seconds of every lane, for each choice.

Choices for a block's parameters and optimizer states (`MemoryTier`):

    device     D    parameters and states are on the device, which updates them
    optimizer  O    the device has a copy of the weights; the host has the master weights and the states, and updates
    host       H    as O, but the copy is fetched for each pass and dropped after it
    disk       N    as H, with the states in a file
    file       F    weights, gradients and states in a file: for a machine whose RAM is the device

Choices for the tensors that its forward pass saves for the backward pass (`Activations`): keep K, swap to the host S,
recompute R.

The bytes of one block in a step (`stream`: the tensor between two blocks, counted once for all):

    forward    requests   saved tensors + forward's transients (R: its input + transients)
               frees      the transients; S: the saved tensors too, once they are on the host
    backward   requests   S: saved tensors; R: recomputed tensors; backward's transients; its gradients
               frees      all of that but the gradients; O, H, N: also the gradients, once they are on the host; D: also
                          the gradients, if they were added to those of another batch of the step
    step       frees      the gradients of D

Units: bytes and seconds. Parameters are counted in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from isles.network.machines import Machine

MemoryTier = Literal["device", "optimizer", "host", "disk", "file"]
Activations = Literal["keep", "swap", "recompute"]
TIERS: tuple[MemoryTier, ...] = get_args(MemoryTier)
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
CODES: dict[str, str] = dict(zip((*TIERS, *ACTIVATIONS), "DOHNFKSR", strict=True))
SLOTS = 2
"""The most units with updates between memory and the disk at a time: one is read while another is updated and written.
"""


_ROUNDED = 16384  # bytes that a unit's tensors take in addition, because each begins at a page


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice for one unit."""

    tier: MemoryTier
    activations: Activations

    @property
    def short(self) -> str:
        """Two letters, such as DK."""
        return CODES[self.tier] + CODES[self.activations]


def tiers_of(machine: Machine, disk: float) -> set[MemoryTier]:
    """The tiers of a machine with this many bytes of disk. A machine whose RAM is the device has no host tier."""
    if machine.host_bytes:
        return {"device", "optimizer", "host", *(("disk",) if disk else ())}
    return {"device", *(("file",) if disk else ())}


class Transient(NamedTuple):
    """Bytes that exist only while a unit's forward or backward pass runs."""

    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What a unit's forward and backward pass take on the device, in bytes.

    saved: storages that forward saves for backward, with its input, but without parameters, casts and inputs shared
    with other blocks. casts: autocast's copies of float32 weights. They stay until the forward pass of the whole model
    ends, or until the unit's backward pass if its activations are saved. keep: transients if the activations are saved
    (or swapped). recompute: transients if they are recomputed, with the recomputed tensors.
    """

    saved: int
    casts: int
    keep: Transient
    recompute: Transient


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProfile:
    """One block (`isles.memory.profile` measures it).

    params: numbers. weights, states: bytes of all parameters and of their optimizer's state; gradients have the
    weights' bytes. shared_input: bytes of its input that the unit before also saves, as for a residual block that ends
    with its activation. moved: bytes of the weights as O, H and N fetch them; under bfloat16 autocast their matrices
    and the gradients of these are bfloat16. boundary: bytes of its input. resident, device_copy: its passes on the
    weights themselves (D) and on the device copy (O, H, N). flops: of the forward pass; backward counts twice that.
    forward, backward: measured seconds; 0: computed from flops. shared: data parallel workers, each of which keeps and
    updates 1/shared of the host's part; peer_rate: bytes per second that they send each other. averaged: workers whose
    gradients the plan averages before the update; 1: the plan does not count an average.
    """

    name: str
    params: int
    weights: int
    states: int
    moved: int
    boundary: int
    resident: Passes
    device_copy: Passes
    flops: float
    forward: float = 0.0
    backward: float = 0.0
    shared: int = 1
    peer_rate: float = math.inf
    averaged: int = 1
    shared_input: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """The rest of the model, always on the device: the bottom, before the first block (embedding), and the top, after
    the last one (norm, head, loss).

    weights, states, buffers: bytes. before: bytes that stay from before the first block until the end of the backward
    pass. top: transients of both passes after the last block. bottom: transients of the backward pass before the first.
    top_gradients, bottom_gradients: bytes of gradients that each leaves on the parameters. carried: bytes that wait
    from the top to the bottom, such as the head's part of a tied matrix's gradient. flops: forward, of both.
    """

    params: int
    weights: int
    states: int
    buffers: int
    before: int
    top: int
    bottom: int
    top_gradients: int
    bottom_gradients: int
    carried: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model at one batch: its units in the order of the forward pass.

    stream: bytes of the largest tensor between units. batch, tokens: sequences and tokens of each; autocast: "none" or
    "bf16". model: a name to show. in_flight: the most passes that have run forward and wait for their backward pass;
    more than one in a stage of a pipeline. held: bytes that each of them has on the device outside the units.
    """

    model: str
    units: tuple[UnitProfile, ...]
    ends: Ends
    stream: int
    batch: int
    tokens: int
    autocast: str
    in_flight: int = 1
    held: int = 0

    @property
    def params(self) -> int:
        """All parameters, in numbers."""
        return self.ends.params + sum(unit.params for unit in self.units)

    @property
    def base(self) -> int:
        """Bytes on the device that no plan moves."""
        per_pass = (self.ends.before + self.held) * self.in_flight
        return self.ends.weights + self.ends.states + self.ends.buffers + per_pass + self.stream


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The bytes of one unit under one choice, in the terms of the module."""

    resident: int  # weights and states that stay on the device
    slot: int  # the copy that is fetched for a pass; 0: no copy
    forward: int
    forward_end: int
    casts_end: int  # part of `forward` that is freed when the forward pass of the whole model ends
    swap: int  # moved to the host after forward, and back before backward
    backward: int  # without swap and gradients
    backward_end: int
    gradients: int  # allocated by a backward pass
    on_device: bool  # updated on the device, so its gradients stay until the step
    refreshed: int  # sent up after an update on the host
    host: int
    disk: int
    fetched: int  # bytes transferred for `slot`
    sent: int  # bytes of `gradients` at their destination
    read: int  # from the disk, for an update on the host
    written: int  # to the disk, after it
    filed: bool  # `fetched` is read from the disk, and `sent` is written to it


def tail(tier: MemoryTier, first: Activations, units: int, keep: int) -> tuple[Placement, ...]:
    """All units in one tier; the last `keep` units, whose backward passes come first, keep their activations."""
    return (Placement(tier, first),) * (units - keep) + (Placement(tier, "keep"),) * keep


@lru_cache(maxsize=65536)
def unit_cost(unit: UnitProfile, placement: Placement) -> UnitCost:
    """The bytes of a choice."""
    tier, recompute = placement.tier, placement.activations == "recompute"
    device, is_optimizer, filed, disk = tier == "device", tier == "optimizer", tier == "file", tier == "disk"
    passes = unit.resident if device else unit.device_copy
    transient = passes.recompute if recompute else passes.keep
    saved = unit.boundary if recompute else passes.saved
    swap = passes.saved if placement.activations == "swap" else 0
    released = passes.casts if recompute else 0
    gradients = unit.weights if device else unit.moved
    return UnitCost(
        resident=unit.weights + unit.states if device else unit.moved if is_optimizer else 0,
        slot=0 if device or is_optimizer else unit.moved,
        forward=saved + passes.casts + transient.forward,
        forward_end=transient.forward,
        casts_end=released,
        swap=swap,
        backward=transient.backward,
        backward_end=transient.backward + saved + passes.casts - released,
        gradients=gradients,
        on_device=device,
        refreshed=unit.moved if is_optimizer else 0,
        host=swap + (0 if device or filed else 2 * unit.weights + (0 if disk else unit.states // unit.shared)),
        disk=unit.states if disk else 2 * unit.weights + unit.states if filed else 0,
        fetched=0 if device or is_optimizer else unit.weights if filed else unit.moved,
        sent=unit.weights if filed else gradients,
        read=unit.states if disk else 2 * unit.weights + unit.states if filed else 0,
        written=unit.states if disk else unit.weights + unit.states if filed else 0,
        filed=filed,
    )


def unit_costs(profile: Profile, placements: Sequence[Placement]) -> list[UnitCost]:
    """The costs of a plan's units. A tensor that a unit shares with the one before, which keeps it, is counted once."""
    costs = [unit_cost(unit, placement) for unit, placement in zip(profile.units, placements, strict=True)]
    for index, unit in enumerate(profile.units[1:], 1):
        before, activations = placements[index - 1].activations, placements[index].activations
        if unit.shared_input and before == "keep" and activations != "swap":
            cost = costs[index]
            forward, backward_end = cost.forward - unit.shared_input, cost.backward_end - unit.shared_input
            costs[index] = replace(cost, forward=forward, backward_end=backward_end)
    return costs


@dataclass(frozen=True, slots=True)
class UnitTime:
    """The seconds of one unit under one choice, by lane. Transfers have the rate of a link with one busy direction."""

    forward: float
    backward: float  # with recomputation
    update: float  # on the device
    slot: float  # on the lane `read` if the unit is in a file, else on the lane `up`
    swap_up: float
    swap_down: float
    gradients: float  # on the lane `write` if the unit is in a file, else on the lane `down`
    refresh: float
    host: float
    read: float
    write: float
    exchange: float  # the average with other workers


@lru_cache(maxsize=65536)
def unit_time(unit: UnitProfile, placement: Placement, machine: Machine) -> UnitTime:
    """The seconds of a choice on the machine; infinite if its link or disk has no rate."""
    cost = unit_cost(unit, placement)
    forward = unit.forward or machine.seconds(unit.flops)
    backward = unit.backward or 2 * machine.seconds(unit.flops)
    touched = 2 * unit.weights + unit.weights + 2 * unit.states  # weights and states read and written, gradients read
    return UnitTime(
        forward=forward,
        backward=backward + (forward if placement.activations == "recompute" else 0.0),
        update=touched / machine.device_rate if cost.on_device else 0.0,
        slot=_over(cost.fetched, machine.disk_read if cost.filed else machine.up),
        swap_up=_over(cost.swap, machine.up),
        swap_down=_over(cost.swap, machine.down),
        gradients=0.0 if cost.on_device else _over(cost.sent, machine.disk_write if cost.filed else machine.down),
        refresh=_over(cost.refreshed, machine.up),
        host=0.0 if cost.on_device else unit.params / unit.shared / machine.host_update + _swapped_between(unit),
        read=_over(cost.read, machine.disk_read),
        write=_over(cost.written, machine.disk_write),
        exchange=_mean(unit.weights, unit.averaged, unit.peer_rate),
    )


def _swapped_between(unit: UnitProfile) -> float:
    """Seconds for sending gradients to the workers that update a shared unit, and the updated weights back. They count
    with the update, because nothing else happens to the unit meanwhile. If the plan counts the average too, they are
    part of that: both together take its bytes.
    """
    return 0.0 if unit.averaged > 1 else _mean(unit.weights, unit.shared, unit.peer_rate)


def _mean(nbytes: float, workers: int, rate: float) -> float:
    """Seconds in which each worker sends the others the parts that they sum, and receives the sums."""
    return 2 * nbytes * (workers - 1) / workers / rate


def _over(nbytes: int, rate: float) -> float:
    return nbytes / rate if nbytes and rate else math.inf if nbytes else 0.0


def ends_seconds(profile: Profile, machine: Machine) -> float:
    """Head, loss and embedding, forward and backward, of one batch."""
    return 3 * machine.seconds(profile.ends.flops)


def ends_exchange(profile: Profile) -> float:
    """Seconds of averaging the gradients outside the units, if the plan averages those of the units."""
    first = profile.units[0]
    return _mean(profile.ends.weights, first.averaged, first.peer_rate)


def ends_update(profile: Profile, machine: Machine) -> float:
    """Seconds of the update on the device of the parameters outside of all units."""
    return (3 * profile.ends.weights + 2 * profile.ends.states) / machine.device_rate


def host_bytes(profile: Profile, placements: Sequence[Placement]) -> int:
    """Bytes of the host that a plan uses."""
    costs = [unit_cost(unit, placement) for unit, placement in zip(profile.units, placements, strict=True)]
    slots = max((cost.read for cost in costs if not cost.filed), default=0)
    return SLOTS * slots + sum(cost.host for cost in costs)


def staging(profile: Profile, placements: Sequence[Placement]) -> int:
    """Staging memory on the device for units in a file: `SLOTS` updates, the weights of one unit and the gradients of
    one unit, and a second copy of the gradients while they become those of the parameters.
    """
    costs = [unit_cost(unit, placement) for unit, placement in zip(profile.units, placements, strict=True)]
    return max(
        (SLOTS * (cost.read + _ROUNDED) + 3 * (cost.fetched + _ROUNDED) for cost in costs if cost.filed), default=0
    )


def disk_bytes(profile: Profile, placements: Sequence[Placement]) -> int:
    """Bytes of the file that a plan uses."""
    return sum(unit_cost(unit, placement).disk for unit, placement in zip(profile.units, placements, strict=True))


def least_peak(profile: Profile, placements: Sequence[Placement], accumulation: int = 1) -> int:
    """Peak bytes on the device in a step without prefetching: the least memory in which the plan runs."""
    costs, ends = unit_costs(profile, placements), profile.ends
    used = peak = profile.base + staging(profile, placements) + sum(cost.resident for cost in costs)
    waiting = sum(cost.forward - cost.forward_end - cost.swap for cost in costs) + ends.top + ends.top_gradients
    used += (profile.in_flight - 1) * (waiting + ends.carried)
    for batch in range(min(accumulation, 2)):
        for cost in costs:
            peak = max(peak, used + cost.slot + cost.forward)
            used += cost.forward - cost.forward_end - cost.swap
        peak = max(peak, used + ends.top + ends.top_gradients + ends.carried)
        used += ends.carried + (0 if batch else ends.top_gradients) - sum(cost.casts_end for cost in costs)
        for cost in reversed(costs):
            peak = max(peak, used + cost.slot + cost.swap + cost.backward + cost.gradients)
            used += cost.swap + cost.backward - cost.backward_end
            if cost.on_device and not batch:
                used += cost.gradients
        peak = max(peak, used + ends.bottom + ends.bottom_gradients)
        used += (0 if batch else ends.bottom_gradients) - ends.carried
    return peak

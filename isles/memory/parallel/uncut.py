"""Data parallelism in which every device computes the whole model: out of core (KARMA's), and fully sharded (fsdp)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from isles.memory.costs import Placement, Profile, host_bytes, least_peak, tail
from isles.memory.lanes import LaneRun
from isles.memory.parallel.decoder import STATE, WEIGHT, HalfDecoder, profile_of
from isles.memory.parallel.job import ParallelJob, ParallelWay, deepest, divisors
from isles.memory.searching.counts import Counts, expand, possible
from isles.memory.searching.trials import PlanTrials
from isles.memory.serial import LaneTimeline
from isles.network.machines import Machine

OUT_OF_CORE, OUT_OF_CORE_SHARED = "out of core, states on every host", "out of core, states shared"
_TRIED = 8  # plans that are simulated of every accumulation
_UPDATED = 3 * WEIGHT + 2 * STATE  # bytes that an update on the device reads and writes, a parameter

PassPlan = tuple[int, tuple[Placement, ...]]
"""Accumulated batches, and the plan of each."""


# ---------------------------------------------------------------------------------------------------------------------
# Out of core


def out_of_core(job: ParallelJob, *, shared: bool) -> ParallelWay:
    """Every device trains the whole model under a plan of memory with early updates; gradients are averaged block by
    block while the backward pass goes on, between the hosts. shared: every host keeps and updates the states of its
    share of every block (`memory.shard`); else of all of it, as KARMA's do.
    """
    name = OUT_OF_CORE_SHARED if shared else OUT_OF_CORE
    found = planned(job, shared=shared)
    largest = deepest(lambda shape: _out_of_core_fits(job, shape, shared), job.shape)
    if found is None:
        return ParallelWay(name=name, largest=largest)
    accumulation, plan = found
    made = averaged(job, job.shape, accumulation, shared=shared)
    timeline = played(job, found, shared=shared)
    runs = " ".join(f"{count}x{choice}" for choice, count in Counter(one.short for one in plan).items())
    return ParallelWay(
        name=name,
        how=f"{runs}{f', {accumulation} batches a step' if accumulation > 1 else ''}",
        step=timeline.step,
        device_bytes=int(timeline.peak),
        host_bytes=host_bytes(made, plan),
        bound_by=busiest(timeline),
        largest=largest,
    )


def averaged(job: ParallelJob, shape: HalfDecoder, accumulation: int, *, shared: bool) -> Profile:
    """The model at one device's batch, with the mean of its gradients."""
    made = profile_of(shape, job.sequences // job.devices // accumulation)
    rate = job.mean_rate(1)
    units = (
        replace(unit, averaged=job.devices, peer_rate=rate, shared=job.devices if shared else job.per_host)
        for unit in made.units
    )
    return replace(made, units=tuple(units))


@lru_cache(maxsize=64)
def planned(job: ParallelJob, *, shared: bool) -> PassPlan | None:
    """The fastest plan of a family that is small enough to be played for every link; None where none fits."""
    best, fastest = None, math.inf
    for accumulation in divisors(job.sequences // job.devices):
        made = averaged(job, job.shape, accumulation, shared=shared)
        tried = PlanTrials(made, job.machine, disk=0.0, update="early", accumulation=accumulation)
        tried.first(_family(len(made.units)), _TRIED, below=fastest)
        for plan, seconds in tried.seconds.items():
            if seconds < fastest:
                best, fastest = (accumulation, plan), seconds
    return best


def played(job: ParallelJob, found: PassPlan, *, shared: bool) -> LaneTimeline:
    """A step of it with this job's links."""
    accumulation, plan = found
    made = averaged(job, job.shape, accumulation, shared=shared)
    return LaneRun(made, plan, job.machine, update="early", accumulation=accumulation).play()


def _family(units: int) -> Iterator[tuple[Placement, ...]]:
    """Some counts of each choice, the order that the search takes too."""
    some = sorted({0, units // 8, units // 4, units // 2, 7 * units // 8, units})
    few = sorted({0, units // 24, units // 12, units // 6, units // 3, units})
    for device in some:
        for moved in some:
            for kept in few:
                for swapped in few:
                    counts = Counts(device, moved, 0, 0, kept, swapped, 0)
                    if possible(units, counts):
                        yield expand(units, counts)


def _out_of_core_fits(job: ParallelJob, shape: HalfDecoder, shared: bool) -> bool:
    accumulation, here = job.sequences // job.devices, job.machine
    made = averaged(job, shape, accumulation, shared=shared)
    plan = (Placement("host", "recompute"),) * len(made.units)
    return least_peak(made, plan, accumulation) <= here.device_bytes and host_bytes(made, plan) <= here.host_bytes


def busiest(timeline: LaneTimeline) -> str:
    """The lane that works longest, with its share of the step."""
    name = max(timeline.busy, key=lambda lane: timeline.busy[lane])
    return f"{name} {timeline.busy[name] / timeline.step:.0%}"


# ---------------------------------------------------------------------------------------------------------------------
# Fully sharded


def fully_sharded(job: ParallelJob) -> ParallelWay:
    """Every device keeps 1/devices of weights, gradients and states; a block's weights are gathered for each of its
    passes, its gradients summed to their owners. Played as a plan whose "host" is the other devices: up is gathering,
    down is summing, and the update is that of the device's own share.
    """
    name, best = "fsdp", ParallelWay(name="fsdp")
    largest = deepest(lambda shape: _least_remade(job, shape, job.sequences // job.devices) is not None, job.shape)
    for accumulation in divisors(job.sequences // job.devices):
        remade = _least_remade(job, job.shape, accumulation)
        if remade is None:
            continue
        made, here = _sharded(job, job.shape, accumulation)
        plan = tail("host", "recompute", len(made.units), len(made.units) - remade)
        timeline = LaneRun(made, plan, here, update="early", accumulation=accumulation).play()
        if best.step is None or timeline.step < best.step:
            batches = f", {accumulation} batches a step" if accumulation > 1 else ""
            best = ParallelWay(
                name=name,
                how=f"{remade} of {len(made.units)} made again{batches}",
                step=timeline.step,
                device_bytes=int(timeline.peak),
                bound_by=busiest(timeline).replace("up", "gathering").replace("down", "summing"),
            )
    return replace(best, largest=largest)


def _sharded(job: ParallelJob, shape: HalfDecoder, accumulation: int) -> tuple[Profile, Machine]:
    made = profile_of(shape, job.sequences // job.devices // accumulation)
    share = (WEIGHT + WEIGHT + STATE) * shape.layers * shape.block_params // job.devices
    ends = replace(  # the embedding is gathered for the whole step
        made.ends,
        weights=made.ends.weights // job.devices,
        states=made.ends.states // job.devices,
        buffers=made.ends.buffers + share + made.ends.weights,
    )
    units = tuple(replace(unit, shared=job.devices) for unit in made.units)
    rate = job.mean_rate(1) * job.devices / (job.devices - 1)  # the own share is there
    here = replace(
        job.machine,
        up=rate,
        down=rate,
        up_both=rate,
        down_both=rate,
        host_update=job.machine.device_rate / _UPDATED,
        host_bytes=math.inf,
    )
    return replace(made, units=units, ends=ends), here


def _least_remade(job: ParallelJob, shape: HalfDecoder, accumulation: int) -> int | None:
    """Blocks that must be made again to fit; None: not even all of them do."""
    made, _ = _sharded(job, shape, accumulation)
    units = len(made.units)

    def fits(remade: int) -> bool:
        plan = tail("host", "recompute", units, units - remade)
        return least_peak(made, plan, accumulation) <= job.machine.device_bytes

    return least(units, fits)


def least(most: int, fits: Callable[[int], bool]) -> int | None:
    """The least number up to `most` that fits, where every larger one does too; None: not even `most`."""
    found = bisect_left(range(most + 1), True, key=fits)
    return found if found <= most else None

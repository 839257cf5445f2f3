"""The sheets of `isles plan parallel` and `isles plan explain karma-hybrid`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from isles.network.machines import MACHINES, Machine
from isles.papers.memory_parallel import (
    HalfDecoder,
    ParallelJob,
    ParallelPlan,
    fastest_hybrid,
    fully_sharded,
    hybrid,
    out_of_core,
    planned,
    played,
)
from isles.report.panels import Chart, Point, Table, chart_panel, coloured
from isles.report.sheet import Sheet


def compared(job: ParallelJob) -> list[ParallelPlan]:
    """Each at its fastest; those that fit first, the fastest first."""
    found = [
        out_of_core(job, shared=False),
        out_of_core(job, shared=True),
        fully_sharded(job),
        hybrid(job, tensor=False),
    ]
    found += [hybrid(job, tensor=True)] if job.per_host > 1 else []
    return sorted(found, key=lambda plan: (plan.step is None, plan.step or 0.0))


def turning(
    first: Callable[[float], float | None], second: Callable[[float], float | None], rates: Sequence[float]
) -> float | None:
    """The rate of a link from which on `first` is no slower than `second`. first, second: seconds of a step of two
    ways at a rate, None where a way does not fit.

    Both are asked at `rates`, which rise. Where `first` is slower at one of them and not at the next, the answer lies
    between the two, by a straight line of log(first / second) over log(rate). `first` was never slower: the lowest
    rate. It is slower at all of them: infinite. One of the ways does not fit: None.
    """
    gaps = []
    for rate in rates:
        one, other = first(rate), second(rate)
        if one is None or other is None:
            return None
        gaps.append(math.log(one / other))
    for (low, before), (high, after) in itertools.pairwise(zip(rates, gaps, strict=True)):
        if before > 0 >= after:
            return math.exp(math.log(low) + before / (before - after) * math.log(high / low))
    return rates[0] if gaps[0] <= 0 else math.inf


_COUNTED = (
    "Half precision: 2 bytes a parameter for weights and gradients, 12 of state; updates as soon as gradients are "
    "there, no clipping; blocks without fused attention. Nothing is measured."
)


def parallel_sheet(job: ParallelJob, network: str) -> Sheet:
    """All ways on `job`, the fastest first. network: its name in words."""
    found, shape = compared(job), job.shape
    fits = [plan for plan in found if plan.step is not None]
    heads = ["way", "how", "step s", "device GB", "host GB", "works most", "largest, B parameters"]
    return Sheet(
        name="plan-parallel",
        title=f"{shape.params / 1e9:.3g}B parameters on {job.devices} x {job.machine.name}, {network}",
        subtitle=f"{job.sequences} sequences of {shape.sequence} a step; {job.per_host} to a host",
        what="Each way at its fastest. Largest: the deepest model of this width that it can train.",
        table=Table(heads=heads, rows=[_row(plan) for plan in found], names=2),
        data={
            "network": network,
            "rows": [
                {
                    "way": plan.name,
                    "how": plan.how,
                    "step_seconds": plan.step,
                    "device_bytes": plan.device_bytes,
                    "host_bytes": plan.host_bytes,
                    "largest_parameters": plan.largest,
                }
                for plan in found
            ],
        },
        notes=[
            f"First is {fits[0].name}: {fits[0].how}." if fits else "None of them fits: more devices, or more memory.",
            _COUNTED,
            "Out of core: a plan of memory on every device, gradients averaged block by block between the hosts. "
            "Pipelines: one sequence a microbatch, replayed with their messages; at most 16 stages.",
        ],
    )


def _row(plan: ParallelPlan) -> list[str]:
    if plan.step is None or plan.device_bytes is None:
        return [plan.name, "does not fit", "", "", "", "", f"{plan.largest / 1e9:.3g}"]
    sizes = [f"{nbytes / 1e9:.3g}" for nbytes in (plan.device_bytes, plan.host_bytes)]
    return [plan.name, plan.how, f"{plan.step:.4g}", *sizes, plan.bound_by, f"{plan.largest / 1e9:.3g}"]


# ---------------------------------------------------------------------------------------------------------------------
# KARMA's claim

_MODELS = {
    "Megatron-LM 2.5B": HalfDecoder(layers=54, width=1920, heads=20),
    "Megatron-LM 8.3B": HalfDecoder(layers=72, width=3072, heads=32),
    "Turing-NLG 17B": HalfDecoder(layers=78, width=4256, heads=28),
}
_DEVICES, _PER_HOST, _EACH = 256, 4, (2, 8)
_GB, _GBIT = 1e9, 1e9 / 8
_USABLE = 0.93  # of the device's memory: the rest is lost between pieces
_LINKS = (6.25, 12.5, 25, 50, 100, 200, 400)  # Gbit/s of a host
_BUSES = (3, 6, 12, 24, 48, 96)  # GB/s of a device's link to its host


def _node() -> Machine:
    """A quarter of a host with four V100: the memory and the optimizer of 384 GB and two processors are shared."""
    whole = MACHINES["V100-16"]
    return replace(
        whole,
        device_bytes=_USABLE * whole.device_bytes,
        host_bytes=whole.host_bytes / _PER_HOST,
        host_update=whole.host_update / _PER_HOST,
    )


def _job(shape: HalfDecoder, each: int) -> ParallelJob:
    size = {"devices": _DEVICES, "per_host": _PER_HOST, "sequences": each * _DEVICES}
    return ParallelJob(shape=shape, machine=_node(), link=200 * _GBIT, near=40 * _GB, **size)


def karma_hybrid() -> Sheet:
    """KARMA's out-of-core data parallelism against hybrids that cut the model, and the links at which it turns."""
    rows, data, lines = [], [], dict[str, list[Point]]()
    for name, shape in _MODELS.items():
        for each in _EACH:
            job = _job(shape, each)
            plain, shared = (out_of_core(job, shared=one) for one in (False, True))
            cut, sharded = fastest_hybrid(job, tensor=True), fully_sharded(job)
            curves = _curves(job)
            link = turning(curves["out of core"], curves["hybrid"], _LINKS)
            bus = turning(_over_bus(job), lambda _, step=cut.step: step, _BUSES)
            plans = (plain, shared, cut, sharded)
            seconds = ["does not fit" if plan.step is None else f"{plan.step:.3g}" for plan in plans]
            rows.append([name, str(each), *seconds, cut.how.partition(",")[0], _rate(link), _rate(bus)])
            data.append(
                {
                    "model": name,
                    "sequences_a_device": each,
                    "step_seconds": {plan.name: plan.step for plan in plans},
                    "turns_at_gbit_s_of_a_host": _number(link),
                    "turns_at_gb_s_of_a_bus": _number(bus),
                }
            )
            if each == _EACH[0] and name != "Megatron-LM 2.5B":
                for plan, curve in curves.items():
                    lines[f"{name}, {plan}"] = [(rate, step) for rate in _LINKS if (step := curve(rate)) is not None]
    heads = ["model", "sequences a GPU", "out of core s", "states shared s", "hybrid s", "fsdp s"]
    heads += ["hybrid is", "turns at Gbit/s", "turns at GB/s"]
    chart = Chart(title="Step", x_label="Gbit/s of a host", lines=coloured(lines), log_x=True, log_y=True)
    return Sheet(
        name="karma-hybrid",
        title="Out of core and data parallel, or cut",
        subtitle="After KARMA (arXiv 2008.11421): 64 hosts of four V100 with 16 GB, 200 Gbit/s a host, 12 GB/s a bus",
        what="Seconds of a step. Turns: the rates from which out of core with shared states is faster than the hybrid.",
        table=Table(heads=heads, rows=rows),
        data={"rows": data},
        panels=[replace(chart_panel(chart), heading="Seconds of a step by the links between hosts")],
        notes=[
            _COUNTED,
            "Hybrid: tensor x pipeline x data parallel, the fastest split of the 256; between GPUs of a host 40 GB/s. "
            "KARMA compares itself with Megatron-LM's own hybrid and with ZeRO; its figures have no digits to check.",
            "Where it turns, the plan is that of 200 Gbit/s and 12 GB/s; the hybrid is chosen again for every link.",
            "Out of core: states and updates once a host, weights and gradients once a GPU. Shared: states over all.",
        ],
    )


def _curves(job: ParallelJob) -> dict[str, Callable[[float], float | None]]:
    """Seconds of a step by Gbit/s of a host."""
    found = planned(job, shared=True)

    def at(rate: float) -> ParallelJob:
        return replace(job, link=rate * _GBIT)

    return {
        "out of core": cache(lambda rate: None if found is None else played(at(rate), found, shared=True).step),
        "hybrid": cache(lambda rate: fastest_hybrid(at(rate), tensor=True).step),
    }


def _over_bus(job: ParallelJob) -> Callable[[float], float | None]:
    """Seconds of a step out of core by GB/s of a device's link to its host."""
    found = planned(job, shared=True)

    def at(rate: float) -> float | None:
        link = rate * _GB
        both = link * job.machine.up_both / job.machine.up
        here = replace(job.machine, up=link, down=link, up_both=both, down_both=both)
        return None if found is None else played(replace(job, machine=here), found, shared=True).step

    return at


def _rate(rate: float | None) -> str:
    if rate is None:
        return ""
    return "never" if math.isinf(rate) else f"{rate:.0f}"


def _number(rate: float | None) -> float | None:
    return None if rate is None or math.isinf(rate) else rate

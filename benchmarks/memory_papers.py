"""What the papers on memory report, beside what the planner's model says on their machines. Nothing is measured here.

    AutoHete    arXiv 2503.01890: 4 A100 of 40 GB; decoders of 2B to 20B, sequences of 1024, batches of 8, mixed
                precision Adam (2 bytes of weight and gradient, 12 of state), no clipping, so updates are early
    KARMA       arXiv 2008.11421: instances of its kind (activations alone; what a device holds and what a link carries
                drawn at random), for its figures have no digits to compare with

Two constants are fitted to each of AutoHete's two testbeds, and no others: the share of the peak that blocks reach, and
the parameters a second of the host's optimizer. All ratios of a testbed come out of that one pair.

    python -m benchmarks.memory_papers [--write]        --write: put the tables into docs/memory.md
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks._pages import written
from isles.memory.costs import Ends, Passes, Placement, Profile, Transient, UnitProfile, ends_seconds, least_peak
from isles.memory.lanes import LaneRun
from isles.memory.search import Search
from isles.network.machines import MACHINES, Machine
from isles.papers.memory_parallel import WEIGHT, HalfDecoder, profile_of

GB = 1e9
SEQUENCE, BATCH, VOCABULARY = 1024, 8, 50304
USABLE = 0.93  # of the device's memory: the rest is lost between pieces


class Decoder(NamedTuple):
    layers: int
    width: int
    heads: int


ONE_GPU = {
    "2B": Decoder(40, 2048, 16),
    "4B": Decoder(20, 4096, 32),
    "6B": Decoder(30, 4096, 32),
    "8B": Decoder(40, 4096, 32),
    "10B": Decoder(32, 5120, 40),
    "12B": Decoder(38, 5120, 40),
}
FOUR_GPUS = {name: ONE_GPU[name] for name in ("4B", "6B", "10B", "12B")} | {
    "16B": Decoder(36, 6144, 48),
    "20B": Decoder(25, 8192, 64),
}
LARGER = Decoder(44, 5120, 40)  # 14B


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """GPUs of one node with the two fitted constants: mfu, and host_update, parameters a second of the whole host."""

    gpus: int
    mfu: float
    host_update: float

    @property
    def machine(self) -> Machine:
        """One GPU's share of it."""
        base = MACHINES["A100-40"]
        return replace(
            base,
            device_bytes=40 * GB * USABLE,
            mfu=self.mfu,
            device_rate=1.3e12,
            up_both=base.up,
            down_both=base.down,
            host_update=self.host_update / self.gpus,
            host_bytes=base.host_bytes / self.gpus,
        )


# The best pairs of the grids that `--fit` prints
ONE = Testbed(gpus=1, mfu=0.40, host_update=2.25e9)
FOUR = Testbed(gpus=4, mfu=0.35, host_update=7.0e9)
# mean and maximum over its models: AutoHete against ...
REPORTED = {
    (1, "ZeRO-Offload"): (1.85, 2.08),
    (1, "StrongHold"): (1.32, 1.41),
    (1, "no priority"): (1.16, 1.24),
    (4, "ZeRO-Offload"): (2.23, 2.67),
    (4, "StrongHold"): (1.44, 1.52),
    (4, "no priority"): (1.21, 1.30),
}


def decoder(shape: Decoder, gpus: int = 1) -> Profile:
    """A GPU's share of model and batch; the states are sharded over the GPUs, the weights gathered for a pass."""
    made = HalfDecoder(
        layers=shape.layers, width=shape.width, heads=shape.heads, sequence=SEQUENCE, vocabulary=VOCABULARY
    )
    gathered = WEIGHT * made.block_params if gpus > 1 else 0
    return profile_of(made, BATCH // gpus, gpus=gpus, gathered=gathered)


def uniform(made: Profile, tier: str, activations: str) -> tuple[Placement, ...]:
    return (Placement(tier, activations),) * len(made.units)  # type: ignore[arg-type]


def zero_offload(made: Profile, here: Machine) -> float:
    """Seconds of its step: all states on the host; gradients go down beside the backward pass; then the host updates
    all, half of the way up beside it. The better of with and without checkpointing. Infinite where neither fits.
    """
    best = math.inf
    for activations in ("keep", "recompute"):
        if least_peak(made, uniform(made, "optimizer", activations)) > here.device_bytes:
            continue
        passes = 3 if activations == "keep" else 4
        computing = ends_seconds(made, here) + sum(passes * here.seconds(unit.flops) for unit in made.units)
        params = sum(unit.params for unit in made.units)
        last = made.units[0].weights / here.down
        best = min(best, computing + last + params / here.host_update + params / here.up)
    return best


def played(made: Profile, here: Machine, plan: Sequence[Placement], *, first_come: bool = False) -> float:
    if least_peak(made, plan) > here.device_bytes:
        return math.inf
    return LaneRun(made, plan, here, update="early", first_come=first_come).play().step


def autohete(made: Profile, here: Machine) -> tuple[tuple[Placement, ...], float]:
    """Its plan by our search over its choices, and seconds of a step. ValueError where none fits."""
    search = Search(made, here, method="autohete", disk=0.0, update="early")
    plan = search.run().placements
    return plan, search.seconds[plan]


class Ratios(NamedTuple):
    zero_offload: float
    stronghold: float
    no_priority: float


def ratios(shape: Decoder, bed: Testbed) -> Ratios:
    """How much longer the others' steps are. StrongHold stands for itself as: all is streamed, first come."""
    made, here = decoder(shape, bed.gpus), bed.machine
    plan, ours = autohete(made, here)
    streamed = played(made, here, uniform(made, "host", "recompute"), first_come=True)
    return Ratios(zero_offload(made, here) / ours, streamed / ours, played(made, here, plan, first_come=True) / ours)


def summary(bed: Testbed, shapes: dict[str, Decoder]) -> dict[tuple[int, str], tuple[float, float]]:
    """Mean and maximum over the models that a system can train."""
    every = [ratios(shape, bed) for shape in shapes.values()]
    found = {}
    for number, name in enumerate(("ZeRO-Offload", "StrongHold", "no priority")):
        values = [one[number] for one in every if math.isfinite(one[number])]
        found[bed.gpus, name] = statistics.fmean(values), max(values)
    return found


def fitted(bed: Testbed, shapes: dict[str, Decoder]) -> float:
    """How far the worst of the six figures of a testbed is off, as a share of the reported one."""
    found = summary(bed, shapes)
    return max(
        abs(ours / theirs - 1) for key, pair in found.items() for ours, theirs in zip(pair, REPORTED[key], strict=True)
    )


# KARMA


class KarmaRow(NamedTuple):
    """Seconds of a step by each policy over those with all activations at hand; infinite where it does not fit."""

    eager: float
    recompute: float
    capacity: float
    tail: float
    planner: float
    optimum: float


KARMA = {
    "eager": "swap all, one block ahead (eager)",
    "recompute": "recompute all",
    "capacity": "swap what does not fit (capacity)",
    "tail": "keep the last that fit, recompute the rest",
    "planner": "planner",
    "optimum": "optimum over all 3^8",
}
_INSTANCES, _BLOCKS = 40, 8


def karma_instance(rng: random.Random) -> tuple[Profile, Machine]:
    """Eight blocks of 0.2 to 2 GiB on a device that holds 35 to 80 % of them, but at least what recomputing takes; over
    a link that carries them all once in 0.3 to 1.5 of the time of the computing.
    """
    units = []
    for number in range(_BLOCKS):
        saved, forward = int(rng.uniform(0.2, 2.0) * 2**30), rng.uniform(0.01, 0.05)
        boundary = int(saved * rng.uniform(0.02, 0.1))
        passes = Passes(
            saved=saved,
            casts=0,
            keep=Transient(saved // 20, saved // 10),
            recompute=Transient(saved // 20, saved - boundary + saved // 10),
        )
        units.append(
            UnitProfile(
                name=str(number),
                params=1,
                weights=2,
                states=12,
                moved=2,
                boundary=boundary,
                resident=passes,
                brought=passes,
                flops=0.0,
                forward=forward,
                backward=2 * forward,
            )
        )
    ends = Ends(**dict.fromkeys(Ends.__dataclass_fields__, 0))
    made = Profile(model="made up", units=tuple(units), ends=ends, stream=0, batch=1, tokens=1, autocast="none")
    need, least = (least_peak(made, uniform(made, "device", one)) for one in ("keep", "recompute"))
    computing = sum(unit.forward + unit.backward for unit in units)
    link = sum(unit.resident.saved for unit in units) / (computing * rng.uniform(0.3, 1.5))
    here = replace(
        MACHINES["V100-16"],
        device_bytes=max(need * rng.uniform(0.35, 0.8), 1.02 * least),
        up=link,
        down=link,
        up_both=link,
        down_both=link,
        host_bytes=math.inf,
    )
    return made, here


def karma_row(made: Profile, here: Machine) -> KarmaRow:
    """All policies on one instance."""
    saved = played(made, replace(here, device_bytes=math.inf), uniform(made, "device", "keep"))
    swap = uniform(made, "device", "swap")
    ahead = least_peak(made, swap) + max(unit.resident.saved for unit in made.units)
    eager = played(made, replace(here, device_bytes=min(ahead, here.device_bytes)), swap)
    tails = {}
    for activations in ("swap", "recompute"):
        plans = [
            (*uniform(made, "device", activations)[count:], *uniform(made, "device", "keep")[:count])
            for count in range(_BLOCKS + 1)
        ]
        seconds = [played(made, here, plan) for plan in plans]
        tails[activations] = seconds[max((k for k, one in enumerate(seconds) if math.isfinite(one)), default=0)]
    search = Search(made, here, method="karma", host=math.inf, disk=0.0)
    planned = search.seconds[search.run().placements]
    _, optimum = Search(made, here, method="karma", host=math.inf, disk=0.0).exhaustive()
    recompute = played(made, here, uniform(made, "device", "recompute"))
    every = (eager, recompute, tails["swap"], tails["recompute"], planned, optimum)
    return KarmaRow(*(seconds / saved for seconds in every))


def karma_rows() -> list[KarmaRow]:
    """All policies on all instances."""
    rng = random.Random(5)
    return [karma_row(*karma_instance(rng)) for _ in range(_INSTANCES)]


# Pages


def _off(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.0f} %"


def autohete_lines() -> Iterator[str]:
    """The table of AutoHete, in Markdown."""
    yield "| AutoHete | paper | here | off |"
    yield "|---|---|---|---|"
    for bed, shapes in ((ONE, ONE_GPU), (FOUR, FOUR_GPUS)):
        where = "1 GPU" if bed.gpus == 1 else f"{bed.gpus} GPUs"
        yield f"| **{where}**, fitted: {bed.mfu:.0%} of the peak, {bed.host_update / 1e9:g} G parameters/s | | | |"
        for (_, name), ours in summary(bed, shapes).items():
            theirs = REPORTED[bed.gpus, name]
            words = {"ZeRO-Offload": "against ZeRO-Offload", "StrongHold": "against StrongHold (our stand-in)"}
            what = words.get(name, "against itself without priority")
            pair = " / ".join(f"{value:.2f}" for value in ours)
            offs = ", ".join(_off(one, other) for one, other in zip(ours, theirs, strict=True))
            yield f"| {what}, mean / max | {theirs[0]:.2f} / {theirs[1]:.2f} | {pair} | {offs} |"
    yield from _memory_lines()


def _memory_lines() -> Iterator[str]:
    here = ONE.machine
    yield "| **memory**, nothing fitted | | | |"
    for name, theirs in (("4B", 16), ("6B", 24)):
        least = zero_offload_floor(ONE_GPU[name]) / GB
        yield f"| least memory of ZeRO-Offload, {name} | {theirs} GB | {least:.1f} GB | {_off(least, theirs)} |"
    fits, larger = (zero_offload_floor(one) / GB for one in (ONE_GPU["12B"], LARGER))
    agrees = "agrees" if fits * GB <= here.device_bytes < larger * GB else "does not agree"
    yield f"| ZeRO-Offload beyond 12B at 40 GB | out of memory | 12B {fits:.1f} GB, 14B {larger:.1f} GB | {agrees} |"
    for name in ("4B", "6B"):
        made = decoder(ONE_GPU[name])
        small = replace(here, device_bytes=12 * GB * USABLE)
        ours, theirs_seconds = autohete(made, small)[1], zero_offload(made, here)
        agrees = "agrees" if ours < theirs_seconds else "does not agree"
        yield (f"| {name}: 12 GB beat ZeRO-Offload's 40 GB | yes | {ours:.2f} s < {theirs_seconds:.2f} s | {agrees} |")
    plan, _ = autohete(decoder(ONE_GPU["4B"]), here)
    hosted = sum(one.tier != "device" for one in plan)
    yield f"| 4B: optimizers of 13 of 21 blocks on the host | 62 % | {hosted / len(plan):.0%} | does not agree |"
    yield "| PatrickStar 1.63 / 1.91 and 1.65 / 1.79 | | not modelled | |"


def zero_offload_floor(shape: Decoder) -> int:
    """The least bytes of the device that it trains in."""
    made = decoder(shape)
    return least_peak(made, uniform(made, "optimizer", "recompute"))


def karma_lines() -> Iterator[str]:
    """The table of KARMA, in Markdown: seconds over those of a device that holds everything."""
    rows = karma_rows()
    yield f"| policy, {_INSTANCES} instances of {_BLOCKS} blocks | mean | worst | does not fit |"
    yield "|---|---|---|---|"
    for name, what in KARMA.items():
        values = [getattr(row, name) for row in rows]
        good = [value for value in values if math.isfinite(value)]
        yield f"| {what} | {statistics.fmean(good):.2f} | {max(good):.2f} | {len(values) - len(good)} |"
    gaps = [row.planner / row.optimum - 1 for row in rows]
    best = sum(gap < 1e-6 for gap in gaps)
    yield ""
    mean, worst = statistics.fmean(gaps), max(gaps)
    yield f"The planner found the optimum in {best} of {len(gaps)}; mean gap {mean:.2%}, worst {worst:.2%}."


def fit() -> None:
    """Print how far every pair of constants of a grid is off."""
    grids = ((1, ONE_GPU, (1.5e9, 1.75e9, 2.0e9, 2.25e9)), (4, FOUR_GPUS, (4e9, 5e9, 6e9, 7e9)))
    for gpus, shapes, hosts in grids:
        for mfu in (0.25, 0.30, 0.35, 0.40) if gpus == 4 else (0.30, 0.35, 0.40, 0.45):
            offs = [fitted(Testbed(gpus=gpus, mfu=mfu, host_update=host), shapes) for host in hosts]
            cells = ", ".join(f"{host / 1e9:g} G/s {off:.1%}" for host, off in zip(hosts, offs, strict=True))
            print(f"{gpus} GPU(s), mfu {mfu:.2f}: worst figure off by {cells}", flush=True)


def main() -> None:
    """Print the tables, or put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/memory.md")
    parser.add_argument("--fit", action="store_true", help="show how the two constants were chosen")
    asked = parser.parse_args()
    if asked.fit:
        fit()
        return
    made = "\n".join([*autohete_lines(), "", *karma_lines()])
    print(made)
    if asked.write:
        written("memory.md", "python -m benchmarks.memory_papers --write", made)


if __name__ == "__main__":
    main()

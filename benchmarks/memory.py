"""Plans of memory: how long planning takes, and whether runs take the time that was simulated.

The device is part of this machine's RAM: blocks compute for at least 50 and 100 ms, copies and updates take at least
what they take on a machine made up so that each lane matters. Run it on a quiet machine: computing beside it makes
blocks longer than their pace.

    python -m benchmarks.memory [--times]        --times: without the first table
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace

import torch

from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.engines.base import ThreadEngine
from isles.memory.lanes import LaneRun
from isles.memory.optimizer import Managed
from isles.memory.plan import MemoryPlan, digests
from isles.memory.profile import profile
from isles.memory.search import Search
from isles.models.decoder import Decoder
from isles.models.sizes import SIZES, Shape
from isles.network.machines import MACHINES, Machine
from tests.memory.instances import priority_gains

UNITS, STEPS = 6, 6
SHAPE = Shape(d_model=128, layers=UNITS, heads=4, ffn=384, vocab=256, context=64, tie_embeddings=False)
LARGE = Shape(d_model=5120, layers=40, heads=40, ffn=13824, vocab=32000, context=4096, tie_embeddings=False)


def main() -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    if "--times" not in sys.argv:
        _planning()
    _times()
    for update in ("exact", "early"):
        gains = priority_gains(update)
        print(
            f"first come / priority, simulated, {len(gains)} profiles, {update}: mean {statistics.mean(gains):.3f}, "
            f"least {min(gains):.4f}, most {max(gains):.3f}"
        )


def _planning() -> None:
    print(f"{'model':<8}{'machine':<12}{'profile s':>10}{'search s':>10}  plan")
    for name, shape in (("eager-1B", SIZES["eager-1B"]), ("13B", LARGE)):
        for machine in ("RTX 3060", "A100-40"):
            start = time.perf_counter()
            batch = torch.empty(2, 1025, dtype=torch.int64, device="meta")
            made = profile(Decoder(shape, device="meta"), batch, autocast="bf16")
            middle = time.perf_counter()
            try:
                found = Search(made, MACHINES[machine]).run().short
            except ValueError as error:
                found = str(error)
            end = time.perf_counter()
            print(f"{name:<8}{machine:<12}{middle - start:>10.1f}{end - middle:>10.1f}  {found}")


def _plan(*pairs: tuple[str, str]) -> tuple[Placement, ...]:
    return tuple(Placement(place, one) for place, one in pairs)  # type: ignore[arg-type]


def _cases() -> list[tuple[str, tuple[Placement, ...], tuple[float, float, float]]]:
    """Name, plan, and seconds that a block's weights take up, down, and in an update."""
    return [
        ("all on the host", _plan(*[("optimizer", "keep")] * UNITS), (0.04, 0.04, 0.13)),
        ("half on the host", _plan(*[("device", "keep")] * 3, *[("optimizer", "keep")] * 3), (0.04, 0.04, 0.13)),
        ("brought, remade", _plan(*[("host", "recompute")] * UNITS), (0.08, 0.05, 0.05)),
        ("swapped", _plan(*[("device", "swap")] * 4, *[("device", "keep")] * 2), (0.04, 0.04, 0.05)),
        (
            "mixed",
            _plan(
                ("device", "recompute"),
                ("device", "swap"),
                ("host", "recompute"),
                ("host", "swap"),
                ("optimizer", "swap"),
                ("optimizer", "keep"),
            ),
            (0.07, 0.05, 0.08),
        ),
    ]


def _times() -> None:
    made = profile(Decoder(SHAPE), _batch(0))
    made = replace(made, units=tuple(replace(unit, forward=0.05, backward=0.10) for unit in made.units))
    ratios, gains = [], []
    print(f"\n{'plan':<18}{'served by':<14}{'updates':<9}{'simulated s':>12}{'measured s':>12}{'ratio':>8}")
    for name, placements, (up, down, update) in _cases():
        unit = made.units[0]
        rate = 1.0 if name != "swapped" else unit.resident.saved / unit.moved  # a block's activations take as long
        machine = replace(
            MACHINES["H100"],
            up=rate * unit.moved / up,
            down=rate * unit.moved / down,
            up_both=rate * unit.moved / up,
            down_both=rate * unit.moved / down,
            host_update=unit.params / update,
        )
        for how in ("exact", "early"):
            seconds = {}
            for first_come in (False, True):
                wanted, got = _run(made, placements, machine, how, first_come)
                seconds[first_come] = got
                ratios.append(got / wanted)
                served = "first come" if first_come else "priority"
                print(f"{name:<18}{served:<14}{how:<9}{wanted:>12.3f}{got:>12.3f}{got / wanted:>8.3f}", flush=True)
            gains.append(seconds[True] / seconds[False])
    print(f"\nload of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())} (1, 5 and 15 minutes)")
    print(f"measured / simulated: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")
    print(f"first come / priority, measured: {', '.join(f'{gain:.2f}' for gain in gains)}")


def _run(
    made: Profile, placements: tuple[Placement, ...], machine: Machine, update: str, first_come: bool
) -> tuple[float, float]:
    budget = int(least_peak(made, placements) * 1.15)
    timeline = LaneRun(
        made,
        placements,
        machine,
        budget=budget,
        update=update,  # type: ignore[arg-type]
        first_come=first_come,
        steps=STEPS,
    ).play()
    plan = MemoryPlan(
        placements=placements,
        names=tuple(unit.name for unit in made.units),
        method="auto",
        update=update,  # type: ignore[arg-type]
        accumulation=1,
        budget=budget,
        peak=budget,
        step=timeline.step,
        bound=0.0,
        busy={},
        host_bytes=0,
        disk_bytes=0,
        made_for=digests(made, None),
    )
    model = Decoder(SHAPE)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = ThreadEngine(pace=True, first_come=first_come)
    marks = []
    with Managed(plan, model, inner, profile=made, machine=machine, engine=engine) as optimizer:
        for step in range(STEPS):
            model(_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
    return timeline.step, (marks[-1] - marks[1]) / (STEPS - 2)


def _batch(step: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(step))


if __name__ == "__main__":
    main()

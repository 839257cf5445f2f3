"""The pictures of docs/memory.md: a step's lanes, and peaks against budgets, planned and measured.

python -m benchmarks.memory_pictures
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from isles.memory.engines.base import Inline
from isles.memory.lanes import LaneRun, SimulatedSpan
from isles.memory.meter import MemoryMeter
from isles.memory.optimizer import Managed
from isles.memory.plan import InfeasibleBudget
from isles.memory.profile import profile
from isles.memory.search import METHODS, Search
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.network.machines import MACHINES
from isles.papers.memory_parallel import HalfDecoder, profile_of
from isles.report.draw.png import picture
from isles.report.panels import Chart, Lane, Lanes, LaneSegment, Panel, Polyline

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
LAYERS, GB, MB = 8, 1e9, 1e6
LARGE = HalfDecoder(layers=LAYERS, width=2560, heads=20)
SMALL = Shape(d_model=128, layers=LAYERS, heads=4, ffn=384, vocab=256, context=64, tie_embeddings=False)
CARD = MACHINES["RTX 3060"]
_LOOKS = {"forward": "compute", "backward": "other", "top": "away", "update": "away"}
_KEYS = [
    ("compute", "forward; update on the host"),
    ("other", "backward; pale: head and loss"),
    ("transfer", "weights up, gradients down"),
    ("blocked", "activations"),
]


def main() -> None:
    """Write both."""
    torch.set_num_threads(1)
    (PICTURES / "memory-lanes.png").write_bytes(lanes_picture())
    (PICTURES / "memory-budget.png").write_bytes(budget_picture())


def lanes_picture() -> bytes:
    """A step of the same plan, served by priority and first come."""
    made = profile_of(LARGE, 8)
    plan = Search(made, CARD, budget=7 * GB).run()
    played = [
        LaneRun(made, plan.placements, CARD, budget=plan.peak, first_come=first_come, steps=4, spans=True).play()
        for first_come in (False, True)
    ]
    shown = 2 * max(timeline.step for timeline in played)
    panels = [
        Panel(heading=f"{how}: {timeline.step:.2f} s a step", picture=_lanes(timeline.spans, shown), keys=_KEYS)
        for how, timeline in zip(("What is needed first goes first", "First come, first served"), played, strict=True)
    ]
    sizes = f"{LAYERS} blocks of {LARGE.block_params / 1e6:.0f}M parameters, 8 x 1024 tokens"
    return picture("Two steps on an RTX 3060 with 7 GB, simulated", f"{sizes}: {plan.short}; exact updates", panels)


def _lanes(spans: Sequence[SimulatedSpan], seconds: float) -> Lanes:
    """From the second step's first forward pass on."""
    begin = [span.start for span in spans if span.what == "forward 0"][1]
    seen = [span for span in spans if begin <= span.start and span.start + span.seconds <= begin + seconds]
    rows = [
        Lane(label=lane, segments=[_stretch(span, begin) for span in seen if span.lane == lane])
        for lane in ("device", "up", "down", "host")
    ]
    return Lanes(title="Lanes of two steps", x_label="seconds", start=0.0, end=seconds, lanes=rows)


def _stretch(span: SimulatedSpan, begin: float) -> LaneSegment:
    what, _, unit = span.what.partition(" ")
    if span.lane == "device":
        css = _LOOKS[what]
    else:
        css = "compute" if span.lane == "host" else "blocked" if what == "activations" else "transfer"
    start = span.start - begin
    return LaneSegment(start=start, end=start + span.seconds, css=css, row=0, hint=span.what, mark=unit)


def budget_picture() -> bytes:
    """Left: real runs on a CPU, a part of whose RAM is the device. Right: what budgets cost, simulated."""
    planned, measured, budgets = [], [], []
    made = profile(Decoder(SMALL), _batch(0))
    least = _least(made)
    whole = Search(made, CARD).run().peak
    for number in range(12):
        budget = least + (whole * 1.15 - least) * number / 11
        plan = Search(made, CARD, budget=budget).run()
        budgets.append((budget / MB, budget / MB))
        planned.append((budget / MB, plan.peak / MB))
        measured.append((budget / MB, _ran(plan, made) / MB))
    left = Chart(
        title="Peak",
        x_label="budget, MB",
        lines=[
            Polyline(points=budgets, css="ddp", name="budget"),
            Polyline(points=planned, css="series0", name="planned"),
        ],
        dots=measured,
    )
    made, curves = profile_of(LARGE, 8), []
    for number, method in enumerate(METHODS):
        points = []
        for budget in (2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24):
            try:
                points.append(
                    (budget, Search(made, MACHINES["RTX 4090"], method=method, budget=budget * GB).run().step)
                )
            except InfeasibleBudget:
                continue
        curves.append(Polyline(points=points, css=f"series{number}", name=method))
    right = Chart(title="Step", x_label="budget, GB", lines=curves)
    keys = [("ddp", "budget"), ("series0", "planned peak"), ("dot", "measured peak")]
    panels = [
        Panel(heading="Peak in MB against the budget, a small decoder, run", picture=left, keys=keys),
        Panel(
            heading="Seconds of a step, 0.8B on an RTX 4090, simulated",
            picture=right,
            keys=[(line.css, line.name) for line in curves],
        ),
    ]
    return picture(
        "What a budget takes, and what it costs", "A curve begins where the method's first plan fits.", panels
    )


def _least(made: object) -> float:
    try:
        Search(made, CARD, budget=1.0).run()  # type: ignore[arg-type]
    except InfeasibleBudget as error:
        return float(error.device_bytes)
    raise AssertionError


def _ran(plan: object, made: object) -> int:
    """Bytes on the device at the peak of three steps."""
    torch.manual_seed(0)
    model, meter = Decoder(SMALL), MemoryMeter()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with Managed(plan, model, inner, profile=made, machine=CARD, engine=Inline(), meter=meter) as optimizer:  # type: ignore[arg-type]
        for step in range(3):
            with meter:
                model(_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak


def _batch(step: int) -> torch.Tensor:
    return torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(step))


if __name__ == "__main__":
    main()

"""What the planner says of waiting, against the virtual clock: each method exchanges, on lines without jitter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import isles
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.models.sizes import matrices, parameters
from isles.network.links import Links
from isles.network.planner.costs import Lines
from isles.network.planner.forms import form_of
from isles.network.planner.job import Job
from isles.network.planner.planner import utilisation
from isles.network.planner.waits import for_buckets
from isles.network.planner.ways import WAYS, Way

C, H, WORKERS = 0.1, 10, 4  # seconds of a step
SHAPE = Shape(d_model=64, layers=4, heads=2, ffn=128, vocab=64, context=16, tie_embeddings=True)
SETTLED, MEASURED = 3, 2  # rounds


def settings(way: Way) -> dict[str, Any]:
    """What `replicas` would hold."""
    words = [part.split(" = ") for part in way.settings.split(", ") if part]
    given = {key: json.loads(value) if value[0].isdigit() else value for key, value in words}
    return given | ({"start_compress": 0} if "window" in given else {}) | ({} if way.every else {"sync_every": H})


def measured(way: Way, links: Links, step_seconds: float) -> float:
    """Share of the time spent computing, of the slowest worker."""
    every = way.every or H

    def worker(world: Mesh) -> float:
        model = Decoder(SHAPE, device="cpu")
        method = isles.method(way.method)
        inner, options = torch.optim.SGD(model.parameters(), lr=1e-3), settings(way)
        if way.method == "ist":  # the planner's: Adam's moments travel, and every round sends as much
            inner, options = torch.optim.AdamW(model.parameters()), {**options, "sampler": "stratified"}
        if way.method == "dct-dp":  # thresholds that are always new let as many entries through as planned
            options = {**options, "threshold_interval": 1}
        draw = torch.Generator().manual_seed(world.rank)
        optimizer = method(model, inner, world.outer, **options)
        world.transport.compute(100.0 - world.transport.now())  # all begin at once
        begun = 0.0
        for step in range((SETTLED + MEASURED) * every):
            begun = world.transport.now() if step == SETTLED * every else begun
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
            optimizer.zero_grad()
        return world.transport.now() - begun

    return (
        MEASURED
        * every
        * step_seconds
        / max(isles.run_virtual(worker, WORKERS, links=links, step_seconds=step_seconds))
    )


EVEN = Links(bandwidth=1e7, latency=0.05)
UNEVEN = Links(bandwidth=4e6, downlink=2e6, latency=[[0.05 if a < 2 else 0.3 for b in range(4)] for a in range(4)])
WAITING = [way for way in WAYS if way.method != "ddp"]  # here all of the model is one bucket


@pytest.mark.parametrize(
    ("way", "links", "off"),
    [
        *((way, EVEN, 0.012) for way in WAITING),
        *((way, UNEVEN, 0.06) for way in WAITING if way.codec in ("none", "fp4")),
    ],
    ids=lambda given: f"{given.method} {given.settings}" if isinstance(given, Way) else "",
)
def test_waiting_is_that_of_the_virtual_clock(way: Way, links: Links, off: float) -> None:
    """Of uneven lines the planner takes the slowest worker, or the mean over its partners, for all."""
    job = Job(
        parameters=parameters(SHAPE),
        layers=SHAPE.layers,
        step_seconds=C,
        workers=WORKERS,
        links=links,
        matrices=matrices(SHAPE),
    )
    said = utilisation(job, way, way.every or H, Lines.of(links, range(WORKERS)))
    assert said == pytest.approx(measured(way, links, C * way.holds(job)), abs=off)


def test_buckets_leave_as_the_backward_pass_fills_them() -> None:
    """Four alike: the first is full after a quarter of the backward pass, so three quarters of that hide the rest."""
    buckets, seconds, lines = 4, 3.0, Lines.of(Links(bandwidth=1e9), range(2))
    job = Job(
        parameters=buckets * 25 * 2**20 / 4, layers=1, step_seconds=seconds, workers=2, links=Links(bandwidth=1e9)
    )
    whole = 32 * job.parameters / 1e9  # 0.84 s, of which 2 s x 3 / 4 hide all but the last bucket
    assert for_buckets(job, lines, form_of("none", job), 1) == pytest.approx(whole / buckets)
    slow = Lines.of(Links(bandwidth=1e8), range(2))
    assert for_buckets(job, slow, form_of("none", job), 1) == pytest.approx(10 * whole - 1.5)

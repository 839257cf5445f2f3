"""The papers' calculations about pipelines, with what they leave open said: SWARM's square-cube law (arXiv 2301.11913),
Protocol Models over 80 Mbit/s (arXiv 2506.01260), DiLoCoX over 1 Gbit/s (arXiv 2506.21263), NoLoCo's layouts (arXiv
2506.10911, Table 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isles.network.links import Links
from isles.network.routing.orders import in_flight, orders
from isles.network.routing.replay import TaskSeconds, in_order, replay
from isles.network.routing.routes import fixed_routes
from isles.network.routing.wires import MessageLines, Sizes
from isles.network.topology import Topology

V100, TOKENS = 12e12, 512
"""FLOP/s (float32) that a stage reaches, and tokens of a microbatch, of SWARM's devices."""
_LINE = 500e6  # bits per second


def stage_utilisation(width: int, round_trip: float) -> float:
    """Share of the time that one layer of `width` computes, forward and backward, with nothing hidden. round_trip:
    seconds.
    """
    computing = 72 * width**2 * TOKENS / V100
    sending = 2 * TOKENS * width * 8 / _LINE  # 8 bits an entry, both ways
    return computing / (computing + sending + round_trip)


@dataclass(frozen=True, slots=True)
class ProtocolModel:
    """A decoder in stages: its width, and FLOPs of a stage and token forward."""

    name: str
    stages: int
    width: int
    flops: float


PROTOCOL = (
    ProtocolModel("2B, 8 layers", 8, 4096, 2 * 2e9 / 8),
    ProtocolModel("8B, 32 layers", 16, 4096, 2 * 8e9 / 16),
)
MICROBATCHES, PROTOCOL_TOKENS, PROTOCOL_RATE = 16, 4096, 50e12
_LATENCY = 0.020


def step_of(model: ProtocolModel, rate: float, share: float) -> tuple[float, float]:
    """Seconds of a step and the share of it that the stages wait, at `rate` bits per second with `share` of the stream
    on the wire.
    """
    forward = model.flops * PROTOCOL_TOKENS / PROTOCOL_RATE
    seconds = TaskSeconds(
        forward=[forward] * model.stages, loss=[0.0] * model.stages, backward=[2 * forward] * model.stages
    )
    stream = round(PROTOCOL_TOKENS * model.width * share * 2)
    sizes = Sizes(forward=stream + 4 * PROTOCOL_TOKENS, home=stream, backward=stream)
    routes = fixed_routes(1, model.stages, MICROBATCHES, home=False)
    wire = MessageLines(Topology(model.stages, Links(bandwidth=rate, latency=_LATENCY)), sizes)
    played = replay(routes, seconds, wire, in_order(orders(routes, in_flight("auto", 1, model.stages))))
    return played.makespan, sum(played.bubbles.values()) / model.stages


@dataclass(frozen=True, slots=True)
class DilocoxCase:
    """A model of the paper. flat: tokens a second of its DiLoCoX, taken for those of computing. allreduce: those of
    AllReduce, which give the tokens of a step. compression: of a round against half precision, by low rank and int4.
    """

    name: str
    parameters: float
    flat: float
    allreduce: float
    compression: float
    printed: Mapping[str, float] = field(default_factory=dict)


DILOCOX = (
    DilocoxCase("1.3B", 1.3e9, 23_880, 745, 4.0, {"AllReduce": 745, "DiLoCoX": 23_880}),
    DilocoxCase(
        "107B",
        107e9,
        3_728,
        10.4,
        8.0,
        {"AllReduce": 10.4, "no compression": 1_168, "no overlap": 2_197, "DiLoCoX": 3_728},
    ),
)
_EVERY, _GIGABIT = 125, 1e9


def rates(case: DilocoxCase) -> dict[str, float]:
    """Tokens a second of AllReduce, DiLoCoX without compression, without overlap, and whole."""
    whole = 2 * case.parameters * 8 / _GIGABIT  # half precision, sent once and got once at a time: a pair's ring
    tokens = whole / (1 / case.allreduce - 1 / case.flat)
    computing = _EVERY * tokens / case.flat
    small = whole / case.compression
    seconds = {
        "AllReduce": _EVERY * (tokens / case.flat + whole),
        "no compression": max(computing, whole),
        "no overlap": computing + small,
        "DiLoCoX": max(computing, small),
    }
    return {name: _EVERY * tokens / took for name, took in seconds.items()}


A100, MFU = 312e12, 0.4
NOLOCO_TOKENS = {"small": 2**19, "medium": 2**20, "large": 2**21}
NOLOCO = (
    ("small", 8, 1, (25.5, 27.6, 27.3)),
    ("small", 4, 2, (25.7, 26.8, 26.4)),
    ("small", 8, 2, (25.5, 27.6, 27.2)),
    ("small", 16, 2, (25.5, 29.7, 29.1)),
    ("medium", 8, 2, (19.6, 21.0, 20.5)),
    ("medium", 16, 2, (19.6, 21.2, 20.7)),
    ("medium", 16, 4, (19.6, 21.0, 20.9)),
    ("large", 16, 4, (16.1, 18.0, 17.5)),
)
"""Size, replicas, stages, perplexity of FSDP, DiLoCo and NoLoCo on Reddit."""

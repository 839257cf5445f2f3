"""The papers' calculations about pipelines, with what they leave open said: SWARM's square-cube law (arXiv 2301.11913),
Protocol Models over 80 Mbit/s (arXiv 2506.01260), DiLoCoX over 1 Gbit/s (arXiv 2506.21263), NoLoCo's layouts (arXiv
2506.10911, Table 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.network.links import Links
from isles.network.routing.replay import TaskSeconds, fixed_step
from isles.network.routing.wires import Sizes

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
    played = fixed_step(MICROBATCHES, seconds, "auto", Links(bandwidth=rate, latency=_LATENCY), sizes)
    return played.makespan, sum(played.bubbles.values()) / model.stages


DILOCOX_PARAMETERS, DILOCOX_TIMES = 107e9, 357
"""What the abstract says: the model, and how many times as fast as AllReduce over 1 Gbit/s."""
DILOCOX_EVERY, DILOCOX_SMALLER = 125, 8
"""Ours: H, and how many times fewer bytes a round has than in half precision (int4, half of them left by the rank)."""


def dilocox_times() -> dict[str, float]:
    """How many times as fast as AllReduce: DiLoCoX without compression, without overlap, and whole, which is set."""
    whole = 2 * DILOCOX_PARAMETERS * 8 / 1e9  # half precision, sent once and got once at a time: a pair's ring
    computing = whole / (DILOCOX_TIMES - 1)  # of a step: all that is left of it where the exchange is hidden
    round_of = whole / DILOCOX_EVERY
    seconds = {
        "AllReduce": computing + whole,
        "no compression": max(computing, round_of),
        "no overlap": computing + round_of / DILOCOX_SMALLER,
        "DiLoCoX": max(computing, round_of / DILOCOX_SMALLER),
    }
    return {name: seconds["AllReduce"] / took for name, took in seconds.items()}


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

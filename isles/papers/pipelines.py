"""The papers' calculations about pipelines, with the assumptions that they leave open: SWARM's square-cube law (arXiv
2301.11913), Protocol Models over 80 Mbit/s (arXiv 2506.01260), DiLoCoX over 1 Gbit/s (arXiv 2506.21263), NoLoCo's
layouts (arXiv 2506.10911, Table 2).

`isles plan explain swarm-square-cube`, `protocol-80mbit`, `dilocox-speedup` and `noloco-table2` print them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isles.models.config import ModelConfig
from isles.models.cuts import decoder_costs
from isles.models.sizes import SIZES
from isles.network.links import Links
from isles.network.routing.replay import Sizes, TaskSeconds, fixed_step
from isles.report.panels import Table
from isles.report.sheet import Sheet

if TYPE_CHECKING:
    from isles.plan.splits import SplitsQuestion

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


_WIDTHS, _ROUND_TRIPS = (768, 4096, 12_288), (0.0, 0.010, 0.050, 0.100, 0.200)


def square_cube() -> Sheet:
    """Utilisation of a stage a device, by width and round trip."""
    rows, data = [], []
    for round_trip in _ROUND_TRIPS:
        ours = [100 * stage_utilisation(width, round_trip) for width in _WIDTHS]
        rows.append([f"{1000 * round_trip:.0f}", *(f"{own:.3g}" for own in ours)])
        data.append({"round_trip_seconds": round_trip, "ours": ours})
    return Sheet(
        name="swarm-square-cube",
        title="Computing of a stage grows faster than what it sends",
        subtitle="A layer a V100, 500 Mbit/s, after SWARM (arXiv 2301.11913): per cent computing",
        what="Computing n^3, sending n^2: the wider the model, the busier the stage.",
        table=Table(heads=["round trip, ms", *(f"d = {width}" for width in _WIDTHS)], rows=rows),
        data={"widths": list(_WIDTHS), "rows": data},
        notes=[
            f"72 d^2 FLOPs a token and layer at {V100 / 1e12:.0f} TFLOP/s, 8 bits an entry both ways, "
            f"microbatches of {TOKENS} tokens, nothing hidden: computing / (computing + sending + round "
            "trip). The paper has a table of its own, of models with other layers a stage and batches.",
        ],
    )


def eighty_mbit() -> Sheet:
    """Subspace boundaries against whole ones."""
    rows, data = [], []
    for model in PROTOCOL:
        for label, rate, share in (
            ("k = d / 100, 80 Mbit/s", 80e6, 0.01),
            ("whole, 80 Mbit/s", 80e6, 1.0),
            ("whole, 100 Gbit/s", 100e9, 1.0),
        ):
            seconds, bubble = step_of(model, rate, share)
            rows.append([model.name, label, f"{seconds:.4g}", f"{100 * bubble:.1f}"])
            data.append({"model": model.name, "boundary": label, "step_seconds": seconds, "bubble": bubble})
    return Sheet(
        name="protocol-80mbit",
        title="A pipeline over home connections, with a hundredth of the bytes",
        subtitle="After Protocol Models (arXiv 2506.01260): boundaries of k of d numbers a token",
        what="Seconds of a step by the replay of its tasks and messages.",
        table=Table(heads=["model", "boundary", "step s", "bubble %"], rows=rows, names=2),
        data={"rows": data},
        notes=[
            "Paper: up to 100 times less traffic, 80 Mbit/s on a par with 100 Gbit/s. Its table of seconds is not "
            "published in readable form, so none is beside ours.",
            f"Ours: {MICROBATCHES} microbatches of {PROTOCOL_TOKENS} tokens, bfloat16, "
            f"{PROTOCOL_RATE / 1e12:.0f} TFLOP/s reached a stage, 20 ms one way, the ids of 4 bytes beside.",
        ],
    )


def speedup() -> Sheet:
    """DiLoCoX against AllReduce over 1 Gbit/s, and its parts."""
    found, stated = dilocox_times(), DILOCOX_TIMES
    rows = [[label, f"{times:.0f}"] for label, times in found.items()]
    return Sheet(
        name="dilocox-speedup",
        title="DiLoCoX over 1 Gbit/s",
        subtitle=f"107B, after the abstract of arXiv 2506.21263, which says {stated} times for the whole",
        what="AllReduce: half-precision gradients every step. DiLoCoX: H steps, a round late, low rank and int4.",
        table=Table(heads=["what", "times AllReduce"], rows=rows),
        data={"rows": [{"what": label, "times": times} for label, times in found.items()]},
        notes=[
            f"The {stated} times are no prediction: they set a step's computing, for it hides its exchange. AllReduce "
            "sends all of it after each step. The parts are predicted from that, by a ring of two over the line.",
            f"Ours: H = {DILOCOX_EVERY}; a round has {DILOCOX_SMALLER} times fewer bytes than in half precision.",
        ],
    )


def table2() -> Sheet:
    """Every row of NoLoCo's Table 2: what a worker holds, sends and waits for."""
    from isles.plan.splits import WorkerSplit, plan_split

    rows, data = [], []
    for size, replicas, stages, printed in NOLOCO:
        one = plan_split(_requests(size, replicas, stages), WorkerSplit(replicas=replicas, stages=stages, inner=1))
        shares = [f"{100 * part / one.step:.1f}" for part in (one.computing, one.bubble)]
        sizes = [f"{nbytes / 1e9:.3g}" for nbytes in (one.stage_bytes, one.outer_bytes, one.memory)]
        paper = " / ".join(f"{value:g}" for value in printed)
        rows.append([f"{size}, {replicas} x {stages}", paper, *shares, *sizes])
        data.append(
            {
                "model": size,
                "replicas": replicas,
                "stages": stages,
                "paper_perplexity_fsdp_diloco_noloco": list(printed),
                "utilisation": one.computing / one.step,
                "bubble": one.bubble / one.step,
                "stage_bytes": one.stage_bytes,
                "outer_bytes": one.outer_bytes,
                "memory_bytes": one.memory,
            }
        )
    heads = ["model, replicas x stages", "paper: FSDP / DiLoCo / NoLoCo", "computing %", "bubble %"]
    heads += ["GB/step to stages", "GB/step to replicas", "memory GB"]
    return Sheet(
        name="noloco-table2",
        title="NoLoCo's data parallel x pipeline rows",
        subtitle="Table 2 of arXiv 2506.10911, Reddit; what such workers hold, send and wait for on 10 Gbit/s, 1 ms",
        what="Perplexities are the paper's; the rest is ours: random routes, 8 microbatches, H = 50.",
        table=Table(heads=heads, rows=rows),
        data={"rows": data},
        notes=[
            f"Ours: A100s at {100 * MFU:.0f} % of their peak, float32 streams and weights, AdamW. "
            "Perplexities are not computed here: they take the training."
        ],
    )


def _requests(size: str, replicas: int, stages: int) -> SplitsQuestion:
    from isles.plan.question import PlanQuestion
    from isles.plan.splits import SplitsQuestion

    workers, tokens = replicas * stages, NOLOCO_TOKENS[size]
    costs = decoder_costs(SIZES[f"noloco-{size}"])
    question = PlanQuestion(
        model=ModelConfig(size=f"noloco-{size}"),
        step_seconds=3 * costs.total * tokens / workers / (A100 * MFU),
        workers=workers,
        network="10Gbit/s, 1ms",
        tokens=25_000 * tokens,
        step_tokens=tokens,
    )
    routing = "random" if stages > 1 else "fixed"
    return SplitsQuestion(
        question=question, routing=routing, microbatches=8, method="noloco", replicas={"sync_every": 50}, boundary={}
    )

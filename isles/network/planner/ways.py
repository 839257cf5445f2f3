"""The methods of this library that are planned with, each with the settings that matter on slow lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from isles.network.planner.closed import OVERLAP, Closed, gradients, momentum, rounds, swaps, units
from isles.network.planner.costs import library_mean
from isles.network.planner.forms import LARGEST, LOW_RANK, MOMENTUM, RANK_4, UNITS, PlannedForm
from isles.network.planner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A method with its settings ("key = value, ..."). codec: in what form it sends, see `forms.form_of`. kind: 0
    gradients every step, 1 answers of the same round, 2 a round late or of some entries, 3 a part of the model at each
    worker. holds: the share of the model that a worker holds and computes. vectors: float32 copies of the
    model that it keeps. exchanges: see `isles.network.planner.closed`. payloads: whole models, in its form, that a
    worker sends a round. why: what speaks for it. every: the H that it is made for; None: any from
    `least` on. rounds: whether it has a `sync_every` to set.
    """

    method: str
    codec: str = "none"
    settings: str = ""
    kind: int
    vectors: int
    exchanges: Closed
    payloads: Callable[[int, PlannedForm], float]
    why: str
    every: int | None = None
    least: int = 1
    rounds: bool = True
    holds: Callable[[Job], float] = lambda job: 1.0


def _mean_payloads(workers: int, form: PlannedForm) -> float:
    return library_mean(workers, form.back).payloads


def _part_of_mlps(job: Job) -> float:
    return 1 - job.mlp_share * (1 - 1 / job.workers)


def _one_payload(workers: int, form: PlannedForm) -> float:
    return 1


def _two_payloads(workers: int, form: PlannedForm) -> float:
    return 2


_AFTER_A_STEP = OVERLAP + 1
_BOTH_INT8 = "codec = int8, anchor_codec = int8"
_mean = partial(Way, payloads=_mean_payloads)
_ddp = partial(
    _mean,
    method="ddp",
    kind=0,
    vectors=1,
    exchanges=gradients,
    why="every worker takes the same step: best loss a step",
    every=1,
    rounds=False,
)
_diloco = partial(
    _mean,
    method="diloco",
    kind=1,
    vectors=3,
    exchanges=rounds,
    why="all workers stay equal, one exchange a round",
)
_part = partial(_mean, kind=2, vectors=3, exchanges=rounds, why="little is sent, and what is left out is not lost")
_late = partial(
    _mean, kind=2, vectors=6, exchanges=partial(rounds, late=True), why="the exchange has a whole round to arrive"
)
_pairs = partial(Way, kind=1, payloads=_two_payloads, why="nobody waits for more than one other worker")
_noloco = partial(_pairs, method="noloco", exchanges=swaps)
_streaming_noloco = partial(
    _pairs, method="streaming-noloco", exchanges=partial(swaps, streams=True), least=_AFTER_A_STEP
)

WAYS: tuple[Way, ...] = (
    _ddp(),
    _ddp(codec="bf16", settings="codec = bf16"),
    _ddp(codec="int8", settings="codec = int8"),
    _diloco(),
    _diloco(codec="int8", settings="codec = int8"),
    _mean(
        method="streaming-diloco",
        codec="fp4",
        settings="codec = fp4",
        kind=1,
        vectors=3,
        exchanges=partial(rounds, streams=True),
        why="a fragment at a time travels behind the computation",
        least=_AFTER_A_STEP,
    ),
    _noloco(vectors=4),
    _noloco(
        settings="exchange = single_vector", vectors=3, exchanges=partial(swaps, anchors=False), payloads=_one_payload
    ),
    _noloco(codec="int8", settings=_BOTH_INT8, vectors=5),
    _streaming_noloco(vectors=4),
    _streaming_noloco(codec="int8", settings=_BOTH_INT8, vectors=5),
    _part(method="sparseloco", codec="topk:64+int2", settings="codec = topk:64+int2"),
    _late(method="eager"),
    _late(method="eager", codec="fp4", settings="codec = fp4"),
    _late(method="dilocox", codec="int4", settings="codec = int4, rank = 0"),
    _late(method="dilocox", codec=LOW_RANK, settings="window = 0"),
    Way(
        method="ist",
        codec=UNITS,
        settings="split = ffn",
        kind=3,
        vectors=0,
        exchanges=units,
        payloads=_mean_payloads,
        why="a worker holds and computes a part of the MLPs",
        holds=_part_of_mlps,
    ),
    _ddp(
        codec=RANK_4,
        settings="codec = powersgd:4, error_feedback = local",
        kind=2,
        vectors=3,
        why="every worker takes the same step, on the gradients' main directions",
    ),
    _part(
        method="dct-dp",
        codec=LARGEST,
        settings="sparsity = 0.99",
        vectors=2,
        exchanges=gradients,
        every=1,
        rounds=False,
    ),
    _part(method="sparta", codec="randk:0.005", settings="fraction = 0.005", every=1),
    _part(
        method="demo", codec=MOMENTUM, vectors=0, exchanges=momentum, every=1, rounds=False
    ),  # its two stand for AdamW's
)
"""In the order in which those of equal rank are shown."""

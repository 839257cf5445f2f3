"""The methods of this library that are planned with, each with the settings that matter on slow lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from isles.network.planner import kept
from isles.network.planner.closed import OVERLAP, Closed, gradients, momentum, rounds, swaps, units
from isles.network.planner.costs import library_mean
from isles.network.planner.forms import LARGEST, LOW_RANK, MOMENTUM, RANK_4, UNITS, PlannedForm, form_of
from isles.network.planner.job import Job
from isles.network.planner.memory import OuterVectors, WorkerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A method with its settings ("key = value, ..."). codec: in what form it sends, see `forms.form_of`. kind: 0
    gradients every step, 1 answers of the same round, 2 a round late or of some entries, 3 a part of the model at each
    worker. holds: the share of the model that a worker holds and computes. moments: the inner optimizer's, vectors of
    that. kept: what it keeps beside. exchanges: see `isles.network.planner.closed`. payloads: whole models, in its
    form, that a worker sends a round. why: what speaks for it. every: the H that it is made for; None: any from
    `least` on. rounds: whether it has a `sync_every` to set.
    """

    method: str
    codec: str = "none"
    settings: str = ""
    kind: int
    kept: kept.KeptVectors
    moments: int = 2
    exchanges: Closed
    payloads: Callable[[int, PlannedForm], float]
    why: str
    every: int | None = None
    least: int = 1
    rounds: bool = True
    holds: Callable[[Job], float] = lambda job: 1.0

    def memory(self, job: Job) -> WorkerMemory:
        """Of a worker: float32, without activations."""
        form, part = form_of(self.codec, job), int(4 * job.parameters * self.holds(job))
        held = self.kept(job, form, self.codec == "none")
        if not any(one.when == "end" for one in held):
            held = [kept.compared(job), *held]
        return WorkerMemory(weights=part, gradients=part, inner=self.moments * part, held=tuple(held))


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
    kept=kept.gradients,
    exchanges=gradients,
    why="every worker takes the same step: best loss a step",
    every=1,
    rounds=False,
)
_nesterov = OuterVectors(rule=("momentum",))
_late_vectors = OuterVectors(rule=("momentum",), late=1, own=True)
_dilocox_vectors = OuterVectors(rule=("momentum",), feedback=True, reference=True, late=1)
_diloco = partial(
    _mean,
    method="diloco",
    kind=1,
    kept=kept.outer(_nesterov),
    exchanges=rounds,
    why="all workers stay equal, one exchange a round",
)
_part = partial(_mean, kind=2, exchanges=rounds, why="little is sent, and what is left out is not lost")
_late = partial(_mean, kind=2, exchanges=partial(rounds, late=True), why="the exchange has a whole round to arrive")
_swapped = OuterVectors(rule=("momentum",), anchors=True)
_swapped_lossy = OuterVectors(rule=("momentum",), anchors=True, sent_anchor=True)
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
        kept=kept.outer(_nesterov, streams=True),
        exchanges=partial(rounds, streams=True),
        why="a fragment at a time travels behind the computation",
        least=_AFTER_A_STEP,
    ),
    _noloco(kept=kept.outer(_swapped, members=2)),
    _noloco(
        settings="exchange = single_vector",
        kept=kept.outer(_nesterov, members=2),
        exchanges=partial(swaps, anchors=False),
        payloads=_one_payload,
    ),
    _noloco(codec="int8", settings=_BOTH_INT8, kept=kept.outer(_swapped_lossy, members=2)),
    _streaming_noloco(kept=kept.outer(_swapped, streams=True, members=2)),
    _streaming_noloco(codec="int8", settings=_BOTH_INT8, kept=kept.outer(_swapped_lossy, streams=True, members=2)),
    _part(
        method="sparseloco",
        codec="topk:64+int2",
        settings="codec = topk:64+int2",
        kept=kept.outer(OuterVectors(feedback=True)),
    ),
    _late(method="eager", kept=kept.outer(_late_vectors)),
    _late(method="eager", kept=kept.outer(_late_vectors), codec="fp4", settings="codec = fp4"),
    _late(method="dilocox", kept=kept.outer(_dilocox_vectors), codec="int4", settings="codec = int4, rank = 0"),
    _late(method="dilocox", kept=kept.outer(_dilocox_vectors), codec=LOW_RANK, settings="window = 0"),
    Way(
        method="ist",
        codec=UNITS,
        settings="split = ffn",
        kind=3,
        kept=kept.units,
        exchanges=units,
        payloads=_mean_payloads,
        why="a worker holds and computes a part of the MLPs",
        holds=_part_of_mlps,
    ),
    _ddp(
        codec=RANK_4,
        settings="codec = powersgd:4, error_feedback = local",
        kind=2,
        kept=partial(kept.gradients, feedback=True),
        why="every worker takes the same step, on the gradients' main directions",
    ),
    _part(
        method="dct-dp",
        codec=LARGEST,
        settings="sparsity = 0.99",
        kept=kept.largest,
        exchanges=gradients,
        every=1,
        rounds=False,
    ),
    _part(
        method="sparta",
        codec="randk:0.005",
        settings="fraction = 0.005",
        kept=kept.outer(OuterVectors(own_entries=True)),
        every=1,
    ),
    _part(method="demo", codec=MOMENTUM, kept=kept.momentum, moments=0, exchanges=momentum, every=1, rounds=False),
)
"""In the order in which those of equal rank are shown."""

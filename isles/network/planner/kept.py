"""What the planned methods keep in a worker's memory: those vectors that the library's own account names
(`isles.network.planner.memory`), from the size of the model and the form in which it travels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from isles.network.planner.closed import buckets, fragments
from isles.network.planner.forms import PlannedForm
from isles.network.planner.job import Job
from isles.network.planner.memory import BLOCK, COMPARED, UNDER_WAY, Held, OuterVectors, planned_working_bytes

KeptVectors = Callable[[Job, PlannedForm, bool], list[Held]]
"""job, form, whether it is lossless -> what is held."""


def outer(vectors: OuterVectors, *, streams: bool = False, members: int | None = None) -> KeptVectors:
    """A method with an outer loop. streams: in fragments. members: of a group; None: all workers."""
    return partial(_outer, vectors, streams, members)


def _outer(
    vectors: OuterVectors, streams: bool, members: int | None, job: Job, form: PlannedForm, lossless: bool
) -> list[Held]:
    sizes, size = fragments(job) if streams else [job.parameters], members or job.workers
    times = 2 if vectors.anchors else 1
    return vectors.held(
        _vector(job),
        scratch=int(4 * sum(min(entries, BLOCK) for entries in sizes)),
        bases=int(form.kept * job.parameters),
        under_way=int(times * sum(_means(form, entries, size, lossless) for entries in sizes)),
    )


def gradients(job: Job, form: PlannedForm, lossless: bool, *, feedback: bool = False) -> list[Held]:
    """ddp: buckets, and the means of each."""
    sizes = [entries for ones in buckets(job) for entries in ones]
    residual = ("error feedback", "error feedback of the step") if feedback else ()
    held = [Held(what, _vector(job), "always") for what in ("gradient buckets", *residual)]
    held += [Held("bases of the factors", int(form.kept * job.parameters), "always")] if form.kept else []
    under_way = sum(_means(form, entries, job.workers, lossless) for entries in sizes)
    return [*held, Held(UNDER_WAY, int(under_way), "exchange")]


def largest(job: Job, form: PlannedForm, lossless: bool) -> list[Held]:
    """dct-dp: of each bucket the entries of all workers, a value and a place of 6 bytes, and as read 12."""
    pairs = form.bits / 48 * job.parameters
    vectors = ("gradient buckets", "error feedback", "error feedback of the step")
    held = [Held(what, _vector(job), "always") for what in vectors]
    return [*held, Held(UNDER_WAY, int(job.workers * pairs * (6 + 12)), "exchange")]


def momentum(job: Job, form: PlannedForm, lossless: bool) -> list[Held]:
    """demo: momentum, update, and coefficients of all workers, of 28 bits and as read of 12 bytes."""
    pairs = form.bits / 28 * job.parameters
    under_way = job.workers * pairs * (3.5 + 12)
    return [
        Held("momentum", _vector(job), "always"),
        Held("update", _vector(job), "exchange"),
        Held(UNDER_WAY, int(under_way), "exchange"),
    ]


def units(job: Job, form: PlannedForm, lossless: bool) -> list[Held]:
    """ist: what is kept of the MLPs goes out and comes in; the rest is averaged."""
    whole = 4 * job.parameters
    own, rest = 3 * whole * job.mlp_share / job.workers, whole * (1 - job.mlp_share)
    averaging = rest + planned_working_bytes(rest / 4, job.workers, 32, 1, lossless=True)
    return [
        Held("units kept between rounds", int(own), "always"),
        Held(UNDER_WAY, int(2 * own + averaging), "exchange"),
        Held("the full model and its parts", int(2 * whole * job.mlp_share), "end"),
    ]


def _vector(job: Job) -> int:
    return int(4 * job.parameters)


def _means(form: PlannedForm, entries: float, size: int, lossless: bool) -> float:
    """What averaging a vector takes. Low rank: the factors, and what is not compressed beside them."""
    if not form.entries:
        return planned_working_bytes(entries, size, form.bits, form.back, lossless=lossless)
    parts = zip(form.entries, (*form.phases, form.beside), strict=True)
    return sum(
        4 * entries * share + planned_working_bytes(entries * share, size, bits / share, 1, lossless=bits == 32 * share)
        for share, bits in parts
        if share
    )


def compared(job: Job) -> Held:
    """Weights and their mean, when validating and at the end."""
    return Held(COMPARED, 2 * _vector(job), "end")

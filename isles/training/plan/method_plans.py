"""Which method for which link: seconds, bytes and memory of each method, from the time of a step and the lines between
the workers.

    question, candidate -> configuration -> the method around a sketched model -> its exchanges, memory, bytes
                        -> seconds waited a round, for each H -> utilisation = Hc / (Hc + waits)
                        -> MethodPlan, in the order to try them

A candidate is sketched once, and then retimed for each H. Up to 16 workers what is shown is replayed message by
message, as a dry run replays it: the run, where its tokens are given, else the long run. Where that is too much, and in
the search of H and of rates, alike workers are played once (`isles.network.planner.classes`).

Left out: the time to encode, workers of unequal speed. With ist computing is that of a worker's part.

Rank: what reaches the wanted utilisation comes before what does not; then what changes training less (`KINDS`); then
the smaller H; then the order of the candidates. That is a judgement from the papers' losses, not a measurement of
yours. Of those that do not reach it the one that computes most of the time is first. Who never talks is last; what does
not fit into memory comes behind all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from isles.network.planner.memory import WorkerMemory
from isles.training.config.sections import Config
from isles.training.elastic.terms import goes_on, lands_together
from isles.training.plan.candidates import KINDS, Candidate, candidates
from isles.training.plan.fit import memory_fit
from isles.training.plan.planned_method import MethodTiming, PlannedMethod, inside_share
from isles.training.plan.question import InSite, PlanQuestion
from isles.training.plan.record import MemoryFit, stage_fillings

_ALONE = KINDS.index("no answers")
_INSIDE: tuple[InSite, ...] = ("ddp", "fsdp", "stages")
_ENOUGH = 0.9  # share of computing inside a site


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """One candidate. asked: with batches, and what is inside sites. bytes_a_step: that a worker sends to others, or to
    other sites, on average. memory: a worker's; fit: into the machine, None: that is not known. hours, nbytes (that all
    workers send), money: of the run; None: not known. pairs: it exchanges in pairs. grows: workers may come and go.
    is_best: no other is better in something, and in nothing worse: fit, change of training, time, bytes, money.
    """

    candidate: Candidate
    asked: PlanQuestion
    config: Config
    timing: MethodTiming
    bytes_a_step: float
    memory: WorkerMemory
    fit: MemoryFit | None
    hours: float | None
    nbytes: float | None
    money: float | None
    pairs: bool
    grows: bool
    is_best: bool = False

    @property
    def is_unfit(self) -> bool:
        """Whether it is known not to fit."""
        return self.fit is not None and not self.fit.fits

    @property
    def every(self) -> int:
        """H."""
        return self.timing.every

    @property
    def waits(self) -> float:
        """Seconds a round, a mean over the workers."""
        return self.timing.account.waiting

    @property
    def utilisation(self) -> float:
        """Share of the time spent computing."""
        return self.timing.account.share


@dataclass(frozen=True, kw_only=True)
class MethodTable:
    """plans: the first the one to try first. left_out: why others are not planned, by method and settings."""

    plans: Sequence[MethodPlan]
    left_out: dict[str, str]


Best = Literal["hours", "bytes", "money"]


def plan_methods(
    question: PlanQuestion,
    *,
    targets: Sequence[float] = (0.9,),
    every: int | None = None,
    among: Sequence[Candidate] | None = None,
    grows: bool = False,
    best: Best | None = None,
) -> MethodTable:
    """targets: utilisations for which rates are asked; the first of them is the one to reach. every: H for all; None:
    for each candidate the smallest of `EVERY` that reaches it, or the largest. grows: workers come and go, so what
    cannot be done without a lost one is last. best: what those that reach it are ordered by. ValueError where nothing
    can be planned.
    """
    if not targets or not all(0 < target < 1 for target in targets):
        raise ValueError(f"targets = {list(targets)}: choose shares between 0 and 1, such as 0.9")
    if every is not None and every < 1:
        raise ValueError(f"sync_every = {every}: choose 1 or more")
    _refuse_unknown(question, best)
    plans, left_out = list[MethodPlan](), dict[str, str]()
    known: list[tuple[object, MethodTiming]] = []
    ways, full = _leaner(question), set[int]()
    for one in candidates() if among is None else among:
        try:
            made, fit = _that_fits(ways, full, one)
            key = made.signature(every)
            timing = next((timing for other, timing in known if other == key), None)
            if timing is None:
                known.append((key, timing := made.timing(targets, every)))
            plans.append(_plan(made, timing, fit))
        except ValueError as error:
            left_out[" ".join((one.method, one.settings)).strip()] = str(error)
    if not plans:
        raise ValueError("; ".join(dict.fromkeys(left_out.values())))

    def order(one: MethodPlan) -> tuple[float, ...]:
        unfit, alone = one.is_unfit, one.candidate.kind == _ALONE
        reached = (0, _amount(one, best)) if best and one.timing.reaches else _rank(one)
        return (unfit, grows and not one.grows, alone, *reached)

    front = {id(one) for one in plans if not any(_is_better(other, one) for other in plans)}
    ranked = sorted(plans, key=order)
    return MethodTable(
        plans=[replace(one, is_best=id(one) in front) for one in ranked],
        left_out=left_out,
    )


def _leaner(question: PlanQuestion) -> list[PlanQuestion]:
    """The question, and where the machine is known the same with less memory, in the order in which to try them: more
    and more batches whose gradients are accumulated, inside a site FSDP or stages; those first that wait least there.
    """
    if question.machine is None or question.step_tokens is None:
        return [question]
    most, found = question.sequences, list[tuple[float, PlanQuestion]]()
    for count in (min(1 << power, most) for power in range((most - 1).bit_length() + 1)):
        for kind in _INSIDE if question.devices > 1 else _INSIDE[:1]:
            asked = replace(question, batches=count, inside=kind)
            with suppress(ValueError):  # more stages than layers
                found.append((max(_ENOUGH - inside_share(asked), 0.0), asked))
    return [asked for _, asked in sorted(found, key=lambda one: one[0])]


def _that_fits(ways: Sequence[PlanQuestion], full: set[int], one: Candidate) -> tuple[PlannedMethod, MemoryFit | None]:
    """The first of `ways` that fits; where none does, what takes least of the device. full: numbers of those that did
    not fit another method, and so do not fit this one, nearly. ValueError where it goes with none of them.
    """
    over, unfit, least, refusal = set[InSite](), set[int](), None, None
    for number, asked in enumerate(ways):
        if asked.inside in over or number in full:
            continue
        try:
            made, fit = _fitted(asked, one)
        except ValueError as error:
            over.add(asked.inside)
            refusal = refusal or error
            continue
        if fit is None or fit.fits:
            full |= unfit
            return made, fit
        unfit.add(number)
        if least is None or least[1] is None or fit.device_bytes < least[1].device_bytes:
            least = made, fit
        is_sharded = asked.devices == 1 or asked.inside != "ddp"
        if is_sharded and fit.device_bytes - (fit.activations or 0) > fit.device_room:
            over.add(asked.inside)  # states alone are too large: batches do not help
    if least is None:
        raise refusal or ValueError("nothing goes with this model inside a site: choose other --devices")
    return _fitted(least[0].question, one, mends=True)


def _fitted(question: PlanQuestion, one: Candidate, *, mends: bool = False) -> tuple[PlannedMethod, MemoryFit | None]:
    """With whether it fits, where the machine is known; and what alone would mend it, if that is asked."""
    made, here = PlannedMethod(question, one), question.machine
    if here is None:
        return made, None
    return made, memory_fit(made.config, stage_fillings(made.memory), None, here, mends=mends)


def _refuse_unknown(question: PlanQuestion, best: Best | None) -> None:
    if best == "money" and (question.price_gb, question.price_hour) == (None, None):
        raise ValueError("--best money: say what it costs: --price-gb, --price-hour")
    if (best or question.price_hour is not None or question.price_gb is not None) and question.tokens is None:
        raise ValueError("--best, --price-gb, --price-hour: give --tokens of the run and --step-tokens too")


def _amount(one: MethodPlan, best: Best) -> float:
    """Of what there should be little."""
    found = {"hours": one.hours, "bytes": one.nbytes, "money": one.money}[best]
    assert found is not None, "refused before"
    return found


def _is_better(one: MethodPlan, other: MethodPlan) -> bool:
    """In nothing worse: fit, change of training, time, bytes, money; and in something better."""
    mine, theirs = (
        (plan.is_unfit, plan.candidate.kind, -plan.utilisation, plan.bytes_a_step, plan.money or 0.0)
        for plan in (one, other)
    )
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _rank(one: MethodPlan) -> tuple[float, ...]:
    if one.candidate.kind == _ALONE:
        return (2,)
    return (0, one.candidate.kind, one.every) if one.timing.reaches else (1, -one.utilisation)


def _plan(one: PlannedMethod, timing: MethodTiming, fit: MemoryFit | None) -> MethodPlan:
    question, steps, account = one.question, one.question.steps, timing.account
    hours = None if steps is None else steps / timing.every * (account.computing + account.waiting) / 3600
    sent = one.bytes_a_step(timing.every)
    nbytes = None if steps is None else sent * steps * question.workers
    prices = question.price_gb, question.price_hour
    money = None
    if hours is not None and nbytes is not None and prices != (None, None):
        money = (prices[0] or 0.0) * nbytes / 1e9 + (prices[1] or 0.0) * hours * question.workers
    return MethodPlan(
        candidate=one.candidate,
        asked=one.question,
        config=one.config_at(timing.every),
        timing=timing,
        bytes_a_step=sent,
        memory=max(one.memory, key=lambda held: held.peak),
        fit=fit,
        hours=hours,
        nbytes=nbytes,
        money=money,
        pairs=not lands_together(one.config),
        grows=goes_on(one.config),
    )

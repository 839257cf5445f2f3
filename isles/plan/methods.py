"""Which method for which link: seconds, bytes and memory of each method, from the time of a step and the links between
the workers.

    question, candidate -> configuration -> the method around a sketched model -> its exchanges, memory, bytes
                        -> seconds waited a round, for each H -> utilisation = Hc / (Hc + waits)
                        -> MethodPlan, in the order to try them

A candidate is sketched once, and then retimed for each H. Up to 16 workers what is shown is replayed message by
message, as a dry run replays it: the run, where its tokens are known, else the long run. Where that is too much, and in
the search of H and of rates, workers with equal links are simulated once (`isles.plan.worker_classes`), and the
devices of a site count as one worker: an inner step takes as long as that of the method inside, and what has landed is
spread behind it.

Left out: the time to encode, workers of unequal speed. With ist computing is that of a worker's part.

Rank: what reaches the wanted utilisation comes before what does not; then what changes training less (`KINDS`); then
the smaller H; then the order of the candidates. That is a judgement from the papers' losses, not a measurement of
yours. Of those that do not reach it the one that computes most of the time is first. A candidate that never exchanges
is last; what does not fit into memory comes behind all others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Literal

from isles.network.exchange_plan import PlannedExchange, Rhythm, WorkerMemory, sent_by_all
from isles.network.links import Links, Topology, links
from isles.pipeline.config import PipelineConfig
from isles.plan.memory_fit import memory_fit
from isles.plan.question import KINDS, Candidate, InSite, PlanQuestion, candidates
from isles.plan.record import MemoryFit, stage_fillings
from isles.plan.replay import ExchangeRecords, RunReplay, TimeAccount
from isles.plan.replicas import replayed, staged_steps, worker_memory
from isles.plan.sketch import RunSketch, sketch_quietly
from isles.plan.worker_classes import LEVELS, Representatives, links_of_all, links_of_partners, wanted_rate
from isles.replicas import method
from isles.replicas.sync import ReplicaSync
from isles.training.config.reading import resolve
from isles.training.config.sections import Config
from isles.training.elastic.support import goes_on, lands_together

EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
"""Rounds that are tried, in inner steps."""
MOST_REPLAYED = 16
"""Workers."""
_CLASSES = 3
_ROUNDS, _MOST_ROUNDS = 4, 20  # that are simulated, at least and at most
_MESSAGES = 10_000  # in all of them, of all workers
_SHOWN, _TRIED, _WANTED = 2_000, 200, 50  # in a round of representatives: of what is shown, for an H, and for a rate
_LONGEST = 2_000  # inner steps of a round that is simulated
_PAIRED, _ANY = 64, "lan"  # workers whose pairs stand for those of any number, and a network that does not count them
_MOST_PARTS = 256  # workers, each of which sends another part to each other
_STEPS, _MOST_MICROBATCHES = 4, 512  # of a site's stages that are simulated
_PART = KINDS.index("a part of the model at each worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTiming:
    """At one H. account: of a round. about: not replayed message by message. reaches: the first target. wanted: how
    many times the present rates each target wants; nan: no rate is enough. enough: the H that would reach the first
    target, where none that was tried does. curve: the share of the time spent computing with every rate multiplied.
    """

    every: int
    account: TimeAccount
    about: bool
    reaches: bool
    wanted: tuple[float, ...]
    enough: int | None
    curve: Callable[[float], float]


class PlannedMethod:
    """A candidate around a sketch. ValueError where it cannot be."""

    def __init__(self, question: PlanQuestion, candidate: Candidate) -> None:
        self.question, self.candidate = question, candidate
        if candidate.kind == _PART and question.workers > _MOST_PARTS:
            raise ValueError(f"{question.workers} workers: each holds a part of its own; planned up to {_MOST_PARTS}")
        steps = 4 * max(EVERY) if question.steps is None else question.steps
        config = _config(question, candidate, steps)
        # Devices of a site are one worker here: they send its exchanges over its uplink.
        sites = question.sites if lands_together(config) else min(question.sites, _PAIRED)
        if (question.devices, question.sites) != (1, sites):
            made = _in_world(
                config,
                PipelineConfig(),
                workers=sites,
                inner=1,
                inside="ddp",
                links=_ANY,
                inner_links="lan",
                shares_uplink=False,
            )
        else:
            made = config
        self._sketch = sketch_quietly(made)
        (self.optimizer,) = self._sketch.optimizers
        alike = [self.optimizer] if question.devices == 1 else _in_site(config, question)
        self.memory = [worker_memory(config, one) for one in alike]
        """Of a worker, or of that of each stage."""
        held = sum(own.numel() for own in self.optimizer.model.parameters()) / self._sketch.parameters
        self.computing = question.step_seconds * (held if candidate.kind == _PART else 1.0)
        self.seconds = self.computing / inside_share(question)
        """Of an inner step: of computing, and of a site's, inside which devices wait for each other."""
        self.config = _in_world(config, step_seconds=self.computing * question.stages)
        self.has_rounds = hasattr(config.replicas, "sync_every")
        self.every: int = getattr(config.replicas, "sync_every", 1)
        # Also by H, with which `retime` changes them.
        self._schedule_of = lru_cache(maxsize=8)(lambda every, steps: self.optimizer.schedule(steps))
        self._of_few = cache(self._of_representatives)

    def signature(self, every: int | None) -> object:
        """Equal for methods that send the same at the same moments."""
        rhythm = self._rhythm
        return self.seconds, rhythm, self._tried(every), self._schedule(rhythm.start + rhythm.every)

    def timing(self, targets: Sequence[float], every: int | None) -> MethodTiming:
        """At the smallest H that reaches the first target, or the largest. targets: of what a site alone computes."""
        targets = [target * self.computing / self.seconds for target in targets]
        tried = self._tried(every)
        last = len(tried) - 1
        index = bisect_left(range(last), True, key=lambda at: self.share(tried[at]) >= targets[0])
        found = tried[index]
        account, about = self.account(found)
        for larger in tried[index + 1 :]:  # the end of the run may ask for more than the search knew
            if account.share >= targets[0]:
                break
            found, (account, about) = larger, self.account(larger)
        reaches = account.share >= targets[0]
        searched = every is None and self.has_rounds and not self.candidate.every
        rates = partial(self.share, found, messages=_WANTED)
        return MethodTiming(
            every=found,
            account=account,
            about=about,
            reaches=reaches,
            wanted=tuple(wanted_rate(rates, target) for target in targets),
            enough=None if reaches or not searched else self._enough(account.waiting, targets[0]),
            curve=rates,
        )

    def share(self, every: int, rate: float = 1.0, messages: int = _TRIED) -> float:
        """Of the time, spent computing in the long run; with every rate multiplied by `rate`."""
        account, _ = self._of_few(every, messages, rate)
        return account.share

    def account(self, every: int) -> tuple[TimeAccount, bool]:
        """Of a round, on average over the run where tokens are given, else in the long run; and whether it is about."""
        question = self.question
        self._at(every)
        if question.workers <= MOST_REPLAYED and question.inside != "fsdp" and (question.stages == 1 or question.steps):
            run = self._whole
            for one in run.optimizers if self.has_rounds else ():
                one.retime(every)
            rhythm = self._rhythm
            if run.cut:
                found = replayed(run, self.config.network, staged_steps(run), most=_MESSAGES)
                rounds = run.config.run.steps / every
                if found is not None:
                    return TimeAccount(found.computing / rounds, found.waiting / rounds), False
            elif _ROUNDS * sum(one.messages for one in run.exchanges(rhythm.start + rhythm.every)) <= _MESSAGES:
                near = links(question.near) if question.devices > 1 else None
                topology = Topology(question.workers, self.config.network, near, question.devices)
                records = partial(self._replayed, run.exchanges, topology, self.computing, _MESSAGES)
                # In the long run nobody knows any more who began a little later.
                return records(question.steps, run.opening() if question.steps else ()), False
        return self._of_few(every, _SHOWN, steps=question.steps)

    def bytes_a_step(self, every: int) -> float:
        """That a worker sends to others, or to other sites, on average, in the long run."""
        self._at(every)
        rhythm = self._rhythm
        sent = [sum(one.sent_by_all for one in self._schedule(rhythm.start + n * rhythm.every)) for n in (1, 3)]
        return (sent[1] - sent[0]) / (2 * rhythm.every) / self.optimizer.group.size / self.question.devices

    def _of_representatives(
        self, every: int, messages: int, rate: float = 1.0, steps: int | None = None
    ) -> tuple[TimeAccount, bool]:
        self._at(every)
        between = self._few_links
        inside = every * (self.seconds - self.computing)
        if between is None:
            return TimeAccount(every * self.computing, inside), False
        some = next((some for some in self._levels if self._played(some) <= messages), self._levels[-1])
        exact = len(self.question.classes) == 1 and not self.question.links.jitter and some.coarse == LEVELS[0]
        found = self._replayed(
            lambda taken: some(self._schedule(taken)),
            Topology(_count(between), _scaled(between, rate)),
            self.seconds,
            math.ceil(_ROUNDS * self._played(some)),
            steps,
        )
        whole = TimeAccount(every * self.computing, found.waiting + inside + self._spread)
        return whole, not exact or self.question.devices > 1

    def _replayed(
        self,
        records: ExchangeRecords,
        topology: Topology,
        seconds: float,
        messages: int,
        steps: int | None,
        opening: Sequence[PlannedExchange] = (),
    ) -> TimeAccount:
        """Of one round. seconds: of a step."""
        rhythm, replays = self._rhythm, RunReplay(topology, [seconds] * topology.workers, opening, messages=messages)
        if steps is None:
            rounds = rhythm.every / self.every
            found = replays.long_run(records, rhythm, rounds=_MOST_ROUNDS)
        else:
            rounds = steps / self.every
            found = replays.run(records, rhythm, steps)
        assert found is not None, "its caller has looked that it can be simulated"
        return TimeAccount(found.computing / rounds, found.waiting / rounds)

    @cached_property
    def _whole(self) -> RunSketch:
        return self._sketch if self.question.devices == 1 else sketch_quietly(self.config)

    @property
    def _spread(self) -> float:
        """Seconds a round in which the devices of a site tell each other what has landed at each."""
        devices, near = self.question.devices, links(self.question.near)
        if self.question.inside == "stages" or devices == 1 or not self.has_rounds:
            return 0.0
        sent = sum(parameter.nbytes for parameter in self.optimizer.parameters) * (devices - 1) / devices
        return 8 * sent / near.way_rate(0, 1) + near.base_latency(0, 1)

    def _tried(self, every: int | None) -> list[int]:
        if not self.has_rounds:
            return [1]
        choices = [self.candidate.every] if self.candidate.every else EVERY if every is None else [every]
        steps = self.question.steps
        possible = [one for one in choices if steps is None or one <= steps]
        if not possible:
            raise ValueError(f"sync_every = {min(choices)}: no exchange falls into a run of {steps} steps")
        self.config_at(possible[0])  # refuses it
        return possible

    def config_at(self, every: int) -> Config:
        """With rounds of so many inner steps."""
        if not self.has_rounds:
            return self.config
        return replace(self.config, replicas=replace(self.config.replicas, sync_every=every))  # type: ignore[type-var]

    def _at(self, every: int) -> None:
        if every != self.every:
            self.optimizer.retime(every)
            self.every = every

    def _schedule(self, steps: int) -> list[PlannedExchange]:
        return self._schedule_of(self.every, steps)

    @property
    def _rhythm(self) -> Rhythm:
        """A method that does not say its own is asked for a run as long as a round."""
        return self.optimizer.rhythm(self.every)

    def _played(self, some: Representatives) -> float:
        """Messages of a round, and in a run with an end of the beginning."""
        rhythm = self._rhythm
        begun = 0 if self.question.steps is not None else rhythm.start
        sent = [one for one in self._schedule(rhythm.start + rhythm.every) if one.sent > begun]
        return sum(one.messages for one in some(sent))

    @cached_property
    def _few_links(self) -> Links | None:
        """Between representatives of a few classes; None where nobody exchanges."""
        rhythm, network = self._rhythm, self.question.links
        sent = self._schedule(rhythm.start + rhythm.every)
        largest = max((len(group) for one in sent for group in one.groups), default=1)
        if largest == 1:
            return None
        if largest == self.optimizer.group.size:
            return links_of_all(network, self.question.classes, _CLASSES)
        nbytes = max(sent_by_all(one.pattern(largest), largest) / largest for one in sent)
        return links_of_partners(network, self.question.classes, nbytes)

    @cached_property
    def _levels(self) -> list[Representatives]:
        """From fine to coarse."""
        assert self._few_links is not None
        return [Representatives(_count(self._few_links), level) for level in LEVELS]

    def _enough(self, waits: float, target: float) -> int:
        """The H at which it would reach the target, to two digits: longer rounds wait no longer."""
        share = target / (1 - target) / self.seconds
        every = waits * share
        if every < _LONGEST:
            every = max(
                (1 / self.share(math.ceil(every)) - 1) * math.ceil(every) * self.seconds * share, max(EVERY) + 1
            )
        digits = 10 ** max(math.floor(math.log10(every)) - 1, 0)
        return math.ceil(every / digits) * digits


@lru_cache(maxsize=64)
def inside_share(question: PlanQuestion) -> float:
    """Of the time of an inner step, spent computing and not waiting for the other devices of the site."""
    if question.devices == 1:
        return 1.0
    if question.stages > 1:
        if question.batches * question.stages > _MOST_MICROBATCHES:
            raise ValueError(f"{question.batches * question.stages} microbatches in a site: too many to simulate")
        config = _config(question, Candidate(method="none", kind=0, why=""), _STEPS)
        site = sketch_quietly(_in_world(config, workers=question.devices, shares_uplink=False))
        account = replayed(site, site.config.network, staged_steps(site))
        assert account is not None, "so few are simulated"
        return account.share
    text = None if question.step_tokens is None else question.step_tokens / question.sites
    alone = replace(question, workers=question.devices, devices=1, network=question.near, tokens=None, step_tokens=text)
    inside = PlannedMethod(alone, Candidate(method=question.inside, kind=0, why=""))
    return inside.account(1)[0].share


def _in_site(config: Config, question: PlanQuestion) -> Sequence[ReplicaSync]:
    """The optimizers of a device, or of each stage, among those of two sites."""
    return sketch_quietly(_in_world(config, workers=2 * question.devices, links=_ANY), size=question.stages).optimizers


def _config(question: PlanQuestion, candidate: Candidate, steps: int) -> Config:
    tables = question.tables(candidate.replicas, steps, question.step_seconds * question.stages)
    if candidate.method == "fsdp":  # torch's own wants processes
        tables["world"]["backend"] = "distributed"
    if hasattr(method(candidate.method).Config, "sync_every"):
        tables["replicas"]["sync_every"] = candidate.every or min(EVERY[0], steps)
    return resolve(tables)


def _in_world(config: Config, pipeline: PipelineConfig | None = None, **keys: Any) -> Config:
    """`config` with other keys of [world] and [world.virtual], and another [pipeline]."""
    world = config.world
    virtual = {key: value for key, value in keys.items() if hasattr(world.virtual, key)}
    own = {key: value for key, value in keys.items() if key not in virtual}
    made = replace(world, **own, virtual=replace(world.virtual, **virtual))
    return replace(config, world=made, pipeline=pipeline or config.pipeline)


def _count(between: Links) -> int:
    return len(between.latency)  # type: ignore[arg-type]


def _scaled(between: Links, rate: float) -> Links:
    if rate == 1.0:
        return between
    up, down = ([rate * own for own in rates] for rates in (between.bandwidth, between.downlink))  # type: ignore
    return replace(between, bandwidth=up, downlink=down)


_ALONE = KINDS.index("no answers")
_INSIDE: tuple[InSite, ...] = ("ddp", "fsdp", "stages")
_ENOUGH = 0.9  # share of computing inside a site


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """One candidate. question: with batches, and what is inside sites. bytes_a_step: that a worker sends to others, or
    to other sites, on average. memory: a worker's; fit: into the machine, None: that is not known. hours, nbytes (that
    all workers send), money: of the run; None: not known. pairs: it exchanges in pairs. grows: workers may come and go.
    is_best: no other is better in something, and in nothing worse: fit, change of training, time, bytes, money.
    """

    candidate: Candidate
    question: PlanQuestion
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
    variants, full = _leaner(question), set[int]()
    for one in candidates() if among is None else among:
        try:
            made, fit = _that_fits(variants, full, one)
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
            case = replace(question, batches=count, inside=kind)
            with suppress(ValueError):  # more stages than layers
                found.append((max(_ENOUGH - inside_share(case), 0.0), case))
    return [case for _, case in sorted(found, key=lambda one: one[0])]


def _that_fits(
    variants: Sequence[PlanQuestion], full: set[int], one: Candidate
) -> tuple[PlannedMethod, MemoryFit | None]:
    """The first of `variants` that fits; where none does, what takes least of the device. full: numbers of those that
    did not fit another method, and so do not fit this one, nearly. ValueError where it goes with none of them.
    """
    over, unfit, least, refusal = set[InSite](), set[int](), None, None
    for number, case in enumerate(variants):
        if case.inside in over or number in full:
            continue
        try:
            made, fit = _fitted(case, one)
        except ValueError as error:
            over.add(case.inside)
            refusal = refusal or error
            continue
        if fit is None or fit.fits:
            full |= unfit
            return made, fit
        unfit.add(number)
        if least is None or least[1] is None or fit.device_bytes < least[1].device_bytes:
            least = made, fit
        is_sharded = case.devices == 1 or case.inside != "ddp"
        if is_sharded and fit.device_bytes - (fit.activations or 0) > fit.device_room:
            over.add(case.inside)  # states alone are too large: batches do not help
    if least is None:
        raise refusal or ValueError("nothing goes with this model inside a site: choose other --devices")
    return _fitted(least[0].question, one, suggestions=True)


def _fitted(
    question: PlanQuestion, one: Candidate, *, suggestions: bool = False
) -> tuple[PlannedMethod, MemoryFit | None]:
    """With whether it fits, where the machine is known; and with suggestions, the settings that alone would make it
    fit.
    """
    made, here = PlannedMethod(question, one), question.machine
    if here is None:
        return made, None
    return made, memory_fit(made.config, stage_fillings(made.memory), None, here, suggestions=suggestions)


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
        question=one.question,
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

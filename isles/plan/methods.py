"""Compare methods on given links: seconds, bytes and memory of each method, from the time of a step and the links
between the workers.

    question, candidate -> configuration -> the method around a sketched model -> its exchanges, memory, bytes
                        -> seconds waited a round, for each H -> utilisation = Hc / (Hc + waits)
                        -> MethodPlan, in the order to try them

A candidate is sketched once, and then retimed for each H. Up to 16 workers the shown figures are replayed message by
message, as in a dry run: the whole run if its tokens are known, otherwise the long run. If that is too much, and in the
search for H and for rates, a few representatives stand for alike workers (`isles.plan.worker_classes`), and the devices
of a site count as one worker: an inner step takes as long as one of the method inside the site, and landed parameters
are then sent to the site's other devices.

Not counted: the time to encode, and workers of unequal speed. With ist, computing is that of a worker's part.

Rank: methods that reach the wanted utilisation come first; then those that change training less (`KINDS`); then the
smaller H; then the order of the candidates. That is a judgement from the papers' losses, not a measurement. Methods
that miss the wanted utilisation are ordered by utilisation. A candidate that never exchanges is last; methods that do
not fit into memory come behind all others.
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
"""Values of H to try, in inner steps."""
MOST_REPLAYED = 16
"""The most workers that are replayed message by message."""
_CLASSES = 3
_ROUNDS, _MOST_ROUNDS = 4, 20  # rounds to replay, at least and at most
_MESSAGES = 10_000  # in all these rounds, of all workers
_SHOWN, _TRIED, _WANTED = 2_000, 200, 50  # messages of a round of representatives: shown, to try an H, to try a rate
_LONGEST = 2_000  # the most inner steps of a replayed round
_PAIRED, _ANY = 64, "lan"  # pairs among 64 workers stand for any number; a network for any number of workers
_MOST_PARTS = 256  # the most workers of a method in which each sends a different part to each other one
_STEPS, _MOST_MICROBATCHES = 4, 512  # replayed, of the stages inside a site
_PART = KINDS.index("a part of the model at each worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTiming:
    """A method's times at one H.

    account: of a round. about: not replayed message by message. reaches: whether it reaches the first target. wanted:
    for each target, the factor on the present rates that reaches it; nan: no rate is enough. enough: the H that would
    reach the first target, if no tried H does. curve: share of time spent computing, by the factor on every rate.
    """

    every: int
    account: TimeAccount
    about: bool
    reaches: bool
    wanted: tuple[float, ...]
    enough: int | None
    curve: Callable[[float], float]


class PlannedMethod:
    """A candidate with its sketch. ValueError if the method cannot run with the question's workers."""

    def __init__(self, question: PlanQuestion, candidate: Candidate) -> None:
        self.question, self.candidate = question, candidate
        if candidate.kind == _PART and question.workers > _MOST_PARTS:
            raise ValueError(f"{question.workers} workers: each holds a part of its own; planned up to {_MOST_PARTS}")
        steps = 4 * max(EVERY) if question.steps is None else question.steps
        config = _config(question, candidate, steps)
        # The devices of a site count as one worker here: they send its exchanges over its uplink.
        sites = question.sites if lands_together(config) else min(question.sites, _PAIRED)
        if (question.devices, question.sites) != (1, sites):
            site_config = _in_world(
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
            site_config = config
        self._sketch = sketch_quietly(site_config)
        (self.optimizer,) = self._sketch.optimizers
        optimizers = [self.optimizer] if question.devices == 1 else _in_site(config, question)
        self.memory = [worker_memory(config, optimizer) for optimizer in optimizers]
        """Memory of a worker, or of one worker of each stage."""
        share = sum(parameter.numel() for parameter in self.optimizer.model.parameters()) / self._sketch.parameters
        self.computing = question.step_seconds * (share if candidate.kind == _PART else 1.0)
        self.seconds = self.computing / inside_share(question)
        """Of an inner step, with the time in which the devices of a site wait for each other."""
        self.config = _in_world(config, step_seconds=self.computing * question.stages)
        self.has_rounds = hasattr(config.replicas, "sync_every")
        self.every: int = getattr(config.replicas, "sync_every", 1)
        # Keyed by H too, because `retime` changes the schedule.
        self._schedule_of = lru_cache(maxsize=8)(lambda every, steps: self.optimizer.schedule(steps))
        self._of_few = cache(self._of_representatives)

    def signature(self, every: int | None) -> object:
        """Equal for methods that send the same bytes at the same moments."""
        rhythm = self._rhythm
        return self.seconds, rhythm, self._tried(every), self._schedule(rhythm.start + rhythm.every)

    def timing(self, targets: Sequence[float], every: int | None) -> MethodTiming:
        """Times at the smallest H that reaches the first target, or at the largest H. targets: shares of the time in
        which a site would compute without exchanges.
        """
        targets = [target * self.computing / self.seconds for target in targets]
        tried = self._tried(every)
        last = len(tried) - 1
        index = bisect_left(range(last), True, key=lambda at: self.share(tried[at]) >= targets[0])
        chosen = tried[index]
        account, about = self.account(chosen)
        for larger in tried[index + 1 :]:  # the search knew the long run only; the end may take longer
            if account.share >= targets[0]:
                break
            chosen, (account, about) = larger, self.account(larger)
        reaches = account.share >= targets[0]
        searched = every is None and self.has_rounds and not self.candidate.every
        rates = partial(self.share, chosen, messages=_WANTED)
        return MethodTiming(
            every=chosen,
            account=account,
            about=about,
            reaches=reaches,
            wanted=tuple(wanted_rate(rates, target) for target in targets),
            enough=None if reaches or not searched else self._enough(account.waiting, targets[0]),
            curve=rates,
        )

    def share(self, every: int, rate: float = 1.0, messages: int = _TRIED) -> float:
        """Share of the time spent computing in the long run, with every rate multiplied by `rate`."""
        account, _ = self._of_few(every, messages, rate)
        return account.share

    def account(self, every: int) -> tuple[TimeAccount, bool]:
        """The time account of a round (mean over the run if its tokens are given, else in the long run), and whether
        it is approximate.
        """
        question = self.question
        self._at(every)
        if question.workers <= MOST_REPLAYED and question.inside != "fsdp" and (question.stages == 1 or question.steps):
            run = self._whole
            for optimizer in run.optimizers if self.has_rounds else ():
                optimizer.retime(every)
            rhythm = self._rhythm
            if run.cut:
                replay = replayed(run, self.config.network, staged_steps(run), most=_MESSAGES)
                rounds = run.config.run.steps / every
                if replay is not None:
                    return TimeAccount(replay.computing / rounds, replay.waiting / rounds), False
            elif _ROUNDS * sum(each.messages for each in run.exchanges(rhythm.start + rhythm.every)) <= _MESSAGES:
                near = links(question.near) if question.devices > 1 else None
                topology = Topology(question.workers, self.config.network, near, question.devices)
                records = partial(self._replayed, run.exchanges, topology, self.computing, _MESSAGES)
                # In the long run the workers' different starts no longer matter.
                return records(question.steps, run.opening() if question.steps else ()), False
        return self._of_few(every, _SHOWN, steps=question.steps)

    def bytes_a_step(self, every: int) -> float:
        """Bytes that a worker sends to others, or to other sites, per inner step in the long run, on average."""
        self._at(every)
        rhythm = self._rhythm
        sent = [sum(each.sent_by_all for each in self._schedule(rhythm.start + n * rhythm.every)) for n in (1, 3)]
        return (sent[1] - sent[0]) / (2 * rhythm.every) / self.optimizer.group.size / self.question.devices

    def _of_representatives(
        self, every: int, messages: int, rate: float = 1.0, steps: int | None = None
    ) -> tuple[TimeAccount, bool]:
        self._at(every)
        between = self._few_links
        inside = every * (self.seconds - self.computing)
        if between is None:
            return TimeAccount(every * self.computing, inside), False
        level = next((level for level in self._levels if self._played(level) <= messages), self._levels[-1])
        exact = len(self.question.classes) == 1 and not self.question.links.jitter and level.coarse == LEVELS[0]
        replay = self._replayed(
            lambda taken: level(self._schedule(taken)),
            Topology(_count(between), _scaled(between, rate)),
            self.seconds,
            math.ceil(_ROUNDS * self._played(level)),
            steps,
        )
        whole = TimeAccount(every * self.computing, replay.waiting + inside + self._spread)
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
        """The time account of one round. seconds: of an inner step."""
        rhythm, replays = self._rhythm, RunReplay(topology, [seconds] * topology.workers, opening, messages=messages)
        if steps is None:
            rounds = rhythm.every / self.every
            account = replays.long_run(records, rhythm, rounds=_MOST_ROUNDS)
        else:
            rounds = steps / self.every
            account = replays.run(records, rhythm, steps)
        assert account is not None, "the caller checked that it can be replayed"
        return TimeAccount(account.computing / rounds, account.waiting / rounds)

    @cached_property
    def _whole(self) -> RunSketch:
        return self._sketch if self.question.devices == 1 else sketch_quietly(self.config)

    @property
    def _spread(self) -> float:
        """Seconds per round in which the devices of a site exchange what has landed at each."""
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
        possible = [choice for choice in choices if steps is None or choice <= steps]
        if not possible:
            raise ValueError(f"sync_every = {min(choices)}: no exchange falls into a run of {steps} steps")
        self.config_at(possible[0])  # raises if the method refuses this H
        return possible

    def config_at(self, every: int) -> Config:
        """The configuration with rounds of `every` inner steps."""
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
        """The schedule's rhythm. For a method that does not define one, a run as long as one round."""
        return self.optimizer.rhythm(self.every)

    def _played(self, level: Representatives) -> float:
        """Messages of a round; with an end of the run, also of the steps before the first round."""
        rhythm = self._rhythm
        begun = 0 if self.question.steps is not None else rhythm.start
        sent = [exchange for exchange in self._schedule(rhythm.start + rhythm.every) if exchange.sent > begun]
        return sum(exchange.messages for exchange in level(sent))

    @cached_property
    def _few_links(self) -> Links | None:
        """Links between representatives of a few classes; None if nothing is exchanged."""
        rhythm, network = self._rhythm, self.question.links
        sent = self._schedule(rhythm.start + rhythm.every)
        largest = max((len(group) for exchange in sent for group in exchange.groups), default=1)
        if largest == 1:
            return None
        if largest == self.optimizer.group.size:
            return links_of_all(network, self.question.classes, _CLASSES)
        nbytes = max(sent_by_all(exchange.pattern(largest), largest) / largest for exchange in sent)
        return links_of_partners(network, self.question.classes, nbytes)

    @cached_property
    def _levels(self) -> list[Representatives]:
        """Representatives, from fine to coarse."""
        assert self._few_links is not None
        return [Representatives(_count(self._few_links), level) for level in LEVELS]

    def _enough(self, waits: float, target: float) -> int:
        """The H that would reach the target, rounded up to two digits. Longer rounds do not wait longer."""
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
    """Share of an inner step spent computing, not waiting for other devices of the site."""
    if question.devices == 1:
        return 1.0
    if question.stages > 1:
        if question.batches * question.stages > _MOST_MICROBATCHES:
            raise ValueError(f"{question.batches * question.stages} microbatches in a site: too many to simulate")
        config = _config(question, Candidate(method="none", kind=0, why=""), _STEPS)
        site = sketch_quietly(_in_world(config, workers=question.devices, shares_uplink=False))
        account = replayed(site, site.config.network, staged_steps(site))
        assert account is not None, "few enough to replay"
        return account.share
    text = None if question.step_tokens is None else question.step_tokens / question.sites
    alone = replace(question, workers=question.devices, devices=1, network=question.near, tokens=None, step_tokens=text)
    inside = PlannedMethod(alone, Candidate(method=question.inside, kind=0, why=""))
    return inside.account(1)[0].share


def _in_site(config: Config, question: PlanQuestion) -> Sequence[ReplicaSync]:
    """The optimizers of one device, or of each stage, in a world of two sites."""
    return sketch_quietly(_in_world(config, workers=2 * question.devices, links=_ANY), size=question.stages).optimizers


def _config(question: PlanQuestion, candidate: Candidate, steps: int) -> Config:
    tables = question.tables(candidate.replicas, steps, question.step_seconds * question.stages)
    if candidate.method == "fsdp":  # torch's FSDP needs processes
        tables["world"]["backend"] = "distributed"
    if hasattr(method(candidate.method).Config, "sync_every"):
        tables["replicas"]["sync_every"] = candidate.every or min(EVERY[0], steps)
    return resolve(tables)


def _in_world(config: Config, pipeline: PipelineConfig | None = None, **keys: Any) -> Config:
    """`config` with other keys of [world] and [world.virtual], and another [pipeline]."""
    world = config.world
    virtual = {key: value for key, value in keys.items() if hasattr(world.virtual, key)}
    world_keys = {key: value for key, value in keys.items() if key not in virtual}
    changed_world = replace(world, **world_keys, virtual=replace(world.virtual, **virtual))
    return replace(config, world=changed_world, pipeline=pipeline or config.pipeline)


def _count(between: Links) -> int:
    return len(between.latency)  # type: ignore[arg-type]


def _scaled(between: Links, rate: float) -> Links:
    if rate == 1.0:
        return between
    up, down = ([rate * own_rate for own_rate in rates] for rates in (between.bandwidth, between.downlink))  # type: ignore
    return replace(between, bandwidth=up, downlink=down)


_ALONE = KINDS.index("no answers")
_INSIDE: tuple[InSite, ...] = ("ddp", "fsdp", "stages")
_ENOUGH = 0.9  # share of computing inside a site


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """The plan of one candidate.

    question: with batches, and the method inside sites. bytes_a_step: that a worker sends to others, or to other sites,
    on average. memory: of a worker. fit: None: the machine is not known. hours, nbytes (of all workers), money: of the
    run; None: not known. pairs: whether it exchanges in pairs. grows: whether workers may come and go. is_best: no
    other plan is better in one of fit, change of training, time, bytes, money and as good in the others.
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
        """Seconds of waiting per round, mean over the workers."""
        return self.timing.account.waiting

    @property
    def utilisation(self) -> float:
        return self.timing.account.share


@dataclass(frozen=True, kw_only=True)
class MethodTable:
    """plans: in the order to try them. left_out: why other candidates are not planned, by method and settings."""

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
    """Compare methods.

    targets: utilisations for which rates are computed; the first is the one to reach. every: H of all; None: for each
    candidate the smallest of `EVERY` that reaches the target, or the largest. grows: workers come and go, so methods
    that cannot lose a worker are last. best: what the plans that reach the target are ordered by. ValueError if
    nothing can be planned.
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
            planned, fit = _that_fits(variants, full, one)
            key = planned.signature(every)
            timing = next((timing for other, timing in known if other == key), None)
            if timing is None:
                known.append((key, timing := planned.timing(targets, every)))
            plans.append(_plan(planned, timing, fit))
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
    """The question, and variants with less memory if the machine is known, in the order to try them: more gradient
    accumulation, and FSDP or stages inside a site. Variants that wait least inside the site come first.
    """
    if question.machine is None or question.step_tokens is None:
        return [question]
    most, cases = question.sequences, list[tuple[float, PlanQuestion]]()
    for count in (min(1 << power, most) for power in range((most - 1).bit_length() + 1)):
        for kind in _INSIDE if question.devices > 1 else _INSIDE[:1]:
            case = replace(question, batches=count, inside=kind)
            with suppress(ValueError):  # more stages than layers
                cases.append((max(_ENOUGH - inside_share(case), 0.0), case))
    return [case for _, case in sorted(cases, key=lambda entry: entry[0])]


def _that_fits(
    variants: Sequence[PlanQuestion], full: set[int], candidate: Candidate
) -> tuple[PlannedMethod, MemoryFit | None]:
    """The first of `variants` that fits, or the one that takes least memory of the device.

    full: indices of variants that did not fit another method, so they will hardly fit this one. ValueError if the
    method works with none of them.
    """
    over, unfit, least, refusal = set[InSite](), set[int](), None, None
    for number, case in enumerate(variants):
        if case.inside in over or number in full:
            continue
        try:
            planned, fit = _fitted(case, candidate)
        except ValueError as error:
            over.add(case.inside)
            refusal = refusal or error
            continue
        if fit is None or fit.fits:
            full |= unfit
            return planned, fit
        unfit.add(number)
        if least is None or least[1] is None or fit.device_bytes < least[1].device_bytes:
            least = planned, fit
        is_sharded = case.devices == 1 or case.inside != "ddp"
        if is_sharded and fit.device_bytes - (fit.activations or 0) > fit.device_room:
            over.add(case.inside)  # states alone are too large, so smaller batches do not help
    if least is None:
        raise refusal or ValueError("nothing goes with this model inside a site: choose other --devices")
    return _fitted(least[0].question, candidate, suggestions=True)


def _fitted(
    question: PlanQuestion, candidate: Candidate, *, suggestions: bool = False
) -> tuple[PlannedMethod, MemoryFit | None]:
    """The planned method, and whether it fits if the machine is known. suggestions: also look for settings, each of
    which would make it fit.
    """
    planned, here = PlannedMethod(question, candidate), question.machine
    if here is None:
        return planned, None
    return planned, memory_fit(planned.config, stage_fillings(planned.memory), None, here, suggestions=suggestions)


def _refuse_unknown(question: PlanQuestion, best: Best | None) -> None:
    if best == "money" and (question.price_gb, question.price_hour) == (None, None):
        raise ValueError("--best money: give --price-gb or --price-hour")
    if (best or question.price_hour is not None or question.price_gb is not None) and question.tokens is None:
        raise ValueError("--best, --price-gb, --price-hour: give --tokens of the run and --step-tokens too")


def _amount(plan: MethodPlan, best: Best) -> float:
    """The amount that `best` minimises."""
    amount = {"hours": plan.hours, "bytes": plan.nbytes, "money": plan.money}[best]
    assert amount is not None, "_refuse_unknown has refused this"
    return amount


def _is_better(one: MethodPlan, other: MethodPlan) -> bool:
    """Whether `one` is as good as `other` in fit, change of training, time, bytes and money, and better in one."""
    mine, theirs = (
        (plan.is_unfit, plan.candidate.kind, -plan.utilisation, plan.bytes_a_step, plan.money or 0.0)
        for plan in (one, other)
    )
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _rank(plan: MethodPlan) -> tuple[float, ...]:
    if plan.candidate.kind == _ALONE:
        return (2,)
    return (0, plan.candidate.kind, plan.every) if plan.timing.reaches else (1, -plan.utilisation)


def _plan(planned: PlannedMethod, timing: MethodTiming, fit: MemoryFit | None) -> MethodPlan:
    question, steps, account = planned.question, planned.question.steps, timing.account
    hours = None if steps is None else steps / timing.every * (account.computing + account.waiting) / 3600
    sent = planned.bytes_a_step(timing.every)
    nbytes = None if steps is None else sent * steps * question.workers
    prices = question.price_gb, question.price_hour
    money = None
    if hours is not None and nbytes is not None and prices != (None, None):
        money = (prices[0] or 0.0) * nbytes / 1e9 + (prices[1] or 0.0) * hours * question.workers
    return MethodPlan(
        candidate=planned.candidate,
        question=planned.question,
        config=planned.config_at(timing.every),
        timing=timing,
        bytes_a_step=sent,
        memory=max(planned.memory, key=lambda memory: memory.peak),
        fit=fit,
        hours=hours,
        nbytes=nbytes,
        money=money,
        pairs=not lands_together(planned.config),
        grows=goes_on(planned.config),
    )

"""A candidate of `isles plan methods` around its sketch: what a round costs, for each H and any rates.

Up to 16 workers what is shown is replayed message by message, as a dry run replays it. Where that is too much, and in
the search of H and of rates, alike workers are played once (`isles.network.planner.classes`), and the devices of a site
stand for one worker: an inner step takes as long as that of the method inside, and what has landed is spread behind it.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from isles.network.links import Links
from isles.network.named import links
from isles.network.planner.classes import LEVELS, Representatives, lines_of_all, lines_of_partners
from isles.network.planner.planned import PlannedExchange, Rhythm, sent_by_all
from isles.network.planner.replay import ExchangeRecords, RunReplay, TimeAccount
from isles.network.planner.wanted_rate import wanted_rate
from isles.network.topology import Topology
from isles.pipeline.config import PipelineConfig
from isles.replicas import method
from isles.replicas.sync import ReplicaSync
from isles.training.config.reading import resolve
from isles.training.config.sections import Config
from isles.training.elastic.terms import lands_together
from isles.training.plan.candidates import KINDS, Candidate
from isles.training.plan.pipelines import staged_steps
from isles.training.plan.question import PlanQuestion
from isles.training.plan.replicas import replayed, worker_memory
from isles.training.plan.sketch import RunSketch, sketch_run

EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
"""Rounds that are tried, in inner steps."""
MOST_REPLAYED = 16
"""Workers."""
_CLASSES = 3
_ROUNDS, _MOST_ROUNDS = 4, 20  # that are played, at least and at most
_MESSAGES = 10_000  # in all of them, of all workers
_SHOWN, _TRIED, _WANTED = 2_000, 200, 50  # in a round of representatives: of what is shown, for an H, and for a rate
_LONGEST = 2_000  # inner steps of a round that is played
_PAIRED, _ANY = 64, "lan"  # workers whose pairs stand for those of any number, and a network that does not count them
_MOST_PARTS = 256  # workers, each of which sends another part to each other
_STEPS, _MOST_MICROBATCHES = 4, 512  # of a site's stages that are played
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
        # Devices of a site are one worker here: they send its exchanges over its line.
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
                shares_line=False,
            )
        else:
            made = config
        self._sketch = _sketched(made)
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
        self._schedules: dict[tuple[int, int], list[PlannedExchange]] = {}
        self._few: dict[tuple[int, int, float, int | None], tuple[TimeAccount, bool]] = {}

    def signature(self, every: int | None) -> object:
        """Equal for methods that send the same at the same moments."""
        rhythm = self._rhythm
        return self.seconds, rhythm, self._tried(every), self._schedule(rhythm.start + rhythm.every)

    def timing(self, targets: Sequence[float], every: int | None) -> MethodTiming:
        """At the smallest H that reaches the first target, or the largest. targets: of what a site alone computes."""
        targets = [target * self.computing / self.seconds for target in targets]
        tried = self._tried(every)
        last = len(tried) - 1
        place = bisect_left(range(last), True, key=lambda at: self.share(tried[at]) >= targets[0])
        found = tried[place]
        account, about = self.account(found)
        for larger in tried[place + 1 :]:  # the end of the run may ask for more than the search knew
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

    def _of_few(
        self, every: int, messages: int, rate: float = 1.0, steps: int | None = None
    ) -> tuple[TimeAccount, bool]:
        key = every, messages, rate, steps
        if key not in self._few:
            self._few[key] = self._of_representatives(*key)
        return self._few[key]

    def _of_representatives(
        self, every: int, messages: int, rate: float, steps: int | None
    ) -> tuple[TimeAccount, bool]:
        self._at(every)
        lines = self._lines
        inside = every * (self.seconds - self.computing)
        if lines is None:
            return TimeAccount(every * self.computing, inside), False
        some = next((some for some in self._levels if self._played(some) <= messages), self._levels[-1])
        exact = len(self.question.classes) == 1 and not self.question.links.jitter and some.coarse == LEVELS[0]
        found = self._replayed(
            lambda taken: some(self._schedule(taken)),
            Topology(_count(lines), _scaled(lines, rate)),
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
        assert found is not None, "its caller has looked that it can be played"
        return TimeAccount(found.computing / rounds, found.waiting / rounds)

    @cached_property
    def _whole(self) -> RunSketch:
        """All workers."""
        return self._sketch if self.question.devices == 1 else _sketched(self.config)

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
        asked = [self.candidate.every] if self.candidate.every else EVERY if every is None else [every]
        steps = self.question.steps
        possible = [one for one in asked if steps is None or one <= steps]
        if not possible:
            raise ValueError(f"sync_every = {min(asked)}: no exchange falls into a run of {steps} steps")
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
            self._schedules.clear()

    def _schedule(self, steps: int) -> list[PlannedExchange]:
        key = self.every, steps
        if key not in self._schedules:
            self._schedules[key] = self.optimizer.schedule(steps)
        return self._schedules[key]

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
    def _lines(self) -> Links | None:
        """Between representatives of a few classes; None where nobody exchanges."""
        rhythm, network = self._rhythm, self.question.links
        sent = self._schedule(rhythm.start + rhythm.every)
        largest = max((len(group) for one in sent for group in one.groups), default=1)
        if largest == 1:
            return None
        if largest == self.optimizer.group.size:
            return lines_of_all(network, self.question.classes, _CLASSES)
        nbytes = max(sent_by_all(one.pattern(largest), largest) / largest for one in sent)
        return lines_of_partners(network, self.question.classes, nbytes)

    @cached_property
    def _levels(self) -> list[Representatives]:
        """From fine to coarse."""
        assert self._lines is not None
        return [Representatives(_count(self._lines), level) for level in LEVELS]

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
            raise ValueError(f"{question.batches * question.stages} microbatches in a site: too many to be played")
        config = _config(question, Candidate(method="none", kind=0, why=""), _STEPS)
        site = _sketched(_in_world(config, workers=question.devices, shares_line=False))
        account = replayed(site, site.config.network, staged_steps(site))
        assert account is not None, "so few are played"
        return account.share
    text = None if question.step_tokens is None else question.step_tokens / question.sites
    alone = replace(question, workers=question.devices, devices=1, network=question.near, tokens=None, step_tokens=text)
    inside = PlannedMethod(alone, Candidate(method=question.inside, kind=0, why=""))
    return inside.account(1)[0].share


def _in_site(config: Config, question: PlanQuestion) -> Sequence[ReplicaSync]:
    """The optimizers of a device, or of each stage, among those of two sites."""
    return _sketched(_in_world(config, workers=2 * question.devices, links=_ANY), places=question.stages).optimizers


def _sketched(config: Config, places: int | None = None) -> RunSketch:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run says it
        return sketch_run(config, places=places)


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


def _count(lines: Links) -> int:
    return len(lines.latency)  # type: ignore[arg-type]


def _scaled(lines: Links, rate: float) -> Links:
    if rate == 1.0:
        return lines
    up, down = ([rate * own for own in rates] for rates in (lines.bandwidth, lines.downlink))  # type: ignore
    return replace(lines, bandwidth=up, downlink=down)

"""Compare divisions of workers into replicas, stages and workers that share a stage: step time and memory of each.

    question, split -> configuration -> its workers around a sketched model -> tasks of a step, exchanges, memory
                    -> one replay of the long run -> SplitPlan

All splits read the same number of tokens in a step of all workers, so each worker computes equally long in all of
them, and only the waiting differs. Not counted: the time to encode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from isles.network.exchange_plan import BySize, PlannedExchange, Rhythm
from isles.network.links import Topology, links
from isles.pipeline.boundaries.names import boundary_name
from isles.plan.memory_fit import memory_fit
from isles.plan.pipeline_steps import StagedSteps
from isles.plan.question import PlanQuestion
from isles.plan.record import stage_fillings
from isles.plan.replay import ExchangeRecords, RunReplay, TimeAccount
from isles.plan.replicas import staged_steps, subspace_updates, worker_memory
from isles.plan.sketch import RunSketch, sketch_quietly
from isles.plan.worker_classes import LEVELS, Representatives, fewer
from isles.replicas import method
from isles.training.config.reading import resolve
from isles.training.config.sections import Config

_MESSAGES = 24_000  # the most messages to replay for one split
_FEWEST = 4  # the fewest steps of a round to replay
_WORKERS, _REPLICAS = 16, 4  # of a large fleet, replay about this many workers, and at least this many replicas
_MOST_INSIDE, _MOST_STAGES = 8, 16
Routing = Literal["fixed", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSplit:
    """replicas x stages x inner workers."""

    replicas: int
    stages: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class SplitsQuestion:
    """A model to be trained by replicas that may be cut into stages.

    near: the network inside a replica; None: the network between replicas. microbatches: parts of a replica's batch.
    method, replicas: the method between replicas and its keys of [replicas]. boundary: keys of [pipeline.boundary],
    what crosses between stages. recompute: stages repeat forward passes instead of keeping activations.
    """

    question: PlanQuestion
    routing: Routing = "fixed"
    microbatches: int = 4
    method: str = "diloco"
    replicas: dict[str, Any]
    near: str | None = None
    boundary: dict[str, Any]
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.question.step_tokens is None:
            raise ValueError("missing: --tokens and --step-tokens: the bytes between stages depend on them")
        if self.microbatches < 1:
            raise ValueError(f"--microbatches {self.microbatches}: choose 1 or more")

    @property
    def every(self) -> int:
        """Inner steps of a round; 1 where the method has none."""
        known = getattr(method(self.method).Config(), "sync_every", 1)
        return int(self.replicas.get("sync_every", known))

    def config(self, split: WorkerSplit) -> Config:
        """The configuration of a run with this split. ValueError if there is none."""
        question, parts = self.question, split.stages > 1
        batches = self.microbatches if parts or question.machine else 1  # a whole replica accumulates as many gradients
        tokens = (question.step_tokens or 0.0) / (split.replicas * split.inner * batches)
        sequences = max(1, round(tokens / question.model.shape().context))
        replicas = {"method": self.method, **self.replicas}
        if not hasattr(method(self.method).Config, "sync_every"):
            replicas.pop("sync_every", None)
        tables = question.tables(replicas, 10 * self.every, question.step_seconds * split.stages)
        tables["model"]["context"] = max(1, round(tokens / sequences))
        tables["data"]["batch_size"] = sequences * (batches if parts else 1)
        tables["inner"] |= {"accumulation": batches} if batches > 1 and not parts else {}
        tables["world"]["inner"] = split.inner
        if parts:
            tables["pipeline"] = {
                "stages": split.stages,
                "microbatches": self.microbatches,
                "routing": "fixed" if split.replicas == 1 else self.routing,
                "boundary": self.boundary,
                "recompute": self.recompute,
            }
            if boundary_name(self.boundary.get("kind", "none")).is_one_way:  # the output head is not tied
                tables["model"]["tie_embeddings"] = False
        return resolve(tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """One split: the seconds of an inner step, of which a worker computes, waits for its pipeline (bubble), and waits
    for other replicas and inside its stage (waiting).

    stage_bytes: bytes per step that a worker sends to other stages. outer_bytes: to other workers of its stage, on
    average. memory: bytes of the fullest worker. on_device: those on the device, including activations if the machine
    is known. fits: whether they fit. recompute: stages repeat forward passes, because only that makes it fit.
    """

    split: WorkerSplit
    step: float
    computing: float
    bubble: float
    waiting: float
    stage_bytes: float
    outer_bytes: float
    memory: float
    on_device: float
    fits: bool | None
    recompute: bool


def splits(workers: int, layers: int, stages: Sequence[int] | None) -> list[WorkerSplit]:
    """All splits that use all `workers`. stages: the numbers to consider. ValueError if there are none."""
    wanted = range(1, min(workers, layers) + 1) if stages is None else stages
    possible = [
        WorkerSplit(replicas=workers // (number * inner), stages=number, inner=inner)
        for number in wanted
        for inner in range(1, min(workers // max(number, 1), _MOST_INSIDE) + 1)
        if 1 <= number <= min(layers, _MOST_STAGES) and workers % (number * inner) == 0
    ]
    if not possible:
        listed = ", ".join(map(str, wanted))
        raise ValueError(
            f"--stages {listed}: {workers} workers and {layers} layers make no such replicas; choose fewer"
        )
    return possible


def plan_splits(splits: SplitsQuestion, candidates: Sequence[WorkerSplit]) -> list[SplitPlan]:
    """Plans of the possible splits: those that fit first, then by step time. ValueError if none is possible."""
    plans, refusal = [], None
    for split in candidates:
        try:
            plans.append(plan_split(splits, split))
        except ValueError as error:
            refusal = error
    if not plans and refusal is not None:
        raise refusal
    return sorted(plans, key=lambda plan: (plan.fits is False, plan.step, plan.memory))


def plan_split(splits: SplitsQuestion, split: WorkerSplit) -> SplitPlan:
    """Plan one split. ValueError if it is impossible."""
    run, every, island = sketch_quietly(splits.config(split)), splits.every, split.stages * split.inner
    memory = [worker_memory(run.config, one) for one in run.optimizers[:: split.inner]]
    fullest, machine = max(memory, key=lambda one: one.peak), splits.question.machine
    fit = None if machine is None else memory_fit(run.config, stage_fillings(memory), None, machine)
    if fit is not None and "pipeline.recompute = true" in fit.suggestions:
        return plan_split(replace(splits, recompute=True), split)
    few = min(split.replicas, max(_REPLICAS, _WORKERS // island))
    part = run
    if few < split.replicas:
        part_question, part_split = _part(splits, split, few)
        part = sketch_quietly(part_question.config(part_split))
    records = partial(_exchanges_of, run, few * island, island)
    config, near = part.config, None if splits.near is None else links(splits.near)
    topology = Topology(few * island, config.network, near, 1 if near is None else island)
    staged = staged_steps(part) if part.cut else None
    exchanged = [
        sum(one.sent_by_all for one in run.exchanges(rounds * every) if _is_across(one, island)) for rounds in (1, 3)
    ]
    account = _replayed(run, records, part.opening(), staged, topology, every)
    sent = 0.0 if staged is None else sum(staged.sent()) / topology.workers
    update = None if staged is None else subspace_updates(part, staged)
    if update is not None:
        account = account.plus(every / config.pipeline.boundary.update_every, update[0].account(topology))
        sent += sum(update[0].bytes_sent) / topology.workers / config.pipeline.boundary.update_every
    return SplitPlan(
        split=split,
        step=(account.computing + account.waiting) / every,
        computing=account.computing / every,
        bubble=account.for_stages / every,
        waiting=(account.waiting - account.for_stages) / every,
        stage_bytes=sent,
        outer_bytes=(exchanged[1] - exchanged[0]) / 2 / every / splits.question.workers,
        memory=fullest.peak,
        on_device=fullest.computing if fit is None else fit.device_bytes,
        fits=None if fit is None else fit.fits,
        recompute=splits.recompute and part.cut is not None,
    )


def _part(splits: SplitsQuestion, split: WorkerSplit, few: int) -> tuple[SplitsQuestion, WorkerSplit]:
    """A part of a large fleet: `few` replicas, on links with its slowest rate and longest latency."""
    whole, workers = splits.question, few * split.stages * split.inner
    rate, latency = whole.links.slowest_rate(whole.workers), whole.links.longest_latency(whole.workers)
    assert whole.step_tokens is not None
    part = replace(
        whole,
        workers=workers,
        network=f"{min(rate, 1e15):.9g}bit/s, {latency:.9g}s",
        step_tokens=whole.step_tokens * few / split.replicas,
    )
    return replace(splits, question=part), replace(split, replicas=few)


def _exchanges_of(run: RunSketch, workers: int, island: int, steps: int) -> list[PlannedExchange]:
    """The exchanges of the first `workers` workers, which send other replicas as much as the whole fleet's would."""
    planned = run.exchanges(steps)
    if workers == run.config.world.workers:
        return planned
    exchanges, few = [], workers // island
    for exchange in planned:
        groups, pattern = tuple(group for group in exchange.groups if max(group) < workers), exchange.pattern
        if _is_across(exchange, island):
            size = max(map(len, exchange.groups))
            at_once = min(size, few)
            firsts = range(0, few - at_once + 1, at_once)
            groups = tuple(
                tuple(replica * island + index for replica in range(first, first + at_once))
                for first in firsts
                for index in sorted({group[0] % island for group in exchange.groups if len(group) > 1})
            )
            pattern = BySize(((at_once, fewer(exchange.pattern(size), size, at_once)),))
        exchanges.append(exchange._replace(groups=groups, pattern=pattern))
    return exchanges


def _is_across(exchange: PlannedExchange, island: int) -> bool:
    """Whether the exchange crosses replicas."""
    return any(group[0] // island != group[-1] // island for group in exchange.groups)


def _replayed(
    run: RunSketch,
    records: ExchangeRecords,
    opening: Sequence[PlannedExchange],
    staged: StagedSteps | None,
    topology: Topology,
    every: int,
) -> TimeAccount:
    """The time account of one round in the long run. If workers share stages, they exchange in every step; then only
    some steps of a long round are replayed, and the others count like them.
    """
    seconds = [run.config.world.virtual.step_seconds] * topology.workers
    replays = RunReplay(topology, seconds, opening, staged=staged, messages=_MESSAGES)
    levels = [Representatives(None, level) for level in LEVELS]

    def played(every: int) -> TimeAccount:
        for representatives in levels:
            if 3 * sum(one.messages for one in representatives(records(every))) <= _MESSAGES:
                break
        account = replays.long_run(lambda steps: representatives(records(steps)), Rhythm(0, every), rounds=6)
        if account is None:
            raise ValueError(
                f"{topology.workers} workers send too many messages to be simulated: choose a larger "
                "--sync-every, or fewer --microbatches"
            )
        return account

    if run.config.world.inner == 1 and run.rhythm(every).every > 1:
        return played(every)
    step = sum(one.messages for one in records(1)) + (0 if staged is None else staged.messages)
    short = min(every, max(_FEWEST, int(_MESSAGES / (3 * max(step, 1)))))
    if short == every:
        return played(every)
    rounds = [one for one in run.optimizers if hasattr(one.config, "sync_every")]
    for one in rounds:
        one.retime(short)
    account = played(short)
    for one in rounds:
        one.retime(1 << 20)
    return account.plus(every - short, played(1))

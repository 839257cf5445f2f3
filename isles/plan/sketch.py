"""The workers of a planned run around a model on the meta device, so that the code that will run reports its numbers.

configuration -> model on the meta device -> the method's optimizers around it, in a world that is only planned
              -> memory, schedules and advice of each; exchanges of all workers
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil

from torch import nn

from isles.base.imports import describe
from isles.comm.mesh import dry_mesh
from isles.models import sketch
from isles.models.stages import Stage
from isles.network.exchange_plan import Groups, PlannedExchange, Rhythm, Swap, Tree, among, by_size, gathered
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut
from isles.plan.pipeline_steps import ANSWER
from isles.replicas import METHODS, method
from isles.replicas.island.island import Together
from isles.replicas.loop.outer import OuterSync
from isles.replicas.sync import ReplicaSync
from isles.training.config.conflicts import plan_of
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.memory.plans import sketched
from isles.training.optimizer import wrapped
from isles.training.stage_runner import planned_cut, run_scheme

HASH_BYTES = 8


def clips_model(config: Config) -> bool:
    """Whether the stages of a replica exchange their gradient norm."""
    return config.pipeline.stages > 1 and bool(config.inner.max_norm) and config.pipeline.clip == "model"


def reduces_first(config: Config) -> bool:
    """Whether the nodes of a plan of paths average their gradients before the norm is computed."""
    return plan_of(config.pipeline) is not None and method(config.method).level == "gradient"


@dataclass(frozen=True, kw_only=True)
class RunSketch:
    """A planned run.

    model: the whole model. parameters: its number, before a method divides them. pieces: the stages' models, or the
    whole one. cut, scheme: of the stages. holders: by position in a replica, stage after stage, the ranks that hold the
    same part of the model. optimizers: by position too; all replicas are alike. notices: for the user.
    """

    config: Config
    model: nn.Module
    parameters: int
    pieces: Sequence[nn.Module]
    cut: Cut | None
    scheme: Scheme | None
    holders: Sequence[Sequence[int]]
    optimizers: Sequence[ReplicaSync]
    notices: tuple[str, ...]

    def rhythm(self, steps: int) -> Rhythm:
        """The rhythm in which the exchanges of a run of `steps` repeat."""
        widest = max(self.optimizers, key=lambda optimizer: optimizer.group.size)
        rhythms = [each.rhythm(steps) for each in (widest, _inside(widest)) if each is not None]
        return Rhythm(max(rhythm.start for rhythm in rhythms), rhythms[0].every)

    def exchanges(self, steps: int) -> list[PlannedExchange]:
        """The exchanges of all workers in a run of `steps`: inside islands, across them, those that complete islands
        after a landing, and norms of averaged gradients. Groups are of ranks.
        """
        outside = [(ranks, one.schedule(steps)) for ranks, one in zip(self.holders, self.optimizers, strict=True)]
        inside: list[tuple[Sequence[int], list[PlannedExchange]]] = []
        ends: list[tuple[Sequence[int], list[PlannedExchange]]] = []
        for first, members, islands in self._islands():
            inside += [(island, first.schedule(steps)) for island in islands]
            outer = members[0]
            if isinstance(outer, OuterSync):
                landings = zip(*(one.landings(steps) for one in members if isinstance(one, OuterSync)), strict=True)
                whole = [_spread(members, number, at) for number, at in enumerate(landings)]
                sent_last = sum(one.sent > steps for one in outer.schedule(steps) if one.what == "payload")
                if outer.parts.cadence.rounds_late:  # what is sent at the end is in flight while the others land
                    for number in range(sum(one.sent <= steps for one in whole), len(whole) - 1 - sent_last):
                        whole[number] = whole[number]._replace(lands=steps + 2)
                outside += [(island, whole[:-1]) for island in islands]
                ends += [(island, whole[-1:]) for island in islands]
        numbers = count()
        parts = inside + outside, ends
        earlier, last = ([one for ranks, plan in part for one in among(ranks, plan, numbers)] for part in parts)
        if clips_model(self.config) and reduces_first(self.config):
            earlier += _norms(self.config.world.workers, steps)
        at_once = {(one.flight, one.sent) for one in earlier if one.what == "payload"}

        def order(one: PlannedExchange) -> tuple[int, float, int]:
            is_behind = one.what == "anchor" and (one.flight, one.sent) not in at_once  # an island is made whole first
            is_before = one.what == "spread" and one.lands > one.sent
            return ceil(one.sent), one.sent, (is_behind if ends else 0) - is_before

        return [*sorted(earlier, key=order), *last]

    def opening(self) -> list[PlannedExchange]:
        """The exchanges of all workers before the first step, one after the other. With a plan of paths, the workers of
        a column also learn whether there is validation text, and all compare their plans.
        """
        by_ranks: list[tuple[Sequence[int], list[PlannedExchange]]] = []
        for first, _, islands in self._islands():
            by_ranks += [(island, first.opening_exchanges()) for island in islands]
        by_ranks += [(ranks, one.opening_exchanges()) for ranks, one in zip(self.holders, self.optimizers, strict=True)]
        numbers = count()
        exchanges = [one for ranks, planned in by_ranks for one in among(ranks, planned, numbers)]
        if plan_of(self.config.pipeline) is None:
            return exchanges
        layout = layout_of(self.config)
        columns = tuple({tuple(layout.sharing(rank, "replica", "inner")): None for rank in range(layout.size)})
        everyone = (tuple(range(layout.size)),)
        validation = PlannedExchange(0, 0, 0, "opening", columns, by_size(columns, lambda _: Tree(1)), 0, "control")
        hashes = by_size(everyone, lambda size: gathered(HASH_BYTES, size))
        exchanges = [validation, *exchanges, PlannedExchange(0, 0, 0, "opening", everyone, hashes, 0, "control")]
        return [one._replace(flight=number) for number, one in enumerate(exchanges)]

    def _islands(self) -> Iterator[tuple[ReplicaSync, Sequence[ReplicaSync], list[range]]]:
        """Per stage, if workers share one: the method inside an island, their optimizers, and the ranks of each
        island.
        """
        world, size = self.config.world, len(self.optimizers)
        for index in range(0, size, world.inner):
            if (inside := _inside(self.optimizers[index])) is not None:
                ranks = [range(first, first + world.inner) for first in range(index, world.workers, size)]
                yield inside, self.optimizers[index : index + world.inner], ranks


def sketch_run(config: Config, here: int | None = None, size: int | None = None) -> RunSketch:
    """Sketch the workers of a run with fixed workers.

    here: workers of a machine. size: workers of a replica to sketch; None: all. ValueError, naming the key, if the
    method or the model cannot be configured so.
    """
    model, layout = sketch(config.model), layout_of(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    pieces, cut, scheme = [model], None, None
    if config.pipeline.stages > 1:
        cut = planned_cut(config)
        scheme, pieces = run_scheme(config, cut), [Stage(model, piece) for piece in cut.pieces]
        for piece in pieces:
            scheme.fit(piece)
    wrapped_parts, world = [], config.world
    try:
        for index, ranks in enumerate(layout.holders[:size]):
            mesh = dry_mesh(world.workers, inner=1, rank=ranks[0], native=world.has_processes).arranged(layout)
            part, manage = pieces[index // world.inner], partial(sketched, config)
            wrapped_parts.append(wrapped(config, part, mesh.outer, mesh, manage, here=here))
    except RuntimeError as error:  # torch refuses to read values of meta tensors
        if config.method in METHODS:
            raise
        raise ValueError(f"replicas.method = {config.method!r} cannot be planned: {describe(error)}") from error
    return RunSketch(
        config=config,
        model=model,
        parameters=parameters,
        pieces=pieces,
        cut=cut,
        scheme=scheme,
        holders=layout.holders,
        optimizers=[optimizer for optimizer, _ in wrapped_parts],
        notices=tuple(wrapped_parts[0][1]),
    )


def sketch_quietly(config: Config, size: int | None = None) -> RunSketch:
    """`sketch_run` without its warnings, which the run itself will show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sketch_run(config, size=size)


def _inside(optimizer: ReplicaSync) -> ReplicaSync | None:
    """The method inside an island; None: there are no islands."""
    return optimizer.replica.inside if isinstance(optimizer.replica, Together) else None


def _norms(workers: int, steps: int) -> list[PlannedExchange]:
    """The exchanges of gradient norms among all workers."""
    groups = (tuple(range(workers)),)
    pattern = by_size(groups, lambda size: gathered(ANSWER, size))
    return [PlannedExchange(step, step, 0, "norm", groups, pattern, -step, "inner") for step in range(1, steps + 1)]


def _spread(
    optimizers: Sequence[ReplicaSync], number: int, landing: Sequence[tuple[int, Sequence[int]]]
) -> PlannedExchange:
    """The exchange that completes an island's weights after its workers' shards have landed."""
    size, moment = len(optimizers), landing[0][0]
    groups: Groups = (tuple(range(size)),)
    pairs = zip(optimizers, landing, strict=True)
    each = [optimizer.replica.spread_bytes(landed) / (size - 1) for optimizer, (_, landed) in pairs]
    return PlannedExchange(
        moment, moment, 0, "spread", groups, by_size(groups, lambda _: Swap(tuple(each))), number, "inner"
    )


def refuse_known(config: Config) -> None:
    """ValueError for what the run refuses when it builds replicas; only for models and methods that come with Isles."""
    if config.model.factory is None and config.model.hf is None and config.method in METHODS:
        sketch_quietly(config)

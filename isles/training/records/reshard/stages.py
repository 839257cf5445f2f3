"""States of replicas cut into other stages than they were saved in: everything by the parameters' names.

    states of a replica's stages -> weights, moments and flat vectors by name -> those of other stages, or of the whole

So no bit of a weight, a moment, an anchor, a momentum or an exchange under way is changed; only hashes of vectors and
what concerns a worker (totals, clocks, draws) are made anew. A method's own state is cut where it `keeps_flat` vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from isles.models import sketch
from isles.models.cuts import cut_points
from isles.models.stages import Stage
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.config import PipelineConfig
from isles.replicas import method
from isles.replicas.flat import FlatParameters
from isles.replicas.sync import ReplicaSync
from isles.tables import changed
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.inner_optimizer import inner_optimizer
from isles.training.kinds import kind_of
from isles.training.records.shard import State
from isles.training.staged import planned_cut, run_scheme
from isles.version import __version__

_NORMS = ("progress", "left_ratio")  # of what the last round had to send: gauges, until the next one
_SHARED = ("lr", "initial_lr", "betas", "eps", "fused")
"""Settings in which groups of an inner optimizer are alike; by the others (weight decay, rows) they differ."""


class Holding:
    """What a worker holds of the model, by names: `model` is that part without numbers."""

    def __init__(self, config: Config, model: nn.Module) -> None:
        if config.pipeline.boundary.kind != "none":
            run_scheme(config, planned_cut(config)).fit(model)
        inner = inner_optimizer(model, config.inner, method(config.method).usual_inner)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = {name: own.shape for name, own in model.named_parameters() if own.requires_grad}
        """Shapes, in the order of its flat vectors."""
        self.sizes = [shape.numel() for shape in self.trained.values()]
        self.stepped = [names[id(own)] for group in inner.param_groups for own in group["params"]]
        numbers, self.kept = count(), list(model.state_dict())
        self.groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            | ({"fused": True} if "fused" in group else {})  # as where there are numbers
            for group in inner.param_groups
        ]


def holdings(config: Config, *, whole: bool = False) -> list[Holding]:
    """Of each stage of a replica, or of the whole model."""
    model = sketch(config.model)
    if whole or config.pipeline.stages == 1:
        return [Holding(config, model)]
    return [Holding(config, Stage(model, piece)) for piece in planned_cut(config).pieces]


def first_blocks(config: Config) -> list[Any]:
    """The first block of each stage after the first; where clusters are cut each in its own way, those of each."""
    if config.pipeline.ravnest.clusters:
        return [list(cuts) for cuts in config.pipeline.ravnest.clusters]
    if config.pipeline.stages == 1:
        return []
    return [piece.blocks.start for piece in planned_cut(config).pieces[1:]]


def run_facts(config: Config) -> dict[str, Any]:
    """What a manifest says of the run that it is of, and of its stages."""
    stages = config.pipeline.stages
    facts = {"isles_version": __version__, "method": config.method, "run": run_name(config), "stages": stages}
    return facts | ({"cut": first_blocks(config)} if stages > 1 else {})


def with_stages(config: Config, stages: int, workers: int | None) -> Config:
    """`config` in replicas of so many stages; workers: None: as many replicas as before. Batches stay as they are:
    microbatches are what is accumulated without stages, so that sums are formed alike. ValueError as `Config`.
    """
    if stages < 1:
        raise ValueError(f"--stages {stages}: choose 1 or more")
    pipeline = config.pipeline
    if pipeline.recovery.stage_loss or pipeline.skippipe.plan or kind_of(pipeline).has_peers:
        key = "recovery.stage_loss" if pipeline.recovery.stage_loss else f'routing = "{pipeline.routing}"'
        raise ValueError(f"--stages {stages}: pipeline.{key} is for the stages that there are; resume without --stages")
    world, data, inner = config.world, config.data, config.inner
    sequences = data.batch_size_per_worker(world.workers // pipeline.stages)
    world = replace(world, workers=config.replicas_in_all * stages * world.inner if workers is None else workers)
    if stages == 1 < pipeline.stages:
        data = replace(data, batch_size=data.batch_size // pipeline.microbatches)
        inner = replace(inner, accumulation=pipeline.microbatches)
        pipeline = PipelineConfig()
    elif stages > 1 == pipeline.stages:
        parts = inner.accumulation
        if parts == 1:
            parts = max(count for count in range(1, PipelineConfig.microbatches + 1) if sequences % count == 0)
        data = replace(data, batch_size=data.batch_size * inner.accumulation)
        inner = replace(inner, accumulation=1)
        pipeline = PipelineConfig(stages=stages, microbatches=parts)
    elif stages > 1:
        pipeline = replace(pipeline, stages=stages, cut=pipeline.cut if stages == pipeline.stages else ())
    return replace(config, world=world, data=data, inner=inner, pipeline=pipeline)


def with_boundary(saved: Config, config: Config) -> Config:
    """`config`, which is `saved` with its stages cut anew, with boundaries for the same weights. ValueError where they
    want others.
    """
    name, stages = boundary_name(saved.pipeline.boundary.kind), config.pipeline.stages
    before, after = first_blocks(saved), first_blocks(config)
    if before == after:
        return config
    told = f'--stages {stages}: pipeline.boundary.kind = "{saved.pipeline.boundary.kind}"'
    if name.has_layers:
        raise ValueError(f"{told} has trained layers where the stages begin now: blocks {before}; leave out --stages")
    if name.kind != "subspace":
        return config
    if stages == 1:
        raise ValueError(
            f"{told} is of stages, and a whole model has no coordinates; choose 2 or more, or begin a run with "
            "run.start at this one's model"
        )
    if saved.pipeline.boundary.form != "coordinates":
        raise ValueError(
            f'{told} with form = "{saved.pipeline.boundary.form}": what its optimizers see of gradients hangs on where '
            "the stages begin; leave out --stages"
        )
    inside = saved.pipeline.boundary.blocks or before[-1]
    if after[-1] > inside:
        if stages - 1 > inside:
            raise ValueError(
                f"{told}: only the first {inside} blocks write into the subspace; choose at most {inside + 1} stages"
            )
        costs = planned_cut(config).costs.to_cut(loss_at_origin=False)
        after = [*cut_points(costs[:inside], stages - 1), inside]
        config = changed(config, {"pipeline.cut": tuple(after)})
    return changed(config, {"pipeline.boundary.blocks": 0 if inside == after[-1] else inside})


def recut(
    states: Sequence[State], before: Sequence[Holding], after: Sequence[Holding], kind: type[ReplicaSync]
) -> Iterator[State]:
    """The states of workers that hold `after` what those of `states` held `before`, of one replica. kind: its method.
    The first of them inherits the replica's totals. ValueError: the method does not say where in its state what lies.
    """
    first, optimizers = states[0], [state["optimizer"] for state in states]
    if any(optimizer.get("frozen") for optimizer in optimizers):
        raise ValueError("some parameters were frozen during the run: resume with as many stages as before")
    weights = {name: tensor for state in states for name, tensor in state["model"].items()}
    moments: dict[str, Any] = {}
    for holding, optimizer in zip(before, optimizers, strict=True):
        moments |= {holding.stepped[index]: own for index, own in optimizer["inner"]["state"].items()}
    outers = _outer_states([optimizer["outer"] for optimizer in optimizers], before, after, kind)
    for number, (holding, outer) in enumerate(zip(after, outers, strict=True)):
        inner, schedule = first["optimizer"]["inner"], first["schedule"]
        shared = {key: value for key, value in inner["param_groups"][0].items() if key in _SHARED}
        optimizer = {
            **first["optimizer"],
            "shapes": [list(shape) for shape in holding.trained.values()],
            "inner": {
                "state": {index: moments[name] for index, name in enumerate(holding.stepped) if name in moments},
                "param_groups": [group | shared for group in holding.groups],
            },
            "outer": outer,
        }
        rates = {key: [value[0]] * len(holding.groups) for key, value in schedule.items() if isinstance(value, list)}
        made = {
            **first,
            "model": {name: weights[name] for name in holding.kept},
            "optimizer": optimizer,
            "schedule": schedule | rates,
            "step": states[-1].get("step") if number == len(after) - 1 else first.get("step"),
            "loader": first["loader"] if number == 0 else None,
        }
        yield inheriting(made, first, states if number == 0 else [], states)


def _outer_states(
    states: Sequence[State], before: Sequence[Holding], after: Sequence[Holding], kind: type[ReplicaSync]
) -> list[State]:
    """What the method keeps (`outer_state`). ValueError where it does not say how, or where it is of several fragments,
    or of bases that belong to places in the model.
    """
    if any(states) and not kind.keeps_flat:
        raise ValueError(f"{kind.__name__} does not say how its state is cut anew: resume with as many stages")
    for fragments, flights in ((state.get("fragments", ()), state.get("flights", ())) for state in states):
        if len(fragments) > 1:
            raise ValueError("fragments are cut from each stage's own blocks: resume with as many stages")
        if any(flight["at_rest"] for flight in flights):
            raise ValueError("some parameters were frozen while a round was under way: resume with as many stages")
        if any(fragment["averaging"] for fragment in fragments):
            raise ValueError("bases of low-rank factors belong to each stage's matrices: resume with as many stages")
    made = _entries(states, before, after)
    for state, holding in zip(made, after, strict=True):
        for fragment in state.get("fragments", ()):
            if fragment["digest"]:
                vector = fragment["anchor"]
                fragment["digest"] = FlatParameters(vector.split(holding.sizes)).digest(vector)
    return made


def _entries(values: Sequence[Any], before: Sequence[Holding], after: Sequence[Holding]) -> list[Any]:
    """One entry of all states: a flat vector, what holds such, or what is equal in all stages."""
    first = values[0]
    if isinstance(first, Tensor) and [value.numel() for value in values] == [sum(one.sizes) for one in before]:
        parts: dict[str, Tensor] = {}
        for vector, holding in zip(values, before, strict=True):
            parts |= dict(zip(holding.trained, vector.split(holding.sizes), strict=True))
        return [torch.cat([parts[name] for name in holding.trained]) for holding in after]
    if isinstance(first, dict):
        made = {
            key: [math.hypot(*(value[key] for value in values))] * len(after)
            if key in _NORMS
            else _entries([value[key] for value in values], before, after)
            for key in first
        }
        return [{key: parts[number] for key, parts in made.items()} for number in range(len(after))]
    if isinstance(first, list) and first and isinstance(first[0], dict):
        rows = [_entries(entries, before, after) for entries in zip(*values, strict=True)]
        return [[row[number] for row in rows] for number in range(len(after))]
    return [first] * len(after)


def inheriting(state: State, like: State, inherited: Sequence[State], everyone: Sequence[State]) -> State:
    """`state` of a new worker with the totals of those that it takes the place of; zeros where there are none. like: a
    worker that counts the same. everyone: of the latest of their clocks; message numbers begin anew.
    """
    counted = [one["optimizer"]["traffic"] for one in inherited]
    traffic = {
        channel: {key: sum((one[channel][key] for one in counted), start=type(own)()) for key, own in row.items()}
        for channel, row in like["optimizer"]["traffic"].items()
    }
    transport = like["optimizer"]["transport"]
    if "clock" in transport:  # a virtual one
        latest = max(one["optimizer"]["transport"]["clock"] for one in everyone)
        transport = {**transport, "clock": latest, "messages": {}, "latest": []}
    return {
        **state,
        "optimizer": {**state["optimizer"], "traffic": traffic, "transport": transport},
        **{key: sum(one[key] for one in inherited) for key in ("tokens", "training_seconds")},
        **{key: max(one[key] for one in everyone) for key in ("clock_seconds", "host_seconds")},
    }


def cut_notes(saved: Config, config: Config, step: int) -> list[str]:
    """What a user should know of stages that are cut anew."""
    old, new = saved.pipeline.stages, config.pipeline.stages
    said = f"going on in {new} stage{'s' if new > 1 else ''} a replica instead of {old} after step {step}, cut by name"
    notes = [said + ": weights, moments, anchors, momenta and what is under way keep their bits"]
    if first_blocks(saved) != first_blocks(config) and saved.pipeline.boundary.kind.startswith("dct"):
        masked = [block - 1 for block in first_blocks(config)]
        notes.append(
            f"the masks of {saved.pipeline.boundary.kind} are part of the model, and stand behind blocks {masked} now: "
            "the loss may jump"
        )
    codec = str(getattr(config.replicas, "codec", "none"))
    if codec not in ("none", "bf16", "fp16"):
        notes.append(f"{codec} has scales over blocks of neighbours, which are others now: rounds differ a little")
    if old == 1 and config.pipeline.microbatches > 1 and saved.inner.accumulation == 1:
        notes.append(f"a batch is now summed in {config.pipeline.microbatches} microbatches")
    return notes

"""Resharding: converts a checkpoint for other workers or stages, in the same directory, before a run resumes from it.

`prepare` chooses the checkpoint and the conversion:

    none                  the same workers and stages: an ordinary resume
    other replicas        every replica, one at a time -> means of weights, inner state, anchors, momenta (bits
                          unchanged if all were equal) -> M replicas: the means, and each worker's own counts
    other stages          states of a replica's stages -> weights, moments and flat vectors by name -> those of other
                          stages, or of the whole model
    clusters with churn   shards by rank of all workers that ever joined -> shards of the remaining ones, cluster by
                          cluster, then standby workers; also sets pipeline.ravnest.clusters and world.workers in
                          config.toml

Other replicas. Weights in the middle of a round are averaged too: their difference to the anchor is the mean of the
steps since the last exchange, so none of these is lost. Exchanges in flight land when they are due, in the mean. Totals
are conserved: those of leaving workers are added to remaining ones, new workers start at zero. Clocks continue from the
latest. If replicas are cut into stages, their stages are joined first and cut again last; if the number of replicas
stays, each keeps its own state.

Other stages. No bit of a weight, a moment, an anchor, a momentum or an exchange in flight changes; only hashes of
vectors and a worker's own values (totals, clocks, draws) are new. A method's own state is cut if it `keeps_flat`
vectors. Scalars of an outer rule belong to a stage: they stay if the number of stages does, or else must be equal.

Clusters. Weights, moments, draws and the position in the text keep their bits: if there were two clusters or more, and
all of them intact, the run continues to the same bits as without the conversion. A broken cluster is dissolved: its
remaining workers become standby, and the others read its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isles.base.durable import write_text
from isles.base.tables import changed, read_toml
from isles.base.version import __version__
from isles.data import Loader, load_corpus
from isles.data.loader import resharded
from isles.models import limits, sketch
from isles.models.cuts import cut_points
from isles.models.stages import Stage
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.config import PipelineConfig
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.replicas import method
from isles.replicas.flat import FlatParameters
from isles.replicas.sync import ReplicaSync
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.reading import ending_after, read_config, run_name, to_toml
from isles.training.config.sections import Config
from isles.training.kinds import kind_of
from isles.training.optimizer import inner_optimizer
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.rundir import SUMMARY, RunLock
from isles.training.records.shard import State, join_state, split_state
from isles.training.stage_runner import planned_cut, run_scheme
from isles.training.step import carried_draws, new_draws

_NORMS = ("progress", "left_ratio")  # gauges, norms of the last round's vectors
_SHARED = ("lr", "initial_lr", "betas", "eps", "fused")
"""Settings that are equal in all groups of one kind of inner optimizer; others (weight decay, rows) differ."""


class StageLayout:
    """The tensors that a worker holds, by name. model: its part of the model, as a sketch without values."""

    def __init__(self, config: Config, model: nn.Module) -> None:
        if config.pipeline.boundary.kind != "none":
            run_scheme(config, planned_cut(config)).fit(model)
        inner = inner_optimizer(model, config.inner, method(config.method).usual_inner)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = {name: own.shape for name, own in model.named_parameters() if own.requires_grad}
        """Shapes by name, in the order of the flat vectors."""
        self.sizes = [shape.numel() for shape in self.trained.values()]
        self.stepped = [names[id(own)] for group in inner.param_groups for own in group["params"]]
        numbers, self.saved_names = count(), list(model.state_dict())
        self.groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            | ({"fused": True} if "fused" in group else {})  # as for a model with values
            for group in inner.param_groups
        ]


def stage_layouts(config: Config, *, whole: bool = False) -> list[StageLayout]:
    """The layouts of a replica's stages, or of the whole model."""
    model = sketch(config.model)
    if whole or config.pipeline.stages == 1:
        return [StageLayout(config, model)]
    return [StageLayout(config, Stage(model, piece)) for piece in planned_cut(config).pieces]


def first_blocks(config: Config) -> list[Any]:
    """The first block of each stage after the first; a list of these per cluster if clusters have their own cuts."""
    if config.pipeline.ravnest.clusters:
        return [list(cuts) for cuts in config.pipeline.ravnest.clusters]
    if config.pipeline.stages == 1:
        return []
    return list(planned_cut(config).begins)


def run_facts(config: Config) -> dict[str, Any]:
    """The manifest's facts about the run and its stages."""
    stages = config.pipeline.stages
    facts = {"isles_version": __version__, "method": config.method, "run": run_name(config), "stages": stages}
    return facts | ({"cut": first_blocks(config)} if stages > 1 else {})


def with_stages(config: Config, stages: int, workers: int | None) -> Config:
    """`config` with replicas of `stages` stages. workers: None: as many replicas as before. Batches are unchanged:
    microbatches become accumulated batches and vice versa, so that sums are formed alike. ValueError as `Config`.
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
    """`config` (`saved` with other cuts) with boundaries that fit the same weights. ValueError if there are none."""
    name, stages = boundary_name(saved.pipeline.boundary.kind), config.pipeline.stages
    before, after = first_blocks(saved), first_blocks(config)
    if before == after:
        return config
    prefix = f'--stages {stages}: pipeline.boundary.kind = "{saved.pipeline.boundary.kind}"'
    if name.has_layers:
        raise ValueError(f"{prefix} has trained layers where the stages begin now: blocks {before}; leave out --stages")
    if name.kind != "subspace":
        return config
    if stages == 1:
        raise ValueError(
            f"{prefix} is of stages, and a whole model has no coordinates; choose 2 or more, or begin a run with "
            "run.start at this one's model"
        )
    if saved.pipeline.boundary.form != "coordinates":
        raise ValueError(
            f'{prefix} with form = "{saved.pipeline.boundary.form}": what its optimizers see of gradients depends on '
            "where the stages begin; leave out --stages"
        )
    inside = saved.pipeline.boundary.blocks or before[-1]
    if after[-1] > inside:
        if stages - 1 > inside:
            raise ValueError(
                f"{prefix}: only the first {inside} blocks write into the subspace; choose at most {inside + 1} stages"
            )
        costs = planned_cut(config).costs.to_cut(loss_at_origin=False)
        after = [*cut_points(costs[:inside], stages - 1), inside]
        config = changed(config, {"pipeline.cut": tuple(after)})
    return changed(config, {"pipeline.boundary.blocks": 0 if inside == after[-1] else inside})


def recut(
    states: Sequence[State], before: Sequence[StageLayout], after: Sequence[StageLayout], kind: type[ReplicaSync]
) -> Iterator[State]:
    """Convert one replica's states from the layouts `before` to the layouts `after`. kind: its method. The first new
    worker inherits the replica's totals. ValueError if the method does not declare the form of its state.
    """
    first, optimizers = states[0], [state["optimizer"] for state in states]
    if any(optimizer.get("frozen") for optimizer in optimizers):
        raise ValueError("some parameters were frozen during the run: resume with as many stages as before")
    weights = {name: tensor for state in states for name, tensor in state["model"].items()}
    moments: dict[str, Any] = {}
    for layout, optimizer in zip(before, optimizers, strict=True):
        moments |= {layout.stepped[index]: own for index, own in optimizer["inner"]["state"].items()}
    outers = _outer_states([optimizer["outer"] for optimizer in optimizers], before, after, kind)
    for number, (layout, outer) in enumerate(zip(after, outers, strict=True)):
        inner, schedule = first["optimizer"]["inner"], first["schedule"]
        optimizer = {
            **first["optimizer"],
            "shapes": [list(shape) for shape in layout.trained.values()],
            "inner": {
                "state": {index: moments[name] for index, name in enumerate(layout.stepped) if name in moments},
                "param_groups": [group | _shared(group, inner["param_groups"]) for group in layout.groups],
            },
            "outer": outer,
        }
        rates = {key: [value[0]] * len(layout.groups) for key, value in schedule.items() if isinstance(value, list)}
        made = {
            **first,
            "model": {name: weights[name] for name in layout.saved_names},
            "optimizer": optimizer,
            "schedule": schedule | rates,
            "step": states[-1].get("step") if number == len(after) - 1 else first.get("step"),
            "loader": first["loader"] if number == 0 else None,
        }
        yield inheriting(made, first, states if number == 0 else [], states)


def _shared(group: dict[str, Any], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the saved groups that are equal in all groups of the kind of `group`, such as Muon's."""
    like = next((one for one in saved if one.keys() - {"initial_lr"} == group.keys()), saved[0])
    return {key: like[key] for key in _SHARED if key in like and (key in group or key == "initial_lr")}


def _outer_states(
    states: Sequence[State], before: Sequence[StageLayout], after: Sequence[StageLayout], kind: type[ReplicaSync]
) -> list[State]:
    """Convert the method's `outer_state`. ValueError if its form is not declared, it has several fragments, or it has
    bases of single matrices.
    """
    if any(states) and not kind.keeps_flat:
        raise ValueError(f"{kind.__name__} does not say how its state is cut anew: resume with as many stages")
    for fragments, flights in ((state.get("fragments", ()), state.get("flights", ())) for state in states):
        if len(fragments) > 1:
            raise ValueError("fragments are cut from each stage's own blocks: resume with as many stages")
        if any(flight["frozen"] for flight in flights):
            raise ValueError("some parameters were frozen while a round was in flight: resume with as many stages")
        if any(fragment["averaging"] for fragment in fragments):
            raise ValueError("bases of low-rank factors belong to each stage's matrices: resume with as many stages")
    made = _entries(states, before, after)
    for state, layout in zip(made, after, strict=True):
        for fragment in state.get("fragments", ()):
            if fragment["digest"]:
                vector = fragment["anchor"]
                fragment["digest"] = FlatParameters(vector.split(layout.sizes)).digest(vector)
    return made


def _entries(values: Sequence[Any], before: Sequence[StageLayout], after: Sequence[StageLayout]) -> list[Any]:
    """Convert one entry of all states: a flat vector, a container of these, or a value that all stages share."""
    first = values[0]
    if isinstance(first, Tensor) and [value.numel() for value in values] == [sum(one.sizes) for one in before]:
        parts: dict[str, Tensor] = {}
        for vector, layout in zip(values, before, strict=True):
            parts |= dict(zip(layout.trained, vector.split(layout.sizes), strict=True))
        return [torch.cat([parts[name] for name in layout.trained]) for layout in after]
    if isinstance(first, dict):
        made = dict[str, list[Any]]()
        for key in first:
            each = [value[key] for value in values]
            if key in _NORMS:
                made[key] = [math.hypot(*each)] * len(after)
            elif key == "scalars" and isinstance(each[0], dict):
                made[key] = _scalars(each, len(after))
            else:
                made[key] = _entries(each, before, after)
        return [{key: parts[number] for key, parts in made.items()} for number in range(len(after))]
    if isinstance(first, list) and first and isinstance(first[0], dict):
        rows = [_entries(entries, before, after) for entries in zip(*values, strict=True)]
        return [[row[number] for row in rows] for number in range(len(after))]
    return [first] * len(after)


def _scalars(values: Sequence[dict[str, Tensor]], stages: int) -> list[dict[str, Tensor]]:
    """Convert an outer rule's scalars: () of one stage, (S,) of a replica whose S stages were joined. ValueError if the
    number of stages changes and their scalars differ.
    """
    if values[0][next(iter(values[0]))].dim() == 0:
        return [{name: torch.stack([value[name] for value in values]) for name in values[0]}]
    (held,) = values
    for name, own in held.items():
        if len(own) != stages and not bool((own == own[0]).all()):
            raise ValueError(
                f"{name} of the outer rule is {', '.join(map(repr, own.tolist()))} in the {len(own)} "
                "stages, and no number for others: resume with as many stages as before"
            )
    return [{name: own[stage if len(own) == stages else 0] for name, own in held.items()} for stage in range(stages)]


def inheriting(state: State, like: State, inherited: Sequence[State], everyone: Sequence[State]) -> State:
    """`state` of a new worker with the totals of the `inherited` workers; zeros if there are none. like: a state with
    the same counters. everyone: the latest of their clocks is taken; message numbers start at zero.
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
    """Notices for the user on stages with other cuts."""
    old, new = saved.pipeline.stages, config.pipeline.stages
    stated = (
        f"going on in {new} stage{'s' if new > 1 else ''} a replica instead of {old} after step {step}, cut by name"
    )
    notes = [stated + ": weights, moments, anchors, momenta and what is under way keep their bits"]
    kind = saved.pipeline.boundary.kind
    what = {"dct": "masks", "own": "boundaries"}.get(boundary_name(kind).kind)
    if what and first_blocks(saved) != first_blocks(config):
        masked = [block - 1 for block in first_blocks(config)]
        notes.append(
            f"the {what} of {kind} are part of the model, and stand behind blocks {masked} now: the loss may jump"
        )
    codec = str(getattr(config.replicas, "codec", "none"))
    if codec not in ("none", "bf16", "fp16"):
        notes.append(f"{codec} has scales over blocks of neighbours, which are others now: rounds differ a little")
    if old == 1 and config.pipeline.microbatches > 1 and saved.inner.accumulation == 1:
        notes.append(f"a batch is now summed in {config.pipeline.microbatches} microbatches")
    return notes


_PARTS = {  # names of the parts of a worker's state, by the first component of a tensor's path
    ".model": "weights",
    ".inner": "the inner optimizer's state",
    ".outer": "anchors and outer momenta",
}
_OWN = {  # parts that differ between workers even if anchors agree, by a part of the path
    ".residual": "error feedback",
    ".thresholds": "thresholds",
    ".reference": "weights",
    ".flights.": "exchanges in flight",
    ".local_momentum": "local momenta",
}


def reshard_replicas(run: Path, step: int, saved: Config, config: Config) -> tuple[Config, int, list[str]]:
    """Convert the checkpoint of `run` after `step`, written with `saved`, to `config`; returns the configuration to
    resume with, the step, and notices for the user. ValueError if that is impossible; then nothing is changed.
    """
    checkpoints = Checkpoints(run)
    before = len(checkpoints.ranks(step))
    config = ending_after(config, before // (saved.pipeline.stages * saved.world.inner), step)
    refuse_conflicts(config, "fixed workers")
    kind_of(config.pipeline).refuse(config)  # ValueError if the method or the batch does not fit
    replicas, context = config.replicas_in_all, limits(config.model).context
    reader = {"context": context, "worker": replicas - 1, "workers": replicas, "seed": config.run.seed}
    Loader(load_corpus(config.data), config.data, **reader)  # ValueError if the data is too small
    old = _Replicas(checkpoints, step, saved, config)
    notes = cut_notes(saved, config, step) if old.is_cut else []
    with RunLock(run):
        if old.is_cut and len(old) == replicas:
            fresh = map(old.read, range(replicas))
        else:
            common, equal, own = _common(old, config)
            fresh = (_replica(common, own, number, config) for number in range(replicas))
            notes += _notes(equal, len(own), before, config.world.workers, step)
        fresh = (state | {"loader": _loader(state["loader"], config)} for state in fresh)
        checkpoints.replace(step, old.divided(fresh), run_facts(config) | {"regrouped_from": before})
        write_text(run / "config.toml", to_toml(config))
    return config, step, notes


def _loader(state: State, config: Config) -> State:
    """The loader's state for other shares of the batch."""
    replicas = config.replicas_in_all
    return resharded(state, workers=replicas, batch_size=config.data.batch_size_per_worker(replicas))


class _Replicas:
    """The replicas of a checkpoint, each as the state of one worker that holds the whole model."""

    def __init__(self, checkpoints: Checkpoints, step: int, saved: Config, config: Config) -> None:
        self._checkpoints, self._step, self._ranks = checkpoints, step, checkpoints.ranks(step)
        self._kind, self._seed, self._stages = method(config.method), config.run.seed, saved.pipeline.stages
        self.is_cut = max(self._stages, config.pipeline.stages) > 1
        if self.is_cut:
            self._parts, self._after = stage_layouts(saved), stage_layouts(config)
            self._whole = stage_layouts(config, whole=True)

    def __len__(self) -> int:
        return len(self._ranks) // self._stages

    def read(self, number: int) -> State:
        ranks = self._ranks[number * self._stages : (number + 1) * self._stages]
        states = [self._checkpoints.read_shard(self._step, rank) for rank in ranks]
        return next(recut(states, self._parts, self._whole, self._kind)) if self.is_cut else states[0]

    def divided(self, states: Iterable[State]) -> Iterator[State]:
        """Cut the replicas' `states` into the workers' states. The first stage keeps the replica's draws."""
        for number, state in enumerate(states):
            parts = recut([state], self._whole, self._after, self._kind) if self.is_cut else [state]
            for stage, part in enumerate(parts):
                yield part | (new_draws(self._seed, number * len(self._after) + stage) if stage else {})


def _common(replicas: _Replicas, config: Config) -> tuple[State, dict[str, bool], list[State]]:
    """The mean state of all replicas; whether each part was equal in all; and each replica's own values."""
    first = replicas.read(0)
    method(config.method).regrouped(first["optimizer"]["outer"])  # ValueError for a state without a mean
    structure, tensors = split_state(_large(first))
    same = dict.fromkeys(tensors, True)
    sums: dict[str, Tensor] = {}
    own = [_small(first)]
    for number in range(1, len(replicas)):
        other = replicas.read(number)
        own.append(_small(other))
        for path, tensor in split_state(_large(other))[1].items():
            if not tensors[path].is_floating_point():
                continue
            sums[path] = sums[path] if path in sums else tensors[path].double()
            sums[path] += tensor
            same[path] = same[path] and torch.equal(tensor, tensors[path])
    count = len(replicas)
    means = {path: tensor if same[path] else (sums[path] / count).to(tensor.dtype) for path, tensor in tensors.items()}
    equal: dict[str, bool] = {}
    for path, is_same in same.items():
        if ".ahead." not in path:  # sent ahead to members of the old groups, and dropped
            own_part = next((part for name, part in _OWN.items() if name in path), None)
            part = own_part or _PARTS["." + path.split(".")[1]]
            equal[part] = equal.get(part, True) and is_same
    large = join_state(structure, means)
    large["outer"] = method(config.method).regrouped(large["outer"])
    optimizer = {**first["optimizer"], "inner": large["inner"], "outer": large["outer"]}
    return {**first, "model": large["model"], "optimizer": optimizer}, equal, own


def _large(state: State) -> State:
    return {"model": state["model"], "inner": state["optimizer"]["inner"], "outer": state["optimizer"]["outer"]}


def _small(state: State) -> State:
    keys = ("tokens", "losses", "training_seconds", "clock_seconds", "host_seconds")
    counted = {key: state["optimizer"][key] for key in ("traffic", "transport")}
    return {key: state[key] for key in keys} | carried_draws(state) | {"optimizer": counted}


def _replica(common: State, every: Sequence[State], number: int, config: Config) -> State:
    """The state of a new replica: the common one, with its own totals. every: the own values of each old replica."""
    old, new = len(every), config.replicas_in_all
    nearest = every[number % old]
    inherited = [every[other] for other in range(number, old, new)]  # empty for an additional replica
    draws = carried_draws(nearest) if number < old else new_draws(config.run.seed, number)
    return inheriting(common, nearest, inherited, every) | {"losses": nearest["losses"]} | draws


def _notes(equal: dict[str, bool], replicas: int, before: int, after: int, step: int) -> list[str]:
    equal_parts, mixed = ([part for part, is_equal in equal.items() if is_equal == wanted] for wanted in (True, False))
    who = f"{after} workers instead of {before}" if after != before else f"the {after} workers that were left"
    always = ["the step", "the learning rate's schedule", "the place in the data", "totals of tokens and bytes"]
    notes = [
        f"going on with {who} after step {step}",
        f"kept: {', '.join([*always, *(f'{part} (equal on all)' for part in equal_parts)])}",
    ]
    if mixed:
        whose = "workers" if before == replicas else "replicas"
        notes.append(f"replaced by the mean over the {replicas} {whose}: {', '.join(mixed)}")
        notes.append("lost: what set the workers apart in those")
    return notes


POSITIONS = "positions"
"""Key in a manifest: the number of ranks, including those of workers that left or joined later."""


def reshard_clusters(run: Path, step: int, config: Config, workers: int | None) -> tuple[Config, int, list[str]]:
    """Convert the checkpoint of `run` after `step` to the workers that remained; returns the configuration to resume
    with, the step, and notices for the user. workers: the number that the user typed, if any. ValueError if that is
    impossible; then nothing is changed.
    """
    checkpoints = Checkpoints(run)
    manifest, saved = checkpoints.manifest(step), checkpoints.ranks(step)
    plain = checkpoints.read_shard(step, saved[0])["assignment"]
    saved_then = ClusterAssignment.of_plain(plain, int(manifest[POSITIONS]))
    assignment = saved_then.without(set(saved_then.living) - set(saved))
    if not assignment.whole:
        raise ValueError(f"{run}: after step {step} no cluster was complete; name an earlier step with --step")
    nodes = [position for number in assignment.whole for position in assignment.clusters[number]]
    aside = [position for position in assignment.living if position not in nodes]
    dropped = aside if len(assignment.whole) == 1 else []  # standby workers need another cluster to load from
    remaining = nodes + [position for position in aside if position not in dropped]
    if workers not in (None, len(remaining)):
        raise ValueError(f"--workers {workers}: after step {step} {len(remaining)} were left; leave it out")
    now = assignment.without(dropped).renumbered(remaining)
    after = _config(config, now, remaining)
    with RunLock(run):
        states = (
            _state(checkpoints.read_shard(step, position), number, now) for number, position in enumerate(remaining)
        )
        checkpoints.replace(step, states, run_facts(after))
        write_text(run / "config.toml", to_toml(after))
    clusters = f"{len(now.clusters)} cluster{'s' * (len(now.clusters) > 1)}"
    notes = [
        f"going on with the {len(remaining)} workers that were left after step {step}, in {clusters}; from here on "
        "no worker joins or leaves",
        f"workers {', '.join(map(str, remaining))} are 0 to {len(remaining) - 1} now",
    ]
    if dropped:
        notes.append(f"workers {', '.join(map(str, dropped))} were standby and are dropped: there is only one cluster")
    return after, step, notes


def _config(config: Config, assignment: ClusterAssignment, remaining: Sequence[int]) -> Config:
    """`config` for a world of the `remaining` workers only."""
    own = config.world.virtual.step_factors
    factors = list(islice(cycle(own or (1.0,)), max(remaining) + 1))
    now = {"world.workers": len(remaining), "pipeline.stages": 1, "pipeline.cut": ()}
    now |= {"world.virtual.step_factors": tuple(factors[position] for position in remaining) if own else ()}
    now |= {"pipeline.ravnest.clusters": assignment.cuts, "pipeline.ravnest.spares": 0}
    return changed(config, now | {"pipeline.together": PipelineConfig.together})


def _state(state: State, number: int, assignment: ClusterAssignment) -> State:
    """The state of a worker with its new `number`."""
    coordinates, serving = assignment.coordinates_of(number), state["server"]
    if coordinates is not None and serving is None:
        raise ValueError("the checkpoint was written while a worker was lost: name an earlier one with --step")
    transport: dict[str, Any] = state["transport"]
    if "clock" in transport:
        transport = {**transport, "messages": {}, "latest": []}  # these are counters by the old ranks
    loader = None if serving is None else serving["loader"]
    if loader is not None:
        shared = resharded(loader, workers=len(assignment.clusters), batch_size=loader["batch_size"])
        serving = {**serving, "loader": {**shared, "consumed": state["read"]}}
    return {
        **state,
        "server": serving if coordinates is not None else None,
        "assignment": assignment.to_plain(),
        "transport": transport,
    }


_SECTIONS = {"model", "data", "inner", "replicas", "world", "run"}  # required in a run's config.toml


@dataclass(frozen=True)
class Resumption:
    """A run that is ready to resume: its configuration, the step of its checkpoint, and notices for the user."""

    config: Config
    step: int
    notes: list[str]


def prepare(
    run: Path,
    workers: int | None,
    stages: int | None = None,
    step: int | None = None,
    *,
    trust: bool = False,
    shared: bool = False,
) -> Resumption:
    """Convert the checkpoint of `run` after `step` (None: the newest), and config.toml, to `workers` workers in
    replicas of `stages` stages. None: as in config.toml; if only `stages` is set, as many replicas as before. trust:
    import code that config.toml names, whoever made the run. shared: other processes do the same, so none may convert.

    ValueError if there is no such checkpoint, the run does not allow so many workers or stages, or it is running; then
    nothing is changed.
    """
    checkpoints = Checkpoints(run)
    newest, step = step is None, _chosen(checkpoints, run, step)
    manifest, path = checkpoints.manifest(step), run / "config.toml"
    own = read_config(str(path), {}, [], trust=trust)
    if POSITIONS in manifest:
        if stages is not None:
            raise ValueError(f"--stages {stages}: clusters keep their stages; leave it out")
        return Resumption(*reshard_clusters(run, step, own, workers))
    if missing := _SECTIONS - read_toml(str(path)).keys():
        raise ValueError(
            f"{path}: damaged: the section [{sorted(missing)[0]}] is missing; restore the file from a copy"
        )
    if stages is None:
        _refuse_other_cut(own, manifest)
        saved = own
        config = own if workers is None else read_config(str(path), {"world.workers": workers}, [], trust=trust)
    else:
        config, cut = with_stages(own, stages, workers), tuple(manifest.get("cut", ()))
        # config.toml may have been edited since: the checkpoint's own stages count
        saved = changed(own, {"pipeline.stages": manifest["stages"], "pipeline.cut": cut})
        config = with_boundary(saved, config)
    kind = kind_of(config.pipeline)
    if first_blocks(saved) == first_blocks(config):
        notes = []
        if manifest["run"] != run_name(config):
            notes = [f"note: {path} was changed since this checkpoint was written: what follows is another run's"]
        if checkpoints.ranks(step) == list(range(config.world.workers)):
            return Resumption(config, step, notes)
        as_they_are = kind.lost(run, step, config, newest=newest) if config.world.workers == own.world.workers else None
        if as_they_are is not None:
            return Resumption(config, as_they_are[0], notes + as_they_are[1])
    _refuse_reshard(run, checkpoints, step, config)
    if shared:
        ranks = checkpoints.ranks(step)
        raise ValueError(
            f"{run}: step {step} has {len(ranks)} workers' states: isles resume {run} in one process first"
        )
    return Resumption(*reshard_replicas(run, step, saved, config))


def _refuse_reshard(run: Path, checkpoints: Checkpoints, step: int, config: Config) -> None:
    """ValueError if the states after `step` cannot be converted to other workers or stages."""
    ranks = checkpoints.ranks(step)
    if kind_of(config.pipeline).has_peers:
        raise ValueError(
            f"{run}: after step {step} only workers {', '.join(map(str, ranks))} saved; clusters and swarms resume "
            "with the same workers, clusters from a checkpoint that all wrote (name an earlier one with --step)"
        )
    if elsewhere := checkpoints.absent(step):
        raise ValueError(
            f"{run}: after step {step} the states of workers {', '.join(map(str, elsewhere))} are on other machines: "
            f"copy them here, into {checkpoints.folder}, and resume without --nodes"
        )
    by_plan = bool(config.pipeline.skippipe.plan)
    if by_plan or config.world.inner > 1:
        why = "a plan is for its nodes" if by_plan else "the workers of an island have parts of their own"
        raise ValueError(f"{why}: resume with {len(ranks)} workers, as before")


def _refuse_other_cut(config: Config, manifest: dict[str, Any]) -> None:
    """ValueError if config.toml has another cut than the checkpoint."""
    stages, here = config.pipeline.stages, first_blocks(config)
    if stages != manifest["stages"]:
        raise ValueError(
            f"pipeline.stages = {stages}: the checkpoint is of {manifest['stages']}; set it back, or resume with "
            f"--stages {stages}"
        )
    if (blocks := manifest.get("cut", [])) != here:
        raise ValueError(
            f"pipeline.cut: the checkpoint's stages begin at blocks {blocks}, config.toml's at {here}; set "
            f"pipeline.cut = {blocks}, or resume with --stages {stages} to cut it anew"
        )


def _chosen(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    """The checkpoint to resume from. ValueError if there is none."""
    steps = checkpoints.steps()
    if not run.exists():
        raise ValueError(f"{run}: there is nothing of that name; give the directory of a run")
    if not steps and (run / SUMMARY).exists():
        raise ValueError(f"{run}: no checkpoint of this run is there: begin another from its model, run.start={run}")
    if not steps:
        raise ValueError(f"{run}: no complete checkpoint there; set run.checkpoint_every, or start again")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(f"--step {chosen}: no complete checkpoint of it; there are {', '.join(map(str, steps))}")
    return chosen

"""Going on with another number of workers or stages: a checkpoint of N workers made into one of M, in the same place.

    every shard, one at a time -> means of weights, inner state, anchors, momenta (bits kept where all were equal)
                               -> M shards: the means, and of its own what each worker counted
                               -> an ordinary resume

Weights in the middle of a round are averaged too: against the anchor they hold the mean of the steps since the last
exchange, so none of those is lost. What is under way lands when it is due, in the mean. Totals are conserved: those of
workers that leave are added to those that stay, new workers begin at zero. Clocks go on from the latest.

Where replicas are cut into stages, the stages of each are put together first, by the parameters' names, and cut again
last (`isles.training.records.recut`). As many replicas as before each go on with their own state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.data import Loader, load_corpus
from isles.data.loader import resharded
from isles.durable import write_text
from isles.models import limits
from isles.replicas import method
from isles.tables import read_toml
from isles.training.config.reading import read_config, run_name, to_toml
from isles.training.config.sections import Config
from isles.training.config.tokens import ending_after
from isles.training.draws import carried_draws, new_draws
from isles.training.plan.run_plan import plan_run
from isles.training.records.checkpoint import Checkpoints, newest_whole
from isles.training.records.lock import locked
from isles.training.records.recut import (
    cut_at,
    cut_facts,
    first_blocks,
    holdings,
    latest_clock,
    recut,
    total_traffic,
    whole_holding,
    with_boundary,
    with_stages,
)
from isles.training.records.regrown import POSITIONS, regrown
from isles.training.records.shard import State, join_state, split_state
from isles.version import __version__

_SECTIONS = {"model", "data", "inner", "replicas", "world", "run"}  # of every run's config.toml
_PARTS = {  # of a worker's state, by the beginning of the paths of its tensors
    ".model": "weights",
    ".inner": "the inner optimizer's state",
    ".outer": "anchors and outer momenta",
}
_OWN = {  # what is each worker's own even where anchors agree, by a part of the path
    ".residual": "error feedback",
    ".thresholds": "thresholds",
    ".reference": "weights",
    ".flights.": "what is under way",
    ".local_momentum": "local momenta",
}


@dataclass(frozen=True)
class Resumption:
    """A run ready to go on: its configuration, the step of its checkpoint, and what a user should know."""

    config: Config
    step: int
    notes: list[str]


def prepare(
    run: Path, workers: int | None, stages: int | None = None, step: int | None = None, *, trust: bool = False
) -> Resumption:
    """Make the checkpoint of `run` after `step` (None: the newest) one of `workers` workers in replicas of `stages`
    stages (None: as config.toml says, or with `stages` alone as many replicas as before), and config.toml too. trust:
    import what that names, whoever made the run.

    ValueError: there is no such checkpoint, its weights are no numbers, the run cannot be with so many workers or
    stages, or it is going on; then nothing is changed.
    """
    checkpoints = Checkpoints(run)
    asked, step = step, _chosen(checkpoints, run, step)
    if POSITIONS in checkpoints.manifest(step):
        if stages is not None:
            raise ValueError(f"--stages {stages}: clusters go on as they were; leave it out")
        return _regrown(run, step, workers, trust=trust)
    saved, config = _configs(run, checkpoints.manifest(step), workers, stages, trust=trust)
    path = run / "config.toml"
    if missing := _SECTIONS - read_toml(str(path)).keys():
        raise ValueError(
            f"{path}: damaged, for it has no [{sorted(missing)[0]}], as every run's own: take it from a copy"
        )
    seats, after = checkpoints.seats(step), config.world.workers
    before, is_cut = len(seats), max(saved.pipeline.stages, config.pipeline.stages) > 1
    anew = is_cut and (saved.pipeline.stages != config.pipeline.stages or first_blocks(saved) != first_blocks(config))
    if seats == list(range(after)) and not anew:
        return Resumption(config, step, _changed(checkpoints.manifest(step), config, run))
    if config.pipeline.routing == "swarm" and not anew and config.world.workers == saved.world.workers:
        whole = newest_whole(checkpoints) if asked is None else step
        if whole is None:
            raise ValueError(f"{run}: no checkpoint has the weights of every stage; start again")
        absent = ", ".join(str(worker) for worker in range(after) if worker not in checkpoints.seats(whole))
        notes = [f"workers {absent} begin with what their stages' peers saved"] if absent else []
        return Resumption(config, whole, notes)
    if config.pipeline.ravnest.clusters and after == saved.world.workers and not anew:
        back = ", ".join(str(worker) for worker in range(after) if worker not in seats)
        notes = _changed(checkpoints.manifest(step), config, run)
        told = f"note: workers {back} had been lost: they load the others' weights at the next average, or stand by"
        return Resumption(config, step, [*notes, told])
    if config.pipeline.routing in ("ravnest", "swarm"):
        raise ValueError(
            f"{run}: after step {step} workers {', '.join(map(str, seats))} saved; clusters and swarms resume with "
            "all workers of before, clusters from a checkpoint that all wrote (--step names an earlier one)"
        )
    if elsewhere := checkpoints.absent(step):
        raise ValueError(
            f"{run}: after step {step} the states of workers {', '.join(map(str, elsewhere))} lie on other machines: "
            f"copy them here, into {checkpoints.folder}, and resume without --nodes"
        )
    if config.pipeline.routing == "skippipe":
        raise ValueError(f"a plan is for its nodes: resume with {before} workers, as before")
    if config.world.inner > 1:
        raise ValueError(f"the workers of an island have parts of their own: resume with {before} workers, as before")
    config = ending_after(config, before // (saved.pipeline.stages * saved.world.inner), step)
    plan_run(config)  # refuses what the method or the batch cannot be
    replicas = config.replicas_in_all
    Loader(
        load_corpus(config.data),
        config.data,
        context=limits(config.model).context,
        worker=replicas - 1,
        workers=replicas,
        seed=config.run.seed,
    )
    replica_states = _Replicas(checkpoints, step, seats, saved, config, is_cut)
    with locked(run):
        facts = {"isles_version": __version__, "method": config.method, "run": run_name(config)}
        facts |= {"regrouped_from": before} | cut_facts(config)
        if is_cut and len(replica_states) == replicas:
            common = None
            fresh = (_carried_on(replica_states.read(number), config) for number in range(replicas))
        else:
            common = _common(replica_states, config)
            fresh = (_shard(common, number, config) for number in range(replicas))
        checkpoints.replace(step, replica_states.divided(fresh), facts)
        write_text(run / "config.toml", to_toml(config))
    notes = _cut_notes(saved, config, step) if is_cut else []
    return Resumption(config, step, notes if common is None else [*notes, *_notes(common, seats, after, step)])


def _regrown(run: Path, step: int, workers: int | None, *, trust: bool) -> Resumption:
    """Of clusters whose nodes came and went."""
    config, notes = regrown(run, step, read_config(str(run / "config.toml"), {}, [], trust=trust), workers)
    return Resumption(config, step, notes)


def _configs(
    run: Path, manifest: dict[str, Any], workers: int | None, stages: int | None, *, trust: bool
) -> tuple[Config, Config]:
    """As it was saved, with its cut; and as it goes on. ValueError where config.toml has another cut by itself."""
    path = str(run / "config.toml")
    if stages is None:
        config = read_config(path, {} if workers is None else {"world.workers": workers}, [], trust=trust)
        if config.pipeline.stages != manifest.get("stages", config.pipeline.stages):
            raise ValueError(
                f"pipeline.stages = {config.pipeline.stages}: the checkpoint is of {manifest['stages']}; set it back, "
                f"or resume with --stages {config.pipeline.stages}"
            )
        if config.pipeline.stages == 1:
            return config, config
        blocks = manifest.get("cut", first_blocks(config))
        if blocks != first_blocks(config):
            raise ValueError(
                f"pipeline.cut: the checkpoint's stages begin at blocks {blocks}, config.toml's at "
                f"{first_blocks(config)}; set pipeline.cut = {blocks}, or resume with --stages "
                f"{config.pipeline.stages} to cut it anew"
            )
        return config, config
    now = read_config(path, {}, [], trust=trust)
    before = manifest.get("stages", now.pipeline.stages)
    if before != now.pipeline.stages:  # config.toml was changed
        now = replace(now, pipeline=replace(now.pipeline, stages=before, cut=()))
    saved = cut_at(now, manifest.get("cut", first_blocks(now))) if before > 1 else now
    return saved, with_boundary(saved, with_stages(now, stages, workers))


def _changed(manifest: dict[str, Any], config: Config, run: Path) -> list[str]:
    """A word where config.toml is not what the checkpoint was written with."""
    if manifest.get("run", run_name(config)) == run_name(config):
        return []
    return [f"note: {run / 'config.toml'} was changed since this checkpoint was written: what follows is another run's"]


class _Replicas:
    """The replicas of a checkpoint, each as if one worker held all of it."""

    def __init__(
        self, checkpoints: Checkpoints, step: int, seats: Sequence[int], saved: Config, config: Config, is_cut: bool
    ) -> None:
        self._checkpoints, self._step, self._seats, self._config = checkpoints, step, seats, config
        self._stages, self._is_cut = saved.pipeline.stages, is_cut
        if is_cut:
            self._before, self._after = holdings(saved), holdings(config)
            self._whole = [whole_holding(config)]

    def __len__(self) -> int:
        return len(self._seats) // self._stages

    def read(self, number: int) -> State:
        """One of them."""
        seats = self._seats[number * self._stages : (number + 1) * self._stages]
        states = [self._checkpoints.read_shard(self._step, seat) for seat in seats]
        if not self._is_cut:
            return states[0]
        return next(recut(states, self._before, self._whole, method(self._config.method)))

    def divided(self, states: Iterable[State]) -> Iterator[State]:
        """The workers' states of those replicas. The first stage goes on with the replica's draws."""
        for number, state in enumerate(states):
            if not self._is_cut:
                yield state
                continue
            parts = recut([state], self._whole, self._after, method(self._config.method))
            for stage, part in enumerate(parts):
                rank = number * len(self._after) + stage
                yield part | (new_draws(self._config.run.seed, rank) if stage else {})


def _carried_on(state: State, config: Config) -> State:
    """A replica that stays as it is, where its batch may be read in other parts."""
    return state | {"loader": _loader(state["loader"], config)}


def _loader(state: dict[str, Any], config: Config) -> dict[str, Any]:
    replicas = config.replicas_in_all
    return resharded(state, workers=replicas, batch_size=config.data.batch_size_per_worker(replicas))


def _chosen(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    """The checkpoint to go on from. ValueError, with the newest good one, where it is none to go on from."""
    steps = checkpoints.steps()
    if not run.exists():
        raise ValueError(f"{run}: there is nothing of that name; give the directory of a run")
    if not steps:
        raise ValueError(f"{run}: no whole checkpoint there; set run.checkpoint_every, or start again")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(f"--step {chosen}: there is no whole checkpoint of it; there are {', '.join(map(str, steps))}")
    if (what := checkpoints.broken(chosen)) is None:
        return chosen
    good = next((older for older in reversed(steps) if older < chosen and checkpoints.broken(older) is None), None)
    mend = (
        "and none before it is good: start again, with a lower inner.lr"
        if good is None
        else f"go back to the newest good one with: isles resume {run} --step {good}, and lower inner.lr in "
        f"{run / 'config.toml'} first"
    )
    raise ValueError(f"{run}: the checkpoint of step {chosen} is not to go on from ({what}); {mend}")


@dataclass(frozen=True)
class _Common:
    """What the shards have in common (`state`), by part whether it was equal on all (`equal`), and each one's own."""

    state: State
    equal: dict[str, bool]
    own: list[State]


def _common(replicas: _Replicas, config: Config) -> _Common:
    first = replicas.read(0)
    method(config.method).regrouped(first["optimizer"]["outer"])  # refuses what has no mean, such as other shapes
    structure, tensors = split_state(_large(first))
    same = dict.fromkeys(tensors, True)
    sums: dict[str, Tensor] = {}
    own = [_small(first)]
    for number in range(1, len(replicas)):
        shard = replicas.read(number)
        own.append(_small(shard))
        for path, tensor in split_state(_large(shard))[1].items():
            if not tensors[path].is_floating_point():
                continue
            sums[path] = sums[path] if path in sums else tensors[path].double()
            sums[path] += tensor
            same[path] = same[path] and torch.equal(tensor, tensors[path])
    count = len(replicas)
    means = {path: tensor if same[path] else (sums[path] / count).to(tensor.dtype) for path, tensor in tensors.items()}
    equal: dict[str, bool] = {}
    for path, is_same in same.items():
        if ".ahead." not in path:  # of the old groups, and not gone on with
            own_part = next((part for name, part in _OWN.items() if name in path), None)
            part = own_part or _PARTS["." + path.split(".")[1]]
            equal[part] = equal.get(part, True) and is_same
    large = join_state(structure, means)
    large["outer"] = method(config.method).regrouped(large["outer"])
    optimizer = {**first["optimizer"], "inner": large["inner"], "outer": large["outer"]}
    return _Common({**first, "model": large["model"], "optimizer": optimizer}, equal, own)


def _large(shard: State) -> State:
    optimizer = shard["optimizer"]
    return {"model": shard["model"], "inner": optimizer["inner"], "outer": optimizer["outer"]}


def _small(shard: State) -> State:
    kept = ("tokens", "losses", "training_seconds", "clock_seconds", "host_seconds")
    optimizer = shard["optimizer"]
    own = {key: shard[key] for key in kept} | carried_draws(shard)
    return own | {key: optimizer[key] for key in ("traffic", "transport")}


def _shard(common: _Common, worker: int, config: Config) -> State:
    """The state of the new replica: the common one, with totals of its own."""
    old, new = len(common.own), config.replicas_in_all
    nearest = common.own[worker % old]
    inherited = [common.own[rank] for rank in range(worker, old, new)]  # none for a worker that is new
    return {
        **common.state,
        "optimizer": {
            **common.state["optimizer"],
            "traffic": total_traffic([state["traffic"] for state in inherited], nearest["traffic"]),
            "transport": latest_clock(nearest["transport"], common.own),
        },
        "loader": _loader(common.state["loader"], config),
        "tokens": sum(state["tokens"] for state in inherited),
        "losses": nearest["losses"],
        "training_seconds": sum(state["training_seconds"] for state in inherited),
        "clock_seconds": max(state["clock_seconds"] for state in common.own),
        "host_seconds": max(state["host_seconds"] for state in common.own),
        **(carried_draws(nearest) if worker < old else new_draws(config.run.seed, worker)),
    }


def _cut_notes(saved: Config, config: Config, step: int) -> list[str]:
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


def _notes(common: _Common, seats: Sequence[int], after: int, step: int) -> list[str]:
    kept = [part for part, equal in common.equal.items() if equal]
    mixed = [part for part, equal in common.equal.items() if not equal]
    before = len(seats)
    who = f"{after} workers instead of {before}" if after != before else f"the {after} workers that were left"
    always = ["the step", "the learning rate's schedule", "the place in the data", "totals of tokens and bytes"]
    notes = [
        f"going on with {who} after step {step}",
        f"kept: {', '.join([*always, *(f'{part} (equal on all)' for part in kept)])}",
    ]
    if mixed:
        whose = "workers" if before == len(common.own) else "replicas"
        notes.append(f"replaced by the mean over the {len(common.own)} {whose}: {', '.join(mixed)}")
        notes.append("lost: what set the workers apart in those")
    return notes

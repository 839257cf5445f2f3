"""Going on with another number of workers: a checkpoint of N workers made into one of M, in the same place.

    every shard, one at a time -> means of weights, inner state, anchors, momenta (bits kept where all were equal)
                               -> M shards: the means, and of its own what each worker counted
                               -> an ordinary resume

Weights in the middle of a round are averaged too: against the anchor they hold the mean of the steps since the last
exchange, so none of those is lost. What is under way lands when it is due, in the mean. Totals are conserved: those of
workers that leave are added to those that stay, new workers begin at zero. Clocks go on from the latest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.data import Loader, load_corpus
from isles.data.loader import resharded
from isles.models import limits
from isles.replicas import method
from isles.training.config.reading import read_config, to_toml
from isles.training.config.sections import Config
from isles.training.dry_run import dry_run
from isles.training.records.checkpoint import Checkpoints, State, join_state, split_state
from isles.training.records.lock import locked
from isles.training.trainer import draws_seed
from isles.version import __version__

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


def prepare(run: Path, workers: int | None, *, trust: bool = False) -> Resumption:
    """Make the newest checkpoint of `run` one of `workers` workers (None: as config.toml says), and config.toml too.
    trust: import what that names, whoever made the run.

    ValueError: there is no checkpoint, the run cannot be with so many workers, or it is going on; then nothing is
    changed.
    """
    checkpoints = Checkpoints(run)
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"{run}: no whole checkpoint there; set run.checkpoint_every, or start again")
    step = steps[-1]
    flags = {} if workers is None else {"world.workers": workers}
    config = read_config(str(run / "config.toml"), flags, [], trust=trust)
    seats, after = checkpoints.seats(step), config.world.workers
    before = len(seats)
    if seats == list(range(after)):
        return Resumption(config, step, [])
    if elsewhere := checkpoints.absent(step):
        raise ValueError(
            f"{run}: after step {step} the states of workers {', '.join(map(str, elsewhere))} lie on other machines: "
            f"copy them here, into {checkpoints.folder}, and resume without --nodes"
        )
    if config.pipeline.stages > 1:
        raise ValueError(f"the workers of a replica hold stages of their own: resume with {before} workers, as before")
    if config.world.inner > 1:
        raise ValueError(f"the workers of an island have parts of their own: resume with {before} workers, as before")
    dry_run(config)  # refuses what the method or the batch cannot be
    Loader(
        load_corpus(config.data),
        config.data,
        context=limits(config.model).context,
        worker=after - 1,
        workers=after,
        seed=config.run.seed,
    )
    with locked(run):
        common = _common(checkpoints, step, seats, config)
        facts = {"isles_version": __version__, "method": config.method, "regrouped_from": before}
        checkpoints.replace(step, (_shard(common, worker, config) for worker in range(after)), facts)
        partial = run / "config.partial"
        partial.write_text(to_toml(config), encoding="utf-8")
        os.replace(partial, run / "config.toml")
    return Resumption(config, step, _notes(common, seats, after, step))


@dataclass(frozen=True)
class _Common:
    """What the shards have in common (`state`), by part whether it was equal on all (`equal`), and each one's own."""

    state: State
    equal: dict[str, bool]
    own: list[State]


def _common(checkpoints: Checkpoints, step: int, seats: Sequence[int], config: Config) -> _Common:
    first = checkpoints.read_shard(step, seats[0])
    method(config.method).regrouped(first["optimizer"]["outer"])  # refuses what has no mean, such as other shapes
    structure, tensors = split_state(_large(first))
    same = dict.fromkeys(tensors, True)
    sums: dict[str, Tensor] = {}
    own = [_small(first)]
    for worker in seats[1:]:
        shard = checkpoints.read_shard(step, worker)
        own.append(_small(shard))
        for path, tensor in split_state(_large(shard))[1].items():
            if not tensors[path].is_floating_point():
                continue
            sums[path] = sums[path] if path in sums else tensors[path].double()
            sums[path] += tensor
            same[path] = same[path] and torch.equal(tensor, tensors[path])
    means = {
        path: tensor if same[path] else (sums[path] / len(seats)).to(tensor.dtype) for path, tensor in tensors.items()
    }
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
    kept = ("tokens", "losses", "training_seconds", "clock_seconds", "host_seconds", "random")
    optimizer = shard["optimizer"]
    return {key: shard[key] for key in kept} | {key: optimizer[key] for key in ("traffic", "transport")}


def _shard(common: _Common, worker: int, config: Config) -> State:
    """The state of the new worker: the common one, with totals of its own."""
    old, new = len(common.own), config.world.workers
    nearest = common.own[worker % old]
    inherited = [common.own[rank] for rank in range(worker, old, new)]  # none for a worker that is new
    return {
        **common.state,
        "optimizer": {
            **common.state["optimizer"],
            "traffic": _total([state["traffic"] for state in inherited], nearest["traffic"]),
            "transport": _clocks_on(nearest["transport"], common.own),
        },
        "loader": resharded(common.state["loader"], workers=new, batch_size=config.data.batch_size_per_worker(new)),
        "tokens": sum(state["tokens"] for state in inherited),
        "losses": nearest["losses"],
        "training_seconds": sum(state["training_seconds"] for state in inherited),
        "clock_seconds": max(state["clock_seconds"] for state in common.own),
        "host_seconds": max(state["host_seconds"] for state in common.own),
        "random": nearest["random"]
        if worker < old
        else torch.Generator().manual_seed(draws_seed(config.run.seed, worker)).get_state(),
    }


def _total(states: list[dict[str, dict[str, Any]]], like: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sum of traffic counters, channel by channel; zeros where there are none."""
    return {
        channel: {
            key: sum((state[channel][key] for state in states), start=type(value)()) for key, value in row.items()
        }
        for channel, row in like.items()
    }


def _clocks_on(transport: dict[str, Any], own: list[State]) -> dict[str, Any]:
    """A virtual transport's state at the latest clock, its message numbers begun anew; a real one has none."""
    if "clock" not in transport:
        return transport
    latest = max(state["transport"]["clock"] for state in own)
    return {**transport, "clock": latest, "messages": {}, "latest": []}


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
        notes.append(f"replaced by the mean over the {before} workers: {', '.join(mixed)}")
        notes.append("lost: what set the workers apart in those")
    return notes

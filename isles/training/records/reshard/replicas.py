"""Going on with another number of replicas: a checkpoint of N of them made into one of M, in the same place.

    every replica, one at a time -> means of weights, inner state, anchors, momenta (bits kept where all were equal)
                                 -> M replicas: the means, and of its own what each worker counted
                                 -> an ordinary resume

Weights in the middle of a round are averaged too: against the anchor they hold the mean of the steps since the last
exchange, so none of those is lost. What is under way lands when it is due, in the mean. Totals are conserved: those of
workers that leave are added to those that stay, new workers begin at zero. Clocks go on from the latest.

Where replicas are cut into stages, the stages of each are put together first and cut again last (`stages`). As many
replicas as before each go on with their own state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from isles.data import Loader, load_corpus
from isles.data.loader import resharded
from isles.durable import write_text
from isles.models import limits
from isles.replicas import method
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.config.tokens import ending_after
from isles.training.draws import carried_draws, new_draws
from isles.training.plan.run_plan import plan_run
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.lock import RunLock
from isles.training.records.reshard.stages import cut_notes, holdings, inheriting, recut, run_facts
from isles.training.records.shard import State, join_state, split_state

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


def reshard_replicas(run: Path, step: int, saved: Config, config: Config) -> tuple[Config, int, list[str]]:
    """Make the checkpoint of `run` after `step`, which `saved` wrote, one of `config`: the configuration with which it
    is gone on from, the step, and what a user should know. ValueError where it cannot be; then nothing is changed.
    """
    checkpoints = Checkpoints(run)
    before = len(checkpoints.seats(step))
    config = ending_after(config, before // (saved.pipeline.stages * saved.world.inner), step)
    plan_run(config)  # refuses what the method or the batch cannot be
    replicas, context = config.replicas_in_all, limits(config.model).context
    reader = {"context": context, "worker": replicas - 1, "workers": replicas, "seed": config.run.seed}
    Loader(load_corpus(config.data), config.data, **reader)  # or refuses
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
    """Where replicas may read the batch in other parts."""
    replicas = config.replicas_in_all
    return resharded(state, workers=replicas, batch_size=config.data.batch_size_per_worker(replicas))


class _Replicas:
    """The replicas of a checkpoint, each as if one worker held all of it."""

    def __init__(self, checkpoints: Checkpoints, step: int, saved: Config, config: Config) -> None:
        self._checkpoints, self._step, self._seats = checkpoints, step, checkpoints.seats(step)
        self._kind, self._seed, self._stages = method(config.method), config.run.seed, saved.pipeline.stages
        self.is_cut = max(self._stages, config.pipeline.stages) > 1
        if self.is_cut:
            self._parts, self._after, self._whole = holdings(saved), holdings(config), holdings(config, whole=True)

    def __len__(self) -> int:
        return len(self._seats) // self._stages

    def read(self, number: int) -> State:
        """One of them."""
        seats = self._seats[number * self._stages : (number + 1) * self._stages]
        states = [self._checkpoints.read_shard(self._step, seat) for seat in seats]
        return next(recut(states, self._parts, self._whole, self._kind)) if self.is_cut else states[0]

    def divided(self, states: Iterable[State]) -> Iterator[State]:
        """The workers' states of those replicas. The first stage goes on with the replica's draws."""
        for number, state in enumerate(states):
            parts = recut([state], self._whole, self._after, self._kind) if self.is_cut else [state]
            for stage, part in enumerate(parts):
                yield part | (new_draws(self._seed, number * len(self._after) + stage) if stage else {})


def _common(replicas: _Replicas, config: Config) -> tuple[State, dict[str, bool], list[State]]:
    """What replicas have in common, by part whether it was equal in all, and each one's own."""
    first = replicas.read(0)
    method(config.method).regrouped(first["optimizer"]["outer"])  # refuses what has no mean, such as other shapes
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
        if ".ahead." not in path:  # of the old groups, and not gone on with
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
    kept = ("tokens", "losses", "training_seconds", "clock_seconds", "host_seconds")
    counted = {key: state["optimizer"][key] for key in ("traffic", "transport")}
    return {key: state[key] for key in kept} | carried_draws(state) | {"optimizer": counted}


def _replica(common: State, every: Sequence[State], number: int, config: Config) -> State:
    """The state of a new replica: the common one, with totals of its own. every: what each old one had of its own."""
    old, new = len(every), config.replicas_in_all
    nearest = every[number % old]
    inherited = [every[other] for other in range(number, old, new)]  # none for one that is new
    draws = carried_draws(nearest) if number < old else new_draws(config.run.seed, number)
    return inheriting(common, nearest, inherited, every) | {"losses": nearest["losses"]} | draws


def _notes(equal: dict[str, bool], replicas: int, before: int, after: int, step: int) -> list[str]:
    kept, mixed = ([part for part, is_equal in equal.items() if is_equal == wanted] for wanted in (True, False))
    who = f"{after} workers instead of {before}" if after != before else f"the {after} workers that were left"
    always = ["the step", "the learning rate's schedule", "the place in the data", "totals of tokens and bytes"]
    notes = [
        f"going on with {who} after step {step}",
        f"kept: {', '.join([*always, *(f'{part} (equal on all)' for part in kept)])}",
    ]
    if mixed:
        whose = "workers" if before == replicas else "replicas"
        notes.append(f"replaced by the mean over the {replicas} {whose}: {', '.join(mixed)}")
        notes.append("lost: what set the workers apart in those")
    return notes

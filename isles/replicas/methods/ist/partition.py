"""Which worker trains which units in a round, and which stores them between rounds: indices only, drawn by every worker
from the same seed, so that no index is ever sent.

    (seed, round, layer) -> partition: n lists of units, one a worker, all units once
    server               -> stored_ranges: a run of neighbouring units a worker
    both                 -> entries: which entries of a parameter go between a worker and a server
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from isles.comm.group import numbers
from isles.models.subnet import Axes, Axis, layers_of

Units = tuple[Tensor | None, ...]
"""A parameter's units by dimension (None: undivided), as `isles.models.subnet.take` wants them."""


def sizes(units: int, workers: int) -> list[int]:
    """Units of each worker, the same in every round: equal, or one more for the first few."""
    return [units // workers + (worker < units % workers) for worker in range(workers)]


def partition(layer: str, units: int, workers: int, sampler: str, seed: int, round: int) -> tuple[Tensor, ...]:
    """The units of every worker in `round`, ascending: within a subnet their order means nothing.

    sampler: "random", a random permutation, cut; "stratified", equally many for each worker (or one more or less) from
    each of `workers` neighbouring runs, drawn at random there; "rolling", neighbouring units, moved on by one each
    round; "fixed", the same ones in every round.
    """
    if sampler in ("rolling", "fixed"):  # alike in all layers
        layer, seed = "", 0
    return _partition(layer, units, workers, sampler, seed, round)


@lru_cache(maxsize=4096)
def _partition(layer: str, units: int, workers: int, sampler: str, seed: int, round: int) -> tuple[Tensor, ...]:
    counts = sizes(units, workers)
    if sampler in ("rolling", "fixed"):
        order = (_run(units) + (round if sampler == "rolling" else 0)) % units
        return tuple(part.sort().values for part in order.split(counts))
    draw = torch.Generator().manual_seed(_seed(f"isles ist {seed} {round} {layer}"))
    if sampler == "random":
        return tuple(part.sort().values for part in _shuffled(units, draw).split(counts))
    # Deal the shuffled runs one after the other, in an order of workers whose first ones have a unit more.
    more = units % workers
    order = torch.cat([_shuffled(more, draw), more + _shuffled(workers - more, draw)])
    runs = [part[_shuffled(len(part), draw)] for part in _run(units).split(counts)]
    owners = order[_run(units) % workers]
    dealt = torch.cat(runs)
    return tuple(dealt[owners == worker].sort().values for worker in range(workers))


def stored_ranges(units: int, workers: int, server: str) -> list[tuple[int, int]]:
    """First and last + 1 of the units that each worker keeps between rounds. central: worker 0 all of them."""
    if server == "central":
        return [(0, units), *[(units, units)] * (workers - 1)]
    stops = list(accumulate(sizes(units, workers)))
    return list(zip([0, *stops[:-1]], stops, strict=True))


@lru_cache(maxsize=256)
def _between(trained: tuple[Tensor, ...], units: int, server: str) -> Tensor:
    """How many units each worker (rows) holds of what each keeps (columns), (n, n). trained: of a layer, by worker."""
    n = len(trained)
    trainers = _run(n).repeat_interleave(numbers(*map(len, trained)))
    stops = numbers(*(stop for _, stop in stored_ranges(units, n, server)))
    servers = torch.bucketize(torch.cat(trained), stops, right=True)
    return torch.bincount(trainers * n + servers, minlength=n * n).view(n, n)


class EntryPositions(NamedTuple):
    """The same entries of a parameter as they lie at the worker that holds them and at the one that keeps them."""

    trained: Units
    stored: Units


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a model is divided among `workers`. axes, shapes: of its divided parameters, by name; shapes are the full
    ones.

    A parameter is kept along its first divided dimension. One that is divided twice (between two hidden layers) is held
    in part only: what lies between the units of different subnets rests for a round.
    """

    axes: Mapping[str, Axes]
    shapes: Mapping[str, tuple[int, ...]]
    workers: int
    sampler: str
    server: str
    seed: int
    layers: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layers_of(self.axes))
        for layer, units in self.layers.items():
            if units < self.workers:
                raise ValueError(
                    f"split: {layer} has {units} units for {self.workers} workers: leave {layer.rpartition('.')[2]!r} "
                    f"out, choose a wider model, or at most {units} workers"
                )

    def trained(self, layer: str, worker: int, round: int) -> Tensor:
        return partition(layer, self.layers[layer], self.workers, self.sampler, self.seed, round)[worker]

    def trained_units(self, name: str, worker: int, round: int) -> Units:
        """The same for a parameter, dimension by dimension."""
        return tuple(None if axis is None else self.trained(axis.layer, worker, round) for axis in self.axes[name])

    def stored_units(self, name: str, worker: int) -> Units:
        lead = self.lead(name)
        return tuple(
            None if axis is None else _run(*(self._stored(axis.layer, worker) if axis is lead else (axis.units,)))
            for axis in self.axes[name]
        )

    def entries(self, name: str, trainer: int, server: int, round: int) -> EntryPositions | None:
        """What of a parameter goes between the two; None: nothing."""
        lead = self.lead(name)
        trained, stored = [], []
        for axis in self.axes[name]:
            if axis is None:
                trained.append(None)
                stored.append(None)
                continue
            units = self.trained(axis.layer, trainer, round)
            first, last = self._between(axis.layer, trainer, server, round) if axis is lead else (0, len(units))
            if first == last:
                return None
            trained.append(_run(first, last))
            stored.append(units[first:last] - (self._stored(axis.layer, server)[0] if axis is lead else 0))
        return EntryPositions(tuple(trained), tuple(stored))

    def units_between(self, layer: str, round: int) -> Tensor:
        """How many units each worker (rows) holds of what each keeps (columns), (n, n)."""
        units, n = self.layers[layer], self.workers
        return _between(partition(layer, units, n, self.sampler, self.seed, round), units, self.server)

    def trained_numel(self, name: str, worker: int) -> int:
        """Entries of a parameter that a worker holds, in any round."""
        counts = [
            size if axis is None else size // axis.units * sizes(axis.units, self.workers)[worker]
            for axis, size in zip(self.axes[name], self.shapes[name], strict=True)
        ]
        return prod(counts)

    def lead(self, name: str) -> Axis:
        """The axis that a parameter is kept along."""
        return next(axis for axis in self.axes[name] if axis is not None)

    def digest(self, round: int) -> int:
        """64-bit hash of who holds what in `round`."""
        found = hashlib.sha256()
        for layer in self.layers:
            for worker in range(self.workers):
                found.update(self.trained(layer, worker, round).numpy().tobytes())
        return int.from_bytes(found.digest()[:8], "little", signed=True)

    @property
    def steady(self) -> bool:
        """Whether all rounds send equally much between any two workers."""
        even = all(units % self.workers**2 == 0 for units in self.layers.values())
        return self.server == "central" or self.sampler == "fixed" or (self.sampler == "stratified" and even)

    def _stored(self, layer: str, worker: int) -> tuple[int, int]:
        return stored_ranges(self.layers[layer], self.workers, self.server)[worker]

    def _between(self, layer: str, trainer: int, server: int, round: int) -> tuple[int, int]:
        """Where in the trainer's units the server's lie: a run, for both ascend."""
        edges = numbers(*self._stored(layer, server))
        first, last = torch.searchsorted(self.trained(layer, trainer, round), edges).tolist()
        return first, last


def _run(*ends: int) -> Tensor:
    return torch.arange(*ends, dtype=torch.int64, device="cpu")


def _shuffled(units: int, draw: torch.Generator) -> Tensor:
    return torch.randperm(units, generator=draw, dtype=torch.int64, device="cpu")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

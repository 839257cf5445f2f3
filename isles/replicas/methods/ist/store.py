"""The divided parameters between rounds, and how they get to the workers that train them and back.

    live tensors of a worker  -- up -->  stored tensors of the servers  -- down, another round's units -->  live tensors

A pair of workers exchanges one message each way: the entries that one trains and the other stores, parameter after
parameter, slot after slot (the weight, then what travels of the inner optimizer's state), as they lie in memory.

`Division`: which worker trains which units in a round, and which stores them between rounds. Indices only, drawn by
every worker from the same seed, so that no index is ever sent:

    (seed, round, layer) -> partition: n lists of units, one a worker, all units once
    server               -> stored_ranges: a run of neighbouring units a worker
    both                 -> entries: which entries of a parameter go between a worker and a server
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isles.base.modes import generator_of
from isles.comm.call import Call
from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.basic import all_to_all
from isles.comm.group import numbers
from isles.comm.transport import Steps
from isles.comm.trust import JUMPS, mean_square
from isles.models.subnet import Axes, Axis, layers_of, put, take

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
    draw = generator_of(f"isles ist {seed} {round} {layer}")
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


WEIGHT = ""


class Key(NamedTuple):
    """A tensor of a divided parameter: its weight, or a moment of the inner optimizer's."""

    name: str
    slot: str = WEIGHT


Tensors = Mapping[Key, Tensor]


class Store:
    """What worker `rank` keeps: of every divided parameter the entries of its units, on the CPU.

    weights: the full tensors, by name. moments: of each parameter, the slots that travel and their dtypes; they begin
    at zero.
    """

    def __init__(
        self,
        division: Division,
        rank: int,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Mapping[str, torch.dtype]],
    ) -> None:
        self.division, self.rank = division, rank
        self.stored: dict[Key, Tensor] = {}
        for name, axes in division.axes.items():
            own = take(weights[name].detach(), axes, division.stored_units(name, rank))
            own = own if own.is_meta else own.cpu()
            self.stored[Key(name)] = own
            for slot, dtype in moments.get(name, {}).items():
                self.stored[Key(name, slot)] = torch.zeros_like(own, dtype=dtype)

    def keys(self, *, moments: bool) -> list[Key]:
        """What travels, in the order of the messages."""
        return [key for key in self.stored if moments or key.slot == WEIGHT]

    def weights(self) -> dict[Key, Tensor]:
        return {key: self.stored[key].clone() for key in self.keys(moments=False)}

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored.values())

    def messages(self, round: int, *, moments: bool = True) -> Tensor:
        """Bytes of the message between each trainer (rows) and each server (columns) in `round`, either way, (n, n)."""
        total = torch.zeros(self.division.workers, self.division.workers, dtype=torch.int64, device="cpu")
        for layer, each in self._unit_bytes[moments].items():
            total += self.division.units_between(layer, round) * each[:, None]
        return total

    @cached_property
    def _unit_bytes(self) -> dict[bool, dict[str, Tensor]]:
        """Without moments and with them: of all that lies along a unit of a layer, by trainer, (n,)."""
        division, found = self.division, dict[bool, dict[str, Tensor]]()
        for moments in (False, True):
            found[moments] = {}
            for key in self.keys(moments=moments):
                lead = division.lead(key.name)
                trained = [division.trained_numel(key.name, worker) for worker in range(division.workers)]
                each = numbers(*trained) // numbers(*sizes(lead.units, division.workers)) * self.stored[key].itemsize
                found[moments][lead.layer] = found[moments].get(lead.layer, 0) + each
        return found

    def sent_bytes(self, round: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes that each position sends at the end of `round`: up, and down for the next one."""
        up, down = self.messages(round).fill_diagonal_(0), self.messages(round + 1).fill_diagonal_(0)
        return tuple(up.sum(dim=1).tolist()), tuple(down.sum(dim=0).tolist())

    def up(self, call: Call, live: Tensors, stored: dict[Key, Tensor], round: int) -> Steps[None]:
        """Bring what all workers hold in `round` to its servers: into `stored` here. Its keys are what travels."""
        keys, lengths = list(stored), self.messages(round, moments=any(key.slot != WEIGHT for key in stored))
        trainer, server = self._end(live, keys, round, trained=True), self._end(stored, keys, round, trained=False)
        incoming = [torch.empty(int(nbytes), dtype=torch.uint8, device="cpu") for nbytes in lengths[:, self.rank]]
        yield from _exchange(call, trainer, server, incoming)

    def down(self, call: Call, live: Tensors, round: int) -> Steps[None]:
        """Bring to all workers what they hold in `round`: into the tensors of `live` here."""
        keys, lengths = list(self.stored), self.messages(round)
        server, trainer = self._end(self.stored, keys, round, trained=False), self._end(live, keys, round, trained=True)
        incoming = [torch.empty(int(nbytes), dtype=torch.uint8, device="cpu") for nbytes in lengths[self.rank]]
        yield from _exchange(call, server, trainer, incoming)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.stored.items():
            state.setdefault(key.name, {})[key.slot] = tensor.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for key, tensor in self.stored.items():
            tensor.copy_(state[key.name][key.slot])

    def _end(self, tensors: Tensors, keys: Sequence[Key], round: int, *, trained: bool) -> _End:
        return _End(division=self.division, rank=self.rank, tensors=tensors, keys=keys, round=round, trained=trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """This worker's end of a round's messages: they come out of `tensors`, or go into them. trained: these are what
    it holds in the round, and the other one is the server; else what it keeps, and the other one is the trainer.
    """

    division: Division
    rank: int
    tensors: Tensors
    keys: Sequence[Key]
    round: int
    trained: bool

    def pack(self, other: int) -> Tensor:
        """The message to `other` as bytes."""
        parts = [
            as_bytes(take(self.tensors[key], self.division.axes[key.name], units).contiguous())
            for key, units in self._units(other)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")

    def unpack(self, wire: Tensor, other: int) -> None:
        """Write the message from `other` to its places."""
        for key, units, part in self._parts(wire, other):
            put(self.tensors[key], self.division.axes[key.name], units, part)

    def check(self, call: Call, wires: Sequence[Tensor]) -> None:
        """Refused, by name, for what cannot be units of this round; nothing was written yet. Weights are compared with
        weights, each moment with its like, where a gradient's leeway is allowed.
        """
        found: dict[str, dict[int, list[Tensor]]] = {}
        for other, wire in enumerate(wires):
            for key, _, part in self._parts(wire, other):
                if part.is_floating_point():
                    found.setdefault(key.slot, {}).setdefault(other, []).append(part.view(-1))
        for number, slot in enumerate(sorted(found)):
            flats = {other: torch.cat(parts) for other, parts in found[slot].items()}
            squares = {other: mean_square(flat) for other, flat in flats.items()}
            own = squares.pop(self.rank, 0.0)
            checked = call if slot == WEIGHT else replace(call, leeway=JUMPS)
            kind = -1 - 2 * number - self.trained  # means have the numbers from 0 on
            checked.accept(kind, squares, own, min(flat.numel() for flat in flats.values()))

    def _parts(self, wire: Tensor, other: int) -> Iterator[tuple[Key, Any, Tensor]]:
        """What lies in a message from `other`: whose it is, its units in `tensors`, and its entries."""
        at = 0
        for key, units in self._units(other):
            out = self.tensors[key]
            shape = take(
                torch.empty(out.shape, device="meta", dtype=torch.float32), self.division.axes[key.name], units
            ).shape
            end = at + shape.numel() * out.itemsize
            yield key, units, wire[at:end].clone().view(out.dtype).view(shape)  # cloned: a view wants to be aligned
            at = end
        assert at == len(wire), "a message of another length"

    def _units(self, other: int) -> Iterator[tuple[Key, Any]]:
        """What a message with `other` consists of, in its order: units in `tensors`."""
        trainer, server = (self.rank, other) if self.trained else (other, self.rank)
        for key in self.keys:
            entries = self.division.entries(key.name, trainer, server, self.round)
            if entries is not None:
                yield key, entries.trained if self.trained else entries.stored


def _exchange(call: Call, source: _End, target: _End, incoming: list[Tensor]) -> Steps[None]:
    """From `source` of all to `target` of all. incoming: buffers for what comes, by position."""
    yield from all_to_all(call, [source.pack(other) for other in range(len(incoming))], incoming)
    target.check(call, incoming)
    for other, wire in enumerate(incoming):
        target.unpack(wire, other)

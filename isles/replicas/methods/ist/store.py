"""The divided parameters between rounds, and how they get to the workers that train them and back.

    live tensors of a worker  -- up -->  stored tensors of the servers  -- down, another round's units -->  live tensors

A pair of workers exchanges one message each way: the entries that one trains and the other stores, parameter after
parameter, slot after slot (the weight, then what travels of the inner optimizer's state), as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.basic import all_to_all
from isles.comm.group import numbers
from isles.comm.transport import Steps
from isles.comm.trust import JUMPS, mean_square
from isles.models.subnet import put, take
from isles.replicas.methods.ist.partition import Division, sizes

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

"""What is kept of the divided parameters between rounds, and how it gets to those who hold it and back.

    live tensors of a worker  -- up -->  kept tensors of the keepers  -- down, another round's units -->  live tensors

A pair of workers exchanges one message each way: the entries that one holds and the other keeps, parameter after
parameter, slot after slot (the weight, then what travels of the inner optimizer's state), as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.basic import all_to_all
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
        self.kept: dict[Key, Tensor] = {}
        for name, axes in division.axes.items():
            own = take(weights[name].detach(), axes, division.kept_units(name, rank))
            own = own if own.is_meta else own.cpu()
            self.kept[Key(name)] = own
            for slot, dtype in moments.get(name, {}).items():
                self.kept[Key(name, slot)] = torch.zeros_like(own, dtype=dtype)

    def keys(self, *, moments: bool) -> list[Key]:
        """What travels, in the order of the messages."""
        return [key for key in self.kept if moments or key.slot == WEIGHT]

    def weights(self) -> dict[Key, Tensor]:
        """A copy of the kept weights."""
        return {key: self.kept[key].clone() for key in self.keys(moments=False)}

    def nbytes(self) -> int:
        """Memory of what is kept."""
        return sum(tensor.nbytes for tensor in self.kept.values())

    def messages(self, round: int, *, moments: bool = True) -> Tensor:
        """Bytes of the message between each holder (rows) and each keeper (columns) in `round`, either way, (n, n)."""
        division = self.division
        total = torch.zeros(division.workers, division.workers, dtype=torch.int64)
        of_unit: dict[str, Tensor] = {}  # of all that lies along a layer, by holder
        for key in self.keys(moments=moments):
            lead = division.lead(key.name)
            held = [division.held_numel(key.name, worker) for worker in range(division.workers)]
            each = torch.tensor(held) // torch.tensor(sizes(lead.units, division.workers)) * self.kept[key].itemsize
            of_unit[lead.layer] = of_unit.get(lead.layer, 0) + each
        for layer, each in of_unit.items():
            total += division.units_between(layer, round) * each[:, None]
        return total

    def sent_bytes(self, round: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes that each position sends at the end of `round`: up, and down for the next one."""
        up, down = self.messages(round).fill_diagonal_(0), self.messages(round + 1).fill_diagonal_(0)
        return tuple(up.sum(dim=1).tolist()), tuple(down.sum(dim=0).tolist())

    def up(self, call: Call, live: Tensors, kept: dict[Key, Tensor], round: int) -> Steps[None]:
        """Bring what all workers hold in `round` to its keepers: into `kept` here. Its keys are what travels."""
        everyone, lengths = range(self.division.workers), self.messages(round, moments=_has_moments(kept))
        outgoing = [self._pack(live, list(kept), self.rank, other, round, held=True) for other in everyone]
        incoming = [torch.empty(int(nbytes), dtype=torch.uint8) for nbytes in lengths[:, self.rank]]
        yield from all_to_all(call, outgoing, incoming)
        self._judge(call, incoming, kept, list(kept), round, held=False)
        for other in everyone:
            self._unpack(incoming[other], kept, list(kept), other, self.rank, round, held=False)

    def down(self, call: Call, live: Tensors, round: int) -> Steps[None]:
        """Bring to all workers what they hold in `round`: into the tensors of `live` here."""
        everyone, keys, lengths = range(self.division.workers), list(self.kept), self.messages(round)
        outgoing = [self._pack(self.kept, keys, other, self.rank, round, held=False) for other in everyone]
        incoming = [torch.empty(int(nbytes), dtype=torch.uint8) for nbytes in lengths[self.rank]]
        yield from all_to_all(call, outgoing, incoming)
        self._judge(call, incoming, live, keys, round, held=True)
        for other in everyone:
            self._unpack(incoming[other], live, keys, self.rank, other, round, held=True)

    def state_dict(self) -> dict[str, Any]:
        """What is kept, by parameter and slot."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.kept.items():
            state.setdefault(key.name, {})[key.slot] = tensor.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from `state_dict`."""
        for key, tensor in self.kept.items():
            tensor.copy_(state[key.name][key.slot])

    def _pack(
        self, tensors: Tensors, keys: Sequence[Key], holder: int, keeper: int, round: int, *, held: bool
    ) -> Tensor:
        """The message between the two as bytes. held: `tensors` are the holder's; else the keeper's."""
        parts = []
        for key in keys:
            places = self.division.places(key.name, holder, keeper, round)
            if places is not None:
                part = take(tensors[key], self.division.axes[key.name], places.held if held else places.kept)
                parts.append(as_bytes(part.contiguous().cpu()))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _unpack(
        self,
        wire: Tensor,
        tensors: Tensors,
        keys: Sequence[Key],
        holder: int,
        keeper: int,
        round: int,
        *,
        held: bool,
    ) -> None:
        """Write the message between the two to its places in `tensors`."""
        for key, units, part in self._parts(wire, tensors, keys, holder, keeper, round, held=held):
            put(tensors[key], self.division.axes[key.name], units, part.to(tensors[key].device))

    def _parts(
        self,
        wire: Tensor,
        tensors: Tensors,
        keys: Sequence[Key],
        holder: int,
        keeper: int,
        round: int,
        *,
        held: bool,
    ) -> Iterator[tuple[Key, Any, Tensor]]:
        """What lies in the message between the two: whose it is, its units in `tensors`, and its entries."""
        at = 0
        for key in keys:
            places = self.division.places(key.name, holder, keeper, round)
            if places is None:
                continue
            units = places.held if held else places.kept
            out = tensors[key]
            shape = take(torch.empty(out.shape, device="meta"), self.division.axes[key.name], units).shape
            end = at + shape.numel() * out.itemsize
            yield key, units, wire[at:end].clone().view(out.dtype).view(shape)  # cloned: a view wants to be aligned
            at = end
        assert at == len(wire), "a message of another length"

    def _judge(
        self, call: Call, wires: Sequence[Tensor], tensors: Tensors, keys: Sequence[Key], round: int, *, held: bool
    ) -> None:
        """Refused, by name, for what cannot be units of this round; nothing was written yet. Weights are compared with
        weights, each moment with its like, where a gradient's leeway is allowed.
        """
        found: dict[str, dict[int, list[Tensor]]] = {}
        for other, wire in enumerate(wires):
            ends = (self.rank, other) if held else (other, self.rank)
            for key, _, part in self._parts(wire, tensors, keys, *ends, round, held=held):
                if part.is_floating_point():
                    found.setdefault(key.slot, {}).setdefault(other, []).append(part.view(-1))
        for number, slot in enumerate(sorted(found)):
            flats = {other: torch.cat(parts) for other, parts in found[slot].items()}
            squares = {other: mean_square(flat) for other, flat in flats.items()}
            own = squares.pop(self.rank, 0.0)
            judged = call if slot == WEIGHT else replace(call, leeway=JUMPS)
            kind = -1 - 2 * number - held  # means have the numbers from 0 on
            judged.accept(kind, squares, own, min(flat.numel() for flat in flats.values()))


def _has_moments(tensors: Tensors) -> bool:
    return any(key.slot != WEIGHT for key in tensors)

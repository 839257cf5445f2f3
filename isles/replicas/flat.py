"""A list of parameters seen as one flat vector, in cache-sized blocks.

Parameters stay where the user put them; only what Isles adds (anchor, momentum, staging) is flat. A block is a run of
entries small enough that every vector's part of it stays in the second-level cache while a rule works on it: this makes
a whole outer round cost about what its memory traffic costs. No Python loop runs per inner step, one runs per block and
round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 17  # entries; 512 KB of float32


@dataclass(frozen=True, slots=True)
class _Piece:
    """Entries [first, last) of parameter `index` (the whole of it where first is None), at `start` in the flat
    vector.
    """

    index: int
    first: int | None
    last: int
    start: int
    elements: int


@dataclass(frozen=True, slots=True)
class Block:
    """Entries [start, stop) of the flat vector and the live tensors that hold them, in order."""

    start: int
    stop: int
    live: list[Tensor]

    def of(self, flat: Tensor) -> Tensor:
        """This block's part of a flat vector (b,), a view."""
        return flat[self.start : self.stop]

    def shaped(self, flat_block: Tensor) -> list[Tensor]:
        """A block (b,) as views of the live tensors' shapes."""
        if len(self.live) == 1:
            return [flat_block if self.live[0].dim() == 1 else flat_block.view(self.live[0].shape)]
        sizes = [tensor.numel() for tensor in self.live]
        return [part.view(tensor.shape) for part, tensor in zip(flat_block.split(sizes), self.live, strict=True)]

    def read(self, scratch: Tensor) -> Tensor:
        """The live entries as a flat block (b,) in scratch's dtype: a view where they lie so already, else copied
        into `scratch`.
        """
        first = self.live[0]
        if len(self.live) == 1 and first.dim() == 1 and first.dtype == scratch.dtype and first.device == scratch.device:
            return first
        out = scratch[: self.stop - self.start]
        torch._foreach_copy_(self.shaped(out), self.live)
        return out


class FlatParameters:
    """Unique parameters in a fixed order; `numel` entries in all.

    dtype: what flat vectors of them are held in: float32, or float64 where a parameter is float64.
    exact: True if all parameters have that dtype.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        dtypes = {parameter.dtype for parameter in self.parameters}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.exact = dtypes <= {self.dtype}
        planning = any(parameter.is_meta for parameter in self.parameters)
        self.device = torch.device("meta" if planning else "cpu")  # a model without numbers: nothing is allocated
        self._runs = self._cut()

    def new(self) -> Tensor:
        """An uninitialised flat vector (numel,) on the CPU, or on the meta device where the parameters are."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def scratch(self) -> Tensor:
        """Room for one block."""
        largest = max((run[-1].start + run[-1].elements - run[0].start for run in self._runs), default=0)
        return torch.empty(largest, dtype=self.dtype, device=self.device)

    def blocks(self) -> Iterator[Block]:
        """All blocks in order. The live views are made anew each time: a user may move parameters between rounds."""
        whole = [parameter.detach() for parameter in self.parameters]
        lines = [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in whole]
        for run in self._runs:
            live = [lines[p.index] if p.first is None else lines[p.index][p.first : p.last] for p in run]
            yield Block(run[0].start, run[-1].start + run[-1].elements, live)

    @torch.no_grad()
    def read(self, out: Tensor) -> Tensor:
        """Copy all parameters into flat `out` (numel,)."""
        for block in self.blocks():
            torch._foreach_copy_(block.shaped(block.of(out)), block.live)
        return out

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy flat (numel,) into the parameters."""
        for block in self.blocks():
            torch._foreach_copy_(block.live, block.shaped(block.of(flat)))

    def rounded(self, block: Block, flat: Tensor) -> Tensor:
        """The block of a flat vector as the live weights hold it: rounded to their dtypes where those are coarser."""
        if self.exact:
            return block.of(flat)
        parts = zip(block.shaped(block.of(flat)), block.live, strict=True)
        return torch.cat([part.to(live.dtype).to(self.dtype).reshape(-1) for part, live in parts])

    def _cut(self) -> list[list[_Piece]]:
        runs: list[list[_Piece]] = []
        room, start = 0, 0
        for index, parameter in enumerate(self.parameters):
            count = parameter.numel()
            # A strided parameter has no flat view: it travels whole, as one piece.
            step = BLOCK if parameter.is_contiguous() else max(count, 1)
            for first in range(0, count, step):
                last = min(first + step, count)
                whole = not parameter.is_contiguous()
                piece = _Piece(index, None if whole else first, last, start, last - first)
                if piece.elements > room:
                    runs.append([])
                    room = BLOCK
                runs[-1].append(piece)
                room -= piece.elements
                start += piece.elements
        return runs


def digest(sums: Sequence[Tensor]) -> int:
    """64-bit hash of a flat vector from the `word_sum` of each of its blocks: depends on every bit and on the order
    of blocks.
    """
    if not sums:
        return 0
    places = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64) * 0x9E3779B97F4A7C1
    return int((torch.stack(list(sums)) * places).sum())


def word_sum(block: Tensor) -> Tensor:
    """The block's bits as integers, summed modulo 2**64: any changed bit changes it."""
    aligned = block.numel() * block.itemsize % 8 == 0 and block.storage_offset() * block.itemsize % 8 == 0
    return block.view(torch.int64 if aligned else torch.int32).sum()

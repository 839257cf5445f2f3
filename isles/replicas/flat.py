"""A list of parameters seen as one flat vector, in cache-sized blocks; and the names by which workers and checkpoints
agree on a model's tensors.

Parameters stay where the user put them; only what Isles adds (anchor, momentum, staging) is flat. A block is a run of
entries small enough that every vector's part of it stays in the second-level cache while a rule works on it: a whole
outer round then costs about what its memory traffic costs. No Python loop runs per inner step, one runs per block and
round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.base.modes import HostCopies, arena, is_away
from isles.network.exchange_plan import BLOCK


@dataclass(frozen=True, slots=True)
class _Piece:
    """The `number`th run of at most BLOCK entries of parameter `index`, `elements` long."""

    index: int
    number: int
    elements: int


@dataclass(frozen=True, slots=True)
class FlatBlock:
    """Neighbouring entries of the flat vector: the tensors that hold them, in order; see `FlatParameters.blocks`."""

    live: list[Tensor]

    def shaped(self, part: Tensor) -> list[Tensor]:
        """This block's part (b,) of a flat vector as views of the live tensors' shapes."""
        if len(self.live) == 1:
            return [part if self.live[0].dim() == 1 else part.view(self.live[0].shape)]
        pieces = part.split([tensor.numel() for tensor in self.live])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self.live, strict=True)]

    def read(self, scratch: Tensor) -> Tensor:
        """The live entries as a flat block (b,) in scratch's dtype: a view where possible, else copied to `scratch`."""
        first = self.live[0]
        if len(self.live) == 1 and first.dim() == 1 and first.dtype == scratch.dtype:
            return first
        out = scratch[: sum(tensor.numel() for tensor in self.live)]
        torch._foreach_copy_(self.shaped(out), self.live)
        return out


VectorMaker = Callable[[int, torch.dtype], Tensor]
"""Makes an uninitialised vector (numel,) of a dtype, on the CPU: in memory, or wherever else one may read and write."""


class FlatParameters:
    """Unique parameters in a fixed order; `numel` entries in all. maker: of flat vectors; None: they are in memory.
    pinned: they cross often, so what stands on the host for those on GPUs is kept, in pinned memory.

    dtype: what flat vectors of them are held in: float32, or float64 where a parameter is float64.
    exact: True if all parameters have that dtype.
    """

    def __init__(self, parameters: Sequence[Tensor], maker: VectorMaker | None = None, *, pinned: bool = False) -> None:
        self.parameters, self._maker, self._pinned = list(parameters), maker, pinned
        self._staging: HostCopies | None = None
        self.is_read = False
        """Whether the host's blocks hold the present weights of the GPU."""
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        dtypes = {parameter.dtype for parameter in self.parameters}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.exact = dtypes <= {self.dtype}
        planning = any(parameter.is_meta for parameter in self.parameters)
        self.device = torch.device("meta" if planning else "cpu")  # a model without numbers: nothing is allocated

    @property
    def layout(self) -> tuple[list[torch.Size], torch.dtype, torch.device]:
        """Shapes of the tensors in their order, dtype and device of flat vectors of them."""
        return [parameter.shape for parameter in self.parameters], self.dtype, self.device

    def new(self) -> Tensor:
        """An uninitialised flat vector (numel,) on the CPU, or on the meta device where the parameters are."""
        if self._maker is not None and self.device.type == "cpu":
            return self._maker(self.numel, self.dtype)
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def scratch(self) -> Tensor:
        is_cut = any(parameter.numel() >= BLOCK for parameter in self.parameters)
        size = BLOCK if is_cut else max(self._sizes, default=0)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def blocks(self) -> list[FlatBlock]:
        """All blocks in order: of the weights, or, where those are on GPUs, of tensors of the host that stand for them
        between `down` and `up`. The views are made anew each time: a user may move parameters between rounds, and
        change their memory format.
        """
        lines = [_runs(tensor) for tensor in self._hosted()]
        return [FlatBlock([view for piece in run for view in lines[piece.index][piece.number]]) for run in self._runs]

    def _hosted(self) -> list[Tensor]:
        weights = [parameter.detach() for parameter in self.parameters]
        if not is_away(weights):
            self._staging = None
            return weights
        if self._staging is None or not self._staging.fits(weights):
            self._staging, self.is_read = HostCopies(arena(weights, pinned=None if self._pinned else False)), False
        self._staging.settle()
        return self._staging.hosts

    @property
    def is_staged(self) -> bool:
        """Whether the last `blocks` stand for weights on a GPU."""
        return self._staging is not None

    def down(self) -> None:
        """Copy the weights from the GPU to the host's blocks, unless these hold them. The host waits for it once."""
        if self._staging is not None and not self.is_read:
            self._staging.down(self.parameters)
            self.is_read = True

    def up(self, local_share: float = 0.0) -> None:
        """Write the host's blocks back to the GPU: weights = local_share weights + (1 - local_share) blocks."""
        if self._staging is not None:
            self._staging.up(self.parameters, local_share)
            self.is_read = not local_share

    def spans(self, indices: Sequence[int]) -> list[slice]:
        """Where the parameters of these numbers lie in a flat vector."""
        ends = list(accumulate((parameter.numel() for parameter in self.parameters), initial=0))
        return [slice(ends[index], ends[index + 1]) for index in indices]

    def parts(self, flat: Tensor, *, by_tensor: bool = False) -> tuple[Tensor, ...]:
        """A flat vector (numel,) as one view (b,) a block. by_tensor: a parameter."""
        return flat.split([own.numel() for own in self.parameters] if by_tensor else self._sizes)

    def parts_or_none(self, flat: Tensor | None, *, by_tensor: bool = False) -> Sequence[Tensor | None]:
        if flat is None:
            return [None] * len(self.parameters if by_tensor else self._sizes)
        return self.parts(flat, by_tensor=by_tensor)

    @torch.no_grad()
    def read(self, out: Tensor) -> Tensor:
        if out.is_meta:
            return out  # there are no numbers, and millions of blocks perhaps
        blocks, self.is_read = self.blocks(), False
        self.down()
        for block, part in zip(blocks, self.parts(out), strict=True):
            torch._foreach_copy_(block.shaped(part), block.live)
        return out

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        for block, part in zip(self.blocks(), self.parts(flat), strict=True):
            torch._foreach_copy_(block.live, block.shaped(part))
        self.up()

    def rounded(self, block: FlatBlock, part: Tensor) -> Tensor:
        """The block's part (b,) of a flat vector, rounded to the live weights' dtypes where those are coarser."""
        if self.exact:
            return part
        pieces = zip(block.shaped(part), block.live, strict=True)
        return torch.cat([piece.to(live.dtype).to(self.dtype).reshape(-1) for piece, live in pieces])

    def words(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The bits of a flat vector as integers, one view a block: what `digest` sums."""
        if flat.itemsize == 8:
            return flat.view(torch.int64).split(self._sizes)
        if all(size % 2 == 0 for size in self._sizes) and flat.storage_offset() % 2 == 0:
            return flat.view(torch.int64).split(
                [size // 2 for size in self._sizes]
            )  # sums of them are ten times faster
        return flat.view(torch.int32).split(self._sizes)

    def digest(self, flat: Tensor) -> int:
        return digest([words.sum() for words in self.words(flat)])

    @cached_property
    def _sizes(self) -> list[int]:
        return [sum(piece.elements for piece in run) for run in self._runs]

    @cached_property
    def _runs(self) -> list[list[_Piece]]:
        runs: list[list[_Piece]] = []
        room = 0
        for index, parameter in enumerate(self.parameters):
            count = parameter.numel()
            for number, first in enumerate(range(0, count, BLOCK)):
                elements = min(BLOCK, count - first)
                if elements > room:
                    runs.append([])
                    room = BLOCK
                runs[-1].append(_Piece(index, number, elements))
                room -= elements
        return runs


def _runs(tensor: Tensor) -> list[Sequence[Tensor]]:
    """Each run of BLOCK entries as views of `tensor`: one, or a few where its memory is in another order."""
    if tensor.is_contiguous():
        return [(part,) for part in tensor.view(-1).split(BLOCK)]
    return [views(tensor, first, min(first + BLOCK, tensor.numel())) for first in range(0, tensor.numel(), BLOCK)]


def views(tensor: Tensor, start: int, stop: int) -> list[Tensor]:
    """The entries [start, stop) of a strided tensor: whole rows, and parts of the rows before and behind."""
    if stop - start == tensor.numel():
        return [tensor]
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:
        return views(tensor[last], start - last * row, stop - last * row)
    before = views(tensor[first - 1], start - (first - 1) * row, row) if start < first * row else []
    behind = views(tensor[last], 0, stop - last * row) if last * row < stop else []
    return [*before, *([tensor[first:last]] if first < last else []), *behind]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether the sums of all of them are finite: a GPU's host waits for that once."""
    checks = [tensor.detach().sum().isfinite() for tensor in tensors]
    return not checks or bool(torch.stack([one.to(checks[0].device) for one in checks]).all())


def copied(state: Any) -> Any:
    """A nested state of dicts, lists and tuples with copies of its tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(copied(value) for value in state)
    return state


def digest(sums: Sequence[Tensor]) -> int:
    """64-bit hash of a flat vector from the sums of its blocks' words modulo 2**64: any changed bit changes it, and so
    does another order of the blocks.
    """
    if not sums:
        return 0
    # Odd factors have inverses modulo 2**64: one changed sum always changes the hash.
    weights = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device="cpu") * 0x9E3779B97F4A7C1
    return int((torch.stack(list(sums)) * weights).sum())


_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def clean_names(model: nn.Module, tensors: Sequence[Tensor]) -> list[str]:
    """Of parameters and buffers of `model`, without what wrappers such as torch.compile put before them."""
    names = {id(tensor): name for name, tensor in chain(model.named_buffers(), model.named_parameters())}
    return [clean_name(names[id(tensor)]) for tensor in tensors]


def clean_name(name: str) -> str:
    """One of them, or the beginning of one."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def all_names(model: nn.Module) -> list[str]:
    """`clean_names` of parameters and buffers, in the order in which all workers must have them."""
    return clean_names(model, [*model.parameters(), *model.buffers()])


def warn_if_not_held(model: nn.Module, parameters: Sequence[Tensor], inner: Optimizer, method: str) -> None:
    """A warning that names trainable parameters which the inner optimizer does not step."""
    stepped = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    names = clean_names(model, [parameter for parameter in parameters if id(parameter) not in stepped])
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"{len(names)} trainable parameters ({shown}) are not in the optimizer that {method} has around it: they "
            "are exchanged too, but what steps them is not in its state, clipping and scaling. Wrap all optimizers of "
            f"the model together, isles.{method}(model, [muon, adamw], ...), or freeze them",
            stacklevel=3,
        )

"""The changes that each `pipeline.boundary.kind` makes to a model and to the messages between its stages.

    a stage, before it trains            fit(stage), then boundary(stage) for its messages
    the whole model of a finished run    fit(whole), load the stages' weights, then unsplit(whole)

`unsplit` gives the trained function in one process: a subspace is folded into the weights; masks and learned layers run
after the blocks where the boundaries were.

DCT-MP (arXiv 2010.08899): of each token's stream only the largest entries are sent, the same ones in both directions.

    K = max(1, ceil((1 - sparsity) D))
    forward     the K entries of largest |x|, and their indices (1 byte each if D <= 256, else 2)
    backward    the gradient of those K only, in the same order, without indices

The receiver uses x * mask, and the sender gradient * mask: the derivative of masking with a constant mask. The mask is
part of the trained function, so evaluation and generation keep it.

Deviation: exactly K entries, ties by torch's `topk`, so that every message has a fixed length.

Coordinates of a stream in a subspace: see `isles.models.subspace`.

    forward     c = (x - table[token]) U      backward    dL/dc = (dL/dx) U

If everything before the boundary writes into the subspace, this is lossless for all parameters, in both directions.

Rotating a boundary's subspace towards the loss's gradients (Protocol Models; off by default):

    M = sum over tokens of g g^T       g (D,): gradient of the stream after the last boundary, before its projection
    loss(U) = tr M - tr(U^T M U)       the part of those gradients outside the subspace
    U <- qr(U + 2 rate / |M|_2 (1 - U U^T) M U)

The minimum is the sum of the D - K smallest eigenvalues of M. Values in coordinates (weights, moments, anchors,
messages in flight) are not changed, so they rotate with U.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from isles.comm.codecs.base import as_bytes
from isles.comm.errors import Malformed
from isles.models.blocks import sharing
from isles.models.stages import cuttable
from isles.models.subspace import (
    Subspace,
    SubspaceForm,
    check_inside,
    drawn_basis,
    drawn_table,
    fold,
    orthonormal,
    put_inside,
)
from isles.pipeline.boundaries.base import Boundary, FullStream
from isles.pipeline.boundaries.learned import Learned, LearnedKind, attach
from isles.pipeline.boundaries.names import BoundaryName, entries_sent, index_bytes


class Drift:
    """Accumulates M (D, D) of the gradients since the last rotation, in float64 on the host."""

    def __init__(self, width: int) -> None:
        self.total = torch.zeros(width, width, dtype=torch.float64, device="cpu")

    def add(self, gradient_BTD: Tensor) -> None:
        """Add the gradients of a microbatch."""
        rows = gradient_BTD.detach().flatten(0, -2).to(torch.promote_types(gradient_BTD.dtype, torch.float32))
        self.total += (rows.T @ rows).to(device="cpu", dtype=torch.float64)


def turned(basis: Tensor, total: Tensor, rate: float) -> Tensor:
    """The next basis (D, K) of float64, orthonormal; total: M (D, D). Above a rate of 0.5 the loss may rise."""
    size = float(torch.linalg.matrix_norm(total, ord=2))
    if size == 0.0:
        return basis
    product = total @ basis
    return orthonormal(basis + (2 * rate / size) * (product - basis @ (basis.T @ product)))


class Coordinates(Boundary):
    """Sends K numbers per token. drift: accumulates the gradients of the decoded stream, before their projection."""

    def __init__(self, subspace: Subspace, drift: Drift | None = None) -> None:
        self.subspace, self.drift = subspace, drift

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.subspace.coordinates(x_BTD, tokens[:, :-1]), None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        x_BTD = self.subspace.stream(payload, tokens[:, :-1])
        if self.drift is not None and x_BTD.requires_grad:
            x_BTD.register_hook(self.drift.add)
        return x_BTD

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        return (sequences, length, self.subspace.rank), 0


class LargestEntries(Boundary):
    """The `entries` largest entries of each token's stream of `width`."""

    def __init__(self, width: int, entries: int) -> None:
        super().__init__(width)
        self.entries = entries
        self.index_dtype = torch.uint8 if index_bytes(width) == 1 else torch.uint16

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        indices_BTK = largest(x_BTD, self.entries)
        return x_BTD.gather(-1, indices_BTK), as_bytes(indices_BTK.to(self.index_dtype).contiguous())

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        assert side is not None
        indices_BTK = side.clone().view(self.index_dtype).to(torch.int64).view(payload.shape)
        if int(indices_BTK.max()) >= self.width:
            raise Malformed(-1, f"an entry {int(indices_BTK.max())} of a stream of {self.width}")
        return payload.new_zeros(*payload.shape[:-1], self.width).scatter(-1, indices_BTK, payload)

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        shape = (sequences, length, self.entries)
        return shape, math.prod(shape) * self.index_dtype.itemsize


def largest(x_BTD: Tensor, entries: int) -> Tensor:
    """Indices (B, T, K) of the entries of largest size, ascending."""
    return x_BTD.detach().abs().topk(entries, dim=-1).indices.sort(dim=-1).values


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """The positions of the boundaries. cuts: the first block of each stage after the first; home: whether the stream
    also crosses from the last block back to the first stage; width: of the stream; vocab: number of token ids.
    """

    cuts: tuple[int, ...]
    home: bool
    width: int
    vocab: int


class Scheme:
    """The base class, which sends the stream unchanged: nothing to fit or to unsplit."""

    compares = False
    """Whether workers must compare `settings`."""

    def __init__(self, crossings: Crossings) -> None:
        self.crossings = crossings

    def settings(self, stage: Any) -> str | None:
        """What must be equal at all workers with a fitted stage, as text; None: only their configurations."""
        return None

    def fit(self, model: nn.Module) -> None:
        """Add the boundaries' parameters and constraints to `model`, whole or a stage, in place."""

    def check(self, model: nn.Module, tokens_BT: Tensor) -> None:
        """ValueError, naming the module, if the fitted whole `model` computes what the boundaries cannot transmit."""

    def boundary(self, stage: Any) -> Boundary:
        """The boundary for the messages of a fitted stage."""
        return FullStream(self.crossings.width)

    def unsplit(self, model: nn.Module) -> nn.Module:
        """Turn the fitted whole `model` into the trained function in one process, in place."""
        return model

    def restored(self, model: nn.Module) -> nn.Module:
        """Change a plain whole `model`, in place, so that it can load and run the weights of a finished run."""
        self.fit(model)
        return self.unsplit(model)

    @property
    def _crossed(self) -> list[int]:
        """The blocks whose output crosses a boundary."""
        return [cut - 1 for cut in self.crossings.cuts]


class Between(Scheme):
    """A boundary without parameters that is part of the trained function: masks, or a user's own."""

    def __init__(self, crossings: Crossings, boundary: Boundary) -> None:
        super().__init__(crossings)
        self._boundary = boundary

    def boundary(self, stage: Any) -> Boundary:
        return self._boundary

    def unsplit(self, model: nn.Module) -> nn.Module:
        last = [len(cast(Any, model).blocks) - 1] if self.crossings.home else []
        return crossing(model, [*self._crossed, *last], self.boundary(model))


class Inside(Scheme):
    """Weights in a subspace: `Coordinates`. blocks: number of blocks that write into it; 0: all before the last stage.
    turns: whether the subspace is rotated during training.
    """

    compares = True

    def __init__(
        self, crossings: Crossings, rank: int, form: SubspaceForm, seed: int, *, blocks: int = 0, turns: bool = False
    ) -> None:
        super().__init__(crossings)
        self.form, self.seed, self.inside = form, seed, range(blocks or crossings.cuts[-1])
        self.basis = drawn_basis(crossings.width, rank, seed)
        """The current basis (D, K), float64, on the host."""
        self.drift = Drift(crossings.width) if turns else None

    def settings(self, stage: Any) -> str:
        return stage.subspace.checksum

    def fit(self, model: Any) -> None:
        like = next(model.parameters()).detach()
        model.subspace = Subspace(
            self.basis.to(like), drawn_table(self.crossings.vocab, self.crossings.width, self.seed, like)
        )
        put_inside(model, model.subspace, self.inside, self.form)

    def rotate(self, stage: Any, basis: Tensor) -> None:
        """Use another basis (D, K) from now on."""
        self.basis = basis
        stage.subspace.basis.copy_(basis)

    def check(self, model: Any, tokens_BT: Tensor) -> None:
        if not tokens_BT.is_meta:  # the check compares the streams of a real forward pass
            check_inside(cuttable(sharing(model)), model.subspace, self.inside, tokens_BT)

    def boundary(self, stage: Any) -> Boundary:
        first = next(name for name, _ in cast(nn.Module, stage.blocks).named_children())
        is_last = int(first) == self.crossings.cuts[-1]
        return Coordinates(stage.subspace, self.drift if is_last else None)

    def restored(self, model: nn.Module) -> nn.Module:
        return model  # the subspace was folded into the weights before they were saved

    def unsplit(self, model: nn.Module) -> nn.Module:
        return fold(model)


class Layers(Scheme):
    """Learned layers before and after each boundary: `Learned`."""

    def __init__(self, crossings: Crossings, kind: LearnedKind, rank: int, seed: int) -> None:
        super().__init__(crossings)
        self.kind, self.rank, self.seed = kind, rank, seed

    def fit(self, model: nn.Module) -> None:
        attach(model, self.crossings.cuts, self.kind, self.crossings.width, self.rank, self.seed)

    def boundary(self, stage: Any) -> Boundary:
        blocks = list(stage.blocks)
        return Learned(self.rank, getattr(blocks[0], "entering", None), getattr(blocks[-1], "leaving", None))

    def unsplit(self, model: nn.Module) -> nn.Module:
        blocks = cast(Any, model).blocks
        for block in self._crossed:
            between = Learned(self.rank, blocks[block + 1].entering, blocks[block].leaving)
            crossing(model, [block], between)
        return model


def scheme_of(
    name: BoundaryName,
    crossings: Crossings,
    *,
    form: SubspaceForm = "coordinates",
    seed: int = 0,
    blocks: int = 0,
    turns: bool = False,
) -> Scheme:
    """Create the scheme of `name`. form, blocks, turns: of a subspace.
    ValueError if the stream is too narrow for it.
    """
    name.check_width(crossings.width)
    if name.kind == "subspace":
        return Inside(crossings, name.rank, form, seed, blocks=blocks, turns=turns)
    if name.kind == "dct" and name.sparsity:
        entries = entries_sent(crossings.width, name.sparsity)
        return Between(crossings, LargestEntries(crossings.width, entries))
    if name.kind == "bottleneck" or name.kind == "maxout":
        return Layers(crossings, name.kind, name.rank, seed)
    return Scheme(crossings)


def crossing(model: nn.Module, blocks: Iterable[int], boundary: Boundary) -> nn.Module:
    """Pass the output of each of `blocks` through `boundary`, in place; for boundaries that need no tokens. Returns
    `model`.
    """

    def across(module: nn.Module, inputs: object, x: Tensor) -> Tensor:
        no_tokens = torch.empty(0, dtype=torch.int64, device="cpu")
        payload, side = boundary.encode(x, no_tokens)
        return boundary.decode(payload, side, no_tokens)

    for number in blocks:
        cast(Any, model).blocks[number].register_forward_hook(across)
    return model

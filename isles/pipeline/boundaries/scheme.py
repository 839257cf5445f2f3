"""What `pipeline.boundary.kind` makes of a model, at every place where one is held.

    a stage, before it trains            fit(stage), then boundary(stage) for its messages
    the whole model of a finished run    fit(whole), filled with the stages' weights, then unsplit(whole)

`unsplit` gives the function that was trained to one process: a subspace is folded away, masks and learned layers stand
behind the blocks where the boundaries were.

DCT-MP (arXiv 2010.08899): of each token's stream the entries of largest size, the same ones both ways.

    K = max(1, ceil((1 - sparsity) D))
    forward     the K entries of largest |x|, and which they are (1 byte each where D <= 256, else 2)
    backward    the gradient of those K alone, in the same order: both sides know which

The receiver goes on with x * mask, and the sender with gradient * mask: the derivative of masking with the mask held
fixed. The mask is part of the function that is trained, so judging and generating keep it.

Deviation: K entries exactly, ties by torch's `topk`, so that every length is known beforehand.

The coordinates of a stream that lies in a subspace: see `isles.models.subspace`.

    forward     c = (x - table[token]) U      backward    dL/dc = (dL/dx) U

Both ways nothing is lost that a parameter could feel, where everything before the boundary writes into the subspace.

Turning the subspace of a boundary towards what the loss asks for (Protocol Models; off unless asked for).

    M = sum over tokens of g g^T       g (D,): gradient of the stream behind the last boundary, before it is projected
    loss(U) = tr M - tr(U^T M U)       what of those gradients lies outside S
    U <- qr(U + 2 rate / |M|_2 (1 - U U^T) M U)

The minimum is the sum of the D - K smallest eigenvalues of M. What is held in coordinates (weights, moments, anchors,
messages under way) stays as it is and so turns with U, by one and the same rotation.
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
    """M (D, D) of the gradients since it was last taken, in float64 on the host."""

    def __init__(self, width: int) -> None:
        self.total = torch.zeros(width, width, dtype=torch.float64, device="cpu")

    def add(self, gradient_BTD: Tensor) -> None:
        """Those of a microbatch."""
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
    """K numbers a token. drift: told of each gradient of the stream that comes out, before it is cut to K numbers."""

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
    """Places (B, T, K) of the entries of largest size, rising."""
    return x_BTD.detach().abs().topk(entries, dim=-1).indices.sort(dim=-1).values


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """Where boundaries are. cuts: the first block of each stage after the first; home: the stream also crosses from the
    last block back to the first stage; width: of the stream; vocab: token ids.
    """

    cuts: tuple[int, ...]
    home: bool
    width: int
    vocab: int


class Scheme:
    """The stream as it is: nothing to fit, nothing to leave."""

    compares = False
    """Whether there are `settings`."""

    def __init__(self, crossings: Crossings) -> None:
        self.crossings = crossings

    def settings(self, stage: Any) -> str | None:
        """What must be the same at all workers that hold a fitted stage; None: nothing but their configurations."""
        return None

    def fit(self, model: nn.Module) -> None:
        """Give `model`, whole or a stage, what the boundaries want, in place."""

    def check(self, model: nn.Module, tokens_BT: Tensor) -> None:
        """ValueError, naming the module, where the fitted whole `model` does what the boundaries cannot carry."""

    def boundary(self, stage: Any) -> Boundary:
        """Of the messages of a fitted stage."""
        return FullStream(self.crossings.width)

    def unsplit(self, model: nn.Module) -> nn.Module:
        """The fitted whole `model` for one process, in place."""
        return model

    def restored(self, model: nn.Module) -> nn.Module:
        """A plain whole `model` made, in place, one that the weights of a finished run fit into and that runs as it."""
        self.fit(model)
        return self.unsplit(model)

    @property
    def _crossed(self) -> list[int]:
        """The blocks whose output crosses a boundary."""
        return [cut - 1 for cut in self.crossings.cuts]


class Between(Scheme):
    """A boundary without parameters, which is part of the function that is trained: masks, or one of somebody's own."""

    def __init__(self, crossings: Crossings, boundary: Boundary) -> None:
        super().__init__(crossings)
        self._boundary = boundary

    def boundary(self, stage: Any) -> Boundary:
        return self._boundary

    def unsplit(self, model: nn.Module) -> nn.Module:
        last = [len(cast(Any, model).blocks) - 1] if self.crossings.home else []
        return crossing(model, [*self._crossed, *last], self.boundary(model))


class Inside(Scheme):
    """Weights in a subspace: `Coordinates`. blocks: how many write into it; 0: all before the last stage. turns: it is
    to be turned.
    """

    compares = True

    def __init__(
        self, crossings: Crossings, rank: int, form: SubspaceForm, seed: int, *, blocks: int = 0, turns: bool = False
    ) -> None:
        super().__init__(crossings)
        self.form, self.seed, self.inside = form, seed, range(blocks or crossings.cuts[-1])
        self.basis = drawn_basis(crossings.width, rank, seed)
        """Of now (D, K), float64, on the host."""
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
        if not tokens_BT.is_meta:
            check_inside(cuttable(sharing(model)), model.subspace, self.inside, tokens_BT)

    def boundary(self, stage: Any) -> Boundary:
        first = next(name for name, _ in cast(nn.Module, stage.blocks).named_children())
        is_last = int(first) == self.crossings.cuts[-1]
        return Coordinates(stage.subspace, self.drift if is_last else None)

    def restored(self, model: nn.Module) -> nn.Module:
        return model  # it was folded before it was saved

    def unsplit(self, model: nn.Module) -> nn.Module:
        return fold(model)


class Layers(Scheme):
    """Layers around the wire: `Learned`."""

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
    """The scheme called `name`. form, blocks, turns: of a subspace. ValueError where the stream is too narrow for
    it.
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
    """`model` with what leaves each of `blocks` taken across `boundary`, in place; for boundaries that do without the
    tokens.
    """

    def across(module: nn.Module, inputs: object, x: Tensor) -> Tensor:
        no_tokens = torch.empty(0, dtype=torch.int64, device="cpu")
        payload, side = boundary.encode(x, no_tokens)
        return boundary.decode(payload, side, no_tokens)

    for number in blocks:
        cast(Any, model).blocks[number].register_forward_hook(across)
    return model

"""Weights that keep the residual stream in a subspace (Protocol Models, arXiv 2506.01260).

    x = table[token] + s,   s in S,   S = span of the basis U (D, K),   U^T U = 1

U and the frozen `table` (V, D) come from one seed and are the same at all workers. s stays in S because everything that
writes to the stream writes into S: the embedding, and the last matrix of every branch ("writers"). So if the token is
known, K numbers per token determine x:

    c = (x - table[token]) U        x = table[token] + c U^T

Writers have one of three forms. y = x W^T with W (D, in) as in nn.Linear, and embedding rows e (D,):

    coordinates   W = U Z,  e = U z:  the parameters are Z (K, in) and z (K,). Any optimizer; nothing can leave S
    row-wise      W (D, in), e (D,), with every gradient projected on S. AdamW's entrywise division would leave S, so it
                  has one second moment per row (`isles.pipeline.rowwise`)
    projected     W (D, in), e (D,). Any optimizer; W <- U U^T W, e <- U U^T e after each of its steps

`fold` converts any form to a plain model. `check_inside` runs a model to find modules that leave S.

Deviations: the table has the embedding's standard deviation, D^-1/2, while the paper takes 1, so that the stream begins
as large as a plain decoder's. Positions are rotary, so there is no term for them.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from isles.base.modes import generator_of
from isles.models.blocks import module_at

SubspaceForm = Literal["coordinates", "row-wise", "projected"]
_INSIDE = 1e-6
"""The largest share of a block's output that may be outside S, in float64. Norms with a gain reach 0.1."""


class Subspace:
    """A subspace. basis: U (D, K), orthonormal columns. table: (V, D), frozen; None: the subspace contains zero."""

    def __init__(self, basis: Tensor, table: Tensor | None) -> None:
        self.basis, self.table = basis, table

    @property
    def rank(self) -> int:
        """The dimension K."""
        return self.basis.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of basis and table."""
        return self.basis.nbytes + (0 if self.table is None else self.table.nbytes)

    @property
    def checksum(self) -> str:
        """A hash of the bits of basis and table."""
        parts = [self.basis] if self.table is None else [self.basis, self.table]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def coordinates(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        """Coordinates (B, T, K) of the stream's part in S, computed in float32 or wider, because the table is large."""
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        inside = x_BTD.to(wide) if self.table is None else x_BTD.to(wide) - self.table[tokens_BT].to(wide)
        return (inside @ self.basis.to(wide)).to(x_BTD.dtype)

    def stream(self, c_BTK: Tensor, tokens_BT: Tensor) -> Tensor:
        """The stream (B, T, D) of coordinates."""
        x_BTD = F.linear(c_BTK, self.basis)
        return x_BTD if self.table is None else x_BTD + self.table[tokens_BT]

    def project(self, columns: Tensor) -> Tensor:
        """Project columns (D, n) on S: U U^T columns."""
        return self.basis @ (self.basis.T @ columns)

    def outside(self, rows: Tensor) -> float:
        """The share of rows r (n, D) outside S: |r - r U U^T| / |r|, in float64; 0 for zeros."""
        rows, basis = rows.detach().double(), self.basis.double()
        size = float(rows.norm())
        return float((rows - rows @ basis @ basis.T).norm()) / size if size else 0.0


def drawn_basis(width: int, rank: int, seed: int) -> Tensor:
    """Draw the basis U (D, K) from `seed`, in float64, on the host."""
    return orthonormal(torch.randn(width, rank, generator=generator_of(f"{seed} subspace basis"), dtype=torch.float64))


def drawn_table(vocab: int, width: int, seed: int, like: Tensor) -> Tensor:
    """Draw the frozen table (V, D) from `seed` in float32 on the host; returned in format and on device of `like`."""
    if like.is_meta:
        return like.new_empty(vocab, width)
    return torch.empty(vocab, width).normal_(std=width**-0.5, generator=generator_of(f"{seed} subspace table")).to(like)


def orthonormal(columns: Tensor) -> Tensor:
    """Q (D, K) of `columns` = Q R. The diagonal of R is positive, so that Q depends continuously on the columns."""
    q, r = torch.linalg.qr(columns)
    signs = torch.sign(r.diagonal())
    return (q * torch.where(signs == 0, torch.ones_like(signs), signs)).contiguous()  # LAPACK's is column-major


class SubspaceLinear(nn.Linear):
    """A writer by its coordinates: y = x Z^T U^T. weight: Z (K, in)."""

    def __init__(self, full: nn.Linear, subspace: Subspace) -> None:
        nn.Module.__init__(self)
        _copy_settings(full, self)
        self.subspace = subspace
        self.weight = _trained(subspace.basis.T @ full.weight.detach())

    @override
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.linear(input, self.weight), self.subspace.basis)

    def folded(self) -> Tensor:
        """W (D, in)."""
        return self.subspace.basis @ self.weight.detach()


class SubspaceEmbedding(nn.Embedding):
    """An embedding by its coordinates: x = table[token] + z[token] U^T. weight: z (V, K)."""

    def __init__(self, full: nn.Embedding, subspace: Subspace) -> None:
        nn.Module.__init__(self)
        _copy_settings(full, self)
        self.subspace = subspace
        self.weight = _trained(full.weight.detach() @ subspace.basis)

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self.subspace.stream(super().forward(input), input)

    def folded(self) -> Tensor:
        """Rows (V, D) of a plain embedding."""
        return self.subspace.stream(self.weight.detach(), torch.arange(len(self.weight), device=self.weight.device))


class InsideLinear(nn.Linear):
    """A writer of full size: y = x W^T with the columns of W (D, in) in S."""

    mean_axis = 0
    """Axis of `weight` along which the paper's rows run; the optimizer may scale a row only as a whole."""

    def __init__(self, full: nn.Linear, subspace: Subspace, form: SubspaceForm) -> None:
        nn.Module.__init__(self)
        _copy_settings(full, self)
        self.subspace, self.form = subspace, form
        self.weight = _trained(subspace.project(full.weight.detach()))
        if form == "row-wise":
            self.weight.register_hook(subspace.project)

    def settle(self) -> None:
        self.weight.copy_(self.subspace.project(self.weight))

    def folded(self) -> Tensor:
        """W (D, in)."""
        return self.weight.detach()


class InsideEmbedding(nn.Embedding):
    """An embedding of full size: x = table[token] + e[token] with the rows of e (V, D) in S."""

    mean_axis = 1

    def __init__(self, full: nn.Embedding, subspace: Subspace, form: SubspaceForm) -> None:
        nn.Module.__init__(self)
        _copy_settings(full, self)
        self.subspace, self.form = subspace, form
        self.weight = _trained(subspace.project(full.weight.detach().T).T.contiguous())
        if form == "row-wise":
            self.weight.register_hook(lambda gradient: subspace.project(gradient.T).T)

    @override
    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows if self.subspace.table is None else rows + self.subspace.table[input]

    def settle(self) -> None:
        self.weight.copy_(self.subspace.project(self.weight.T).T)

    def folded(self) -> Tensor:
        """Rows (V, D) of a plain embedding."""
        table = self.subspace.table
        return self.weight.detach() if table is None else self.weight.detach() + table


Writer = SubspaceLinear | SubspaceEmbedding | InsideLinear | InsideEmbedding


def put_inside(model: nn.Module, subspace: Subspace, inside: Iterable[int], form: SubspaceForm) -> None:
    """Convert writers of `model`, a decoder or a stage of it, to the form `form`, in place: those of the blocks with
    numbers in `inside`, and the embedding. Their weights are projected on S. ValueError as in `writers`.
    """
    numbers = {str(number) for number in inside}
    names, entry = writers(model)
    for number, block in cast(nn.Module, model.blocks).named_children():
        for name in names if number in numbers else ():
            full = _checked(block, name)
            writer = SubspaceLinear(full, subspace) if form == "coordinates" else InsideLinear(full, subspace, form)
            _replace(block, name, writer)
    whole = module_at(model, entry)
    if isinstance(whole, nn.Embedding):  # later stages have no embedding
        writer = SubspaceEmbedding(whole, subspace) if form == "coordinates" else InsideEmbedding(whole, subspace, form)
        _replace(model, entry, writer)


def writers(model: nn.Module) -> tuple[Sequence[str], str]:
    """(names, in a block, of the modules that write to the stream; path of the embedding). ValueError for a model that
    does not define them.
    """
    source: Any = model.source if hasattr(model, "source") else model
    names, entry = getattr(source, "writers", None), getattr(source, "entry", None)
    if not names or not entry:
        raise ValueError(
            f'pipeline.boundary.kind = "subspace": a {type(source).__name__} does not name what writes to its stream; '
            'give it `writers`, names of nn.Linear in a block such as ("attention.out", "mlp.down"), and `entry`, that '
            'of its nn.Embedding; or choose "dct:0.75"'
        )
    return names, entry


def fold(model: nn.Module) -> nn.Module:
    """Replace the writers of `model` by plain matrices, in place. The function that it computes stays the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Writer):
                setattr(parent, name, _plain(child))
    return model


def held_inside(model: nn.Module) -> Iterator[Writer]:
    """The writers of `model` in a form of this module."""
    return (module for module in model.modules() if isinstance(module, Writer))


def most_outside(model: nn.Module) -> float:
    """The largest share of any writer's weights outside S; see `Subspace.outside`."""
    shares = [0.0]
    for writer in held_inside(model):
        weight = writer.folded()
        if isinstance(writer, nn.Embedding):
            table = writer.subspace.table
            shares.append(writer.subspace.outside(weight if table is None else weight - table))
        else:
            shares.append(writer.subspace.outside(weight.T))
    return max(shares)


@torch.no_grad()
def check_inside(model: Any, subspace: Subspace, inside: Iterable[int], tokens_BT: Tensor) -> None:
    """ValueError, naming the cause, if a block with a number in `inside` moves a stream in S out of S, by a norm after
    a writer, dropout or a gain. model: a whole model with its writers in a form of this module.
    """
    generator = torch.Generator().manual_seed(0)
    wide = Subspace(subspace.basis.double(), None)
    c = torch.randn(*tokens_BT.shape, subspace.rank, generator=generator, dtype=torch.float64)
    x = F.linear(c, wide.basis)
    for number in inside:
        block = copy.deepcopy(model.blocks[number]).double().train()
        _stir(block, generator)
        for writer in held_inside(block):
            writer.subspace = wide

        def outside(x: Tensor = x, block: nn.Module = block) -> float:
            with torch.random.fork_rng(devices=[]):
                return wide.outside(model.through(block, x).flatten(0, -2))

        if outside() > _INSIDE:
            raise ValueError(
                f'pipeline.boundary.kind = "subspace": block {number} carries the stream out of the subspace by '
                f"{_culprit(block, outside)}; what follows the last matrix of a branch may only scale a token as a "
                'whole: take it out, or choose "dct:0.75"'
            )


def _stir(block: nn.Module, generator: torch.Generator) -> None:
    """Change the trained parameters except the writers from their initial values: gains of 1, biases of 0."""
    writers = {id(writer.weight) for writer in held_inside(block)}
    for parameter in block.parameters():
        if parameter.requires_grad and id(parameter) not in writers:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise.to(parameter.device), alpha=0.1)


def _culprit(block: nn.Module, outside: Callable[[], float]) -> str:
    """The parameter or modules of `block` that leave S: without them the block stays in S."""
    for path, parameter in block.named_parameters():
        before = parameter.clone()
        for value in (1.0, 0.0):  # for a gain, for a bias
            parameter.fill_(value)
            if outside() <= _INSIDE and "." not in path:
                return repr(path)
        parameter.copy_(before)
    removed = _taken_out(block, outside)
    return (
        " and ".join(f"{path!r} ({type(module).__name__})" for path, module in removed.items()) or "what is not known"
    )


def _taken_out(block: nn.Module, outside: Callable[[], float]) -> dict[str, nn.Module]:
    """A minimal set of modules of `block` without which it stays in S; empty if there is none."""
    removed: dict[str, nn.Module] = {}

    def share() -> float:
        try:
            return outside()
        except Exception:  # the user's block may fail without the module
            return math.inf

    outside_share = share()
    for path, module in list(block.named_modules()):
        if not path or any(isinstance(inside, Writer) for inside in module.modules()):
            continue
        _replace(block, path, nn.Identity())
        share_without = share()
        if share_without < outside_share:
            removed[path], outside_share = module, share_without
        else:
            _replace(block, path, module)
        if outside_share <= _INSIDE:
            break
    for path, module in list(removed.items()):
        _replace(block, path, module)
        if outside_share <= _INSIDE and share() <= _INSIDE:
            del removed[path]
        else:
            _replace(block, path, nn.Identity())
    return removed if outside_share <= _INSIDE else {}


def _checked(block: nn.Module, name: str) -> nn.Linear:
    module = module_at(block, name)
    if not isinstance(module, nn.Linear):
        raise ValueError(f'pipeline.boundary.kind = "subspace": {name!r} of a block is no nn.Linear; correct `writers`')
    if module.bias is not None:
        raise ValueError(
            f'pipeline.boundary.kind = "subspace": the bias of {name!r} carries the stream out of the subspace; create '
            "it with bias=False"
        )
    return module


def _trained(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous())


def _copy_settings(full: nn.Linear | nn.Embedding, to: Any) -> None:
    if isinstance(full, nn.Linear):
        to.in_features, to.out_features, to.bias = full.in_features, full.out_features, None
        return
    to.num_embeddings, to.embedding_dim, to.padding_idx = full.num_embeddings, full.embedding_dim, full.padding_idx
    to.max_norm, to.norm_type = None, full.norm_type
    to.scale_grad_by_freq, to.sparse = False, False


def _plain(writer: Writer) -> nn.Module:
    kind: Any = nn.Embedding if isinstance(writer, nn.Embedding) else nn.Linear
    plain = kind.__new__(kind)  # without initial values
    nn.Module.__init__(plain)
    _copy_settings(writer, plain)
    plain.weight = _trained(writer.folded())
    return plain


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)

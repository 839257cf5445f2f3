r"""A model cut in depth: stages with some of its blocks. The first one also turns tokens into the stream, and the last
one computes scores from it.

    tokens -> enter -> x -> through block 0 -> ... | ... -> through block L-1 -> x -> leave -> logits -> loss
              \_________ stage 0 _____________/     \____________ stage 1 ___________________/

A model can be cut if it has the methods of these pieces (`Cuttable`). The decoder has them; `HuggingFaceLM` gets them
from its list of layers; a user's model may define them. A model that reads something other than text also defines the
integers per row (`reads`) and its loss (`loss`). `Stage` runs `enter` and `leave` to detect the parameters that they
use. A stage has only its own parameters, under their names in the whole model, so checkpoints, fragments and
initialisation need no other names.

`load_of` counts a model's FLOPs and bytes by block, for the nodes that share it. It uses a sketch, without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from isles.base.marks import ids_of
from isles.models.blocks import check_order, sharing
from isles.models.cuts import Piece, PieceCosts, pieces
from isles.models.decoder import Decoder, output_of
from isles.models.factory import next_token_scores
from isles.models.hf import HuggingFaceLM, HuggingFacePieces
from isles.models.sizes import Shape
from isles.network.clusters import ModelLoad


@runtime_checkable
class Cuttable(Protocol):
    """A model with a forward pass in pieces. B sequences of T tokens, width D, V token ids."""

    blocks: nn.ModuleList

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """Tokens (B, T), int64, to the stream (B, T, D)."""

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        """The stream after one of `blocks`."""

    def leave(self, x_BTD: Tensor) -> Tensor:
        """The stream to logits (B, T, V)."""


class Stage(nn.Module):
    """One piece of a model: its blocks, and the modules that enter or leave the stream. Call the stage itself, so that
    hooks, compilation and autocast apply.
    """

    def __init__(self, whole: nn.Module, piece: Piece) -> None:
        super().__init__()
        self.piece = piece
        part = cuttable(sharing(whole))
        self.width = _width(part)
        """Width D of the stream."""
        used = _parameters_of(part, piece)
        blocks = _Numbered({number: part.blocks[number] for number in piece.blocks})
        _replace(part, part.blocks, blocks)
        _leave_out(part, used)
        self._whole: tuple[Cuttable, ...] = (part,)  # in a tuple, so that it is not registered as a submodule
        tree = cast(nn.Module, part)
        self._modules, self._parameters, self._buffers = tree._modules, tree._parameters, tree._buffers

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of its piece, in order, under their numbers in the whole model."""
        return self._whole[0].blocks

    @property
    def source(self) -> Cuttable:
        """The model that it is a part of, reduced to this stage's parameters."""
        return self._whole[0]

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        enter: bool = False,
        through: bool = True,
        leave: bool = False,
    ) -> Tensor:
        """The stream (B, T, D) after this stage. enter: `x` has tokens (B, T). through: False skips the blocks. leave:
        return the mean loss over `targets` (B, T), in nats, instead of the stream.
        """
        whole = self._whole[0]
        x = whole.enter(x) if enter else x
        if through:
            for block in whole.blocks:
                x = whole.through(block, x)
        if not leave:
            return x
        assert targets is not None
        own: Any = whole
        if hasattr(whole, "loss"):
            return own.loss(whole.leave(x), targets)
        return output_of(whole.leave, x, targets, getattr(whole, "loss_tokens", 0)).loss

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Scores (B, T, V) of the stream after the last block; only at the stage that leaves the stream."""
        return self._whole[0].leave(x_BTD)


def cuttable(model: nn.Module) -> Cuttable:
    """`model` with its forward pass in pieces. ValueError, with advice, if it has no pieces."""
    part: Any = model
    if type(model) is HuggingFaceLM:
        part = HuggingFacePieces(model.model)
        part.loss_tokens = model.loss_tokens
    if not isinstance(part, Cuttable):
        raise ValueError(
            f"a {type(model).__name__} cannot be cut into stages: give it `blocks` (an nn.ModuleList), "
            "`enter(tokens)`, `through(block, x)` and `leave(x)`, see docs/pipelines.md; or train with "
            "pipeline.stages = 1"
        )
    return part


def decoder_stage(
    shape: Shape,
    piece: Piece,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    loss_tokens: int = 0,
) -> Stage:
    """A piece of the decoder of `shape`, allocated and drawn alone, with the values of the whole decoder. loss_tokens:
    see `isles.models.decoder.output_of`.
    """
    whole = Decoder(shape, device="meta", dtype=dtype)
    whole.loss_tokens = loss_tokens
    stage = Stage(whole, piece)
    if device.type != "meta":
        cast(Decoder, stage._whole[0]).allocate(device, seed)
    return stage


def is_tied(model: nn.Module) -> bool:
    """Whether `enter` and `leave` share a parameter; then both belong to one stage."""
    part = cuttable(sharing(model))
    return bool(_used_by_enter(part) & _used_by_leave(part))


def width_of(model: nn.Module) -> int:
    """Width D of the stream."""
    return _width(cuttable(sharing(model)))


def costs_of(model: nn.Module) -> PieceCosts:
    """Costs of any model in pieces: two FLOPs per parameter, which counts matrix products but not attention."""
    part = cuttable(sharing(model))
    leaving = _used_by_leave(part)
    head = sum(parameter.numel() for parameter in model.parameters() if id(parameter) in leaving)
    blocks = tuple(2.0 * sum(parameter.numel() for parameter in block.parameters()) for block in part.blocks)
    return PieceCosts(blocks=blocks, head=2.0 * head)


def check_stages(whole: nn.Module, cuts: Sequence[int], tokens: Tensor) -> None:
    """Compare the stages of `whole`, one after the other, with `whole` on `tokens` (B, T), int64. ValueError if a bit
    differs: then the pieces are not the forward pass, as in a model that adds positions there. On the meta device only
    shapes are compared.
    """
    mode = whole.training
    whole.eval()
    try:
        with torch.no_grad():
            expected = next_token_scores(whole, tokens)
            layers = len(cuttable(sharing(whole)).blocks)
            parts = pieces(cuts, layers, loss_at_origin=False)
            x = tokens
            for piece in parts:
                stage = Stage(whole, piece)
                x = stage(x, enter=piece.enters)
                if piece.leaves:
                    x = stage.logits(x)
    finally:
        whole.train(mode)
    same = x.shape == expected.shape and (x.is_meta or torch.equal(x, expected))
    if not same:
        excess = "" if x.shape != expected.shape else f" by up to {float((x - expected).abs().max()):.2g}"
        raise ValueError(
            f"the stages of this {type(whole).__name__} in turn differ from the whole{excess}: it does more in its "
            "forward pass than enter, through its blocks and leave; train it with pipeline.stages = 1"
        )


class _Numbered(nn.ModuleList):
    """Some of a model's blocks, under their numbers in the whole model, so that parameter names stay the same."""

    def __init__(self, blocks: dict[int, nn.Module] | Iterable[nn.Module] = ()) -> None:
        super().__init__()
        items = blocks.items() if isinstance(blocks, dict) else enumerate(blocks)  # slicing passes a list
        for number, block in items:
            self.add_module(str(number), block)


def _replace(root: Cuttable, old: nn.Module, new: nn.Module) -> None:
    for module in list(cast(nn.Module, root).modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


def _leave_out(module: Any, used: set[int]) -> None:
    """Remove parameters that are not in `used` (by id), and modules whose parameters are all removed."""
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in used:
            module._parameters[name] = None
    for name, child in module._modules.items():
        if child is None:
            continue
        parameters = list(child.parameters())
        if parameters and not any(id(parameter) in used for parameter in parameters):
            module._modules[name] = nn.Identity()
        else:
            _leave_out(child, used)


def _parameters_of(whole: Cuttable, piece: Piece) -> set[int]:
    """Ids of the parameters of `piece`. ValueError if a block shares parameters, or no piece uses a parameter."""
    model = cast(nn.Module, whole)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = [{id(parameter) for parameter in block.parameters()} for block in whole.blocks]
    entering, leaving = _used_by_enter(whole), _used_by_leave(whole)
    seen: set[int] = set()
    for number, inside in enumerate(blocks):
        shared = inside & (seen | entering | leaving)
        if shared:
            raise ValueError(
                f"block {number} shares {names[shared.pop()]!r} with another part of the model: it cannot be cut into "
                "stages; choose pipeline.stages = 1"
            )
        seen |= inside
    unused = names.keys() - seen - entering - leaving
    if unused:
        raise ValueError(
            f"{names[unused.pop()]!r} is used by none of the model's pieces: it does more in its forward pass than "
            "enter, through its blocks and leave; train it with pipeline.stages = 1"
        )
    used = {key for number in piece.blocks for key in blocks[number]}
    if piece.enters:
        used |= entering
    if piece.leaves:
        used |= leaving
    return used


@torch.no_grad()
def _width(whole: Cuttable) -> int:
    with torch.random.fork_rng(devices=[]):
        return whole.enter(_example(whole)).shape[-1]


def _used_by_enter(whole: Cuttable) -> set[int]:
    tokens = _example(whole)
    return _used(whole, lambda: whole.enter(tokens))


def _used_by_leave(whole: Cuttable) -> set[int]:
    def leave() -> Tensor:
        with torch.no_grad():
            x = whole.enter(_example(whole))
        return whole.leave(x)

    return _used(whole, leave)


def _used(whole: Cuttable, run: Callable[[], Tensor]) -> set[int]:
    """Ids of the parameters, frozen ones too, that the result of `run` depends on."""
    parameters = [p for p in cast(nn.Module, whole).parameters() if p.is_floating_point()]
    trained = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):  # dropout may draw
            gradients = torch.autograd.grad(run().sum(), parameters, allow_unused=True)
    finally:
        for parameter, before in zip(parameters, trained, strict=True):
            parameter.requires_grad_(before)
    return {id(p) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


def _example(whole: Cuttable) -> Tensor:
    """A row of two tokens, or of `reads` integers for a model that reads something other than text."""
    device = next(cast(nn.Module, whole).parameters()).device
    return torch.zeros(1, getattr(whole, "reads", 2), dtype=torch.int64, device=device)


def logits_in_order(model: nn.Module, tokens_BT: Tensor, order: Sequence[int]) -> Tensor:
    """Scores (B, T, V) for the token after each of `tokens_BT`, int64, if only the blocks `order` run, in that order.
    ValueError for a model without pieces, and for a block that it does not have.

    A skipped block passes the stream on unchanged, as if it wrote zero to it. The rest of the forward pass does not
    depend on the order: positions are rotary inside each block, and the last norm is at its usual place.
    """
    if isinstance(model, Decoder):
        return model.logits(tokens_BT, order)
    if getattr(model, "isolates", False):
        raise ValueError("data.isolate_documents: some stages of a model.hf do not keep documents apart; run all")
    part = cuttable(sharing(model))
    check_order("order", order, len(part.blocks), "block")
    x = part.enter(ids_of(tokens_BT))
    for number in order:
        x = part.through(part.blocks[number], x)
    return part.leave(x)


def blocks_of_stages(pieces: Sequence[Piece], stages: Iterable[int]) -> list[int]:
    """The blocks of `stages`, in the order of `stages`."""
    return [number for stage in stages for number in pieces[stage].blocks]


def load_of(sketch: nn.Module, costs: PieceCosts, *, sequences: int, length: int, states: float) -> ModelLoad:
    """The load of `sketch` (on the meta device) for microbatches of `sequences` sequences of `length` tokens. costs: of
    a token. states: bytes of the optimizer's state per byte of weights. ValueError for a model that cannot be cut.
    """
    layers = len(costs.blocks)
    blocks = [Stage(sketch, piece) for piece in pieces(range(1, layers), layers, loss_at_origin=False)]
    x = targets = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    saved, stream = [], 0
    for block in blocks:
        stream = max(stream, x.nbytes if x.is_floating_point() else 0)
        x, nbytes = _saved(block, x, targets)
        saved.append(float(nbytes))
    return ModelLoad(
        flops=tuple(sequences * length * cost for cost in costs.to_cut(loss_at_origin=False)),
        weights=tuple(float(sum(parameter.nbytes for parameter in block.parameters())) for block in blocks),
        saved=tuple(saved),
        stream=float(stream),
        states=states,
    )


def _saved(block: Stage, x: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The output of a block, and the bytes that its forward pass saves for the backward pass, without weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    tensors: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        tensors[tensor.untyped_storage()._cdata] = tensor
        return tensor

    same: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    piece = block.piece
    with torch.autograd.graph.saved_tensors_hooks(note, same):
        start = x if piece.enters else x.detach().requires_grad_()
        out = block(start, targets if piece.leaves else None, enter=piece.enters, leave=piece.leaves)
    nbytes = sum(tensor.untyped_storage().nbytes() for key, tensor in tensors.items() if key not in weights)
    return out.detach(), nbytes

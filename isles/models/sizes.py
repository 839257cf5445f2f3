"""Named shapes of the decoder, and exact counts of their parameters and FLOPs. Pure arithmetic: torch is not imported.

Symbols: d = d_model, F = ffn, L = layers, V = vocab, T = sequence length in tokens.

    parameters    = L (4 d^2 + 3 d F + 2 d) + d + V d (1 if tied else 2)
    forward FLOPs = 2 [ L (4 d^2 + 3 d F) + V d ] + 4 L d T      for one token in a sequence of T
    with backward = 3 x forward

A multiply-add is two FLOPs. 4 L d T is attention (scores and weighted values) over the whole T x T square. That is the
usual convention, although the mask makes half of it useless. The head costs V d multiply-adds, tied or not; an
embedding look-up costs none. Recomputation (flash attention's backward pass, checkpointing) is not counted, because it
is not work of the model.

A size whose name is a number has that many parameters, within 3 %. The labels of the papers' sizes count differently:

- "eager-35M" ... "eager-4B": Eager Updates (arXiv 2502.12996) and Streaming DiLoCo (arXiv 2501.18512). Their "hidden
  dim" is the FFN width; d = 64 heads. Their labels are near 12 d^2 L + 32000 d: one embedding, and a plain MLP with two
  matrices. Isles' MLP is gated and has three, so at the same width each layer has 16 d^2: "eager-35M" has 35.3M by the
  paper's count and 41.6M here.
- "noloco-small", "-medium", "-large": NoLoCo (arXiv 2506.10911), labelled 125M, 1.3B and 6.8B there. The labels leave
  out most of the 128000-word vocabulary; here the MLP is Llama's gated one at the printed width.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from isles.base.errors import nearest
from isles.network.units import parse_count


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers that define a decoder. An impossible one raises a ValueError that names its `model.` key.

    d_model: width of the residual stream. layers: blocks. heads: attention heads, each d_model / heads wide (an even
    number, because the rotary embedding rotates pairs). ffn: inner width of the gated MLP. vocab: token ids. context:
    the longest sequence in tokens. tie_embeddings: the head shares the embedding's matrix.
    """

    d_model: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    context: int
    tie_embeddings: bool

    def __post_init__(self) -> None:
        for key in ("d_model", "layers", "heads", "ffn", "vocab", "context"):
            value = getattr(self, key)
            if not _is_whole(value) or value < 1:
                raise ValueError(f"model.{key} = {value!r} is impossible; use a whole number of at least 1")
        if not isinstance(self.tie_embeddings, bool):
            raise ValueError(f"model.tie_embeddings = {self.tie_embeddings!r} is not known; use true or false")
        if self.d_model % 2:
            raise ValueError(
                f"model.d_model = {self.d_model} is odd; use {self.d_model + 1}, as heads have an even width"
            )
        if self.d_model % self.heads or self.head_dim % 2:
            legal = [n for n in range(1, self.d_model // 2 + 1) if self.d_model % (2 * n) == 0]
            nearest = min(legal, key=lambda n: abs(n - self.heads))
            raise ValueError(
                f"model.heads = {self.heads} does not cut model.d_model = {self.d_model} into heads of an even width; "
                f"use heads = {nearest}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape(
    d_model: int, layers: int, heads: int, ffn: int, vocab: int = 32_000, context: int = 1024, *, tied: bool = True
) -> Shape:
    return Shape(
        d_model=d_model, layers=layers, heads=heads, ffn=ffn, vocab=vocab, context=context, tie_embeddings=tied
    )


SIZES: dict[str, Shape] = {
    # Over bytes. "0.12M" is the embedded default: the lowest validation loss at 40 ms per step and core.
    "0.12M": _shape(64, 2, 2, 192, 256, 128),
    "0.53M": _shape(128, 3, 4, 256, 256, 256),
    "2M": _shape(192, 4, 6, 576, 256, 256),
    "10M": _shape(384, 6, 6, 896, 256, 512),
    # Over 32,000 subwords.
    "35M": _shape(512, 6, 8, 1344),
    "100M": _shape(768, 12, 12, 1728),
    "300M": _shape(1024, 22, 16, 2624),
    "1B": _shape(2048, 18, 32, 5696),
    # Eager Updates.
    "eager-35M": _shape(512, 6, 8, 2048),
    "eager-100M": _shape(768, 9, 12, 3072),
    "eager-200M": _shape(1024, 12, 16, 4096),
    "eager-300M": _shape(1280, 15, 20, 5120),
    "eager-500M": _shape(1536, 18, 24, 6144),
    "eager-1B": _shape(2048, 24, 32, 8192),
    "eager-4B": _shape(3072, 36, 48, 12_288),
    # NoLoCo, table 1.
    "noloco-small": _shape(768, 12, 16, 3072, 128_000, tied=False),
    "noloco-medium": _shape(2048, 24, 32, 8192, 128_000, tied=False),
    "noloco-large": _shape(4096, 32, 32, 16_384, 128_000, tied=False),
}


def shape_of(size: str) -> Shape:
    """The shape called `size`, in whatever case. ValueError as of `size_name`."""
    return SIZES[size_name(size)]


def size_name(size: str) -> str:
    """The name in `SIZES` that is `size` in whatever case. The ValueError for any other has the closest, and all."""
    close = nearest(str(size), SIZES)
    if close is not None and close.casefold() == str(size).casefold():
        return close
    with suppress(ValueError):
        count = parse_count("model.size", str(size))
        close = min(SIZES, key=lambda name: abs(math.log(parameters(SIZES[name]) / count)))
    hint = f"did you mean {close!r}? " if close else ""
    raise ValueError(f"model.size = {size!r} is not known: {hint}choose one of {', '.join(SIZES)}")


def _matmul_weights(shape: Shape) -> int:
    """Weights of the matrices in the blocks: qkv and output projection 4 d^2, gate, up and down 3 d F."""
    return shape.layers * (4 * shape.d_model**2 + 3 * shape.d_model * shape.ffn)


def non_embedding_parameters(shape: Shape) -> int:
    """Trainable numbers in the blocks and the final norm: everything but the embedding and the head."""
    norms = (2 * shape.layers + 1) * shape.d_model
    return _matmul_weights(shape) + norms


def parameters(shape: Shape) -> int:
    """All trainable numbers of the decoder, tied ones counted once."""
    return non_embedding_parameters(shape) + shape.vocab * shape.d_model * (1 if shape.tie_embeddings else 2)


def like_size(shape: Shape, count: int) -> Shape:
    """A smaller decoder of about `count` parameters, with heads of the same width and nearly the same ffn / d_model.
    ValueError if none is so small.
    """
    shapes = []
    for heads in range(1, shape.heads + 1):
        width = heads * shape.head_dim
        narrow = replace(shape, d_model=width, heads=heads, ffn=1)
        ffn = 1 + round((count - parameters(narrow)) / (3 * width * shape.layers))
        if ffn >= 1:
            shapes.append(replace(narrow, ffn=ffn))
    if not shapes:
        raise ValueError(f"no decoder with heads of {shape.head_dim} has so few as {count} parameters")
    return min(
        shapes, key=lambda candidate: abs(math.log(candidate.ffn * shape.d_model / (candidate.d_model * shape.ffn)))
    )


def flops_per_token(shape: Shape, *, backward: bool = True, sequence: int | None = None) -> int:
    """FLOPs that one token costs: forward and backward, or forward alone with backward=False.

    sequence: tokens of its sequence (the attention term grows with it); None: the whole context.
    """
    length = shape.context if sequence is None else sequence
    if not _is_whole(length) or length < 1:
        raise ValueError(f"sequence = {sequence!r} is not a number of tokens; use a whole number of at least 1")
    weights = _matmul_weights(shape) + shape.vocab * shape.d_model
    forward = 2 * weights + 4 * shape.layers * shape.d_model * length
    return 3 * forward if backward else forward

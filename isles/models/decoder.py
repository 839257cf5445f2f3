"""A Llama-style decoder: pre-norm blocks of rotary causal attention and a gated SiLU MLP; no biases, no dropout.

    x <- x + attention(norm(x));   x <- x + mlp(norm(x));   logits = head(norm(x))

Tensor names end in their axes (the torchtitan habit):
B batch, T sequence (tokens), D d_model, H heads, C head width (D = H C), F ffn, V vocabulary.
`qkv_BTN` has N = 3D (queries, keys and values side by side), `qk_BTNC` N = 2H.

Initialisation, from `seed` alone. Matrices are drawn from N(0, s^2):

    s = 1 / sqrt(D)                  the embedding (and so a tied head)
    s = 1 / sqrt(fan-in)             matrices that read the normed stream: qkv, gate, up, an untied head
    s = 0.1 / sqrt(2 L fan-in)       matrices that write to the stream: attention.out, mlp.down
    1                                the gains of the norms

Dividing by sqrt(2 L) keeps the stream's variance from growing with depth. The additional 0.1 is a choice of Isles; with
it blocks start close to the identity: 0.02 nats per byte better after 800 steps of "0.12M". Starting at zero works as
well, but then skipping or swapping blocks would not change a fresh model. Each parameter has its own generator, seeded
from (seed, name), which draws on the CPU in float32. So the global generators stay unchanged, every device and dtype
starts from the same numbers, and a pipeline stage can draw the parameters of its own blocks alone.

`Rotary` is the position embedding (RoFormer, arXiv 2104.09864). Position t rotates pair i of a head by the angle t
base^(-2i/C), so the product of a rotated query and key depends only on their distance. Pairs are neighbours, (2i,
2i+1), as in the paper and in Meta's Llama; so a pair can be read as one complex number and rotated by one
multiplication. Hugging Face's Llama pairs (i, i + C/2), so the rows of query and key matrices are reordered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from isles.base.marks import IGNORED, documents_of, ids_of, targets_of
from isles.base.modes import generator_of
from isles.models.blocks import check_order
from isles.models.sizes import Shape

BASE = 10_000.0


class Rotary(nn.Module):
    """Rotates queries and keys by their positions. Holds the table of angles, and no weights.

    The table (context, 1, C/2, 2), cosine and sine, is a non-persistent buffer. Table and rotation are in float32 or
    wider, also for bf16 weights: bf16 would blur neighbouring positions.
    """

    table: Tensor

    def __init__(
        self,
        head_dim: int,
        context: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        wide = _at_least_float32(dtype or torch.get_default_dtype())
        speeds = BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), speeds)[:, None, :]
        table = torch.stack((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=wide)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x_BTNC: Tensor) -> Tensor:
        """(B, T, N, C) to the same shape and dtype; N heads of queries, keys or both, the first token at position 0."""
        wide = _at_least_float32(x_BTNC.dtype)
        table = self.table[: x_BTNC.shape[1]].to(wide)  # a copy only if the user cast the module to a narrower format
        pairs = x_BTNC.to(wide).unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # the compiler fuses real arithmetic and cannot generate complex code
            (a, b), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        else:  # one kernel instead of seven, in both passes
            turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
        return turned.flatten(-2).to(x_BTNC.dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


NORM_EPS = 1e-5
STREAM_WRITER_SCALE = 0.1  # see the module docstring


class Output(NamedTuple):
    """The result of a forward pass: the mean next-token cross-entropy in nats (a scalar), and the logits (B, T, V), or
    None if the loss was computed in chunks.
    """

    loss: Tensor
    logits: Tensor | None


class _Linear(nn.Linear):
    """A Linear without initial values. Torch would draw them from the global generator. Its `skip_init` would use the
    meta device, which loads torch._dynamo, and this takes longer than the rest of a dry run.
    """

    @override
    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """An Embedding without initial values, see `_Linear`."""

    @override
    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Causal self-attention with rotary positions. One product computes queries, keys and values."""

    def __init__(self, shape: Shape, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.qkv = _linear(shape.d_model, 3 * shape.d_model, device, dtype)
        self.out = _linear(shape.d_model, shape.d_model, device, dtype)

    def forward(self, x_BTD: Tensor, rotary: Rotary, mask_B1TT: Tensor | None = None) -> Tensor:
        """mask_B1TT: 0 where a token sees another one, else -inf; None: each sees itself and all before."""
        B, T, _ = x_BTD.shape
        H, C = self.heads, self.head_dim  # H C is D; less in a subnet with some of the heads (isles.models.subnet)
        qkv_BTNC = self.qkv(x_BTD).view(B, T, 3 * H, C)
        qk_BTNC, v_BTHC = qkv_BTNC.split((2 * H, H), dim=2)
        q_BTHC, k_BTHC = rotary(qk_BTNC).chunk(2, dim=2)
        q, k, v = (one_BTHC.transpose(1, 2) for one_BTHC in (q_BTHC, k_BTHC, v_BTHC))
        mixed_BHTC = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, is_causal=mask_B1TT is None)
        return self.out(mixed_BHTC.transpose(1, 2).reshape(B, T, H * C))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate = _linear(shape.d_model, shape.ffn, device, dtype)
        self.up = _linear(shape.d_model, shape.ffn, device, dtype)
        self.down = _linear(shape.ffn, shape.d_model, device, dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One layer: attention, then MLP, each on the normed stream and added to it."""

    def __init__(self, shape: Shape, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=NORM_EPS, device=device, dtype=dtype)
        self.attention = Attention(shape, device, dtype)
        self.mlp_norm = nn.RMSNorm(shape.d_model, eps=NORM_EPS, device=device, dtype=dtype)
        self.mlp = MLP(shape, device, dtype)

    def forward(self, x_BTD: Tensor, rotary: Rotary, mask_B1TT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, mask_B1TT)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """The whole model: embed, blocks, norm, head; `rotary` has no weights. `enter`, `through` for each block, and
    `leave` are its forward pass in pieces, for stages (`isles.models.stages`).

    Raises ValueError if a sequence is longer than the context.
    """

    writers: ClassVar = ("attention.out", "mlp.down")
    """Names, in a block, of the matrices that write to the stream."""
    entry: ClassVar = "embed"
    """Name of the embedding."""
    loss_tokens = 0
    """See `output_of`."""
    isolates = False
    """Whether attention stays within a document (`isles.base.marks`)."""

    def __init__(
        self,
        shape: Shape,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.get_default_device() if device is None else torch.device(device)
        self.shape = shape
        self.embed = _Embedding(shape.vocab, shape.d_model, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, device, dtype) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=NORM_EPS, device=device, dtype=dtype)
        self.head = _linear(shape.d_model, shape.vocab, device, dtype)
        if shape.tie_embeddings:
            self.head.weight = self.embed.weight
        self.rotary = Rotary(shape.head_dim, shape.context, device=device, dtype=dtype)
        initialise(self, shape, seed)

    def forward(self, tokens: Tensor) -> Output:
        """Loss and logits of windows `tokens` (B, T+1), int64, marked or not. Each of the first T predicts the next."""
        return output_of(self.leave, self._stream(tokens[:, :-1]), targets_of(tokens), self.loss_tokens)

    def logits(self, tokens_BT: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """Scores (B, T, V) for the token after each of `tokens_BT`, int64; generation calls this. order: numbers of the
        blocks to run, in that order, such as those on the route of a microbatch that skips some; None: all.
        """
        if order is not None:
            check_order("order", order, len(self.blocks), "block")
        return self.leave(self._stream(tokens_BT, order))

    def _stream(self, tokens_BT: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """The stream (B, T, D) after the last block."""
        x_BTD = self.enter(ids_of(tokens_BT))
        mask_B1TT = _within_documents(tokens_BT, x_BTD) if self.isolates else None
        for block in self.blocks if order is None else [self.blocks[number] for number in order]:
            x_BTD = self.through(block, x_BTD, mask_B1TT)
        return x_BTD

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """Tokens (B, T), int64, to the stream (B, T, D) that the first block reads."""
        if tokens_BT.shape[1] > self.shape.context:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than model.context = {self.shape.context}; "
                "cut it, or train with a longer context"
            )
        return self.embed(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        return block(x_BTD, self.rotary, mask_B1TT)

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Scores (B, T, V) of the stream after the last block."""
        return self.head(self.norm(x_BTD))

    def allocate(self, device: torch.device, seed: int) -> None:
        """Allocate a part of a decoder from the meta device on `device`, with the whole decoder's initial values."""
        self.to_empty(device=device)
        dtype = next(self.parameters()).dtype
        self.rotary = Rotary(self.shape.head_dim, self.shape.context, device=device, dtype=dtype)
        if self.shape.tie_embeddings and isinstance(self.head, nn.Linear):
            self.head.weight = self.embed.weight  # to_empty has untied them
        initialise(self, self.shape, seed)


def _within_documents(tokens_BT: Tensor, x_BTD: Tensor) -> Tensor:
    """The mask of `Attention` for tokens that see themselves and those before in their document."""
    documents_BT, device = documents_of(tokens_BT), x_BTD.device.type
    seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None]).tril()
    # In the format of the queries, made once: torch would make a copy of a boolean mask in every block.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BTD.dtype
    return torch.zeros_like(seen_BTT, dtype=dtype).masked_fill(~seen_BTT, -torch.inf)[:, None]


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the B T predictions whose target is not -100, in float32 or wider whatever the
    logits' format; 0 without any.
    """
    logits_NV = logits_BTV.flatten(0, 1).to(_at_least_float32(logits_BTV.dtype))
    return F.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum") / _learned(targets_BT)


def _learned(targets: Tensor) -> Tensor:
    """How many targets are learned, a scalar; 1 without any."""
    return (targets != IGNORED).sum().clamp(min=1)


def output_of(leave: Callable[[Tensor], Tensor], x_BTD: Tensor, targets_BT: Tensor, loss_tokens: int = 0) -> Output:
    """The loss, and the logits if all of them may be held at a time.

    Args:
        leave: maps the stream (..., D) after the last block to logits (..., V), each token by itself.
        x_BTD: the stream.
        targets_BT: the next tokens, int64; -100 where none is learned.
        loss_tokens: of so many tokens logits may be held. For more, the loss is summed over chunks of tokens, whose
            logits are computed once more in the backward pass. 0: of all.

    Returns:
        The loss of `next_token_loss`, the same up to the order of a sum, and the logits (B, T, V) or None.
    """
    if not 0 < loss_tokens < targets_BT.numel():
        logits_BTV = leave(x_BTD)
        return Output(next_token_loss(logits_BTV, targets_BT), logits_BTV)
    chunks = -(-targets_BT.numel() // loss_tokens)
    pairs = zip(x_BTD.flatten(0, 1).chunk(chunks), targets_BT.flatten().chunk(chunks), strict=True)
    again = partial(checkpoint, _summed_loss, leave, use_reentrant=False, preserve_rng_state=False)
    return Output(torch.stack([again(x_ND, targets_N) for x_ND, targets_N in pairs]).sum() / _learned(targets_BT), None)


def _summed_loss(leave: Callable[[Tensor], Tensor], x_ND: Tensor, targets_N: Tensor) -> Tensor:
    logits_NV = leave(x_ND)
    return F.cross_entropy(logits_NV.to(_at_least_float32(logits_NV.dtype)), targets_N, reduction="sum")


def initialise(module: nn.Module, shape: Shape, seed: int) -> None:
    """Draw every parameter of `module`, a decoder or a part with the decoder's parameter names; see the module
    docstring. A generator uses one core, so as many generators run at a time as torch has threads.
    """
    is_inference = torch.is_inference_mode_enabled()

    def draw(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        with torch.inference_mode(is_inference), torch.no_grad():  # every thread has its own modes
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                return
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            std = _init_std(name, parameter.shape[1], shape.layers)
            parameter.copy_(drawn.normal_(std=std, generator=generator_of(f"{seed} {name}")))

    # named_parameters yields a tied matrix once, as embed.weight.
    named = [(name, parameter) for name, parameter in module.named_parameters() if not parameter.is_meta]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list((map if torch.get_num_threads() == 1 else threads.map)(draw, named))


def _init_std(name: str, fan_in: int, layers: int) -> float:
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return STREAM_WRITER_SCALE * (2 * layers * fan_in) ** -0.5
    return fan_in**-0.5  # the embedding's second axis is D, so it needs no case of its own


def _linear(inputs: int, outputs: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Linear:
    return _Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

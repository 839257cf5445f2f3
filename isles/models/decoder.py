"""A Llama-style decoder: pre-norm blocks of rotary causal attention and a gated SiLU MLP; no biases, no dropout.

    x <- x + attention(norm(x));   x <- x + mlp(norm(x));   logits = head(norm(x))

Tensor names end in their axes (the torchtitan habit):
B batch, T sequence (tokens), D d_model, H heads, C head width (D = H C), F ffn, V vocabulary.
`qkv_BTN` has N = 3D (queries, keys and values side by side), `qk_BTNC` N = 2H.

Initialisation, from `seed` alone. Matrices are drawn from N(0, s^2):

    s = 1 / sqrt(D)                  the embedding (and so a tied head)
    s = 1 / sqrt(fan-in)             what reads the normed stream: qkv, gate, up, an untied head
    s = 0.1 / sqrt(2 L fan-in)       what writes to the stream: attention.out, mlp.down
    1                                the gains of the norms

Dividing by sqrt(2 L) keeps the stream's variance from growing with depth. The further 0.1 is ours and lets blocks start
close to the identity: 0.02 nats a byte better after 800 steps of "0.12M". Starting at zero does as well, but then a
fresh model would not notice a skipped or swapped block. Each parameter has a generator of its own, seeded from (seed,
name) and drawn on the CPU in float32. So the global generators are never touched, every device and dtype starts from
the same numbers, and a pipeline stage that holds some of the blocks can draw just its own.

`Rotary` is the position embedding (RoFormer, arXiv 2104.09864): position t turns pair i of a head by the angle t
base^(-2i/C), so that the product of a turned query and key depends on their distance alone. Pairs are neighbours, (2i,
2i+1), as in the paper and in Meta's Llama, so that a pair can be read as one complex number and turned by one
multiplication; Hugging Face's Llama pairs (i, i + C/2) and needs the rows of its query and key matrices reordered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from isles.models.blocks import check_order
from isles.models.sizes import Shape

BASE = 10_000.0


class Rotary(nn.Module):
    """Turns queries and keys by their positions; holds the table of angles, no weights.

    The table (context, 1, C/2, 2), cosine and sine, is a non-persistent buffer. It is made in float32 or wider, also
    for bf16 weights, and the turning is done so too: bf16 would blur neighbouring positions.
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
        table = self.table[: x_BTNC.shape[1]].to(wide)  # a copy only where someone cast the whole module down
        pairs = x_BTNC.to(wide).unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # the compiler fuses real arithmetic and cannot generate complex code
            (a, b), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        else:  # one kernel instead of seven, and as few in the backward pass
            turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
        return turned.flatten(-2).to(x_BTNC.dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


NORM_EPS = 1e-5
STREAM_WRITER_SCALE = 0.1  # see the module docstring


class Output(NamedTuple):
    """What a training forward gives: the mean next-token cross-entropy in nats (a scalar), and the logits (B, T, V)."""

    loss: Tensor
    logits: Tensor


class _Linear(nn.Linear):
    """With nothing in it yet: torch's own draws would come from the global generator, and on the meta device (as
    `skip_init` makes them) load torch._dynamo, which takes longer than all else that a dry run does.
    """

    @override
    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """With nothing in it yet, as `_Linear`."""

    @override
    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Causal self-attention with rotary positions; queries, keys and values come from one product."""

    def __init__(self, shape: Shape, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.qkv = _linear(shape.d_model, 3 * shape.d_model, device, dtype)
        self.out = _linear(shape.d_model, shape.d_model, device, dtype)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        B, T, _ = x_BTD.shape
        H, C = self.heads, self.head_dim  # H C is D, or less in a subnet (isles.models.subnet) of some of the heads
        qkv_BTNC = self.qkv(x_BTD).view(B, T, 3 * H, C)
        qk_BTNC, v_BTHC = qkv_BTNC.split((2 * H, H), dim=2)
        q_BTHC, k_BTHC = rotary(qk_BTNC).chunk(2, dim=2)
        mixed_BHTC = F.scaled_dot_product_attention(
            q_BTHC.transpose(1, 2), k_BTHC.transpose(1, 2), v_BTHC.transpose(1, 2), is_causal=True
        )
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

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """The whole model: embed, blocks, norm, head; `rotary` has no weights. `enter`, `through` a block after the other
    and `leave` are its forward pass in pieces, which stages do apart (`isles.models.stages`).

    Raises ValueError where a sequence is longer than the context.
    """

    writers: ClassVar = ("attention.out", "mlp.down")
    """In each block, the matrices that write to the stream."""
    entry: ClassVar = "embed"
    """The embedding."""

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
        """Loss and logits of windows `tokens` (B, T+1), int64: each of the first T tokens predicts the one after it."""
        logits_BTV = self.logits(tokens[:, :-1])
        return Output(next_token_loss(logits_BTV, tokens[:, 1:]), logits_BTV)

    def logits(self, tokens_BT: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """Scores (B, T, V) for the token after each of `tokens_BT`, int64; what generation calls. order: the numbers of
        the blocks that run, in that order, such as those that a microbatch visits that skips some; None: all.
        """
        if order is not None:
            check_order("order", order, len(self.blocks), "block")
        x_BTD = self.enter(tokens_BT)
        for block in self.blocks if order is None else [self.blocks[number] for number in order]:
            x_BTD = self.through(block, x_BTD)
        return self.leave(x_BTD)

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """The stream (B, T, D) that the first block reads, of tokens int64."""
        if tokens_BT.shape[1] > self.shape.context:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than model.context = {self.shape.context}; "
                "cut it, or train with a longer context"
            )
        return self.embed(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        return block(x_BTD, self.rotary)

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Scores (B, T, V) of the stream after the last block."""
        return self.head(self.norm(x_BTD))

    def allocate(self, device: torch.device, seed: int) -> None:
        """Give a decoder's part from the meta device memory on `device`, with the whole decoder's initial numbers."""
        self.to_empty(device=device)
        dtype = next(self.parameters()).dtype
        self.rotary = Rotary(self.shape.head_dim, self.shape.context, device=device, dtype=dtype)
        if self.shape.tie_embeddings and isinstance(self.head, nn.Linear):
            self.head.weight = self.embed.weight  # to_empty gives each its own
        initialise(self, self.shape, seed)


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats over B T predictions, in float32 or wider whatever the logits' format."""
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return F.cross_entropy(logits_BTV.flatten(0, 1).to(wide), targets_BT.flatten())


def initialise(module: nn.Module, shape: Shape, seed: int) -> None:
    """Draw every parameter of `module`, a decoder or a part with the decoder's parameter names; see the module
    docstring. A generator draws on one core, so as many draw at a time as torch has threads.
    """
    is_inference = torch.is_inference_mode_enabled()

    def draw(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        with torch.inference_mode(is_inference), torch.no_grad():  # modes are a thread's own
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                return
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(drawn.normal_(std=_init_std(name, parameter.shape[1], shape.layers), generator=generator))

    # A tied matrix comes once, as embed.weight.
    named = [(name, parameter) for name, parameter in module.named_parameters() if not parameter.is_meta]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list((map if torch.get_num_threads() == 1 else threads.map)(draw, named))


def _init_std(name: str, fan_in: int, layers: int) -> float:
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return STREAM_WRITER_SCALE * (2 * layers * fan_in) ** -0.5
    return fan_in**-0.5  # the embedding's second axis is D, so it needs no case of its own


def _linear(inputs: int, outputs: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Linear:
    return _Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

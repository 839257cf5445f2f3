"""Small models for tests of memory, as they come: our decoder, two of transformers, residual networks; with dropout or
without.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isles.models.decoder import Decoder
from tests.memory.loops import DECODER, SHAPE, TIED, UNITS, Task

DROPOUT = 0.1


def _decoder() -> nn.Module:
    """Ours has no dropout of its own."""
    model = Decoder(SHAPE)
    for block in model.blocks:
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(DROPOUT))  # type: ignore[union-attr]
    return model


class _Residual(nn.Module):
    """Two convolutions; as in He et al., 2015, with the activation after the sum, or as in He et al., 2016, before."""

    def __init__(self, width: int, dropout: float, first: bool) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(width) for _ in range(2)]
        drop = nn.Dropout2d(dropout)
        after = (convolutions[0], norms[0], nn.ReLU(), drop, convolutions[1], norms[1])
        before = (norms[0], nn.ReLU(), convolutions[0], norms[1], nn.ReLU(), drop, convolutions[1])
        self.body = nn.Sequential(*(before if first else after))
        self.last = nn.Identity() if first else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) + x)


class _ResNet(nn.Module):
    def __init__(self, dropout: float, first: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(16, dropout, first) for _ in range(UNITS))
        self.head = nn.Linear(16, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _pictures(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def _picture_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=UNITS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=64,
            attn_implementation="sdpa",
            attention_dropout=dropout,
        )
    )


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=64,
            n_layer=UNITS,
            n_head=4,
            vocab_size=256,
            n_positions=64,
            resid_pdrop=dropout,
            attn_pdrop=dropout,
            embd_pdrop=dropout,
        )
    )


def _text_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def _both(name: str, make: Any, loss: Any, batch: Any) -> dict[tuple[str, bool], Task]:
    return {(name, drops): Task(partial(make, DROPOUT if drops else 0.0), batch, loss) for drops in (False, True)}


TASKS: dict[tuple[str, bool], Task] = {
    ("decoder", False): DECODER,
    ("decoder", True): Task(_decoder, DECODER.batch),
    ("tied", False): TIED,
    **_both("llama", _llama, _text_loss, DECODER.batch),
    **_both("gpt2", _gpt2, _text_loss, DECODER.batch),
    **_both("resnet", partial(_ResNet, first=False), _picture_loss, _pictures),
    **_both("preactivated", partial(_ResNet, first=True), _picture_loss, _pictures),
}
"""By name, and whether it has dropout."""

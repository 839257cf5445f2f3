"""Models that are not Isles' own, as a user would bring them; importable by fresh processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isles.models import Output, next_token_loss
from isles.models.subnet import Axes, Axis

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
}


class Bigram(nn.Module):
    """The next byte from the last one, with dropout, a buffer, a frozen and a tied parameter."""

    def __init__(self, width: int, scores: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.head = nn.Linear(width, 256)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))
        self.scores = scores

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        if self.training:
            self.seen += 1
        logits = self.head(self.drop(self.embed(tokens[:, :-1]))) * self.scale
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits) if self.scores else SimpleNamespace(loss=loss)


class Wide(nn.Module):
    """The next byte from the last one through hidden units, which it knows how to divide."""

    HIDDEN = 24

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.hidden = nn.Parameter(torch.randn(8, self.HIDDEN) / 3)
        self.head = nn.Linear(self.HIDDEN, 256)
        self.width = self.HIDDEN

    def forward(self, tokens: Tensor) -> Output:
        hidden = (self.embed(tokens[:, :-1]) @ self.hidden).view(*tokens[:, 1:].shape, self.width)
        logits = self.head(torch.tanh(hidden))
        return Output(next_token_loss(logits, tokens[:, 1:]), logits)

    def split_axes(self) -> dict[str, Axes]:
        made = Axis(layer="wide.hidden", units=self.HIDDEN)
        return {"hidden": (None, made), "head.weight": (None, replace(made, reads=True))}

    def fit_widths(self) -> None:
        self.width = self.hidden.shape[1]


def wide() -> nn.Module:
    return Wide()


def build(width: int = 8, scores: bool = True) -> nn.Module:
    return Bigram(width, scores)


def no_module() -> int:
    return 3


def nothing_to_train() -> nn.Module:
    return Bigram(4, True).requires_grad_(False)


def no_loss() -> nn.Module:
    return nn.Embedding(256, 4)


def cut_off() -> nn.Module:
    model = Bigram(4, True)
    model.register_forward_hook(lambda module, args, output: SimpleNamespace(loss=output.loss.detach()))
    return model


def two_losses() -> nn.Module:
    model = Bigram(4, True)
    model.register_forward_hook(lambda module, args, output: SimpleNamespace(loss=output.logits))
    return model


def falls() -> nn.Module:
    return nn.Linear(3, 3)


def save_gpt2(folder: Path) -> Path:
    """A folder with the configuration of a small GPT-2 (dropout 0.1, learned positions, tied) and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    return folder

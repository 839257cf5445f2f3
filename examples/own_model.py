"""A model of one's own, trained by `isles train --set model.factory=examples.own_model:build` (docs/own-model.md)."""

import torch
from torch import nn

from isles.models import Output, next_token_loss


class Recurrent(nn.Module):
    """A GRU over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> Output:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]  # (B, T) each, of windows (B, T+1)
        hidden, _ = self.gru(self.embed(inputs))
        logits = self.head(hidden)  # (B, T, 256)
        return Output(next_token_loss(logits, targets), logits)


def build(width: int = 64, layers: int = 1) -> nn.Module:
    return Recurrent(width, layers)

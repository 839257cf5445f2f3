"""A model of one's own, in float64, one of whose blocks ends its process after so many passes, once in the world."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Fragile(nn.Module):
    """Texts of bytes. The process that makes the folder `mark` first ends itself in its pass number `after` through
    block `stage`; 0: nobody does.
    """

    def __init__(self, mark: str, stage: int, after: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.mark, self.left = Path(mark), after
        self.double()
        self.blocks[stage].doomed = True  # type: ignore[assignment]

    def enter(self, tokens_BT: Tensor) -> Tensor:
        return self.embed(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        trains = self.training and torch.is_grad_enabled() and not x_BTD.is_meta
        if trains and self.left and getattr(block, "doomed", False):
            self.left -= 1
            if self.left == 0 and not self.mark.exists():
                self.mark.mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        return x_BTD + torch.tanh(block(x_BTD))

    def leave(self, x_BTD: Tensor) -> Tensor:
        return self.head(x_BTD)

    def forward(self, tokens: Tensor) -> Any:
        x = self.enter(tokens[:, :-1])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.leave(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})()


def make(mark: str, stage: int, after: int) -> nn.Module:
    """What model.factory names."""
    return Fragile(mark, stage, after)

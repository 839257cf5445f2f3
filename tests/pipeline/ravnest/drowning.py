"""A model of one's own one of whose stages ends its process, for a run that must go on without its cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.pipeline.ravnest.nodes import Wet


class Drowning(Wet):
    """A model for texts of bytes whose last block ends its process after so many passes, once in the world: whoever
    makes the folder `mark` first.
    """

    def __init__(self, mark: str, after: int) -> None:
        super().__init__(0.0)
        self.embed, self.head = nn.Embedding(256, 12), nn.Linear(12, 256)
        self.mark, self.left = Path(mark), after
        self.blocks[-1].ends_here = True

    @override
    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        if hasattr(block, "ends_here") and self.training and torch.is_grad_enabled() and not x_BTD.is_meta:
            self.left -= 1
            if self.left == 0 and not self.mark.exists():
                self.mark.mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().through(block, x_BTD)

    @override
    def forward(self, tokens: Tensor) -> Any:
        x = self.enter(tokens[:, :-1])
        for block in self.blocks:
            x = super().through(block, x)
        logits = self.leave(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})()


def make(mark: str, after: int) -> nn.Module:
    """What model.factory names."""
    return Drowning(mark, after)

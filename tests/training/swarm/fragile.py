"""A model of one's own, in float64, one of whose blocks signals its process after so many passes, in some of the
world's processes.
"""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Fragile(nn.Module):
    """Texts of bytes. The first `times` processes to come to their pass number `after` through block `stage` make a
    folder `mark` (and a number) each, and send themselves the signal; 0: nobody does; -1: who is to write the model.
    """

    def __init__(self, mark: str, stage: int, after: int, name: str, times: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.marks = [Path(f"{mark}{number or ''}") for number in range(times)]
        self.left, self.signal = after, signal.Signals[name]
        self.double()
        self.blocks[stage].doomed = True  # type: ignore[assignment]

    def enter(self, tokens_BT: Tensor) -> Tensor:
        return self.embed(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        trains = self.training and torch.is_grad_enabled() and not x_BTD.is_meta
        if trains and self.left > 0 and getattr(block, "doomed", False):
            self.left -= 1
            if self.left == 0 and self._is_among_the_first():
                os.kill(os.getpid(), self.signal)
        return x_BTD + torch.tanh(block(x_BTD))

    def state_dict(self, *of: Any, **named: Any) -> Any:
        writes = self.left == -1 and any(frame.name == "_save_first" for frame in traceback.extract_stack())
        if writes and self._is_among_the_first():
            os.kill(os.getpid(), self.signal)
        return super().state_dict(*of, **named)

    def _is_among_the_first(self) -> bool:
        for mark in self.marks:
            try:
                mark.mkdir()
            except FileExistsError:
                continue
            return True
        return False

    def leave(self, x_BTD: Tensor) -> Tensor:
        return self.head(x_BTD)

    def forward(self, tokens: Tensor) -> Any:
        x = self.enter(tokens[:, :-1])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.leave(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})()


def make(mark: str, stage: int, after: int, name: str = "SIGKILL", times: int = 1) -> nn.Module:
    """What model.factory names."""
    return Fragile(mark, stage, after, name, times)

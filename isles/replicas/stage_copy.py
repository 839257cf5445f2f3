"""Stages that several workers hold alike, where other stages have more or fewer copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.comm.group import Group
from isles.replicas.replica import PeerQuestion, Plain, summed


class ToldNorm(Plain):
    """A stage of which somebody else knows the norm of the whole gradient: `told`, after each step's gradients."""

    def __init__(self, model: nn.Module, inner: Optimizer, told: Callable[[], float]) -> None:
        super().__init__(model, inner, charged=True)
        self.told = told

    @override
    def norm(self, rows: Group | None = None) -> Tensor:
        return torch.tensor(self.told(), device=self.parameters[0].device, dtype=self.parameters[0].dtype)


class StageCopy(Plain):
    """One of `copies` workers that hold `model`. Nobody has a column of stages of its own to ask for the norm of the
    whole gradient, so `everyone` is asked: the holders of all stages, each of which answers for its share of its stage.
    Of copies that step alike, for their gradients are averaged first, that is the norm of the whole; of others the mean
    square over the copies counts for a stage.
    """

    def __init__(self, model: nn.Module, inner: Optimizer, everyone: Group, copies: int) -> None:
        super().__init__(model, inner, charged=True)
        self.everyone, self.copies = everyone, copies

    @override
    def norm(self, rows: Group | None = None) -> Tensor:
        own = torch.nn.utils.get_total_norm(self._gradients())
        share = own.double().square().reshape(1).cpu() / self.copies
        return summed(self.everyone, share, "inner").sqrt().reshape(()).to(own)

    @override
    def sent(self, steps: int, questions: Sequence[PeerQuestion]) -> tuple[int, bool]:
        asked = sum(question == "norm" for question in questions)
        return steps * asked * 8 * len(self.everyone.others), False

"""One stage's work on single microbatches: forward, backward, and backward taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isles.comm.group import Group
from isles.models.stages import Stage
from isles.network.routing.routes import Task
from isles.pipeline.compute import Context, OpenPass, StageCompute, StageShares
from isles.pipeline.wire import StageForm

_FORWARD, _BACKWARD = Task("F", 0, 0), Task("B", 0, 0)


@dataclass(slots=True)
class OpenWork:
    """A microbatch under way here: its forward pass, whose backward is to come. wire: what came from position `sender`,
    sent: what left, as bytes. seconds: that it computed so far.

    receiver: whom it went to last, since when, and whether it is `taken`, its forward pass done there. asked: all whom
    it went to, whose gradients are taken.
    """

    passed: OpenPass
    wire: Tensor | None
    sent: Tensor | None
    seconds: float
    sender: int | None
    receiver: int | None = None
    since: float = 0.0
    taken: bool = False
    asked: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SavedPass:
    """What a peer keeps of a microbatch that it has counted, as bytes: what came, what left, the gradient of that, and
    the gradient of what came. wire and back are None at the first stage, sent and gradient at the last.
    """

    wire: Tensor | None
    sent: Tensor | None
    gradient: Tensor | None
    back: Tensor | None
    loss: Tensor


class StageWork(StageCompute):
    """`stage` and its messages. text: a microbatch of the step under way by its number, (B, T+1) int64, for the first
    stage. scale: what a loss is divided by, the microbatches of a step.
    """

    def __init__(
        self,
        stage: Stage,
        group: Group,
        form: StageForm,
        scale: int,
        *,
        shares: StageShares | None,
        autocast: Context,
    ) -> None:
        super().__init__(stage, group, form, scale, autocast=autocast)
        self.text: Callable[[int], Tensor] | None = None
        self.shares = shares

    @property
    def ends(self) -> bool:
        """Whether this stage makes the loss."""
        return self.stage.piece.leaves

    def forward(self, microbatch: int, wire: Tensor | None, sender: int | None) -> OpenWork:
        """wire: what came from position `sender`; None at the first stage. Refused where that cannot be a payload."""
        began, text = self.group.transport.now(), None
        if wire is None:
            assert self.text is not None
            text = self.text(microbatch)
        passed, sent = self.run_forward(_FORWARD, text, wire, sender, "loss" if self.ends else "on")
        self.charge(0.0 if self.shares is None else self.shares.forward)
        return OpenWork(passed, wire, sent, self.group.transport.now() - began, sender)

    def backward(self, done: OpenWork, gradient: Tensor | None, sender: int | None) -> SavedPass:
        """Add to the gradients of the stage. gradient: what came from position `sender`; None where the loss is."""
        began, shares = self.group.transport.now(), self.shares
        loss, back = self.run_backward(_BACKWARD, done.passed, gradient, sender)
        if shares is not None:
            self.charge(shares.both - shares.forward if gradient is None else shares.backward)
        done.seconds += self.group.transport.now() - began
        return SavedPass(done.wire, done.sent, gradient, back, loss)

    def take_back(self, microbatch: int, saved_pass: SavedPass) -> None:
        """Take what `backward` added of it out of the gradients again, by doing it once more."""
        gradients = [(parameter, parameter.grad) for parameter in self.stage.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        self.backward(self.forward(microbatch, saved_pass.wire, None), saved_pass.gradient, None)
        with torch.no_grad():
            for parameter, before in gradients:
                if before is not None and parameter.grad is not None:
                    before -= parameter.grad
                parameter.grad = before

"""One stage's work on single microbatches: forward, backward, and backward taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isles.comm.group import Group
from isles.models.stages import Stage
from isles.network.routing.routes import Task
from isles.pipeline.executor import Context
from isles.pipeline.shares import StageShares
from isles.pipeline.suspicion import accept, refuse_own
from isles.pipeline.wire import StageForm, phase
from isles.staging import to_device

_FORWARD, _BACKWARD = phase(Task("F", 0, 0)), phase(Task("B", 0, 0))


@dataclass(slots=True)
class OpenPass:
    """A forward pass whose backward is to come. leaf: what came, None where the text is; out: what left, or the loss;
    wire: what came, sent: what left, as bytes. seconds: that it computed so far.
    """

    leaf: Tensor | None
    out: Tensor
    wire: Tensor | None
    sent: Tensor | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Booked:
    """What a peer keeps of a microbatch that it has counted, as bytes: what came, what left, the gradient of that, and
    the gradient of what came. wire and back are None at the first stage, sent and gradient at the last.
    """

    wire: Tensor | None
    sent: Tensor | None
    gradient: Tensor | None
    back: Tensor | None
    loss: Tensor


class StageWork:
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
        self.group, self.scale, self.autocast = group, scale, autocast
        self.text: Callable[[int], Tensor] | None = None
        self.serve(stage, form, shares)

    def serve(self, stage: Stage, form: StageForm, shares: StageShares | None) -> None:
        """This stage from now on."""
        self.stage, self.form, self.shares = stage, form, shares
        self.device = next(stage.parameters()).device

    @property
    def ends(self) -> bool:
        """Whether this stage makes the loss."""
        return self.stage.piece.leaves

    def forward(self, microbatch: int, wire: Tensor | None, sender: int | None) -> OpenPass:
        """wire: what came from position `sender`; None at the first stage. Refused where that cannot be a payload."""
        began = self.group.transport.now()
        leaf, x, tokens = self._begin(microbatch, wire, sender)
        targets = self.form.targets(tokens) if self.ends else None
        with self.autocast():
            out = self.stage(x, targets, enter=wire is None, leave=self.ends)
        self._charge(0.0 if self.shares is None else self.shares.forward)
        if self.ends:
            return OpenPass(leaf, out, wire, None, self._since(began))
        payload, side = self.form.boundary.encode(out, tokens)
        refuse_own(self.group, "its activations", payload)
        return OpenPass(leaf, payload, wire, self.form.pack(payload, side, tokens), self._since(began))

    def backward(self, done: OpenPass, gradient: Tensor | None, sender: int | None) -> Booked:
        """Add to the gradients of the stage. gradient: what came from position `sender`; None where the loss is."""
        began = self.group.transport.now()
        if gradient is None:
            loss = done.out.detach()
            (done.out / self.scale).backward()
            self._charge(0.0 if self.shares is None else self.shares.both - self.shares.forward)
        else:
            given, loss = self.form.unpack_back(gradient, self.device)
            if sender is not None:
                accept(self.group, _BACKWARD, sender, given)
            done.out.backward(given)
            self._charge(0.0 if self.shares is None else self.shares.backward)
        back = None
        if done.leaf is not None:
            assert done.leaf.grad is not None
            refuse_own(self.group, "its gradients", done.leaf.grad)
            back = self.form.pack_back(done.leaf.grad, loss)
        done.seconds += self._since(began)
        return Booked(done.wire, done.sent, gradient, back, loss)

    def take_back(self, microbatch: int, booked: Booked) -> None:
        """Take what `backward` added of it out of the gradients again, by doing it once more."""
        kept = [(parameter, parameter.grad) for parameter in self.stage.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        self.backward(self.forward(microbatch, booked.wire, None), booked.gradient, None)
        with torch.no_grad():
            for parameter, before in kept:
                if before is not None and parameter.grad is not None:
                    before -= parameter.grad
                parameter.grad = before

    def _begin(self, microbatch: int, wire: Tensor | None, sender: int | None) -> tuple[Tensor | None, Tensor, Tensor]:
        if wire is None:
            assert self.text is not None
            (tokens,) = to_device([self.text(microbatch)], self.device)
            return None, tokens[:, :-1], tokens
        payload, side, told = self.form.unpack(wire, self.device)
        assert told is not None
        if sender is not None:
            accept(self.group, _FORWARD, sender, payload)
        leaf = payload.requires_grad_()
        return leaf, self.form.boundary.decode(leaf, side, told), told

    def _charge(self, share: float) -> None:
        transport = self.group.transport
        transport.compute(share * transport.step_seconds)

    def _since(self, began: float) -> float:
        return self.group.transport.now() - began

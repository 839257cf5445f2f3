"""One stage's computation of a microbatch, independent of how its messages travel.

    forward     text, or a message -> check -> decode -> stage -> encode -> a message, or the loss
    backward    a message, or the loss -> check -> backward -> a message to the sender of the forward message
    alone       the forward pass without a backward one, for any number of sequences

With `recompute` a forward pass saves no graph, only its input and the random generators' states, and the backward pass
runs it again. Activations then take the memory of one microbatch, and a third more is computed.

`task_shares`, `stage_shares`: the fraction of an inner step's computation in each task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isles.base.modes import to_device
from isles.comm.errors import WorkerFailed
from isles.comm.group import Group
from isles.comm.trust import JUMPS, mean_square
from isles.models.cuts import Piece, PieceCosts
from isles.models.stages import Stage
from isles.network.routing.events import Task
from isles.network.routing.replay import TaskSeconds
from isles.pipeline.wire import StageForm, phase

Context = Callable[[], AbstractContextManager[object]]
Goes = Literal["on", "home", "loss"]
"""Where a forward pass ends: in a message to the next stage, in one to the origin, or in the loss."""


def accept(group: Group, kind: int, source: int, vector: Tensor) -> None:
    """Raise Refused, naming position `source`, if its message cannot be valid (`isles.comm.trust`). kind: of the
    message; messages of one kind are compared with each other.
    """
    call = group.call("pipeline", leeway=JUMPS)
    call.accept(kind, {source: mean_square(vector.detach().view(-1))}, 0.0, vector.numel())


def refuse_own(group: Group, what: str, vector: Tensor) -> None:
    """WorkerFailed if this worker's own message is not finite: the error names this worker instead of a receiver."""
    total = vector.detach().sum(dtype=torch.promote_types(vector.dtype, torch.float32))  # float16 ends at 65,504
    if not total.isfinite():
        raise WorkerFailed(group.transport.rank, f"{what} are not finite: lower the learning rate (inner.lr)")


@dataclass(slots=True)
class OpenPass:
    """A forward pass whose backward pass is pending.

    leaf:   the received payload; None if the stage reads the text.
    loss:   of the last stage, in nats, detached.
    out:    the sent payload, or the loss, with its graph; None if the pass is to be recomputed.
    random: the states of the random generators of host and GPU, for the recomputation.
    """

    leaf: Tensor | None
    side: Tensor | None
    tokens: Tensor
    goes: Goes
    is_home: bool
    loss: Tensor | None = None
    out: Tensor | None = None
    random: tuple[Tensor, Tensor | None] | None = None


class StageCompute:
    """Runs `stage` with its messages. group: its positions exchange them. scale: divisor of a loss before the backward
    pass. autocast: entered around every pass of the stage. recompute: see the module.
    """

    def __init__(
        self,
        stage: Stage,
        group: Group,
        form: StageForm,
        scale: int,
        *,
        autocast: Context = nullcontext,
        recompute: bool = False,
    ) -> None:
        self.group, self.scale, self.autocast, self.recompute = group, scale, autocast, recompute
        self.hold(stage, form)

    def hold(self, stage: Stage, form: StageForm) -> None:
        """Set the stage and the form of its messages."""
        self.stage, self.form = stage, form
        self.device = next(stage.parameters()).device

    def run_forward(
        self, task: Task, tokens: Tensor | None, wire: Tensor | None, source: int | None = None, goes: Goes = "on"
    ) -> tuple[OpenPass, Tensor | None]:
        """Run a forward pass; returns it with the bytes to send, None if it ends in the loss.

        tokens: (B, T+1), the text, if this worker has it. wire: input from position `source` (None: this worker
        itself); None if the stream begins here. With both, the stream has returned to the origin for its loss.

        Refused, naming `source`, if it is no valid payload. WorkerFailed if this stage's own output is not finite.
        """
        done = self._begin_pass(self.form, tokens, wire, goes)
        if source is not None and done.leaf is not None:
            accept(self.group, phase(task), source, done.leaf)
        again = self.recompute and not done.is_home
        if again:
            on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            done.random = torch.get_rng_state(), on_device
        with torch.no_grad() if again else nullcontext():
            out, side = self._through(done)
        done.out = None if again else out
        if goes == "loss":
            done.loss = out.detach()
            return done, None
        refuse_own(self.group, "its activations", out)
        return done, self.form.pack(out, side, done.tokens if goes == "on" else None)

    def run_backward(
        self, task: Task, done: OpenPass, wire: Tensor | None, source: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add to the stage's gradients. wire: the output's gradient from position `source`; None if `done` ends in the
        loss. Returns the loss, and the bytes for the sender of the input, None if there is none. Refused and
        WorkerFailed as in `run_forward`.
        """
        gradient, loss = None, done.loss
        if wire is not None:
            gradient, loss = self.form.unpack_back(wire, self.device)
            if source is not None:
                accept(self.group, phase(task), source, gradient)
        assert loss is not None
        out = self._again(done) if done.out is None else done.out
        (out / self.scale if gradient is None else out).backward(gradient)
        if done.leaf is None:
            return loss, None
        assert done.leaf.grad is not None
        refuse_own(self.group, "its gradients", done.leaf.grad)
        return loss, self.form.pack_back(done.leaf.grad, loss)

    @torch.no_grad()
    def run_alone(self, form: StageForm, tokens: Tensor | None, wire: Tensor | None, goes: Goes) -> Tensor:
        """Run a forward pass without gradients on messages of `form`; returns the loss (), or the bytes to send."""
        done = self._begin_pass(form, tokens, wire, goes)
        out, side = self._through(done)
        return out if goes == "loss" else form.pack(out, side, done.tokens if goes == "on" else None)

    def charge(self, share: float) -> None:
        """Advance the simulated clock by a fraction of an inner step's compute time."""
        transport = self.group.transport
        transport.compute(share * transport.step_seconds)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        was_training = self.stage.training
        self.stage.eval()
        try:
            yield
        finally:
            self.stage.train(was_training)

    def _begin_pass(self, form: StageForm, tokens: Tensor | None, wire: Tensor | None, goes: Goes) -> OpenPass:
        is_home = tokens is not None and wire is not None
        if tokens is not None:
            (tokens,) = to_device([tokens], self.device)
        payload, side = None, None
        if wire is not None:
            payload, side, text = form.unpack(wire, self.device)
            payload.requires_grad_()
            tokens = text if tokens is None else tokens
        assert tokens is not None
        return OpenPass(payload, side, tokens, goes, is_home)

    def _through(self, done: OpenPass) -> tuple[Tensor, Tensor | None]:
        """The output payload and its side data, or the loss."""
        boundary, tokens, ends = self.form.boundary, done.tokens, done.goes == "loss"
        x = tokens[:, :-1] if done.leaf is None else boundary.decode(done.leaf, done.side, tokens)
        targets = self.form.targets(tokens) if ends else None
        with self.autocast():
            out = self.stage(x, targets, enter=done.leaf is None, through=not done.is_home, leave=ends)
        return (out, None) if ends else boundary.encode(out, tokens)

    def _again(self, done: OpenPass) -> Tensor:
        """Recompute the output or the loss, now with a graph, and free the values of the output."""
        assert done.random is not None
        with _drawing(*done.random, self.device):
            out, _ = self._through(done)
        give_up_numbers(out)
        return out


def give_up_numbers(out: Tensor) -> None:
    """Free the values of a sent payload: its backward pass needs only its shape. Tensors that autograd saved stay."""
    out.data = out.data.new_zeros(()).expand(out.shape)


@contextmanager
def _drawing(random: Tensor, on_device: Tensor | None, device: torch.device) -> Iterator[None]:
    """Context: the random generators repeat the draws of the first pass, and are restored afterwards."""
    with torch.random.fork_rng(devices=[] if on_device is None else [device]):
        torch.set_rng_state(random)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        yield


def task_shares(
    pieces: Sequence[Piece], costs: PieceCosts, microbatches: int, replicas: int, *, recompute: bool
) -> TaskSeconds:
    """The fraction of an inner step's computation in each task of each position: a backward pass costs two forward
    ones, and one more if it recomputes; the loss is included in its gradient's task.
    """
    whole = 3 * costs.total * microbatches
    forward = [sum(costs.blocks[number] for number in piece.blocks) / whole for piece in pieces]
    loss = [3 * costs.head / whole if piece.leaves else 0.0 for piece in pieces]
    backward = [(3 if recompute else 2) * share for share in forward]
    return TaskSeconds(forward=forward * replicas, loss=loss * replicas, backward=backward * replicas)


@dataclass(frozen=True, slots=True)
class StageShares:
    """The fractions of an inner step's computation in an asynchronous stage's tasks: the forward pass, the backward
    pass (with a recomputed forward), and both at once at the last stage.
    """

    forward: float
    backward: float
    both: float


def stage_shares(piece: Piece, costs: PieceCosts, microbatches: int, *, recompute: bool) -> StageShares:
    """The shares of an asynchronous stage; see `task_shares`."""
    whole = 3 * costs.total * microbatches
    forward = sum(costs.blocks[number] for number in piece.blocks) / whole
    return StageShares(forward, (3 if recompute else 2) * forward, 3 * forward + 3 * costs.head / whole)

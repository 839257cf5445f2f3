"""One stage's computation of a microbatch, whoever carries its messages.

    forward     text, or a message -> judged -> decode -> stage -> encode -> a message, or the loss
    backward    a message, or the loss -> judged -> back through the same -> a message for who sent the first one
    alone       the forward pass without a backward one, of any number of sequences

With `recompute` a forward pass leaves no graph: its input and the state of what draws at random are kept, and the
backward pass runs it again. Activations take the memory of one microbatch then, and a third more is computed.

`task_shares`, `stage_shares`: which share of an inner step each task computes.
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
    """Refused, naming position `source`, where what it sent cannot be what it should be (`isles.comm.trust`). kind: of
    message, those of which are compared with each other.
    """
    call = group.call("pipeline", leeway=JUMPS)
    call.accept(kind, {source: mean_square(vector.detach().view(-1))}, 0.0, vector.numel())


def refuse_own(group: Group, what: str, vector: Tensor) -> None:
    """WorkerFailed where what this worker is about to send is not finite, so that nobody else says so."""
    total = vector.detach().sum(dtype=torch.promote_types(vector.dtype, torch.float32))  # float16 ends at 65,504
    if not total.isfinite():
        raise WorkerFailed(group.transport.rank, f"{what} are not finite: lower the learning rate (inner.lr)")


@dataclass(slots=True)
class OpenPass:
    """A forward pass whose backward pass is to come.

    leaf:   the payload that came; None where the text is read.
    loss:   where this pass makes it, nats, detached.
    out:    the payload that left, or the loss, with its graph; None where it is made again.
    random: the state of what draws on the host, and on the GPU, where it is made again.
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
    """`stage` and what its messages are. group: whose positions send them. scale: what a loss is divided by before the
    backward pass. autocast: entered around every pass of the stage. recompute: see the module.
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
        """This stage from now on."""
        self.stage, self.form = stage, form
        self.device = next(stage.parameters()).device

    def run_forward(
        self, task: Task, tokens: Tensor | None, wire: Tensor | None, source: int | None = None, goes: Goes = "on"
    ) -> tuple[OpenPass, Tensor | None]:
        """The pass, and the bytes that are to be sent; None where it ends in the loss.

        tokens: (B, T+1), the text, where this worker has it. wire: what came from position `source` (None: from this
        worker itself); None where the stream begins here. Both: the stream has come home to its text.

        Refused, naming `source`, where that cannot be a payload. WorkerFailed where this stage's own is not finite.
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
        """Add to the gradients of the stage. wire: what came from position `source`, as in `run_forward`; None where
        `done` ends in the loss. Returns the loss, and the bytes for who sent what `done` began with, None where nobody
        did. Refused and WorkerFailed as there.
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
        """The loss (), or the bytes that are to be sent, of messages of `form`. See `run_forward`."""
        done = self._begin_pass(form, tokens, wire, goes)
        out, side = self._through(done)
        return out if goes == "loss" else form.pack(out, side, done.tokens if goes == "on" else None)

    def charge(self, share: float) -> None:
        """Have the simulated clock take so much of an inner step."""
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
        """The payload that leaves and what goes beside it, or the loss."""
        boundary, tokens, ends = self.form.boundary, done.tokens, done.goes == "loss"
        x = tokens[:, :-1] if done.leaf is None else boundary.decode(done.leaf, done.side, tokens)
        targets = self.form.targets(tokens) if ends else None
        with self.autocast():
            out = self.stage(x, targets, enter=done.leaf is None, through=not done.is_home, leave=ends)
        return (out, None) if ends else boundary.encode(out, tokens)

    def _again(self, done: OpenPass) -> Tensor:
        """What left, or the loss, this time with a graph, and without its numbers."""
        assert done.random is not None
        with _drawing(*done.random, self.device):
            out, _ = self._through(done)
        give_up_numbers(out)
        return out


def give_up_numbers(out: Tensor) -> None:
    """Free what a pass has sent: its backward pass begins at its shape. What autograd has kept of it stays."""
    out.data = out.data.new_zeros(()).expand(out.shape)


@contextmanager
def _drawing(random: Tensor, on_device: Tensor | None, device: torch.device) -> Iterator[None]:
    """What draws at random draws what it drew in the first pass, and then goes on as if it had not."""
    with torch.random.fork_rng(devices=[] if on_device is None else [device]):
        torch.set_rng_state(random)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        yield


def task_shares(
    pieces: Sequence[Piece], costs: PieceCosts, microbatches: int, replicas: int, *, recompute: bool
) -> TaskSeconds:
    """The share of an inner step's computation in each task of each position: a backward pass costs two forward ones,
    and one more where that is run again; the loss comes with its gradient.
    """
    whole = 3 * costs.total * microbatches
    forward = [sum(costs.blocks[number] for number in piece.blocks) / whole for piece in pieces]
    loss = [3 * costs.head / whole if piece.leaves else 0.0 for piece in pieces]
    backward = [(3 if recompute else 2) * share for share in forward]
    return TaskSeconds(forward=forward * replicas, loss=loss * replicas, backward=backward * replicas)


@dataclass(frozen=True, slots=True)
class StageShares:
    """The share of an inner step's computation in an asynchronous stage's tasks: a forward pass, the backward pass with
    the forward where that is run again, and where the loss is, both at once.
    """

    forward: float
    backward: float
    both: float


def stage_shares(piece: Piece, costs: PieceCosts, microbatches: int, *, recompute: bool) -> StageShares:
    """Of a stage; see `task_shares`."""
    whole = 3 * costs.total * microbatches
    forward = sum(costs.blocks[number] for number in piece.blocks) / whole
    return StageShares(forward, (3 if recompute else 2) * forward, 3 * forward + 3 * costs.head / whole)

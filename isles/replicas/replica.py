"""What one worker holds of its replica, and how that takes an inner step.

    Plain        a module and the inner optimizer over it; `peers` hold the replica's other parts, such as stages
    StageCopy    one of several workers that hold the same stage, where other stages have more or fewer copies
    Copies       the workers of an island hold the same module, which a method such as DDP keeps the same
    Shards       the workers of an island hold rows of one module, by FSDP

Copies and Shards are in `isles.replicas.island.island`. Methods keep replicas alike and ask of a replica only what
`Replica` says, never its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.base.wrapping import Deferred, SeveralOptimizers, fresh_state, innermost
from isles.comm.group import Group, numbers
from isles.comm.roster import Roster
from isles.comm.tags import Channel
from isles.network.exchange_plan import MemoryItem
from isles.replicas.island.fsdp import own_rows
from isles.replicas.start import same_settings
from isles.replicas.watch import Scaled

PeerQuestion = Literal["norm", "largest"]
"""What a step asks the other workers of its replica; each answer is one number of 8 bytes."""

_ANSWER_BYTES = 8


class Holder(Protocol):
    """What a replica looks at in the method that holds it."""

    group: Group
    max_norm: float | None
    spans_islands: ClassVar[bool]
    needs_whole: ClassVar[bool]

    roster: Roster

    @property
    def survives(self) -> bool: ...


class Replica:
    """One worker's part of one replica: `model`, stepped by `inner`, unless a kind of replica says otherwise.

    model: what this worker computes with. inner: the optimizer whose groups and state schedulers see. parameters: the
    trainable ones of `model`. shares: of each of them, in their order, what this worker alone answers for: views of
    live memory, of 0 entries where there are fewer rows than workers. charged: whoever runs the model charges a virtual
    clock for its steps, so that a method does not. peers: the workers that hold its other parts, such as a pipeline's
    stages.
    """

    model: nn.Module
    inner: Optimizer
    parameters: list[nn.Parameter]
    shares: list[Tensor]
    charged: bool = False
    peers: Group | None = None
    is_part = False
    """Whether other workers hold the other parts of this one's replica."""
    _clipped_with: Group | None = None  # over whom the gradient's norm is taken
    _deferred: Deferred | None = None

    def own(self, tensor: Tensor) -> Tensor:
        """This worker's part of a parameter, live."""
        return tensor

    def refuse(self, holder: Holder) -> None:
        """ValueError, with the mend, where `holder` cannot keep such replicas alike."""
        if holder.needs_whole and (self.peers is not None or self._deferred is not None):
            raise ValueError(
                f"{type(holder).__name__} changes shapes and state of a whole model between steps: give it one without "
                "stages, and an optimizer that steps when it is told to"
            )
        if self.peers is not None:
            refuse_shared(
                self.peers, holder.group, "give mesh.stage and mesh.outer of isles.mesh(outer=..., stage=...)"
            )
            refuse_survivors(holder)

    def begin(self, settings: str) -> None:
        """Called before the holder's first message. Diverged, naming the odd worker, unless all workers of the replica
        give the same `settings`.
        """
        self.catch_up()
        if self.peers is not None:
            same_settings(self.peers, settings)

    # One inner step, in this order.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backward passes that only accumulate; at its end their gradients are in `.grad`."""
        yield
        self.gradients()

    def gradients(self) -> None:
        """Put the gradients of all backward passes of the step into `.grad`."""
        if self._deferred is not None:
            self._deferred.gradients()

    def unscale(self, scaled: Scaled) -> None:
        """Divide the gradients by the scale of the loss; all workers of a replica find them finite, or none does."""
        scaled.unscale()
        if self.peers is not None and self.largest(int(scaled.overflowed)):
            scaled.overflow()

    def norm(self, rows: Group | None = None) -> Tensor:
        """2-norm () of the whole replica's gradient, the same bits on all of its workers. rows: workers that hold the
        other rows of these parameters.
        """
        own = torch.nn.utils.get_total_norm(self._gradients())
        if rows is None and self._clipped_with is None:
            return own
        square = own.double().square().reshape(1).cpu()
        if rows is not None:
            square = summed(rows, square, rows.channel)
        if self._clipped_with is not None:
            square = summed(self._clipped_with, square, "inner")
        return square.sqrt().reshape(()).to(own)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients of norm `norm` so that it is at most `max_norm`."""
        gradients = self._gradients()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for device in {gradient.device for gradient in gradients}:
            torch._foreach_mul_([own for own in gradients if own.device == device], scale.to(device))

    def apply(self, scaled: Scaled | None) -> None:
        """The inner optimizer's step, left out where the scaled loss made gradients that are not finite."""
        if scaled is None or not scaled.overflowed:
            self.inner.step()

    def catch_up(self) -> None:
        """Called before somebody reads or writes weights or inner state: all steps so far are in them."""
        if self._deferred is not None:
            self._deferred.catch_up()

    def is_sound(self) -> bool:
        """Whether the weights are finite that no share of this worker tells of, but all workers of the replica have."""
        return True

    def forget_moments(self) -> None:
        """Fresh inner state, as before the first step."""
        self.catch_up()
        fresh_state(innermost(self.inner))

    # The replica's other workers.

    def total(self, own: Tensor, channel: Channel) -> Tensor:
        """Sum of `own` (n,) over the workers of the replica, in the order of ranks, the same bits on all of them. Bytes
        sent: own's to each of the others.
        """
        return own if self.peers is None else summed(self.peers, own, channel)

    def largest(self, number: int) -> int:
        """Largest of the numbers that the workers of the replica give: for what depends on a worker's part and must be
        the same for all of them. Bytes sent: 8 to each of the others.
        """
        return number if self.peers is None else largest(self.peers, number)

    def spread(self, indexes: Sequence[int], channel: Channel = "inner") -> None:
        """The shares of the parameters `indexes` were written to on all workers: give each what it lacks of them."""
        del indexes, channel  # nobody holds what another one answers for

    def spread_bytes(self, indexes: Sequence[int]) -> int:
        return 0

    @property
    def working_bytes(self) -> int:
        """Host memory that `spread` of everything takes."""
        return 0

    # Around a run.

    @contextmanager
    def for_evaluation(self) -> Iterator[nn.Module]:
        """The model with the weights of now, for evaluation."""
        self.catch_up()
        yield self.model

    def whole(self) -> nn.Module:
        """The model with all of its rows; of a stage, that stage."""
        self.catch_up()
        return self.model

    def weights(self) -> dict[str, Tensor]:
        """The weights that this worker holds, by name: plain tensors, live."""
        self.catch_up()
        return dict(self.model.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Restore `weights`. RuntimeError where they are of another model."""
        self.catch_up()
        self.model.load_state_dict(weights)

    def inner_state(self) -> Any:
        """State of whatever `apply` steps."""
        self.catch_up()
        return self.inner.state_dict()

    def load_inner_state(self, state: Any) -> None:
        """Restore `inner_state`."""
        self.catch_up()
        self.inner.load_state_dict(state)

    # What a plan says of it.

    def sent(self, steps: int, questions: Sequence[PeerQuestion]) -> tuple[int, bool]:
        """Bytes that this worker sends inside its replica in `steps` steps, beside `spread`, and whether they are only
        about so many. questions: asked in each step.
        """
        asked = [self._clipped_with if question == "norm" else self.peers for question in questions]
        return steps * sum(_ANSWER_BYTES * len(group.others) for group in asked if group is not None), False

    def opening(self) -> int:
        return self.spread_bytes(range(len(self.shares)))

    def memory(self) -> list[MemoryItem]:
        """What is held on the host beside weights, gradients and the inner optimizer's state."""
        return []

    def _gradients(self) -> list[Tensor]:
        gradients = [own_rows(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise ValueError(
                "a gradient is sparse, and torch has no norm of it: make its layer with sparse=False, or "
                "leave out max_norm"
            )
        return gradients


def as_replica(model: nn.Module, inner: Any) -> Replica:
    """What takes the inner steps of `model` (optimizers, a method inside an island, a replica) as a replica. ValueError
    where it is one of another model.
    """
    if isinstance(inner, list | tuple):
        inner = inner[0] if len(inner) == 1 else SeveralOptimizers(inner)
    if hasattr(inner, "as_replica"):  # a method whose workers may be one replica
        inner = inner.as_replica()
    if not isinstance(inner, Replica):
        return Plain(model, inner)
    if inner.model is not model:
        raise ValueError("the optimizer is of another module: give the method the module that it was made for")
    return inner


class Plain(Replica):
    """A module and the inner optimizer over it.

    peers: the workers that hold the other parts of this replica, such as a pipeline's stages. clip_over: whether the
    gradient's norm is that over all of them ("peers"), or of this part ("own").
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        *,
        peers: Group | None = None,
        clip_over: Literal["peers", "own"] = "peers",
        charged: bool = False,
    ) -> None:
        self.model, self.inner, self.charged = model, inner, charged
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no trainable parameter: set requires_grad before wrapping the optimizer")
        self.shares = list(self.parameters)
        self.peers = peers if peers is not None and peers.size > 1 else None
        self.is_part = self.peers is not None
        self._clipped_with = self.peers if clip_over == "peers" else None
        self._deferred = inner if isinstance(inner, Deferred) else None

    def opening(self) -> int:
        return 0 if self.peers is None else _ANSWER_BYTES * len(self.peers.others)  # the hash of `begin`


def refuse_shared(own: Group, across: Group, hint: str) -> None:
    """ValueError where other workers are both in this one's replica (`own`) and replicas of it (`across`)."""
    if own.transport is across.transport and set(own.ranks) & set(across.ranks) != {across.transport.rank}:
        raise ValueError(f"the replica's group and the group across replicas share other workers: {hint}")


def refuse_survivors(holder: Holder) -> None:
    """ValueError for a method that goes on without lost workers, where a replica's workers may not answer alike."""
    if holder.survives and not holder.roster.answers_alike:
        raise ValueError('on_peer_failure = "solo": workers of one replica could lose different peers; choose "raise"')


def summed(group: Group, own: Tensor, channel: Channel) -> Tensor:
    """Sum of `own` over the group, in the order of ranks."""
    first, *others = group.all_gather(own, channel)
    total = first.clone()
    for theirs in others:
        total += theirs
    return total


def largest(group: Group, number: int) -> int:
    """Largest of the group's numbers."""
    return max(int(theirs) for theirs in group.all_gather(numbers(number)))


class SuppliedNorm(Plain):
    """A stage whose caller supplies the norm of the whole gradient: `supplied_norm()`, after each step's gradients."""

    def __init__(self, model: nn.Module, inner: Optimizer, supplied_norm: Callable[[], float]) -> None:
        super().__init__(model, inner, charged=True)
        self.supplied_norm = supplied_norm

    @override
    def norm(self, rows: Group | None = None) -> Tensor:
        return torch.tensor(self.supplied_norm(), device=self.parameters[0].device, dtype=self.parameters[0].dtype)


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

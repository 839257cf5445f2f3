"""From batches to a loss with gradients in place: what a trainer does with a model between two steps of its optimizer.

    Whole     this worker has a model that it runs by itself

`Text` is what a worker reads before that. The optimizer does the rest: reduce, clip, step, exchange. So a trainer
drives any way to run a model.

`draws_state`: a worker's random generators, which dropout and the like draw from, the host's and that of its CUDA
device. Both are in a checkpoint, so that a resumed run draws the same numbers as an unbroken one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from isles.comm.tags import Channel
from isles.network.routing.events import Span
from isles.replicas.sync import ReplicaSync

if TYPE_CHECKING:
    from isles.pipeline.recovery import Recovery
    from isles.training.memory.in_use import PlannedMemory

from collections.abc import Iterator

import numpy as np

from isles.comm.mesh import Mesh
from isles.data import Corpus, Loader, load_corpus
from isles.data.tokenizer import Tokenizer
from isles.models import limits
from isles.training.config.sections import Config


class Text(Loader):
    """This worker's. corpus: that of `config.data`, where it was loaded already. share: (which, of how many) of the
    text; None: that of the worker's place. ValueError for text that the model or the batch does not fit.

    positions: places in the data's order of the batches that it reads, (b,) int64 each, instead of its share of every
    step, where workers come and go; None: its share.
    """

    positions: Iterator[np.ndarray] | None = None

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None = None, share: tuple[int, int] | None = None
    ) -> None:
        corpus, (context, vocab) = corpus or load_corpus(config.data), limits(config.model)
        check_vocabulary(vocab, corpus.tokenizer)
        if world.local_rank == 0:  # every machine has files of its own
            world.report({"corpus": corpus.sha256, "rank": world.rank})
        reader, readers = share or world.reader
        super().__init__(corpus, config.data, context=context, worker=reader, workers=readers, seed=config.run.seed)
        together = readers if self.split == "iid" else 1  # who read the same sequences
        if self.batch_size * together > self.sequences:
            raise ValueError(
                f"data.batch_size = {self.batch_size}: a step would read {self.batch_size * together} sequences of "
                f"{self.sequences}, some of them twice; choose a smaller batch or give more text"
            )

    @property
    def validates(self) -> bool:
        """Whether text was kept for validation."""
        return len(self.corpus.validation) > 0

    def batch(self) -> Tensor:
        """The next one (b, T+1)."""
        return next(self) if self.positions is None else self.read(next(self.positions))


def check_vocabulary(vocab: int | None, tokenizer: Tokenizer) -> None:
    """ValueError unless a model of `vocab` token ids (None: not known) has one for each of the tokenizer's."""
    if vocab is not None and tokenizer.vocab_size > vocab:
        raise ValueError(
            f"model.vocab = {vocab} is smaller than the tokenizer's {tokenizer.vocab_size} ids: "
            f"set model.vocab = {tokenizer.vocab_size}, or choose another data.tokenizer"
        )


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[Tensor],
    autocast: AbstractContextManager[object],
    loss: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Mean next-token cross-entropy in nats over all rows of `batches` (each (b, T+1), int64; the last may be
    shorter); NaN without rows. loss: of a batch; None: the model's own.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, rows = 0.0, 0
    with autocast:
        for batch in batches:
            tokens = batch.to(device)
            total += float(model(tokens).loss if loss is None else loss(tokens)) * len(batch)
            rows += len(batch)
    model.train(was_training)
    return total / rows if rows else float("nan")


WAITS: tuple[Channel, ...] = ("outer", "inner", "pipeline")
"""Channels whose waits count as waiting in a worker's metrics."""


class Left(Exception):
    """This worker has left the run, as it was asked to, or has come too late."""


class StepRunner(Protocol):
    """How one worker runs a model. Batches are (b, T + 1) int64 on the model's device."""

    reads: bool
    """Whether `run` and `evaluate` want batches on this worker."""

    @property
    def played(self) -> Sequence[Span]:
        """The tasks of the last inner step on this worker, in seconds of its clock; none where it has no parts."""

    def run(self, batches: Iterable[Tensor]) -> Tensor | None:
        """Forward and backward over the batches of one inner step. Their mean loss (), in nats, detached; the gradient
        of that is in `.grad`, or will be when the optimizer asks for it. None where this worker had a share in none.
        """

    def state_dict(self) -> dict[str, Any] | None:
        """What the next steps depend on beside model and optimizer; None: nothing."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from `state_dict`."""

    def evaluate(self, batches: Iterable[Tensor]) -> float | None:
        """Mean loss over the rows of `batches` with the weights of now, in nats; None on a worker that does not learn
        it.
        """

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        """End the run and give the one model that came of it; None where another worker holds it."""


class TrainerParts:
    """What a trainer is made of. name: of the run's configuration. text: None where this worker reads none. validates:
    whether text was kept for validation, known to all who validate. scaler: a torch.amp.GradScaler. autocast: a context
    for forward passes. notices: what a user should know.
    """

    name: str
    text: Text | None
    validates: bool
    memory: PlannedMemory
    optimizer: ReplicaSync
    runner: StepRunner
    recovery: Recovery | None
    scaler: Any
    autocast: Callable[[], AbstractContextManager[object]]
    notices: list[str]


class Whole:
    """A model that is this worker's alone to run, or that calls others by itself, as a sharded one does.

    optimizer: its `no_sync` is around all backward passes but the last. autocast: a context for each forward pass.
    scaler: a torch.amp.GradScaler, or None. batches: how many `run` gets.
    """

    reads = True
    played: Sequence[Span] = ()

    def __init__(
        self,
        optimizer: ReplicaSync,
        model: nn.Module,
        autocast: Callable[[], AbstractContextManager[object]],
        scaler: Any,
        batches: int,
    ) -> None:
        self._optimizer, self._model, self._autocast = optimizer, model, autocast
        self._scaler, self._batches = scaler, batches

    def run(self, batches: Iterable[Tensor]) -> Tensor:
        total = torch.zeros((), device=next(self._model.parameters()).device, dtype=torch.float32)
        for number, tokens in enumerate(batches, 1):
            with nullcontext() if number == self._batches else self._optimizer.no_sync():
                total += self._backward(tokens)
        return total

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        pass

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        return validation_loss(self._model, batches, self._autocast())

    def whole(self, optimizer: ReplicaSync) -> nn.Module:
        return optimizer.consolidate()

    def _backward(self, tokens: Tensor) -> Tensor:
        with self._autocast():
            loss = self._model(tokens).loss / self._batches
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()


def draws_seed(seed: int, rank: int) -> int:
    """Of a worker's draws: every worker has its own, the same on every backend."""
    return int.from_bytes(hashlib.sha256(f"{seed} worker {rank}".encode()).digest()[:4], "little")


def seed_draws(seed: int, rank: int) -> None:
    """Begin a worker's draws, on the host and on every device."""
    torch.manual_seed(draws_seed(seed, rank))


def draws_state(device: torch.device) -> dict[str, Any]:
    """Where the draws of a worker that computes on `device` stand."""
    on_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"random": torch.get_rng_state(), "random_cuda": on_cuda}


def restore_draws(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing from `draws_state`. One that holds nothing of a CUDA device, for it was taken on another kind of
    device or by an earlier version, leaves that device's draws where they are: at their beginning.
    """
    torch.set_rng_state(state["random"])
    on_cuda = state.get("random_cuda")
    if device.type == "cuda" and on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda, device)


def new_draws(seed: int, rank: int) -> dict[str, Any]:
    """The state of a worker that has drawn nothing yet."""
    return {"random": torch.Generator().manual_seed(draws_seed(seed, rank)).get_state(), "random_cuda": None}


def carried_draws(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a worker's state are its draws."""
    return {"random": state["random"], "random_cuda": state.get("random_cuda")}

"""Forward and backward passes of an inner step: `StepRunner`, the interface between a trainer and a way to run a model.

    Text      the batches that a worker reads
    Whole     the runner of a worker that has the whole model

The optimizer does the rest: reduce, clip, step, exchange.

`draws_state`: the states of a worker's random generators (for dropout and the like), of the host and of its CUDA
device. Both are in a checkpoint, so that a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from isles.base.marks import learned_in
from isles.base.modes import generator_of
from isles.comm.tags import Channel
from isles.network.routing.events import Span
from isles.replicas.sync import ReplicaSync

if TYPE_CHECKING:
    from isles.pipeline.recovery import Recovery
    from isles.training.memory.in_use import PlannedMemory

from collections.abc import Iterator

import numpy as np

from isles.comm.mesh import Mesh
from isles.data import Corpus, DataConfig, Loader, load_corpus
from isles.data.parts import named
from isles.data.tokenizer import Tokenizer
from isles.models import limits
from isles.training.config.sections import Config


class Text(Loader):
    """This worker's batches. corpus: that of `config.data`, if it is loaded already. share: (index, number of shares)
    of the text; None: by the worker's coordinate. ValueError if the text does not fit the model or the batch.

    positions: in elastic runs, the positions in the data's order of each batch to read, (b,) int64; None: its share of
    every step.
    """

    positions: Iterator[np.ndarray] | None = None

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None = None, share: tuple[int, int] | None = None
    ) -> None:
        corpus, (context, vocab) = corpus or load_corpus(config.data), limits(config.model)
        check_vocabulary(vocab, corpus.tokenizer)
        if corpus.masks and config.pipeline.stages > 1:
            raise ValueError(
                "data.path: stages learn every token; set pipeline.stages = 1, or leave labels and loss_mask out"
            )
        if world.local_rank == 0:  # one per machine, each of which has its own files
            world.report({"corpus": corpus.sha256, "rank": world.rank})
        reader, readers = share or world.reader
        super().__init__(corpus, config.data, context=context, worker=reader, workers=readers, seed=config.run.seed)
        together = readers if self.split == "iid" else 1  # number of workers that share the sequences
        if self.batch_size * together > self.sequences:
            raise ValueError(
                f"data.batch_size = {self.batch_size}: a step would read {self.batch_size * together} sequences of "
                f"{self.sequences}, some of them twice; choose a smaller batch or give more text"
            )

    @property
    def validates(self) -> bool:
        """Whether there is validation text."""
        return len(self.corpus.validation) > 0

    def batch(self) -> Tensor:
        """The next batch (b, T+1)."""
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
    """Mean next-token cross-entropy in nats over the learned targets of `batches` (each (b, T+1), int64; the last may
    be shorter); NaN without any. loss: of a batch; None: the model's own.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, rows = 0.0, 0.0
    with autocast:
        for batch in batches:
            tokens = batch.to(device)
            learned = int(learned_in(batch)) / (batch.shape[1] - 1)  # in rows, so exact where every target is
            total += float(model(tokens).loss if loss is None else loss(tokens)) * learned
            rows += learned
    model.train(was_training)
    return total / rows if rows else float("nan")


Losses = dict[str, float]
"""Losses by key: "val_loss" of all sequences of validation, "val_loss.NAME" of each text; {} where others get them."""
Batches = Callable[[], Iterable[Tensor]]


def validation_losses(
    config: DataConfig, text: Callable[[], Loader | None], evaluate: Callable[[Batches], float | None]
) -> Losses:
    """The losses on the texts of `config`. text: returns what this worker reads, which may change meanwhile."""
    read = lambda name: () if (own := text()) is None else own.validation_batches(name)  # noqa: E731
    losses = {name: evaluate(partial(read, name)) for name in named(config.validation_path or config.path)}
    found, own = {name: loss for name, loss in losses.items() if loss is not None}, text()
    if own is None or len(found) < len(losses):
        return {}
    if "" in found:
        return {"val_loss": found[""]}
    weights = own.validation_weights
    total = sum(loss * weights[name] for name, loss in found.items() if weights[name])
    return {"val_loss": total / (sum(weights.values()) or float("nan"))} | {
        f"val_loss.{name}": loss for name, loss in found.items()
    }


def model_losses(model: nn.Module, text: Loader, autocast: Callable[[], AbstractContextManager[object]]) -> Losses:
    """The losses of a whole model."""
    evaluate = lambda batches: validation_loss(model, batches(), autocast())  # noqa: E731
    return validation_losses(text.config, lambda: text, evaluate)


WAITS: tuple[Channel, ...] = ("outer", "inner", "pipeline")
"""Channels whose waits count as waiting in a worker's metrics."""


class Left(Exception):
    """This worker has left the run, as it was asked to, or has joined too late."""


class StepRunner(Protocol):
    """How one worker runs a model. Batches are (b, T + 1) int64 on the model's device."""

    reads: bool
    """Whether `run` and `evaluate` need batches on this worker."""

    @property
    def played(self) -> Sequence[Span]:
        """The tasks of the last inner step on this worker, in seconds of its clock; empty if the model is not cut."""

    def run(self, batches: Iterable[Tensor]) -> Tensor | None:
        """Run forward and backward passes over the batches of one inner step. Returns their mean loss (), in nats,
        detached; its gradient is in `.grad`, or will be when the optimizer reads it. None if this worker took no part.
        """

    def state_dict(self) -> dict[str, Any] | None:
        """State that the next steps depend on, other than model and optimizer; None: nothing."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore `state_dict`."""

    def evaluate(self, batches: Batches) -> float | None:
        """Mean loss over the rows of `batches()` with the current weights, in nats; None if another worker gets it."""

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        """Consolidate and return the run's model at its end; None if another worker has it."""


class TrainerParts:
    """The parts of a trainer. name: of the run's configuration. text: None if this worker reads none. validates:
    whether there is validation text, equal at all that validate. scaler: a torch.amp.GradScaler. autocast: a context
    for forward passes. notices: for the user.
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
    """Runs a whole model, or a sharded one, which communicates by itself.

    optimizer: all backward passes but the last run under its `no_sync`. autocast: a context for each forward pass.
    scaler: a torch.amp.GradScaler, or None. batches: number of batches per `run`. marks: whether their tokens may have
    some (`isles.base.marks`).
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
        marks: bool = False,
    ) -> None:
        self._optimizer, self._model, self._autocast = optimizer, model, autocast
        self._scaler, self._batches, self._marks = scaler, batches, marks

    def run(self, batches: Iterable[Tensor]) -> Tensor:
        total = torch.zeros((), device=next(self._model.parameters()).device, dtype=torch.float32)
        shares: Iterable[tuple[Tensor, Tensor | int, Tensor | int]] = ((tokens, 1, self._batches) for tokens in batches)
        if self._marks:  # a batch counts as much as it has learned targets
            batches = list(batches)
            learned = torch.stack([learned_in(tokens) for tokens in batches])
            shares = zip(batches, learned, repeat(learned.sum().clamp(min=1)), strict=False)
        for number, (tokens, share, of) in enumerate(shares, 1):
            with nullcontext() if number == self._batches else self._optimizer.no_sync():
                total += self._backward(tokens, share, of)
        return total

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        pass

    def evaluate(self, batches: Batches) -> float:
        return validation_loss(self._model, batches(), self._autocast())

    def whole(self, optimizer: ReplicaSync) -> nn.Module:
        return optimizer.consolidate()

    def _backward(self, tokens: Tensor, share: Tensor | int, of: Tensor | int) -> Tensor:
        with self._autocast():
            loss = self._model(tokens).loss * share / of
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()


def draws_seed(seed: int, rank: int) -> int:
    """The seed of a worker's draws, different for each worker and equal on all backends."""
    return generator_of(f"{seed} worker {rank}").initial_seed()


def seed_draws(seed: int, rank: int) -> None:
    """Seed a worker's random generators, on the host and on every device."""
    torch.manual_seed(draws_seed(seed, rank))


def draws_state(device: torch.device) -> dict[str, Any]:
    """The states of the random generators of a worker that computes on `device`."""
    on_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"random": torch.get_rng_state(), "random_cuda": on_cuda}


def restore_draws(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore `draws_state`. If it lacks a CUDA generator's state (from another kind of device, or an earlier version),
    that generator is not changed.
    """
    torch.set_rng_state(state["random"])
    on_cuda = state.get("random_cuda")
    if device.type == "cuda" and on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda, device)


def new_draws(seed: int, rank: int) -> dict[str, Any]:
    """The state of a worker that has drawn nothing yet."""
    return {"random": torch.Generator().manual_seed(draws_seed(seed, rank)).get_state(), "random_cuda": None}


def carried_draws(state: Mapping[str, Any]) -> dict[str, Any]:
    """The random generators' states in a worker's state."""
    return {"random": state["random"], "random_cuda": state.get("random_cuda")}

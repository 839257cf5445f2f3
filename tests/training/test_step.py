"""What lies between a trainer and its model: batches in, a loss out, gradients in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.comm.virtual.cluster import run_virtual
from isles.training.step import Whole
from isles.training.worker import trainer_of
from tests.training.runs import BATCH, CONTEXT, tiny, write_text

STEP_SECONDS, BATCHES = 0.8, 4


class Scored(nn.Module):
    """Loss of (b, T + 1) tokens under scores of its own for each of 7 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.linspace(-1, 1, 7))
        self.shift = nn.Parameter(torch.zeros(7))

    def forward(self, tokens: Tensor) -> Any:
        logits = (self.scores + self.shift).expand(tokens[:, 1:].numel(), 7)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def batches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(7, (2, 6), generator=draw) for _ in range(count)]


def charges(world: Mesh) -> list[float]:
    """Seconds that a step of `BATCHES` batches charges, one by one, with two buckets of 7 of 14 entries each."""
    model = Scored()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = isles.DDP(model, inner, world.outer, bucket_megabytes=7 * 4 / 2**20)
    optimizer.batches = BATCHES
    step = Whole(optimizer, model, nullcontext, scaler=None, batches=BATCHES)
    seen: list[float] = []
    compute = world.transport.compute
    world.transport.compute = lambda seconds: (seen.append(seconds), compute(seconds))[1]  # type: ignore[method-assign]
    for _ in range(2):
        step.run(batches(BATCHES))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_buckets_leave_in_the_last_backward_pass() -> None:
    """By hand: three quarters of a step, batch by batch; of the last quarter a third forward, and half of the backward
    pass before each bucket; nothing is left for the step itself.
    """
    batch = STEP_SECONDS / BATCHES
    wanted = [batch] * 3 + [batch * (1 / 3 + 1 / 3), batch * 1 / 3, 0.0]
    for seen in run_virtual(charges, 2, step_seconds=STEP_SECONDS):
        assert seen == pytest.approx(2 * wanted, abs=1e-12)


def test_several_batches_are_one_of_all_their_rows() -> None:
    together, apart = Scored(), Scored()
    world = isles.init()
    losses = []
    for model, given in ((together, [torch.cat(batches(3))]), (apart, batches(3))):
        optimizer = isles.NoSync(model, torch.optim.SGD(model.parameters(), lr=0.1), world.outer)
        losses.append(float(Whole(optimizer, model, nullcontext, scaler=None, batches=len(given)).run(iter(given))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert together.scores.grad is not None and apart.scores.grad is not None
    torch.testing.assert_close(together.scores.grad, apart.scores.grad)


class Elsewhere:
    """A worker that reads nothing, hears no judgement and does not hold the one model."""

    reads = False
    played = ()

    def __init__(self, optimizer: isles.ReplicaSync) -> None:
        self.parameters = optimizer.parameters

    def run(self, batches: Iterable[Tensor]) -> Tensor:
        assert not list(batches)
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.tensor(1.5)

    def evaluate(self, batches: Callable[[], Iterable[Tensor]]) -> None:
        assert not list(batches())

    def whole(self, optimizer: isles.ReplicaSync) -> None:
        optimizer.consolidate()


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Path]:
    yield write_text(tmp_path / "text.txt")


def test_a_trainer_drives_a_worker_that_neither_reads_nor_holds_the_model(text: Path, tmp_path: Path) -> None:
    config = tiny(text, "run.validate_every=1", method="none", workers=1, steps=3)

    def work(world: Mesh) -> Any:
        trainer = trainer_of(config, world)
        trainer.model_step = Elsewhere(trainer.optimizer)
        return trainer.run(tmp_path)

    (summary,) = run_virtual(work, 1)
    assert (summary["tokens"], summary["val_loss"], summary["val_loss_replica"], summary["parameters"]) == (
        0,
        None,
        None,
        0,
    )
    assert not (tmp_path / "model.safetensors").exists()


def test_batches_are_read_when_they_are_wanted(text: Path) -> None:
    config = tiny(text, "inner.accumulation=3", method="none", workers=1, steps=3)

    def work(world: Mesh) -> tuple[int, int]:
        trainer = trainer_of(config, world)
        run, seen = trainer.model_step.run, []
        trainer.model_step.run = lambda given: run(seen.append(trainer.tokens) or one for one in given)  # type: ignore[method-assign]
        trainer.step()
        return seen, trainer.tokens

    ((seen, total),) = run_virtual(work, 1)
    rows = BATCH * CONTEXT
    assert seen == [rows, 2 * rows, 3 * rows] and total == 3 * rows

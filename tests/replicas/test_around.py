"""What users put around a method in their loops: averages of the weights, torch.compile, transformers' Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import isles
from isles.comm.mesh import Mesh
from tests.gloo import run_gloo
from tests.replicas.trainers import bare, transformed
from tests.replicas.workers import Net, bits, train_step, weights, wrap

DECAY = 0.75


def averaged(world: Mesh, name: str, averages: bool) -> tuple[str, int, Tensor | None, Tensor]:
    """Weights and bytes at the end; torch's moving average of the weights, and the same by hand."""
    torch.manual_seed(0)
    model = Net()
    optimizer = wrap(world, name, model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if averages else None
    by_hand = torch.zeros(0)
    for step in range(1, 8):
        train_step(optimizer, world.rank, step)
        if average is not None:
            average.update_parameters(model)
        now = weights(model).double()
        by_hand = now if step == 1 else DECAY * by_hand + (1 - DECAY) * now
    own = None if average is None else weights(average)
    return bits(weights(optimizer.consolidate())), world.outer.traffic["outer"].bytes_sent, own, by_hand


@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco"])
def test_an_average_of_the_weights_is_the_users(name: str) -> None:
    """It sees what landed, and training sees nothing of it."""
    plain, both = (isles.run_virtual(averaged, 2, args=(name, averages)) for averages in (False, True))
    for (trained, sent, own, by_hand), (alone, unseen, *_) in zip(both, plain, strict=True):
        assert (trained, sent) == (alone, unseen)
        torch.testing.assert_close(own, by_hand.float(), rtol=1e-5, atol=1e-6)


def compiled(world: Mesh, name: str, when: str, backend: str) -> tuple[Tensor, int]:
    model: nn.Module = Net()
    if when == "before":
        model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    optimizer = wrap(world, name, model)
    if when == "after":
        model.compile(backend=backend)
    for step in range(1, 5):
        train_step(optimizer, world.rank, step)
    return weights(optimizer.consolidate()), world.outer.traffic["outer"].bytes_sent


def look_compiled(name: str, when: str, backend: str, **closeness: Any) -> None:
    plain, other = (isles.run_virtual(compiled, 2, args=(name, moment, backend)) for moment in ("never", when))
    for (expected, sent), (found, same) in zip(plain, other, strict=True):
        torch.testing.assert_close(found, expected, **closeness)
        assert sent == same
    assert torch.equal(other[0][0], other[1][0])


def test_ist_divides_a_model_before_it_is_compiled() -> None:
    with pytest.raises(ValueError, match=r"give the model itself, then model.compile\(\)"):
        isles.run_virtual(compiled, 2, args=("ist", "before", "eager"))


@pytest.mark.parametrize(
    ("name", "when"), [("ddp", "before"), ("streaming-diloco", "before"), ("diloco", "after"), ("ist", "after")]
)
def test_a_compiled_model_trains_alike(name: str, when: str) -> None:
    look_compiled(name, when, "eager", rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["ddp", "dct-dp", "demo", "diloco", "streaming-diloco", "noloco"])
def test_a_model_compiled_with_its_backward_pass(name: str, when: str) -> None:
    look_compiled(name, when, "aot_eager", rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["diloco", "ddp"])
def test_transformers_trainer(name: str) -> None:
    pytest.importorskip("transformers")
    assert run_gloo(transformed, 2, args=(name,)) == isles.run_virtual(bare, 2, args=(name,))

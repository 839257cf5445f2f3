"""Around a model and its optimizer: others' DistributedDataParallel is told of, accelerate's wrapper seen through."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isles
from isles.comm.mesh import Mesh
from tests.gloo import run_gloo
from tests.replicas.workers import sgd, weights


class Prepared:
    """As accelerate wraps an optimizer: it passes on what every optimizer has, and nothing else."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> Any:
        return self.optimizer.step()


def around(world: Mesh) -> list[tuple[list[str], list[float]]]:
    """What is warned of in four steps, and the one model; for a model by itself and in several wrappings, of which one
    is made after two steps.
    """
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    results = []
    for wrapped, since in (
        (lambda model: model, 0),
        (DistributedDataParallel, 0),
        (lambda model: DistributedDataParallel(nn.Sequential(model, nn.Linear(1, 1))), 0),
        (lambda model: DistributedDataParallel(model, process_group=alone), 0),
        (DistributedDataParallel, 2),
    ):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        method = isles.DiLoCo(model, sgd(model), world.outer, sync_every=2, outer_momentum=0.0)
        optimizer, net = Prepared(method), model
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                net = wrapped(model) if step == since else net
                net(torch.full((2, 3), 1.0 + world.rank + step)).square().mean().backward()
                optimizer.step()
                model.zero_grad()
        reported = [str(each.message) for each in caught if "DistributedDataParallel" in str(each.message)]
        results.append((reported, weights(isles.unwrap(optimizer).consolidate()).tolist()))
    return results


def test_gradients_that_torch_averages_too_are_reported() -> None:
    """Once, by the first worker, also of one that is made later; not where it is over others than these workers."""
    zero, one = run_gloo(around, 2)
    assert [len(reported) for reported, _ in zero] == [0, 1, 1, 0, 1] and not any(reported for reported, _ in one)
    line = zero[1][0][0]
    assert "this method exchanges on top of it" in line and "prepare() the optimizer and the loader" in line
    assert [model for _, model in zero] == [model for _, model in one]


def test_what_is_no_method_has_none_below() -> None:
    with pytest.raises(ValueError, match="no method of Isles below this Prepared"):
        isles.unwrap(Prepared(sgd(nn.Linear(1, 1))))

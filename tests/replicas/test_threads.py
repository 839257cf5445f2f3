"""Workers with other numbers of torch threads, as GPUs with more or fewer cores near them have: what all must agree on
has the same bits, or the next exchange says that they have come apart.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

import isles
from isles.base.modes import torch_threads
from isles.comm.mesh import Mesh
from tests.covers import share
from tests.device.workers import SETTINGS
from tests.gloo import run_gloo

_SHAPES = ((1201, 301), (140_001,), (300, 1203))  # threads part them where no vector of the processor's ends
_SETTINGS = {**SETTINGS, "dilocox": {**SETTINGS["dilocox"], "sync_every": 1, "rank": 64}}  # large enough for threads
_MAKES_ONE = [name for name in isles.METHODS if name not in ("none", "fsdp", "ist") and "streaming" not in name]


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, generator=drawn) for shape in _SHAPES)


def _consolidated(world: Mesh, name: str) -> str:
    """The bits of the one model at the end, from gradients that are drawn."""
    model, drawn = _Weights(), torch.Generator().manual_seed(world.rank)
    with torch_threads(1 + world.rank):
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = isles.method(name)(model, inner, world.outer, **_SETTINGS[name])
        for _ in range(4):
            parts = [(own * torch.randn(own.shape, generator=drawn)).sum() for own in model.parameters()]
            torch.stack(parts).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = optimizer.consolidate()
    return hashlib.sha256(b"".join(own.detach().numpy().tobytes() for own in whole.parameters())).hexdigest()


@pytest.mark.parametrize("name", share(_MAKES_ONE, 0, len(_MAKES_ONE), ["dilocox"]))
def test_workers_of_one_and_two_threads_agree(name: str) -> None:
    one, two = run_gloo(_consolidated, 2, args=(name,))
    assert one == two

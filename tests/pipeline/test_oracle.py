"""The executor against `torch.distributed.pipelining` on the same stages and processes."""

from __future__ import annotations

import pytest

from tests.gloo import run_gloo


@pytest.mark.parametrize("kind", ["all", "1f1b"])
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.long), 4])
def test_losses_and_gradients_are_those_of_torchs_schedules(stages: int, kind: str) -> None:
    """GPipe and 1F1B, to the bit."""
    from tests.pipeline import torch_schedules  # torch.distributed.pipelining takes a second to load

    names = set()
    for same, losses in run_gloo(torch_schedules.compared, stages, args=(kind, 4)):
        assert losses and all(same.values()), same
        names |= same.keys()
    assert {"embed.weight", "head.weight", "blocks.3.mlp.up.weight"} <= names

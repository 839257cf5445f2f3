"""DiLoCo's rule through torch's fused kernel has the bits of the plain operations, wherever a block ends."""

from __future__ import annotations

import pytest
import torch

from isles.replicas.methods.diloco import Nesterov
from isles.replicas.parts.interfaces import Answer, RuleState


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("entries", [1, 5, 15, 16, 17, 1003, 131079])
def test_fused_and_plain_agree_to_the_bit(entries: int, momentum: float, dtype: torch.dtype) -> None:
    """v <- mu v + g; anchor <- anchor - lr (g + mu v), for every length of the tail."""
    generator = torch.Generator().manual_seed(entries)
    anchor, g, v = (torch.randn(entries, dtype=dtype, generator=generator) for _ in range(3))
    v *= momentum > 0
    expected_v = v.mul(momentum).add(g)
    expected = anchor.sub(g.add(expected_v, alpha=momentum), alpha=0.7)
    Nesterov(lr=0.7, momentum=momentum).apply(anchor, Answer(g), RuleState({"momentum": v}), 1)
    assert torch.equal(anchor, expected)
    assert momentum == 0 or torch.equal(v, expected_v)

"""Sampling: greedy is the argmax, draws follow the seed, the window never exceeds the context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isles.models.factory import generate


class Counter:
    """Always finds the token after the last one likeliest, the one after that second."""

    def __init__(self) -> None:
        self.longest = 0

    def logits(self, tokens_BT: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens_BT.shape[1])
        scores = torch.zeros(*tokens_BT.shape, 10)
        scores.scatter_(-1, (tokens_BT[..., None] + 1) % 10, 5.0)
        scores.scatter_(-1, (tokens_BT[..., None] + 2) % 10, 4.0)
        return scores


def test_temperature_0_takes_the_likeliest() -> None:
    """And the model never sees more than `context` tokens."""
    model = Counter()
    assert list(generate(model.logits, torch.tensor([7]), new_tokens=6, context=3, temperature=0)) == [8, 9, 0, 1, 2, 3]
    assert model.longest == 3


def test_draws_follow_the_seed_and_stay_among_the_top_k() -> None:
    """The same seed draws the same; top_k = 2 leaves the two likeliest; the global generator is untouched."""
    before = torch.get_rng_state()
    runs = [
        list(
            generate(Counter().logits, torch.tensor([0]), new_tokens=40, context=8, temperature=3.0, top_k=2, seed=seed)
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    steps = {(b - a) % 10 for a, b in zip([0, *runs[0]], runs[0], strict=False)}
    assert steps == {1, 2}
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to continue."""
    with pytest.raises(ValueError, match="prompt is empty"):
        list(generate(Counter().logits, torch.tensor([], dtype=torch.int64), new_tokens=1, context=3))

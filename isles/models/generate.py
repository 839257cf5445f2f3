"""Text after a prompt: sample token after token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    logits: Callable[[Tensor], Tensor],
    tokens_T: Tensor,
    *,
    new_tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `new_tokens` ids that follow `tokens_T` (T,), int64, at least one.

    logits: from tokens (B, T) to the scores (B, T, V) of what follows each. context: the model sees at most the last
    `context` tokens. temperature: 0 takes the likeliest token. top_k: choose among so many likeliest (0: all). seed: of
    the draws; the global generator is not used.
    """
    if not len(tokens_T):
        raise ValueError("the prompt is empty: give at least one character")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for _ in range(new_tokens):
        scores_V = logits(tokens_T[-context:][None])[0, -1].float().cpu()
        token = int(scores_V.argmax()) if temperature == 0 else _draw(scores_V / temperature, top_k, generator)
        yield token
        tokens_T = torch.cat((tokens_T, tokens_T.new_tensor([token])))


def _draw(scores_V: Tensor, top_k: int, generator: torch.Generator) -> int:
    if 0 < top_k < len(scores_V):
        least = scores_V.topk(top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
    return int(torch.multinomial(scores_V.softmax(0), 1, generator=generator))

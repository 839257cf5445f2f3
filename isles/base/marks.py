"""Marks of tokens in a batch of windows (b, T + 1), int64. An entry without a mark is its token id, 0 or more.

    ~id             not to be learned: no target
    ~id - FIRST     the first token of a document, where documents are isolated: no target either

So an entry below 0 is no target. A corpus stores the first kind as it is here; a loader adds the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FIRST = 1 << 32  # above every token id
IGNORED = -100
"""In place of a target that is not to be learned, as in torch and in Hugging Face's `labels`."""


def ids_of(tokens: Tensor) -> Tensor:
    """The token ids of `tokens`, int64 of any shape, whatever their marks."""
    return tokens.maximum(~tokens) & (FIRST - 1)


def targets_of(tokens: Tensor) -> Tensor:
    """(B, T) targets of windows `tokens` (B, T+1): the next token's id, or `IGNORED`, which no loss counts."""
    targets = tokens[:, 1:]
    return targets.masked_fill(targets < 0, IGNORED)


def documents_of(tokens: Tensor) -> Tensor:
    """(B, T) number of each token's document within its window, of `tokens` (B, T); 0 where none are isolated."""
    return (tokens < -FIRST).cumsum(1)


def learned_in(tokens: Tensor) -> Tensor:
    """How many targets of windows `tokens` (B, T+1) are learned, a scalar."""
    return (tokens[:, 1:] >= 0).sum()

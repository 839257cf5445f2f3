"""What nodes of clusters say when they agree: one word each, of a length that all know.

state | who is lost                                        a world of fixed size
state | who is lost | who leaves | ROWS x who came, told   where nodes come and leave; what a comer tells of itself:
                                                           `isles.network.clusters.telling`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isles.comm.errors import Malformed
from isles.network.clusters.telling import is_told

GATHERING, DONE, FAILED = range(3)
ROWS = 32
"""Nodes that can come at one average; others do at the next."""
_BITS = 62  # of an int64, for as many positions


@dataclass(frozen=True, slots=True)
class QuorumWord:
    """told: of those who have come, by position; `ROWS` at most."""

    state: int
    lost: frozenset[int]
    leaving: frozenset[int] = frozenset()
    told: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WordForm:
    """In a world of so many positions. is_open: nodes come and leave."""

    workers: int
    is_open: bool = False

    @property
    def numbers(self) -> int:
        """Of 8 bytes each, in a word."""
        return 1 + (2 * self._sets + 2 * ROWS if self.is_open else self._sets)

    @property
    def _sets(self) -> int:
        return -(-self.workers // _BITS)

    def packed(self, word: QuorumWord) -> Tensor:
        """Int64 (numbers,)."""
        numbers = [word.state, *self._bits(word.lost)]
        if self.is_open:
            rows = [number for position, told in sorted(word.told.items()) for number in (position, told)]
            numbers += [*self._bits(word.leaving), *rows, *[0] * (2 * ROWS - len(rows))]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def unpacked(self, rank: int, packed: Tensor) -> QuorumWord:
        """The word of worker `rank`. Malformed, naming it, for what is none."""
        state, *numbers = packed.tolist()
        lost, leaving, rows = numbers[: self._sets], numbers[self._sets : 2 * self._sets], numbers[2 * self._sets :]
        told = {position: number for position, number in zip(rows[::2], rows[1::2], strict=True) if number}
        word = QuorumWord(state, self._positions(lost), self._positions(leaving), told)
        within = all(0 <= position < self.workers for position in (*word.lost, *word.leaving, *told))
        if state not in (GATHERING, DONE, FAILED) or not within or not all(map(is_told, told.values())):
            raise Malformed(rank, "a word that is none of this agreement")
        return word

    def _bits(self, positions: Iterable[int]) -> list[int]:
        words = [0] * self._sets
        for position in positions:
            words[position // _BITS] |= 1 << position % _BITS
        return words

    def _positions(self, words: Sequence[int]) -> frozenset[int]:
        return frozenset(
            number * _BITS + bit for number, word in enumerate(words) if word for bit in range(64) if word >> bit & 1
        )

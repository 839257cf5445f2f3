"""The order of an epoch, one permutation of the sequences from (seed, epoch, share) alone; and positions in that order
for a world whose workers change.

A round's fresh batches lie step by step, and within a step row by row across the workers that take it; a worker that
takes fewer steps than others leaves no gap. Where all take the same number of steps this is the loader's formula:

    position = n + i W + w     with n sequences before this step, row i, worker w of W.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from isles.data.tokenizer import smallest_dtype

# Shared by every loader of the process that is in the same epoch, and gone with the last of them.
_orders: WeakValueDictionary[tuple[Any, ...], np.ndarray] = WeakValueDictionary()


def epoch_order(count: int, *, seed: int, epoch: int, share: int) -> np.ndarray:
    """(count,) permutation of 0 .. count - 1, unsigned, read-only; O(count log count) once, then shared.

    It is the sorting order of Philox's raw 64-bit words, not `Generator.permutation`: NumPy promises the words for ever
    but may change its shuffle, and workers with different NumPy versions must still agree on who reads what.
    """
    key = (count, seed, epoch, share)
    order = _orders.get(key)
    if order is None:
        words = np.random.Philox(np.random.SeedSequence([seed, epoch, share])).random_raw(count)
        order = np.argsort(words, kind="stable").astype(smallest_dtype(count))
        order.setflags(write=False)
        _orders[key] = order
    return order


def mixed_order(sizes: tuple[int, ...], taken: tuple[int, ...], *, seed: int, epoch: int) -> np.ndarray:
    """(N,) sequences of an epoch that takes `taken` of each part, shuffled; shared as above. N is the sum of `taken`; a
    part has `sizes` sequences, numbered after those of the parts before it. Its permutations follow one another without
    a gap: it goes on where the epoch before stopped, and reads all its sequences before it reads one again.
    """
    key = (sizes, taken, seed, epoch)
    order = _orders.get(key)
    if order is None:
        runs, first, dtype = [], 0, smallest_dtype(sum(sizes))
        for part, (size, count) in enumerate(zip(sizes, taken, strict=True), 1):
            start, stop = epoch * count, (epoch + 1) * count
            begun = range(start // size, -(-stop // size))  # of its permutations
            own = np.concatenate([epoch_order(size, seed=seed, epoch=one, share=part) for one in begun])
            runs.append(own[start % size :][:count].astype(dtype) + first)
            first += size
        order = np.concatenate(runs)[epoch_order(sum(taken), seed=seed, epoch=epoch, share=0)]
        order.setflags(write=False)
        _orders[key] = order
    return order


# Where a worker reads that does not know which data slices are its own: far behind every run's data, so in epochs that
# the run never comes to, and each member in a range of its own.
_SPARE = 1 << 52
_SPARE_PER_MEMBER = 1 << 32


def rows(
    start: int, fresh: Sequence[int], index: int, step: int, *, batch_size: int, reader: tuple[int, int] = (0, 1)
) -> np.ndarray:
    """(batch_size,) positions of one batch, int64.

    start: batches that come before the round's first. fresh: steps of the round by member. index, step: whose batch it
    is (index in the view), and which of its steps. reader: which worker of that member's island reads it, and of how
    many: together they read one batch of the member. ValueError where that member takes no such step.
    """
    if not (0 <= index < len(fresh) and 0 <= step < fresh[index]):
        raise ValueError(f"member {index} has no step {step} in a round of {list(fresh)} steps")
    read, positions, taking = _step(tuple(fresh), step)
    number, readers = reader
    rows = np.arange(batch_size, dtype=np.int64)
    return ((start + read) * batch_size + rows * taking + int(positions[index])) * readers + number


@lru_cache(maxsize=64)
def _step(fresh: tuple[int, ...], step: int) -> tuple[int, np.ndarray, int]:
    """(batches of the round before `step`, how many members before each one take that step, how many do in all)."""
    counts = np.array(fresh, dtype=np.int64)
    takes = counts > step
    return int(np.minimum(counts, step).sum()), np.cumsum(takes) - takes, int(takes.sum())


def spare_rows(member: int, step: int, *, batch_size: int, reader: tuple[int, int] = (0, 1)) -> np.ndarray:
    """(batch_size,) positions, int64, in no data slice: `member`'s `step`-th batch of unassigned samples."""
    if not 0 <= member < 1 << 20 or step < 0:
        raise ValueError(f"member {member} has no spare batch {step}")
    number, readers = reader
    first = _SPARE + member * _SPARE_PER_MEMBER + step * batch_size * readers
    return first + np.arange(batch_size, dtype=np.int64) * readers + number

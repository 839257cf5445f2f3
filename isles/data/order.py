"""The order of an epoch: one permutation of the sequences, from (seed, epoch, share) alone."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

from .tokenizer import smallest_dtype

# Shared by every loader of the process that is in the same epoch, and gone with the last of them.
_orders: WeakValueDictionary[tuple[int, int, int, int], np.ndarray] = WeakValueDictionary()


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

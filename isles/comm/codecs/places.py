"""Places of a few entries among many, as bytes: for what picks entries by their size, as many as there are.

    indices   4 bytes each
    blocks    2 bytes each, counted from the start of its block of 65,536 entries; 4 bytes a block for how many
    bitmap    1 bit an entry of all, picked or not

Places ascend. `pack` and `unpack` are inverse; a message says its form and its count beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.comm.errors import Malformed

FORMS = ("blocks", "indices", "bitmap")
_BLOCK = 1 << 16


def places_bytes(form: str, count: int, elements: int) -> int:
    """Length in bytes of `count` places among `elements` entries."""
    if form == "bitmap":
        return -(-elements // 8)
    return 4 * count if form == "indices" else 2 * count + 4 * -(-elements // _BLOCK)


def smallest(count: int, elements: int) -> str:
    """The form that takes the fewest bytes."""
    return min(FORMS, key=lambda form: places_bytes(form, count, elements))


def pack(form: str, places: Tensor, elements: int) -> Tensor:
    """int64 places (c,) among `elements` entries -> uint8 (places_bytes(form, c, elements),)."""
    held = places.numpy()
    if form == "indices":
        packed = held.astype(np.uint32).view(np.uint8)
    elif form == "blocks":
        counts = np.bincount(held >> 16, minlength=-(-elements // _BLOCK)).astype(np.uint32)
        packed = np.concatenate((counts.view(np.uint8), (held & _BLOCK - 1).astype(np.uint16).view(np.uint8)))
    else:
        mask = np.zeros(elements, dtype=np.bool_)
        mask[held] = True
        packed = np.packbits(mask, bitorder="little")
    return torch.from_numpy(packed)


def unpack(form: str, packed: Tensor, elements: int) -> Tensor:
    """The inverse, int64 (c,). Malformed for what is no such message: it is held against `elements`, not believed."""
    held = packed.numpy()
    if form == "indices":
        places = held.copy().view(np.uint32).astype(np.int64)  # a copy begins where numbers may
    elif form == "blocks":
        front = 4 * -(-elements // _BLOCK)
        counts, low = held[:front].copy().view(np.uint32), held[front:].copy().view(np.uint16)
        if counts.sum() != len(low):
            raise Malformed(-1, f"{len(low)} places were announced as {counts.sum()}")
        places = low + np.repeat(np.arange(len(counts), dtype=np.int64) << 16, counts)
    else:
        places = np.flatnonzero(np.unpackbits(held, count=elements, bitorder="little"))
    if len(places) and places.max() >= elements:
        raise Malformed(-1, f"place {places.max()} of {elements}")
    return torch.from_numpy(places)

"""Checksums over the blocks of an array on disk: what was spoilt there is noticed when it is first read, and nothing
else is read for that.
"""

from __future__ import annotations

import zlib

import numpy as np

BLOCK = 1 << 18  # bytes: a quarter of a millisecond to look at


def block_sums(array: np.ndarray) -> np.ndarray:
    """(blocks,) uint32, CRC-32 of each block of flat contiguous `array`."""
    data = np.ascontiguousarray(array).data.cast("B") if len(array) else b""
    return np.array([zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)], dtype=np.uint32)


class CheckedBlocks:
    """Flat `array` and what its blocks' checksums must be. where: what is told to be damaged."""

    def __init__(self, array: np.ndarray, sums: np.ndarray, where: str) -> None:
        self._data, self._sums, self._where = array, sums, where
        self._width = array.dtype.itemsize
        if len(sums) != -(-array.nbytes // BLOCK):
            raise ValueError(f"{where}: damaged ({len(sums)} checksums for {array.nbytes} bytes); delete its folder")
        self._seen = np.zeros(len(sums), dtype=bool)

    def check(self, start: int, stop: int) -> None:
        """Compare the blocks that hold entries start to stop, those that were not compared before. ValueError where one
        differs.
        """
        for block in range(start * self._width // BLOCK, -(-stop * self._width // BLOCK)):
            if not self._seen[block]:
                entries = BLOCK // self._width
                piece = np.ascontiguousarray(self._data[block * entries : (block + 1) * entries])
                if zlib.crc32(piece.data.cast("B")) != self._sums[block]:
                    raise ValueError(f"{self._where}: damaged in bytes {block * BLOCK} and on; delete its folder")
                self._seen[block] = True

"""The corpus: tokenised training and validation text, shared by every worker of a process and never changed.

Its arrays lie in memory, or on disk (`store`). An array on disk has checksums of its blocks (`CheckedBlocks`): damage
is noticed when a block is first read, without reading others.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from isles.data.tokenizer import Tokenizer

BLOCK = 1 << 18  # bytes: a quarter of a millisecond to look at


_PIECE = 64 * BLOCK


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Flat `array`, `_PIECE` bytes at a time."""
    step = _PIECE // array.itemsize
    for at in range(0, len(array), step):
        yield np.ascontiguousarray(array[at : at + step])
        _give_back(array)


def _give_back(array: np.ndarray) -> None:
    """Pages of a mapped `array` no longer count as this process's memory; a later look finds them again."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def block_sums(array: np.ndarray) -> np.ndarray:
    """(blocks,) uint32, CRC-32 of each block of flat contiguous `array`."""
    every = (piece.data.cast("B") for piece in pieces(array))
    sums = [zlib.crc32(data[at : at + BLOCK]) for data in every for at in range(0, len(data), BLOCK)]
    return np.array(sums, dtype=np.uint32)


class CheckedBlocks:
    """Flat `array` and what its blocks' checksums must be. where: what an error calls damaged."""

    def __init__(self, array: np.ndarray, sums: np.ndarray, where: str) -> None:
        self._data, self._sums, self._where = array, sums, where
        self._width = array.dtype.itemsize
        if len(sums) != -(-array.nbytes // BLOCK):
            raise ValueError(f"{where}: damaged ({len(sums)} checksums for {array.nbytes} bytes); delete its folder")
        self._seen = np.zeros(len(sums), dtype=bool)

    def check(self, start: int, stop: int) -> None:
        """Check the blocks of entries start to stop that were not checked before. ValueError where one differs."""
        for block in range(start * self._width // BLOCK, -(-stop * self._width // BLOCK)):
            if not self._seen[block]:
                entries = BLOCK // self._width
                piece = np.ascontiguousarray(self._data[block * entries : (block + 1) * entries])
                if zlib.crc32(piece.data.cast("B")) != self._sums[block]:
                    raise ValueError(f"{self._where}: damaged in bytes {block * BLOCK} and on; delete its folder")
                self._seen[block] = True
                _give_back(self._data)


SplitBy = Literal["document", "position"]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStream:
    """Documents laid end to end.

    tokens: (T,), the smallest unsigned type that holds the vocabulary; where some are not learned, which are ~id, the
    smallest signed one; in memory or memory-mapped; read-only. blocks: what tells whether they are as they were
    written, where they lie on disk; ask `check` before reading.
    bounds: (D + 1,) int64; document d is tokens[bounds[d] : bounds[d + 1]], never empty.
    files: the files that were read; file_of: (D,), the index into `files` of each document.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    files: tuple[str, ...]
    file_of: np.ndarray
    blocks: CheckedBlocks | None = None

    def __post_init__(self) -> None:
        for array in (self.tokens, self.bounds, self.file_of):
            array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def ranges(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """(first token, one after the last) of the parts of these names, in the corpus's order; of [""]: all."""
        if names == [""]:
            return [(0, len(self))]
        numbers = {name: number for number, name in enumerate(names)}
        part_D = np.array([numbers.get(file.partition("/")[0], -1) for file in self.files])[self.file_of]
        parts = [np.flatnonzero(part_D == number) for number in range(len(names))]
        return [(int(self.bounds[part[0]]), int(self.bounds[part[-1] + 1])) if len(part) else (0, 0) for part in parts]

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """ValueError where tokens start to stop are not as they were written to the disk."""
        if self.blocks is not None:
            self.blocks.check(start, len(self.tokens) if stop is None else stop)


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Tokenised text in two parts. One object serves any number of loaders.

    name: what was read ("standard library", or the path). split_by: whether whole documents or their ends were kept out
    of training. sha256: hex digest of the tokens and document bounds of both parts, so equal exactly when a run would
    see the same data. row: tokens of each document where documents are sequences that were cut beforehand and stand
    alone (a share of a pool, such as an expert's); 0: running text. text_sha256: hex digest of the text that was read.
    """

    name: str
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    split_by: SplitBy
    sha256: str
    row: int = 0
    text_sha256: str = ""

    @property
    def masks(self) -> bool:
        """Whether there are tokens that are not to be learned."""
        return self.train.tokens.dtype.kind == "i"


def rows_corpus(name: str, tokenizer: Tokenizer, train_NR: np.ndarray, validation_NR: np.ndarray) -> Corpus:
    """A corpus of sequences (N, R) that a loader gives as they are: R is the context + 1. Only shapes are checked.

    ValueError where there is no sequence to train on.
    """
    if not len(train_NR):
        raise ValueError(f"{name}: has no sequence to train on; give more text, or fewer shares")
    row = train_NR.shape[1]
    assert validation_NR.shape[1] == row
    train, validation = _rows(train_NR), _rows(validation_NR)
    return Corpus(
        name=name,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        split_by="document",
        sha256=content_sha256(train, validation),
        row=row,
    )


def _rows(tokens_NR: np.ndarray) -> TokenStream:
    count, row = tokens_NR.shape
    bounds = np.arange(count + 1, dtype=np.int64) * row
    tokens = np.ascontiguousarray(tokens_NR).reshape(-1)
    return TokenStream(tokens=tokens, bounds=bounds, files=("",), file_of=np.zeros(count, dtype=np.uint8))


def content_sha256(train: TokenStream, validation: TokenStream) -> str:
    """Hex digest over the tokens and the document bounds of both parts, little-endian whatever the machine."""
    digest = hashlib.sha256()
    for stream in (train, validation):
        for array in (stream.bounds, stream.tokens):
            digest.update(f"{array.dtype.name} {len(array)}\n".encode())
            for piece in pieces(array):
                digest.update(np.ascontiguousarray(piece, dtype=array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()

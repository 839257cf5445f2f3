"""The corpus: tokenised training and validation text, shared by every worker of a process and never changed.

An array on disk has checksums of its blocks (`CheckedBlocks`): damage is noticed when a block is first read, without
reading others.

A corpus on disk: one `.npy` an array, memory-mapped on opening, and a manifest in JSON.

Processes that start together may each make the corpus; each writes a folder of its own and the first to move it into
place wins, so a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isles.base.parsing import parse_json
from isles.data.tokenizer import Tokenizer

BLOCK = 1 << 18  # bytes: a quarter of a millisecond to look at


def block_sums(array: np.ndarray) -> np.ndarray:
    """(blocks,) uint32, CRC-32 of each block of flat contiguous `array`."""
    data = np.ascontiguousarray(array).data.cast("B") if len(array) else b""
    return np.array([zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)], dtype=np.uint32)


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


SplitBy = Literal["document", "position"]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStream:
    """Documents laid end to end.

    tokens: (T,), the smallest unsigned type that holds the vocabulary; in memory or memory-mapped; read-only. blocks:
    what tells whether they are as they were written, where they lie on disk; ask `check` before reading.
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

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """ValueError where tokens start to stop are not as they were written to the disk."""
        if self.blocks is not None:
            self.blocks.check(start, len(self.tokens) if stop is None else stop)


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Tokenised text in two disjoint parts. One object serves any number of loaders.

    name: what was read ("standard library", or the path). split_by: whether whole documents or their ends were kept out
    of training. sha256: hex digest of the tokens and document bounds of both parts, so equal exactly when a run would
    see the same data. row: tokens of each document where documents are sequences that were cut beforehand and stand
    alone (a share of a pool, such as an expert's); 0: running text.
    """

    name: str
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    split_by: SplitBy
    sha256: str
    row: int = 0


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
            digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


FORMAT = 3  # raise it when reading, splitting or storing changes, so that no older corpus is taken for a new one
_PARTS = ("train", "validation")
_ARRAYS = ("tokens", "bounds", "file_of")
_SUMS = "sums"  # of the blocks of its tokens
_SMALL = ("bounds", "file_of", _SUMS)  # compared whole when it is opened


def save_corpus(corpus: Corpus, folder: Path) -> Corpus:
    """Write `corpus` to `folder` and return it opened from there, so that its memory is the shared mapping."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(f"data.cache: {folder.parent} cannot be written ({error.strerror}); give another") from None
    try:
        for part in _PARTS:
            for array in _ARRAYS:
                np.save(building / f"{part}-{array}.npy", getattr(getattr(corpus, part), array), allow_pickle=False)
            np.save(building / f"{part}-{_SUMS}.npy", block_sums(getattr(corpus, part).tokens), allow_pickle=False)
        manifest = {
            "format": FORMAT,
            "name": corpus.name,
            "split_by": corpus.split_by,
            "sha256": corpus.sha256,
            "row": corpus.row,
            "tokenizer": corpus.tokenizer.fingerprint,
            "files": list(corpus.train.files),
            "sums": {f"{part}-{array}": _sum_of(building, part, array) for part in _PARTS for array in _SMALL},
        }
        (building / "manifest.json").write_text(json.dumps({"check": _check(manifest), **manifest}), encoding="utf-8")
        building.chmod(0o755)  # mkdtemp makes it private, but the folder around it may be one that several users share
        try:
            building.rename(folder)
        except OSError:
            if not (folder / "manifest.json").is_file():
                raise
            # Another process was first; its corpus is the same.
    finally:
        shutil.rmtree(building, ignore_errors=True)
    stored = open_corpus(folder, corpus.tokenizer)
    assert stored is not None
    return stored


def is_stored(path: str) -> bool:
    """Whether `path` is a folder that `save_corpus` wrote: then it can stand as `data.path`."""
    folder = Path(path).expanduser()
    return (folder / "manifest.json").is_file() and (folder / "train-tokens.npy").is_file()


def open_corpus(folder: Path, tokenizer: Tokenizer) -> Corpus | None:
    """The corpus in `folder`, memory-mapped; None where there is none, ValueError where it cannot be read."""
    if not folder.exists():
        return None
    try:
        manifest = parse_json((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']} instead of {FORMAT}")
        if manifest.pop("check") != _check(manifest):
            raise ValueError("its manifest")
        for part, array in ((part, array) for part in _PARTS for array in _SMALL):
            if manifest["sums"][f"{part}-{array}"] != _sum_of(folder, part, array):
                raise ValueError(f"{part}-{array}.npy")
        made_with = manifest["tokenizer"]
        parts = {part: _open_stream(folder, part, tuple(manifest["files"])) for part in _PARTS}
        corpus = Corpus(
            name=manifest["name"],
            tokenizer=tokenizer,
            train=parts["train"],
            validation=parts["validation"],
            split_by=manifest["split_by"],
            sha256=manifest["sha256"],
            row=manifest["row"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the stored corpus {folder} is damaged ({error}); delete that folder") from None
    if made_with != tokenizer.fingerprint:
        raise ValueError(f"data.tokenizer = {tokenizer.name!r}: {folder} was made with another one; name that one")
    return corpus


def _open_stream(folder: Path, part: str, files: tuple[str, ...]) -> TokenStream:
    arrays = {array: np.load(folder / f"{part}-{array}.npy", mmap_mode="r", allow_pickle=False) for array in _ARRAYS}
    sums = np.load(folder / f"{part}-{_SUMS}.npy", allow_pickle=False)
    # A plain view: indexing the memmap class costs several times more.
    plain = {name: np.asarray(array) for name, array in arrays.items()}
    blocks = CheckedBlocks(plain["tokens"], sums, f"data: {folder / f'{part}-tokens.npy'}")
    return TokenStream(files=files, blocks=blocks, **plain)


def _sum_of(folder: Path, part: str, array: str) -> int:
    return zlib.crc32((folder / f"{part}-{array}.npy").read_bytes())


def _check(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())

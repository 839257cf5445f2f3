"""A corpus on disk: one `.npy` an array, memory-mapped on opening, and a manifest in JSON.

Processes that start together may each make the corpus; each writes a folder of its own and the first to move it into
place wins, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isles.base.parsing import parse_json
from isles.data.corpus import CheckedBlocks, Corpus, TokenStream, block_sums
from isles.data.tokenizer import Tokenizer

FORMAT = 3  # raise it when reading, splitting or storing changes, so that no older corpus is taken for a new one
_PARTS = ("train", "validation")
_ARRAYS = ("tokens", "bounds", "file_of")
_SUMS = "sums"  # of the blocks of its tokens
_SMALL = ("bounds", "file_of", _SUMS)  # compared whole when it is opened


def save_corpus(corpus: Corpus, folder: Path) -> Corpus:
    """Write `corpus` to `folder` and return it opened from there, so that its memory is the shared mapping."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
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
        building.chmod(0o755)  # mkdtemp makes it private, but the cache may be shared by the users of a machine
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

"""Corpora on disk: a folder with one `.npy` an array, memory-mapped on opening, and a manifest in JSON.

A folder is written as a `Draft` in FOLDER.part and renamed when it is whole, so a reader never sees half of one. One
process at a time holds a draft; others wait for it. If that process stops, the next one goes on after what was saved.

FOLDER.part/lock        held by the process that writes (flock)
FOLDER.part/ids         of all documents, raw
FOLDER.part/documents   a `DOCUMENT` each
FOLDER.part/place.json  how much of both is valid, and up to where the text was read
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isles.base.durable import write_text
from isles.base.parsing import parse_json
from isles.data.config import DataConfig
from isles.data.corpus import CheckedBlocks, Corpus, TokenStream, block_sums, pieces
from isles.data.parts import named
from isles.data.tokenizer import Ids, Tokenizer

FORMAT = 5  # raise it when reading, splitting or storing changes, so that no older corpus is taken for a new one
DOCUMENT = np.dtype([("tokens", "<i8"), ("file", "<i8"), ("hash", "<f8")])  # hash: of its name
_PARTS = ("train", "validation")
_ARRAYS = ("tokens", "bounds", "file_of")
_SUMS = "sums"  # of the blocks of its tokens
_SMALL = ("bounds", "file_of", _SUMS)  # compared whole when it is opened
_LOOK, _SILENCE = 0.1, 600.0  # seconds: between two looks at a draft; without a change until it counts as stuck
_COPIED = 1 << 20  # bytes, or ids, at a time


class _Log:
    """A file that grows, and the CRC-32 of its `size` bytes."""

    def __init__(self, path: Path, size: int, crc: int) -> None:
        self.path, self.size, self.crc = path, 0, 0
        path.touch()
        if path.stat().st_size > size >= 0:
            os.truncate(path, size)
        with path.open("rb") as file:
            while data := file.read(_COPIED):
                self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)
        if (self.size, self.crc) != (size, crc):
            raise ValueError(f"{path}: is not as it was written")
        self.file = path.open("ab")

    def add(self, data: bytes) -> None:
        self.file.write(data)
        self.file.flush()
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)


class Draft:
    """A corpus in the making, held by this process; it begins after what is valid of an earlier one.

    documents: how many are whole. characters, tokens: of the one after them. text: hex digest of the text before.
    """

    def __init__(self, part: Path, dtype: np.dtype) -> None:
        self.part, self.dtype = part, dtype
        try:
            place = parse_json((part / "place.json").read_text(encoding="utf-8"))
            if place.pop("check") != _check(place):
                raise ValueError
            self._open(**place)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.restart()

    def _open(self, ids: list[int], documents: list[int], characters: int, tokens: int, text: str) -> None:
        self._ids, self._documents = _Log(self.part / "ids", *ids), _Log(self.part / "documents", *documents)
        self.characters, self.tokens, self.text = characters, tokens, text

    @property
    def documents(self) -> int:
        return self._documents.size // DOCUMENT.itemsize

    def restart(self) -> None:
        """Forget all of it."""
        self._open([0, 0], [0, 0], 0, 0, hashlib.sha256().hexdigest())

    def add(self, ids: Ids) -> None:
        """The next ids of the document."""
        self._ids.add(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(ids)

    def end_document(self, file: int, unit_hash: float) -> None:
        """The document is whole. file: its number. unit_hash: of its name."""
        self._documents.add(np.array((self.tokens, file, unit_hash), dtype=DOCUMENT).tobytes())
        self.tokens = self.characters = 0

    def save(self, text: str) -> None:
        """Another process goes on from here. text: digest of what was read."""
        place: dict[str, Any] = {"characters": self.characters, "tokens": self.tokens, "text": text}
        for log in (self._ids, self._documents):
            place[log.path.name] = [log.size, log.crc]
        write_text(self.part / "place.json", json.dumps({"check": _check(place), **place}))

    def close(self) -> None:
        """Close its files."""
        self._ids.file.close()
        self._documents.file.close()

    def all_documents(self) -> np.ndarray:
        """(D,) of `DOCUMENT`. Nothing is added any more."""
        return np.fromfile(self._documents.path, dtype=DOCUMENT)

    def narrow(self, dtype: np.dtype) -> None:
        """From now on its streams are of `dtype`, if no id is below 0. Nothing is added any more."""
        ids, self._written = np.memmap(self._ids.path, dtype=self.dtype, mode="r"), self.dtype
        if self.dtype.kind != "i" or all(piece.min() >= 0 for piece in pieces(ids)):
            self.dtype = dtype

    def stream(self, part: str, start_D: np.ndarray, length_D: np.ndarray, **where: Any) -> TokenStream:
        """Write ids start to start + length of each document as the tokens of `part`; none is no document.

        where: `files`, `file_of` of the stream; of all D documents.
        """
        there = length_D > 0
        start_D, stop_D = start_D[there], (start_D + length_D)[there]
        bounds = np.append(np.zeros(1, dtype=np.int64), np.cumsum(length_D[there]))
        first_D = np.append(True, start_D[1:] != stop_D[:-1])[: len(start_D)]  # neighbours are copied together
        last_D = np.append(first_D[1:], True)[: len(start_D)]
        head = {"descr": self.dtype.str, "fortran_order": False, "shape": (int(bounds[-1]),)}
        with (self.part / f"{part}-tokens.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, head)
            for start, stop in zip(start_D[first_D], stop_D[last_D], strict=True):
                for at in range(start, stop, _COPIED):
                    offset = at * self._written.itemsize
                    ids = np.fromfile(self._ids.path, self._written, min(_COPIED, stop - at), offset=offset)
                    file.write(ids.astype(self.dtype, copy=False).data)
        return TokenStream(
            tokens=_mapped(Path(file.name)), bounds=bounds, files=where["files"], file_of=where["file_of"][there]
        )


def _write(corpus: Corpus, folder: Path) -> None:
    """Write all of it but tokens that a draft has written; only these files stay, and the lock."""
    for part in _PARTS:
        stream = getattr(corpus, part)
        for array in _ARRAYS:
            if not (file := folder / f"{part}-{array}.npy").exists():
                np.save(file, getattr(stream, array), allow_pickle=False)
        np.save(folder / f"{part}-{_SUMS}.npy", block_sums(stream.tokens), allow_pickle=False)
    manifest = {
        "format": FORMAT,
        "name": corpus.name,
        "split_by": corpus.split_by,
        "sha256": corpus.sha256,
        "text_sha256": corpus.text_sha256,
        "row": corpus.row,
        "tokenizer": corpus.tokenizer.fingerprint,
        "files": list(corpus.train.files),
        "sums": {f"{part}-{array}": _sum_of(folder, part, array) for part in _PARTS for array in _SMALL},
    }
    (folder / "manifest.json").write_text(json.dumps({"check": _check(manifest), **manifest}), encoding="utf-8")
    for name in ("ids", "documents", "place.json"):
        (folder / name).unlink(missing_ok=True)


def make_corpus(
    folder: Path, tokenizer: Tokenizer, make: Callable[[Path], Corpus], notify: Callable[[str], None] | None = None
) -> Corpus:
    """The corpus in `folder`, memory-mapped. Where there is none, one process writes it while others wait.

    make: returns the corpus; it may have a `Draft` in the folder that it is given. notify: called once where this
    process waits. ValueError where it cannot be read, OSError where it cannot be written or locked.
    """
    part = folder.with_name(folder.name + ".part")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while (corpus := open_corpus(folder, tokenizer)) is None:
        part.mkdir(exist_ok=True)
        with _held(part, notify) as held:
            if held and folder.exists():
                shutil.rmtree(part)  # this process made it while another one renamed its own
            elif held:
                for file in (*part.glob("*.npy"), *part.glob("fetched*")):
                    file.unlink()  # perhaps not whole
                try:
                    _write(make(part), part)
                except ValueError as error:
                    if not isinstance(error.__cause__, OSError):  # of the text: nobody goes on with this draft
                        shutil.rmtree(part)
                    raise
                part.rename(folder)
                (folder / "lock").unlink()
    return corpus


def not_writable(folder: Path, error: OSError) -> ValueError:
    """What a user is told of an error of `make_corpus`."""
    return ValueError(f"data.cache: {folder.parent} cannot be written ({error.strerror}); give another")


@contextlib.contextmanager
def _held(part: Path, notify: Callable[[str], None] | None) -> Iterator[bool]:
    """Hold the draft; False where another process held it and finished or removed it meanwhile."""
    since, seen = time.monotonic(), -1
    with contextlib.ExitStack() as opened:
        held = False
        with contextlib.suppress(FileNotFoundError):
            lock = opened.enter_context((part / "lock").open("ab"))
            while not held:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if notify is not None and seen < 0:
                    notify("another process prepares this data: waiting for it")
                size = sum(file.stat().st_size for file in part.iterdir())
                if size != seen:
                    since, seen = time.monotonic(), size
                if time.monotonic() - since > _SILENCE:
                    raise ValueError(f"data.cache: another process has held {part} for {_SILENCE:.0f} s; end it")
                time.sleep(_LOOK)
            held = os.path.samestat(os.fstat(lock.fileno()), (part / "lock").stat())
        yield held


def save_corpus(corpus: Corpus, folder: Path) -> Corpus:
    """Write `corpus` to `folder`, unless there is one already, and return what is opened from there, so that its memory
    is the shared mapping.
    """
    try:
        return make_corpus(folder, corpus.tokenizer, lambda part: corpus)
    except OSError as error:
        raise not_writable(folder, error) from error


def is_stored(config: DataConfig) -> bool:
    """Whether `data.path` is a folder that `save_corpus` wrote. ValueError for one beside, or as, validation_path."""
    if config.source:
        return False  # what a path means is for the class to say
    folders = [Path(x).expanduser() for one in (config.path, config.validation_path) for x in named(one).values()]
    found = [(one / "manifest.json").is_file() and (one / "train-tokens.npy").is_file() for one in folders]
    key = "validation_path" if config.validation_path else "path"
    if (config.validation_path or isinstance(config.path, dict)) and any(found):
        what = "a stored corpus has its own split; leave it out, or give files"
        raise ValueError(f"data.{key} = {getattr(config, key)!r}: {what}")
    return found[0]


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
            text_sha256=manifest["text_sha256"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the stored corpus {folder} is damaged ({error}); delete that folder") from None
    if made_with != tokenizer.fingerprint:
        raise ValueError(f"data.tokenizer = {tokenizer.name!r}: {folder} was made with another one; name that one")
    return corpus


def _open_stream(folder: Path, part: str, files: tuple[str, ...]) -> TokenStream:
    arrays = {array: _mapped(folder / f"{part}-{array}.npy") for array in _ARRAYS}
    sums = np.load(folder / f"{part}-{_SUMS}.npy", allow_pickle=False)
    blocks = CheckedBlocks(arrays["tokens"], sums, f"data: {folder / f'{part}-tokens.npy'}")
    return TokenStream(files=files, blocks=blocks, **arrays)


def _mapped(file: Path) -> np.ndarray:
    # A plain view: indexing the memmap class costs several times more.
    return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))


def _sum_of(folder: Path, part: str, array: str) -> int:
    return zlib.crc32((folder / f"{part}-{array}.npy").read_bytes())


def _check(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())

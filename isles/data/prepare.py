"""From files to a corpus (`load_corpus`: once a process and, on request, once a machine): read, tokenise, and keep
validation out of training.

Which side a document falls on is decided by a hash of its name, so it depends neither on the machine nor on the other
documents. Where that leaves validation less than half or more than twice its share (one book, a few files of unequal
size) every document is cut in two instead and its end goes to validation. Either way no token is on both sides.

`list_sources`: the files behind `data.path`, in an order that is the same on every machine. `read_documents`: their
texts, by a reader for each format. A document is a text file, or a row.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isles.base.parsing import parse_json
from isles.data.config import DataConfig
from isles.data.corpus import FORMAT, Corpus, SplitBy, TokenStream, content_sha256, is_stored, open_corpus, save_corpus
from isles.data.tokenizer import Ids, Tokenizer, load_tokenizer, smallest_dtype

SourceKind = Literal["text", "jsonl", "parquet", "dataset"]

_KINDS: dict[str, SourceKind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

# Tests are not the library, and the two generated packages would spoil a small corpus: `encodings` is 1.4 MB of nearly
# equal character tables (a copy in validation of what training saw), `pydoc_data` one file of 0.8 MB of prose.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
# Written when Python is built or installed, so they differ between machines with the same Python.
_BUILT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Source:
    """One file of a corpus (or one saved dataset folder). `name` is its path relative to `data.path`, with slashes."""

    path: Path
    name: str
    kind: SourceKind
    alone: bool  # named by the user itself, not found in a folder: then nothing about it is passed over

    def document_name(self, row: int | None = None) -> str:
        """What the split hashes. A file that stands alone adds nothing: its path may differ between machines."""
        name = "" if self.alone else self.name
        return name if row is None else f"{name}#{row}"


def list_sources(path: str) -> list[Source]:
    """The sources behind `data.path`, sorted by name. Hidden files and folders are left out.

    ValueError where the path does not exist or the folder holds no file.
    """
    if not path:
        return _standard_library()
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(
            f"data.path = {path!r} does not exist; give a file or a folder, or leave it empty for the standard library"
        )
    if root.is_file():
        return [Source(root, root.name, _kind(root), alone=True)]
    if _is_saved_dataset(root):
        return [Source(root, root.name, "dataset", alone=True)]
    sources = [
        Source(file, file.relative_to(root).as_posix(), _kind(file), alone=False)
        for file in _walk(root, enter=lambda folder: not folder.startswith(".") and folder != "__pycache__")
        if not file.name.startswith(".")
    ]
    if not sources:
        raise ValueError(f"data.path = {path!r} is a folder without a readable file; put text, JSONL or Parquet there")
    return sorted(sources, key=lambda source: source.name)


def fingerprint(sources: list[Source]) -> tuple[tuple[str, str, int, int], ...]:
    """(path, name, bytes, mtime in ns) of every file: changes when a file is written, added, removed or renamed."""
    marks = []
    for source in sources:
        files = _walk(source.path, enter=lambda _: True) if source.kind == "dataset" else [source.path]
        for file in sorted(files):
            stat = file.stat()
            marks.append((str(file.resolve()), source.name, stat.st_size, stat.st_mtime_ns))
    return tuple(marks)


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        Source(file, file.relative_to(root).as_posix(), "text", alone=False)
        for file in _walk(root, enter=lambda folder: folder not in _NOT_LIBRARY and not folder.startswith("config-"))
        if file.suffix == ".py" and not file.name.startswith(_BUILT_FILES)
    ]
    if not sources:
        raise ValueError(f"data.path is empty and {root} holds no standard library source; give a file or folder")
    return sorted(sources, key=lambda source: source.name)


def _walk(root: Path, enter: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if enter(name)]
        for name in files:
            if (file := Path(folder, name)).is_file():  # not a dangling link or a socket
                yield file


def _kind(file: Path) -> SourceKind:
    return _KINDS.get(file.suffix.lower(), "text")


def _is_saved_dataset(folder: Path) -> bool:
    one_split = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return one_split or (folder / "dataset_dict.json").is_file()


_HEAD_BYTES = 8192
_GPT2_IDS = 50256
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_documents(source: Source, text_key: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every document of `source` that is not empty, in order.

    The name is `Source.document_name`. A binary file found in a folder gives nothing; one that `data.path` names itself
    is a ValueError, as is anything else that cannot be read.
    """
    for name, text in _READERS[source.kind](source, text_key):
        if text:
            yield name, text


def _read_text(source: Source, text_key: str) -> Iterator[tuple[str, str]]:
    with source.path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        # A NUL near the start marks an image or an archive; UTF-16 has NULs too but is text that can be converted.
        if not source.alone and b"\0" in head and not head.startswith(_UTF16_MARKS):
            return
        content = head + file.read()
    if b"\0" in content:
        if not source.alone and not content.startswith(_UTF16_MARKS):
            return
        raise ValueError(f"data.path: {source.path} has NUL bytes and is no text: {_looks_like(content)}")
    try:
        yield source.document_name(), content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        hint = _looks_like(content) if _has_ids(content) else "convert it with iconv -t utf-8, or take it out"
        raise ValueError(
            f"data.path: {source.path} is not UTF-8 text (byte {content[error.start]:#04x} at offset {error.start}); "
            f"{hint}"
        ) from None


def _looks_like(content: bytes) -> str:
    """What a file that is no text seems to be, and what to do."""
    if content.startswith(_UTF16_MARKS):
        return "it looks like UTF-16; convert it with iconv -f utf-16 -t utf-8"
    if content.isascii() and not any(content[1::2]):
        return "it looks like numbers of two bytes, such as token ids (nanoGPT's .bin), or UTF-16; give the text itself"
    if _has_ids(content):
        return "it looks like token ids of two bytes (nanoGPT's .bin); give the text that they were made from"
    return "it looks like a binary file; give text, JSONL or Parquet"


def _has_ids(content: bytes) -> bool:
    """Whether it may be ids of a vocabulary such as GPT-2's, as 16-bit numbers."""
    if len(content) % 2:
        return False
    ids = np.frombuffer(content, dtype="<u2")
    return len(ids) > 0 and int(ids.max()) <= _GPT2_IDS and float((ids < 1 << 12).mean()) > 0.05


def _read_jsonl(source: Source, text_key: str) -> Iterator[tuple[str, str]]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise ValueError(f"data.path: {source.path} line {number} is not UTF-8; convert it") from None
            except ValueError as error:
                raise ValueError(f"data.path: {source.path} line {number} is not JSON ({error}); correct it") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"data.path: {source.path} line {number} is not an object; write {{{json.dumps(text_key)}: ...}}"
                )
            if text_key not in row:
                raise _no_column(source, f" line {number}", text_key, list(row))
            yield source.document_name(number), _text(row[text_key], source, text_key, f"line {number}")


def _read_parquet(source: Source, text_key: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'data.path: {source.path} needs the package pyarrow; pip install ".[data]"') from None
    try:
        table = pyarrow.parquet.ParquetFile(source.path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"data.path: {source.path} is not a Parquet file ({reason}); write it again") from None
    with table:
        names = table.schema_arrow.names
        if text_key not in names:
            raise _no_column(source, "", text_key, names)
        number = 0
        for batch in table.iter_batches(columns=[text_key]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield source.document_name(number), _text(value, source, text_key, f"row {number}")


def _read_dataset(source: Source, text_key: str) -> Iterator[tuple[str, str]]:
    """A folder written by `save_to_disk`; of a dictionary of splits, `train` (the others are meant for tests)."""
    try:
        import datasets  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ValueError(
            f'data.path: {source.path} is a saved dataset and needs the package datasets; pip install ".[hf]"'
        ) from None
    table = datasets.load_from_disk(str(source.path))
    if isinstance(table, datasets.DatasetDict):
        if "train" not in table:
            raise ValueError(
                f"data.path: {source.path} has no split 'train' (it has {_listed(table)}); give one split's folder"
            )
        table = table["train"]
    if text_key not in table.column_names:
        raise _no_column(source, "", text_key, table.column_names)
    rows: Iterable[Any] = table.select_columns([text_key])
    for number, row in enumerate(rows, start=1):
        yield source.document_name(number), _text(row[text_key], source, text_key, f"row {number}")


_READERS: dict[SourceKind, Callable[[Source, str], Iterator[tuple[str, str]]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}


def _text(value: Any, source: Source, text_key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"data.text_key = {text_key!r} holds {type(value).__name__} instead of text in {where} of {source.path}; "
            "name another column, or drop the row"
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no character
            raise ValueError(
                f"data.text_key = {text_key!r} holds half a surrogate pair in {where} of {source.path}; correct the row"
            ) from None
    return value


def _no_column(source: Source, where: str, text_key: str, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"data.text_key = {text_key!r} is missing in {source.path}{where}; set it to one of: {_listed(names)}"
    )


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "(nothing)"


_BATCH_CHARACTERS = 4_000_000  # enough for a tokenizer to fill the cores, few enough to hold as text


def prepare_corpus(
    sources: Sequence[Source], tokenizer: Tokenizer, *, path: str, text_key: str, validation_fraction: float
) -> Corpus:
    """Read every source and split it. Needs memory for about three times the tokens. ValueError: no text."""
    hashes: list[float] = []
    file_of: list[int] = []
    chunks: list[Ids] = []
    lengths: list[int] = []
    for batch in _batches(sources, text_key):
        ids = tokenizer.encode_batch([_ended(text, tokenizer) for _, _, text in batch])
        if tokenizer.eos_id is not None:
            ids = [np.append(some, np.array(tokenizer.eos_id, dtype=some.dtype)) for some in ids]
        file_of += [file for file, _, _ in batch]
        hashes += [_unit_hash(name) for _, name, _ in batch]
        lengths += [len(some) for some in ids]
        chunks.append(np.concatenate(ids).astype(smallest_dtype(tokenizer.vocab_size), copy=False))
    if not sum(lengths):
        raise ValueError(
            f"data.path = {path!r} holds no text ({len(sources)} files, all empty or binary); give files with text"
        )
    _warn_of_left_out(sources, set(file_of))

    length_D = np.array(lengths, dtype=np.int64)
    trained_D, split_by = _training_lengths(np.array(hashes), length_D, validation_fraction)
    tokens = np.concatenate(chunks)
    del chunks
    # Training and validation lengths alternate, document by document; one of the two is 0 when documents stay whole.
    pieces = np.stack([trained_D, length_D - trained_D], axis=1).ravel()
    in_training = np.repeat(np.tile([True, False], len(length_D)), pieces)
    files = tuple(source.name for source in sources)
    file_D = np.array(file_of, dtype=smallest_dtype(len(files)))
    train = _stream(tokens[in_training], trained_D, files, file_D)
    np.logical_not(in_training, out=in_training)  # a byte a token: no second mask
    validation = _stream(tokens[in_training], length_D - trained_D, files, file_D)
    return Corpus(
        name=path or "standard library",
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        split_by=split_by,
        sha256=content_sha256(train, validation),
    )


def _batches(sources: Sequence[Source], text_key: str) -> Iterator[list[tuple[int, str, str]]]:
    """Lists of (index of the file, document name, text), in order, of a bounded number of characters."""
    batch: list[tuple[int, str, str]] = []
    characters = 0
    for index, source in enumerate(sources):
        for name, text in read_documents(source, text_key):
            batch.append((index, name, text))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _ended(text: str, tokenizer: Tokenizer) -> str:
    """Without an id that ends a document a newline does, so that the last word of one is not glued to the next."""
    return text if tokenizer.eos_id is not None or text.endswith("\n") else text + "\n"


def _training_lengths(hash_D: np.ndarray, length_D: np.ndarray, fraction: float) -> tuple[np.ndarray, SplitBy]:
    """(D,) number of leading tokens of each document that training sees; the rest is validation."""
    if fraction == 0:
        return length_D, "document"
    in_validation_D = hash_D < fraction
    share = length_D[in_validation_D].sum() / length_D.sum()
    if fraction / 2 <= share <= 2 * fraction and share < 1:
        return np.where(in_validation_D, 0, length_D), "document"
    validation_D = np.ceil(length_D * fraction).astype(np.int64)
    return np.maximum(length_D - validation_D, np.minimum(length_D, 1)), "position"


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def _stream(tokens: np.ndarray, length_D: np.ndarray, files: tuple[str, ...], file_D: np.ndarray) -> TokenStream:
    present = length_D > 0
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length_D[present])])
    return TokenStream(tokens=tokens, bounds=bounds, files=files, file_of=file_D[present])


def _warn_of_left_out(sources: Sequence[Source], read: set[int]) -> None:
    """Empty files are no loss; files with content that gave no document are worth a word."""
    silent = [source for index, source in enumerate(sources) if index not in read]
    binary = [source.name for source in silent if source.kind != "dataset" and source.path.stat().st_size]
    if binary:
        warnings.warn(
            f"data.path: {len(binary)} of {len(sources)} files hold no text and were left out, among them {binary[0]}",
            stacklevel=4,
        )


_REMEMBERED = 4  # corpora: a comparison of tokenizers or of text needs a few, and each may be large
_corpora: dict[tuple[str, str], Corpus] = {}  # by content and cache folder, the one used last at the end
_lock = threading.Lock()  # virtual workers are threads: the second waits for the corpus instead of making another


def load_corpus(config: DataConfig) -> Corpus:
    """Read, tokenise and split the text of `config`; a second call in the process returns the same object.

    The files are looked at on every call (names, sizes, times of change), and a change makes a new corpus. With
    `config.cache` the arrays are saved in that folder and memory-mapped, so that later processes read nothing else. A
    `config.path` that is itself such a folder (`save_corpus`) is opened as it is, with the split that it has.
    ValueError, one line with key and what to do, where something cannot be read or holds no text.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if is_stored(config.path):
        stored = open_corpus(Path(config.path).expanduser(), tokenizer)
        assert stored is not None
        return stored
    sources = list_sources(config.path)
    fraction = float(config.validation_fraction)
    parts = [FORMAT, config.path, fingerprint(sources), tokenizer.fingerprint, config.text_key, fraction]
    content = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    key = (content, config.cache)
    with _lock:
        corpus = _corpora.pop(key, None)
        folder = Path(config.cache).expanduser() / content if config.cache else None
        if corpus is None and folder is not None:
            corpus = open_corpus(folder, tokenizer)
        if corpus is None:
            corpus = prepare_corpus(
                sources, tokenizer, path=config.path, text_key=config.text_key, validation_fraction=fraction
            )
            if folder is not None:
                corpus = save_corpus(corpus, folder)
        _corpora[key] = corpus
        while len(_corpora) > _REMEMBERED:
            del _corpora[next(iter(_corpora))]
    return corpus

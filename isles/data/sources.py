"""The files behind `data.path` and `data.validation_path`, in an order that is the same on every machine, and their
documents, by a reader for each format. A document is a text file, or a row; its text comes in chunks, so that no file
needs memory for all of it.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np

from isles.base.errors import as_typed
from isles.base.imports import describe
from isles.base.marks import IGNORED
from isles.base.parsing import parse_json
from isles.base.parts import make, names_code
from isles.data.config import IDS, DataConfig
from isles.data.mds import INDEX, Shard, read_index, read_rows
from isles.data.parts import named
from isles.data.remote import Origin, fetched, list_files
from isles.data.store import is_stored
from isles.data.tokenizer import Ids

SourceKind = Literal["text", "jsonl", "parquet", "dataset", "ids", "mds", "own"]
SourceKey = Literal["path", "validation_path"]
Chunk = str | Ids

_ROWS: dict[str, SourceKind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_KINDS: tuple[dict[str, SourceKind], ...] = (_ROWS, {**_ROWS, ".bin": "ids", ".npy": "ids"})  # of text, of ids

# Tests are not the library, and the two generated packages would spoil a small corpus: `encodings` is 1.4 MB of nearly
# equal character tables (a copy in validation of what training saw), `pydoc_data` one file of 0.8 MB of prose.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
# Written when Python is built or installed, so they differ between machines with the same Python.
_BUILT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Source:
    """One file of a corpus (or one saved dataset's folder).

    name: its path relative to `data.path`, with slashes. key: of [data], that led to it. validates: whether all of it
    is for validation. part: its name in a table of paths. shard: of MDS, what its index says of the file. own: of
    `data.source`. origin: of that, and of what is remote.
    """

    path: Path
    name: str
    kind: SourceKind
    alone: bool  # named by the user itself, not found in a folder: then nothing about it is passed over
    key: SourceKey = "path"
    validates: bool = False
    part: str = ""
    shard: Shard | None = None
    own: Any = None
    origin: Origin | None = None

    def __str__(self) -> str:
        return f"data.{self.key}: {self.where}"

    @property
    def is_remote(self) -> bool:
        return self.origin is not None and self.own is None

    @property
    def where(self) -> str:
        return self.origin.url if self.origin else str(self.path)

    @property
    def size(self) -> int:
        """Bytes of the file; 1 if that is unknown."""
        return abs(self.origin.size) if self.origin else self.path.stat().st_size

    def document_name(self, row: int | None = None) -> str:
        """What the split hashes. A file that stands alone adds nothing: its path may differ between machines."""
        name = "" if self.alone else self.name
        return name if row is None else f"{name}#{row}"


def list_sources(config: DataConfig) -> list[Source]:
    """The sources behind `data.path`, part by part and sorted by name, and after them those for validation alone.
    Hidden files and folders are left out.

    ValueError where the path does not exist or the folder holds no file.
    """
    sources: list[Source] = []
    for key in ("path", "validation_path"):
        if getattr(config, key) or key == "path":
            sources = [one for one in sources if not one.validates]  # by a saved dataset's split
            for part, path in named(getattr(config, key)).items():
                where = f"data.{key}{part and '.'}{part}"
                sources += [replace(one, part=part) for one in _sources(config, key, path, where)]
    return sources


def _sources(config: DataConfig, key: SourceKey, path: str, where: str) -> list[Source]:
    kinds, held = _KINDS[config.tokenizer == IDS], key != "path"
    root = Path(path).expanduser()
    if config.source:
        return [_own(config, Source(root, config.source, "own", True, key, held), path)]
    files: list[tuple[Path, str, Origin | None]] = [(root, "", None)]
    if "://" in path:
        try:
            files = [(Path(name or file.url), name, file) for name, file in sorted(list_files(path).items())]
        except OSError as error:
            shown = re.sub(r"(?<=//)[^/]*@|\?.*", "...", path)
            raise ValueError(f"{where} = {shown!r} cannot be listed ({error}); correct it") from error
    elif not path:
        root = Path(sysconfig.get_path("stdlib"))
        walked = _walk(root, enter=lambda folder: folder not in _NOT_LIBRARY and not folder.startswith("config-"))
        library = [one for one in walked if one.suffix == ".py" and not one.name.startswith(_BUILT_FILES)]
        files = [(one, one.relative_to(root).as_posix(), None) for one in library]
        if not files:
            raise ValueError(f"data.path is empty and {root} holds no standard library source; give a file or folder")
    elif not root.exists():
        raise ValueError(
            f"{where} = {path!r} does not exist; give a file or a folder, or leave it empty for "
            + ("a share of data.path" if held else "the standard library")
        )
    elif (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return [Source(root, root.name, "dataset", True, key, held)]
    elif (root / _SPLITS).is_file():
        return _splits(config, root, key)
    elif not root.is_file():
        walked = _walk(root, enter=lambda folder: not folder.startswith(".") and folder != "__pycache__")
        files = [(one, one.relative_to(root).as_posix(), None) for one in walked if not one.name.startswith(".")]
    sources = [
        Source(file, name or file.name, kinds.get(file.suffix.lower(), "text"), not name, key, held, origin=origin)
        for file, name, origin in files
    ]
    if not sources or any(one.origin and one.path.name == "dataset_info.json" for one in sources):
        raise ValueError(f"{where} = {path!r} is a folder without a readable file; put text, JSONL or Parquet there")
    return _shards(config, sources, path) or sorted(sources, key=lambda source: source.name)


@contextlib.contextmanager
def _at_hand(source: Source, folder: Path | None = None) -> Iterator[Source]:
    """Context: `source`, with a copy of it if it is remote. OSError and ImportError become ValueError."""
    try:
        copied = fetched(source.origin, folder) if source.origin and source.own is None else None
        with copied or contextlib.nullcontext(source.path) as path:
            yield replace(source, path=path)
    except OSError as error:
        raise ValueError(f"{source} cannot be read ({error.strerror or error}); correct it") from error
    except ImportError as error:
        extra = "hf" if error.name == "datasets" else "data"
        raise ValueError(f'{source} needs the package {error.name}; pip install ".[{extra}]"') from None


def _own(config: DataConfig, source: Source, path: str) -> Source:
    if not names_code("source", source.name) or config.text_key:
        raise ValueError(f"data.source = {source.name!r}: write package.module:Class, without data.text_key")
    try:
        own = make("source", source.name, None, path)
    except ValueError as error:
        raise ValueError(f"data.{error}") from error
    with _described(source):
        mark, size = str(getattr(own, "fingerprint", "")), int(getattr(own, "size", -1))
    return replace(source, own=own, origin=Origin(source.name, size, mark))


@contextlib.contextmanager
def _described(source: Source) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the class is the user's: whatever it raises
        raise ValueError(f"data.source = {source.name!r} raised {describe(error)}; correct it") from error


def _shards(config: DataConfig, sources: list[Source], path: str) -> list[Source]:
    """The shards of MDS among the files of `path`, in the order of their index; none where it holds no MDS."""
    files, shards = {one.name: one for one in sources}, list[Source]()
    splits = [str(Path(name).parent) for name in files if Path(name).name == INDEX]
    if not splits or not any(".mds" in name for name in files):
        return []
    for split in ["."] if "." in splits else _chosen(config, path, sources[0].key, splits):
        index, validates = files[str(Path(split, INDEX))], sources[0].validates or split not in (".", "train")
        try:
            with _at_hand(index) as here:
                listed = read_index(here.path.read_bytes())
            for names, shard in listed:
                there = [files[path] for name in names if (path := str(Path(split, name))) in files]
                if not there:
                    raise ValueError(f"{names[-1]} is not there")
                shards.append(replace(there[0], kind="mds", validates=validates, shard=shard))
        except ValueError as error:
            raise ValueError(f"{index}: {error}; write the dataset again") from None
    return shards


def by_group(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources of each part, those for validation alone by themselves."""
    return [[*group] for _, group in groupby(sources, key=lambda one: (one.key, one.part, one.validates))]


def no_text(config: DataConfig, group: list[Source], why: str) -> ValueError:
    """What a user is told of a group of `by_group`."""
    one = group[0]
    what = "text for validation" if one.validates else "text"
    where = f"data.{one.key}{one.part and '.'}{one.part} = {named(getattr(config, one.key))[one.part]!r}"
    return ValueError(f"{where} holds no {what} ({len(group)} files, {why}); give files with text")


def fingerprint(sources: list[Source]) -> tuple[tuple[str, str, int, int], ...]:
    """(path, name and index, bytes, mtime in ns) of each file: changes when one is written, added, moved or removed."""
    marks = []
    for source in sources:
        name, files = f"{source.name} {source.shard or ''}", _walk(source.path, enter=lambda _: True)
        if source.origin:
            marks.append((source.where, name + source.origin.mark, source.size, 0))
        files = files if source.kind == "dataset" else [] if source.origin else [source.path]
        for file in sorted(files):
            stat = file.stat()
            marks.append((str(file.resolve()), name, stat.st_size, stat.st_mtime_ns))
    return tuple(marks)


def _walk(root: Path, enter: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if enter(name)]
        for name in files:
            if (file := Path(folder, name)).is_file():  # not a dangling link or a socket
                yield file


_SPLITS = "dataset_dict.json"  # of a saved `DatasetDict`, which has a folder for each split


def _splits(config: DataConfig, root: Path, key: SourceKey) -> list[Source]:
    try:
        there = [name for name in parse_json((root / _SPLITS).read_bytes())["splits"] if (root / name).is_dir()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data.{key}: {root / _SPLITS} cannot be read ({error}); save the dataset again") from None
    chosen = _chosen(config, root, key, there)
    return [Source(root / name, f"{root.name}/{name}", "dataset", True, key, name != "train") for name in chosen]


def _chosen(config: DataConfig, root: Any, key: SourceKey, there: list[str]) -> list[str]:
    """Of the splits that are there: the one that is read, and for `path` the one that validates, if there is any."""
    held = [name for name in ("validation", "val", "test") if name in there][:1]
    chosen, lacking = (held, "'validation', 'val' or 'test'") if key != "path" else (["train"], "'train'")
    if not chosen or chosen[0] not in there:
        has = f"has no split {lacking} (it has {_listed(there)})"
        raise ValueError(f"data.{key}: {root} {has}; give one split's folder")
    return chosen + held if key == "path" and config.validation_fraction else chosen


_CHUNK = 1 << 20  # bytes
_HEAD_BYTES = 8192
_GPT2_IDS = 50256
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Document(NamedTuple):
    """name: what the split hashes. chunks: its text or ids, laid end to end. read: share of the source before it."""

    name: str
    chunks: Iterator[Chunk]
    read: float = 0.0


def read_documents(source: Source, config: DataConfig, folder: Path | None = None) -> Iterator[Document]:
    """Every document of `source` in order, with its chunks that are not empty; read them before the next document.

    A binary file found in a folder gives nothing; one that the user names itself is a ValueError, as is anything
    else that cannot be read. folder: for a copy of what is remote.
    """
    with _at_hand(source, folder) as here:
        for document in _READERS[source.kind](here, config):
            yield document._replace(chunks=(chunk for chunk in document.chunks if len(chunk)))


_SAMPLED, _SAMPLED_ROWS, _FETCHED = 8, 100, 8 * _CHUNK  # sources, documents of each, and bytes of a remote one


def check_sample(config: DataConfig, context: int = 0) -> None:
    """Read the beginning of some sources, and warn where a dataset's split is for validation. ValueError as in
    `list_sources` and `read_documents`, and for files with fewer bytes than a sequence of `context` + 1 tokens.
    """
    if is_stored(config):
        return
    groups = by_group(list_sources(config))
    for one, group in ((group[0], group) for group in groups):
        if not one.validates and not any(source.size for source in group):
            raise no_text(config, group, "all empty")
        most = sum(source.size + 1 for source in group[: context + 1])  # an id for each byte, and one for the end
        if most <= context and all(file.origin is None and file.kind in ("text", "jsonl", "ids") for file in group):
            what = f"has at most {most} tokens, fewer than context + 1 = {context + 1}"
            raise ValueError(f"data.{one.key}{one.part and '.'}{one.part} {what}; give more text or a shorter context")
        if one.validates and one.key == "path":
            split = (one.path.parent if one.shard else one.path).name
            what = f"validation reads the split {split!r} of the dataset, not data.validation_fraction"
            warnings.warn(f"data.path: {what}", stacklevel=2)
    for source in (one for group in groups for one in group[:: -(-len(group) // _SAMPLED)]):
        if source.origin and source.own is None and not 0 <= source.origin.size <= _FETCHED:
            continue
        read = partial(_read_text, sampled=True) if source.kind == "text" else _READERS[source.kind]
        with _at_hand(source) as here:
            for document in islice(read(here, config), _SAMPLED_ROWS):
                next(document.chunks, None)


def _read_text(source: Source, config: DataConfig, sampled: bool = False) -> Iterator[Document]:
    if config.tokenizer == IDS:
        if source.alone:
            raise ValueError(f"{source} holds no token ids; give .bin or .npy, or set data.tokenizer")
        return
    with source.path.open("rb") as file:
        data = head = file.read(_HEAD_BYTES)
        while not sampled and b"\0" not in data and (data := file.read(_CHUNK)):
            pass
        if _is_text(source, head, b"\0" in data):
            file.seek(0)
            yield Document(source.document_name(), _decoded(source, file, head))


_OTHER_FORMATS = {
    b"%PDF": "is a PDF; extract its text, as pdftotext does",
    b"PK\3\4": "is a ZIP archive; unpack it",
    b"\x1f\x8b": "is compressed; unpack it",
    b"\x93NUMPY": 'is a NumPy array; if it holds token ids, set data.tokenizer = "ids" and data.vocab',
}


def _is_text(source: Source, head: bytes, has_nul: bool) -> bool:
    """Whether it is read as text; ValueError where it is not, though the user named it."""
    suffix = source.path.suffix.lower()
    other = [what for mark, what in _OTHER_FORMATS.items() if head.startswith(mark)]
    if source.alone and suffix in (".csv", ".tsv"):
        other = ["is a table; write its text as JSONL or Parquet, or name it .txt to train on it as it is"]
    if source.alone and other:
        raise ValueError(f"{source} {other[0]}")
    if source.alone and suffix == ".json":
        _refuse_array(source, head)
    # A NUL marks an image or an archive; UTF-16 has NULs too but is text that can be converted.
    if has_nul and (source.alone or head.startswith(_UTF16_MARKS)):
        raise ValueError(f"{source} has NUL bytes and is no text: {_looks_like(head)}")
    return not has_nul and not other


def _refuse_array(source: Source, head: bytes) -> None:
    if head.lstrip().startswith(b"["):
        raise ValueError(f"{source} is a JSON array; write one object a line (jq -c '.[]'), as JSONL")


def _read_ids(source: Source, config: DataConfig) -> Iterator[Document]:
    """Of nanoGPT's .bin: little-endian numbers and nothing else; or of a .npy."""
    is_npy = source.path.suffix.lower() == ".npy"
    array: np.ndarray = np.empty(0, dtype=np.uint8)
    try:
        if is_npy:
            array = np.load(source.path, mmap_mode="r", allow_pickle=False)
        elif source.size:
            array = np.memmap(source.path, dtype=np.dtype(config.ids_dtype).newbyteorder("<"), mode="r")
    except (ValueError, EOFError) as error:
        what = "a whole array of numbers" if is_npy else f'of data.ids_dtype = "{config.ids_dtype}"'
        raise ValueError(f"{source} is not {what} ({error}); correct it") from None
    parts = [array] if array.ndim != 1 else (array[at : at + _CHUNK] for at in range(0, len(array), _CHUNK))
    yield Document(source.document_name(), (_ids(part, source, config, "") for part in parts))


def _decoded(source: Source, file: BinaryIO, head: bytes) -> Iterator[str]:
    decoder, at, data = codecs.getincrementaldecoder("utf-8")(), 0, b" "
    while data:
        data = file.read(_CHUNK)
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
            yield text if at else text.removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            hint = _looks_like(head) if _has_ids(head) else "convert it with iconv -t utf-8, or take it out"
            raise ValueError(
                f"{source} is not UTF-8 text (byte {error.object[error.start]:#04x} at offset "
                f"{at - held + error.start}); {hint}"
            ) from None
        at += len(data)


_SET_IDS = 'set data.tokenizer = "ids" and data.vocab, or give the text'


def _looks_like(content: bytes) -> str:
    """What a file that is no text seems to be, and what to do."""
    if content.startswith(_UTF16_MARKS):
        return "it looks like UTF-16; convert it with iconv -f utf-16 -t utf-8"
    if content.isascii() and not any(content[1::2]):
        return f"it looks like numbers of two bytes, such as token ids (nanoGPT's .bin), or UTF-16; {_SET_IDS}"
    if _has_ids(content):
        return f"it looks like token ids of two bytes (nanoGPT's .bin); {_SET_IDS}"
    return "it looks like a binary file; give text, JSONL or Parquet"


def _has_ids(content: bytes) -> bool:
    """Whether it may be ids of a vocabulary such as GPT-2's, as 16-bit numbers."""
    if len(content) % 2:
        return False
    ids = np.frombuffer(content, dtype="<u2")
    return len(ids) > 0 and int(ids.max()) <= _GPT2_IDS and float((ids < 1 << 12).mean()) > 0.05


def _read_jsonl(source: Source, config: DataConfig) -> Iterator[Document]:
    size, read = max(source.size, 1), 0
    with source.path.open("rb") as file:
        _refuse_array(source, file.peek(_HEAD_BYTES))
        for number, line in enumerate(file, start=1):
            read += len(line)
            if not line.strip():
                continue
            try:
                row = parse_json(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise ValueError(f"{source} line {number} is not UTF-8; convert it") from None
            except ValueError as error:
                raise ValueError(f"{source} line {number} is not JSON ({error}); correct it") from None
            if not isinstance(row, dict):
                mend = f"write {{{json.dumps(config.column)}: ...}}"
                raise ValueError(f"{source} line {number} is not an object; {mend}")
            if config.column not in row:
                raise _no_column(source, f" line {number}", config.column, list(row))
            yield _row(row, source, config, "line", number, read / size)


def _read_parquet(source: Source, config: DataConfig) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(source.path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} is not a Parquet file ({reason}); write it again") from None
    with table:
        names = table.schema_arrow.names
        if config.column not in names:
            raise _no_column(source, "", config.column, names)
        number, rows = 0, max(table.metadata.num_rows, 1)
        for batch in table.iter_batches(columns=_columns(config, names)):
            for row in batch.to_pylist():
                number += 1
                yield _row(row, source, config, "row", number, number / rows)


def _read_dataset(source: Source, config: DataConfig) -> Iterator[Document]:
    """A folder written by `Dataset.save_to_disk`."""
    import datasets  # pyrefly: ignore[missing-import]

    table: Any = datasets.load_from_disk(str(source.path))
    if config.column not in table.column_names:
        raise _no_column(source, "", config.column, table.column_names)
    rows: Iterable[Any] = table.select_columns(_columns(config, table.column_names))
    for number, row in enumerate(rows, start=1):
        yield _row(row, source, config, "row", number, number / len(table))


def _read_mds(source: Source, config: DataConfig) -> Iterator[Document]:
    shard = cast(Shard, source.shard)
    if config.column not in shard["column_names"]:
        raise _no_column(source, "", config.column, shard["column_names"])
    columns = _columns(config, shard["column_names"])
    for number, row in enumerate(read_rows(source.path, shard, columns, config.ids_dtype, str(source)), start=1):
        yield _row(row, source, config, "sample", number, number / shard["samples"])


def _read_own(source: Source, config: DataConfig) -> Iterator[Document]:
    def documents() -> Iterator[Any]:
        with _described(source):
            yield from source.own

    read = 0
    for number, value in enumerate(documents(), start=1):
        row = value if isinstance(value, dict) else {config.column: value}
        if config.column not in row:
            raise _no_column(source, f" document {number}", config.column, list(row))
        document = _row(row, source, config, "document", number, read / max(source.size, 1))
        read += len(row[config.column])
        yield document


_READERS: dict[SourceKind, Callable[[Source, DataConfig], Iterator[Document]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
    "ids": _read_ids,
    "mds": _read_mds,
    "own": _read_own,
}


_MASKS = {"labels": (IGNORED, "the id if it is learned, else -100"), "loss_mask": (0, "1 if it is learned, else 0")}
"""What a row of ids may have beside them: what stands there for an id that is not learned, and what may stand there."""


def _columns(config: DataConfig, names: Sequence[str]) -> list[str]:
    return [config.column, *(name for name in _MASKS if config.tokenizer == IDS and name in names)]


def _row(row: dict[str, Any], source: Source, config: DataConfig, word: str, number: int, read: float) -> Document:
    """word, number: where it is, as "line", 3."""
    where, value = f"{word} {number}", row[config.column]
    if config.tokenizer == IDS:
        ids = _ids(value, source, config, f" in {where}")
        chunk: Chunk = _masked(ids, row, f"{source} {where}")
    else:
        chunk = _text(value, source, config.column, where)
    return Document(source.document_name(number), iter([chunk]), read)


def _masked(ids: Ids, row: dict[str, Any], where: str) -> Ids:
    """`ids`, with ~id for those that the row says are not learned. ValueError where that is not clear."""
    learned = np.ones(len(ids), dtype=bool)
    for name, (off, form) in _MASKS.items():
        if row.get(name) is not None:
            values = np.array(row[name], dtype=object)
            if values.shape != ids.shape or not ((values == off) | (values == (ids if off else 1))).all():
                raise ValueError(f"{where}: {name} must have, for each of {len(ids)} ids, {form}; correct the row")
            learned &= values != off
    return ids if learned.all() else np.where(learned, ids, ~ids.astype(np.int64))


def _ids(value: Any, source: Source, config: DataConfig, where: str) -> Ids:
    """One-dimensional whole numbers of the vocabulary, as an array; ValueError where it is something else."""
    try:
        ids = np.asarray(value) if isinstance(value, list | np.ndarray) else np.empty((1, 1))
    except ValueError:  # lists of several lengths
        ids = np.empty((1, 1))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        found = f"{ids.ndim}-dimensional {ids.dtype}" if isinstance(value, np.ndarray) else as_typed(value)[:40]
        raise ValueError(f"{source} holds {found}{where}; write one dimension of whole numbers")
    if len(ids) and not 0 <= (least := int(ids.min())) <= (most := int(ids.max())) < config.vocab:
        raise ValueError(
            f"data.vocab = {config.vocab}: {source.where} has an id of {least if least < 0 else most}{where}; raise "
            f'it, or correct the ids (data.ids_dtype = "{config.ids_dtype}" for .bin)'
        )
    return ids


def _text(value: Any, source: Source, text_key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"data.text_key = {text_key!r} holds {type(value).__name__} instead of text in {where} of {source.where}; "
            "name another column, or drop the row"
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no character
            raise ValueError(
                f"data.text_key = {text_key!r} holds half a surrogate pair in {where} of {source.where}; correct it"
            ) from None
    return value


def _no_column(source: Source, where: str, text_key: str, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"data.text_key = {text_key!r} is missing in {source.where}{where}; set it to one of: {_listed(names)}"
    )


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "(nothing)"

"""The texts of the source files: one reader a format, each giving texts one by one. A document is a text file, or a
row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from isles.base.parsing import parse_json
from isles.data.sources import Source, SourceKind

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

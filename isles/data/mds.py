"""MosaicML's MDS, version 2: a folder whose `index.json` lists shards. A shard of N samples, little-endian:

    N: u4     offsets: (N + 1) u4, from the beginning of the file     a header in JSON, not read     samples

A sample is the size (u4) of each column without a fixed one, then the columns one after the other. `bytes` and `str`
are as they are. `ndarray[:dtype[:shape]]` begins with what its name leaves open, then come its values:

    type: u1 = bits + 0 (unsigned), 1 (signed) or 2 (float)           shape: u1 = 4 axes + log2(width), axes numbers
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from isles.base.parsing import parse_json, read, table

INDEX = "index.json"
_Count = Annotated[int, Field(ge=0, lt=1 << 32)]
_CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}  # pyarrow's name of each


@dataclass(frozen=True)
class _File:
    basename: str  # relative to the index
    bytes: _Count


@dataclass(frozen=True)
class Shard:
    """An entry of an index."""

    format: Literal["mds"]
    version: Literal[2]
    samples: _Count
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[_Count | None, ...]
    raw_data: _File
    compression: str | None = None
    zip_data: _File | None = None


def read_index(data: bytes) -> tuple[Shard, ...]:
    """The shards of an index. ValueError, without a place, where it is damaged or names a file elsewhere."""
    shards = read(tuple[Shard, ...], table(parse_json(data), INDEX).get("shards"), "shards")
    for shard in shards:
        for file in filter(None, (shard.raw_data, shard.zip_data)):
            name = PurePosixPath(file.basename)
            if not name.name or name.is_absolute() or ".." in name.parts or not file.basename.isprintable():
                raise ValueError(f"basename {file.basename[:100]!r} is no file below its folder")
        if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes):
            raise ValueError(f"{shard.raw_data.basename}: names, encodings and sizes of columns differ in number")
    return shards


def read_column(path: Path, shard: Shard, name: str, dtype: str, where: str) -> Iterator[Any]:
    """Of each sample in order. dtype: of the numbers in a column of `bytes`. ValueError, begun with `where`, where the
    file is damaged or cannot be read.
    """
    column, count, begin, at = shard.column_names.index(name), shard.samples, 4 * (shard.samples + 2), ""
    try:
        data = _content(path, shard)
        if len(data) != shard.raw_data.bytes or len(data) < begin or int(data[:4].view("<u4")[0]) != count:
            raise ValueError(f"it is not of {shard.raw_data.bytes} bytes with {count} samples, as {INDEX} has it")
        offsets = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
        if offsets[0] < begin or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
            raise ValueError("it has samples before its beginning, or beyond its end")
        for number, (start, stop) in enumerate(pairwise(offsets.tolist()), start=1):
            at = f" sample {number}"
            yield _decoded(_cell(data[start:stop].tobytes(), shard, column), shard.column_encodings[column], dtype)
    except (ValueError, TypeError, IndexError) as error:
        text = " ".join(str(error).split()) + "; write it again" * (";" not in str(error))
        raise ValueError(f"{where}{at}: {text}") from None


def _content(path: Path, shard: Shard) -> np.ndarray:
    if path.suffix == ".mds":
        return np.memmap(path, mode="r")
    codec = _CODECS.get(str(shard.compression).partition(":")[0])
    if codec is None:
        raise ValueError(f"compression {shard.compression!r} is not read, but {', '.join(_CODECS)}")
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f'{codec} needs the package pyarrow; pip install ".[data]"') from None
    with pyarrow.input_stream(str(path), compression=codec) as file:
        return np.frombuffer(file.read(shard.raw_data.bytes + 1), dtype=np.uint8)  # no more than it should have


def _cell(sample: bytes, shard: Shard, column: int) -> bytes:
    heads = np.frombuffer(sample, "<u4", shard.column_sizes.count(None)).tolist()
    ends = np.cumsum([4 * len(heads), *(heads.pop(0) if size is None else size for size in shard.column_sizes)])
    if ends[-1] != len(sample):
        raise ValueError(f"columns up to byte {ends[-1]} of {len(sample)}")
    return sample[ends[column] : ends[column + 1]]


def _decoded(data: bytes, encoding: str, dtype: str) -> Any:
    kind, _, form = encoding.partition(":")
    if kind == "str":
        return data.decode("utf-8")
    if kind == "bytes":
        if len(data) > 64 and not len(data) % 8 and dtype != "int64" and not any(np.frombuffer(data, "<u4")[1::2]):
            raise ValueError('it looks like numbers of 8 bytes, as LLM Foundry has; set data.ids_dtype = "int64"')
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    if kind == "json":
        return parse_json(data)
    if kind != "ndarray":
        raise ValueError(f"a column of {encoding!r}; str, bytes, json and ndarray are read")
    named, _, axes = form.partition(":")
    if not named:
        named, data = "uif"[data[0] % 8] + str(data[0] // 8), data[1:]
    shape = [int(axis) for axis in axes.split(",") if axis]
    if not axes:
        count, width = data[0] >> 2, 1 << data[0] % 4
        shape, data = np.frombuffer(data, f"<u{width}", count, 1).tolist(), data[1 + count * width :]
    return np.frombuffer(data, np.dtype(named).newbyteorder("<")).reshape(shape)

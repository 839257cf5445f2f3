"""MosaicML's MDS: a folder whose `index.json` lists shards. A shard of N samples, little-endian:

    N: u4     offsets: (N + 1) u4, from the beginning of the file     a header in JSON, not read     samples

A sample is the size (u4) of each column without a fixed one, then the columns one after the other. `bytes` and `str`
are as they are. `ndarray[:dtype[:shape]]` begins with what its name leaves open, then come its values:

    type: u1 = bits + 0 (unsigned), 1 (signed) or 2 (float)           shape: u1 = 4 axes + log2(width), axes numbers
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from isles.base.parsing import parse_json, read, table

INDEX = "index.json"
_CODECS = {".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2", ".br": "brotli"}  # pyarrow's name of each
_Count = Annotated[int, Field(ge=0, lt=1 << 32)]


class _File(TypedDict):
    basename: str
    bytes: _Count


class Shard(TypedDict):
    """An entry of an index."""

    samples: _Count
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[_Count | None]
    raw_data: _File
    zip_data: _File | None


def read_index(data: bytes) -> list[tuple[list[str], Shard]]:
    """(names of its files, shard). ValueError, without a place, where it is damaged or names a file elsewhere."""
    found = []
    for shard in read(list[Shard], table(parse_json(data), INDEX).get("shards"), "shards"):
        names = [file["basename"] for file in (shard["raw_data"], shard["zip_data"]) if file]
        for name in names:
            if not PurePosixPath(name).name or name[:1] == "/" or ".." in name.split("/") or not name.isprintable():
                raise ValueError(f"basename {name[:100]!r} is no file below its folder")
        if not len(shard["column_names"]) == len(shard["column_encodings"]) == len(shard["column_sizes"]):
            raise ValueError(f"{names[0]}: names, encodings and sizes of columns differ in number")
        found.append((names, shard))
    return found


def read_rows(path: Path, shard: Shard, names: list[str], dtype: str, where: str) -> Iterator[dict[str, Any]]:
    """The columns `names` of each sample in order. dtype: of the numbers in a column of `bytes`. ValueError, begun with
    `where`, where the file is damaged or cannot be read.
    """
    columns = {name: shard["column_names"].index(name) for name in names}
    encodings, count, size, at = shard["column_encodings"], shard["samples"], shard["raw_data"]["bytes"], ""
    try:
        data, begin = _content(path, size), 4 * (count + 2)
        if len(data) != size or size < begin or int(data[:4].view("<u4")[0]) != count:
            raise ValueError(f"it is not of {size} bytes with {count} samples, as {INDEX} has it")
        offsets = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
        if offsets[0] < begin or offsets[-1] > size or (np.diff(offsets) < 0).any():
            raise ValueError("it has samples before its beginning, or beyond its end")
        for number, (start, stop) in enumerate(pairwise(offsets.tolist()), start=1):
            at, sample = f" sample {number}", data[start:stop].tobytes()
            heads = np.frombuffer(sample, "<u4", shard["column_sizes"].count(None)).tolist()
            sizes = [heads.pop(0) if fixed is None else fixed for fixed in shard["column_sizes"]]
            ends = np.cumsum([4 * shard["column_sizes"].count(None), *sizes])
            if ends[-1] != len(sample):
                raise ValueError(f"columns up to byte {ends[-1]} of {len(sample)}")
            yield {
                name: _decoded(sample[ends[column] : ends[column + 1]], encodings[column], dtype)
                for name, column in columns.items()
            }
    except (ValueError, TypeError, IndexError) as error:
        text = " ".join(str(error).split())
        mend = "" if ";" in text else "; write it again"
        raise ValueError(f"{where}{at}: {text}{mend}") from None


def _content(path: Path, size: int) -> np.ndarray:
    if path.suffix == ".mds":
        return np.memmap(path, mode="r")
    if path.suffix not in _CODECS:
        raise ValueError(f"{path.suffix} is not read, but {', '.join(_CODECS)}")
    import pyarrow

    with pyarrow.input_stream(str(path), compression=_CODECS[path.suffix]) as file:
        return np.frombuffer(file.read(size + 1), dtype=np.uint8)  # no more than it should have


def _decoded(data: bytes, encoding: str, dtype: str) -> Any:
    kind, _, form = encoding.partition(":")
    if kind == "str":
        return data.decode("utf-8")
    if kind == "bytes":
        if len(data) > 64 and not len(data) % 8 and dtype != "int64" and not any(np.frombuffer(data, "<u4")[1::2]):
            raise ValueError('it looks like numbers of 8 bytes, as LLM Foundry has; set data.ids_dtype = "int64"')
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    if kind != "ndarray":
        raise ValueError(f"a column of {encoding!r}; str, bytes and ndarray are read")
    named, _, axes = form.partition(":")
    if not named:
        named, data = "uif"[data[0] % 8] + str(data[0] // 8), data[1:]
    shape = [int(axis) for axis in axes.split(",") if axis]
    if not axes:
        count, width = data[0] >> 2, 1 << data[0] % 4
        shape, data = np.frombuffer(data, f"<u{width}", count, 1).tolist(), data[1 + count * width :]
    return np.frombuffer(data, np.dtype(named).newbyteorder("<")).reshape(shape)

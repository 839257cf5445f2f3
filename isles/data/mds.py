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
from typing import Any

import numpy as np

from isles.base.parsing import parse_json

INDEX = "index.json"
_CODECS = {".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2", ".br": "brotli"}  # pyarrow's name of each
Shard = dict[str, Any]  # an entry of an index: data to check


def read_index(data: bytes) -> list[tuple[list[str], Shard]]:
    """(names of its files, shard). Some error, without a place, where it is damaged or names a file elsewhere."""
    found = []
    for shard in parse_json(data)["shards"]:
        names = [shard[key]["basename"] for key in ("raw_data", "zip_data") if shard.get(key)]
        for name in names:
            if not PurePosixPath(name).name or name[:1] == "/" or ".." in name.split("/") or not name.isprintable():
                raise ValueError(f"basename {name[:100]!r} is no file below its folder")
        if len({len(shard[f"column_{what}"]) for what in ("names", "encodings", "sizes")}) > 1:
            raise ValueError(f"{names[0]}: names, encodings and sizes of columns differ in number")
        found.append((names, shard))
    return found


def read_column(path: Path, shard: Shard, name: str, dtype: str, where: str) -> Iterator[Any]:
    """Of each sample in order. dtype: of the numbers in a column of `bytes`. ValueError, begun with `where`, where the
    file is damaged or cannot be read.
    """
    at = ""
    try:
        column, count, size = shard["column_names"].index(name), shard["samples"], shard["raw_data"]["bytes"]
        data, begin = _content(path, min(max(size, 0), 1 << 32)), 4 * (count + 2)
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
            yield _decoded(sample[ends[column] : ends[column + 1]], shard["column_encodings"][column], dtype)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        text = " ".join(str(error).split()) + "; write it again" * (";" not in str(error))
        raise ValueError(f"{where}{at}: {text}") from None


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

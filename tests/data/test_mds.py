"""MosaicML's MDS: folders that its own library wrote (mds/write.py), and what is damaged or made to deceive."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import DataConfig, load_corpus
from isles.data.sources import check_sample

WRITTEN = Path(__file__).parent / "mds"
TEXTS = ["The first text.\n", "", "Ünïcode 東京", "four\nlines\nof\ntext\n", "the end"]
SHORT = [np.arange(number * 300, number * 300 + 5 * number) for number in (1, 50, 2)]


def ids(path: Path, **more: Any) -> DataConfig:
    values = {"tokenizer": "ids", "vocab": 70_000, "validation_fraction": 0.0}
    return DataConfig(path=str(path), **(values | more))


def tokens(config: DataConfig) -> bytes:
    return load_corpus(config).train.tokens.tobytes()


def as_bytes(*texts: str) -> bytes:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts if text).encode()


@pytest.mark.parametrize(("column", "more"), [("any", {}), ("bytes", {"ids_dtype": "int64"}), ("fixed", {})])
def test_columns_of_ids(column: str, more: dict[str, Any]) -> None:
    config = ids(WRITTEN / "columns", text_key=column, **more)
    check_sample(config)
    found = load_corpus(config).train
    right = [one[:5] for one in SHORT] if column == "fixed" else SHORT
    assert found.bounds.tolist() == np.cumsum([0, *map(len, right)]).tolist()
    assert np.array_equal(found.tokens, np.concatenate(right)) and found.files == ("shard.00000.mds",)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ("flat", "holds 2-dimensional uint16 in sample 1"),
        ("weights", "holds 1-dimensional float32 in sample 1"),
        ("n", "sample 1: a column of 'int'; str, bytes and ndarray are read"),
        ("text", r'holds "The first text'),
        ("bytes", r'sample 2: it looks like numbers of 8 bytes, .*; set data\.ids_dtype = "int64"$'),
        ("other", "is missing in .*; set it to one of: any, bytes, fixed, flat, json, n, text, weights"),
    ],
)
def test_columns_that_are_no_ids(column: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        load_corpus(ids(WRITTEN / "columns", text_key=column))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.")


def test_splits() -> None:
    """As of a saved dataset; `data.path` may name one of them, too."""
    root = WRITTEN / "splits"
    with pytest.warns(UserWarning, match="reads the split 'val' of the dataset"):
        check_sample(DataConfig(path=str(root)))
    whole = load_corpus(DataConfig(path=str(root)))
    apart = load_corpus(DataConfig(path=str(root / "train"), validation_path=str(root)))
    assert whole.sha256 == apart.sha256
    parts = (whole.train.tokens.tobytes(), whole.validation.tokens.tobytes())
    assert parts == (as_bytes(*TEXTS[:3]), as_bytes(*TEXTS[3:]))
    assert tokens(DataConfig(path=str(root), validation_fraction=0)) == parts[0]


def test_a_folder_without_the_split(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "splits" / "train", tmp_path / "train")
    with pytest.raises(ValueError, match=r"has no split 'validation', 'val' or 'test' \(it has train\)"):
        load_corpus(DataConfig(path=str(tmp_path), validation_path=str(tmp_path)))


@pytest.mark.parametrize("codec", ["zstd", "gz", "bz2", "br"])
def test_compressed_shards(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    config = DataConfig(path=str(WRITTEN / codec), validation_fraction=0)
    assert tokens(config) == as_bytes(*TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'needs the package pyarrow; pip install "\.\[data\]"$'):
        check_sample(config)


def _index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index["shards"][0])
        (folder / "index.json").write_text(json.dumps(index))

    return spoil


def _shard(at: int, value: int) -> Callable[[Path], None]:
    """The number (u4) at that byte."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / "shard.00000.mds").read_bytes())
        data[at : at + 4] = value.to_bytes(4, "little")
        (folder / "shard.00000.mds").write_bytes(data)

    return spoil


def _named(name: str) -> Callable[[Path], None]:
    return _index(lambda shard: shard["raw_data"].update(basename=name))


FIRST = int.from_bytes((WRITTEN / "ids" / "shard.00000.mds").read_bytes()[4:8], "little")  # the first sample's place


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: (folder / "index.json").write_text("{"), r"index\.json: damaged \(Expecting property name"),
        (_index(lambda shard: shard.pop("samples")), "mds: 'samples'; write it again"),
        (
            _index(lambda shard: shard.update(format="jsonl") or shard.pop("column_sizes")),
            r"damaged \('column_sizes'\); write the dataset again",
        ),
        (_index(lambda shard: shard.update(samples=-1)), "is not of 5485 bytes with -1 samples"),
        (_index(lambda shard: shard.update(samples=1 << 31)), "is not of 5485 bytes with 2147483648 samples"),
        (_index(lambda shard: shard["column_sizes"].append(4)), "names, encodings and sizes of columns differ"),
        (_index(lambda shard: shard.update(column_sizes=[7, 1])), "sample 1: columns up to byte 8 of 3608"),
        (_index(lambda shard: shard.update(column_encodings=["pkl", "uint8"])), "sample 1: a column of 'pkl'"),
        (_index(lambda shard: shard.update(column_encodings=["ndarray", "uint8"])), "sample 1: "),
        (_index(lambda shard: shard.update(column_encodings=["ndarray:O", "uint8"])), "sample 1: cannot create"),
        (
            _index(lambda shard: shard.update(column_encodings=["ndarray:uint32:9,9", "uint8"])),
            "sample 1: .* element size",
        ),
        (_named("../ids/shard.00000.mds"), r"basename '../ids/shard.00000.mds' is no file below its folder"),
        (_named("/etc/passwd"), "basename '/etc/passwd' is no file below"),
        (_named(""), "basename '' is no file below"),
        (_named("a\nb"), r"basename 'a\\nb' is no file below"),
        (_named("shard.9.mds"), r"shard\.9\.mds is not there\); write the dataset again"),
        (_shard(0, 3), "is not of 5485 bytes with 4 samples, as index.json has it; write it again"),
        (_shard(4, 1), "has samples before its beginning"),
        (_shard(8, 1 << 30), "has samples before its beginning, or beyond its end"),
        (_shard(FIRST, 1 << 30), "sample 1: columns up to byte 1073741829 of"),
        (lambda folder: (folder / "shard.00000.mds").write_bytes(b""), "cannot mmap an empty file; write it again"),
    ],
)
def test_damage_is_a_line(spoil: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "ids", tmp_path / "ids")
    assert len(tokens(ids(tmp_path / "ids"))) == 4 * (900 + 5 + 400 + 1 + 700)
    spoil(tmp_path / "ids")
    for read in (check_sample, load_corpus):
        with pytest.raises(ValueError, match=match) as caught:
            read(ids(tmp_path / "ids"))
        assert "\n" not in str(caught.value) and str(caught.value).startswith("data.path: ")


def test_what_is_packed_too_large_or_in_another_way(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"\.snappy is not read, but \.zstd, \.gz, \.bz2, \.br; write it again"):
        load_corpus(DataConfig(path=str(WRITTEN / "snappy")))
    for number, content in enumerate((b"no zstd", (WRITTEN / "zstd" / "shard.00000.mds.zstd").read_bytes())):
        folder = tmp_path / str(number)
        shutil.copytree(WRITTEN / "zstd", folder)
        (folder / "shard.00000.mds.zstd").write_bytes(content)
        _index(lambda shard: shard["raw_data"].update(bytes=200))(folder)
        with pytest.raises(ValueError, match=r"(cannot be read \(.*\); correct it|is not of 200 bytes.*)$"):
            load_corpus(DataConfig(path=str(folder)))


def test_a_folder_of_text_with_an_index_is_none(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"shards": []}')
    assert tokens(DataConfig(path=str(tmp_path), validation_fraction=0)) == b'{"shards": []}\n'

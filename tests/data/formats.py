"""The same ids in every format, and in memory."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import Corpus, load_tokenizer
from isles.data.corpus import TokenStream
from tests.data.web import serve

VOCAB = 70_000
DOCUMENTS = [np.random.default_rng(seed).integers(0, VOCAB, size) for seed, size in enumerate((900, 5, 400, 1, 700))]
LISTS = [one.tolist() for one in DOCUMENTS]
Setting = dict[str, str]  # of [data], by key


def _bin(folder: Path) -> Setting:
    np.concatenate(DOCUMENTS).astype("<u4").tofile(folder / "train.bin")
    return {"path": str(folder / "train.bin")}


def _npy(folder: Path) -> Setting:
    np.save(folder / "ids.npy", np.concatenate(DOCUMENTS).astype("uint32"))
    return {"path": str(folder / "ids.npy")}


def _parquet(folder: Path) -> Setting:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"input_ids": LISTS, "n": [0] * 5})
    parquet.write_table(table, folder / "rows.parquet")
    return {"path": str(folder / "rows.parquet")}


def _jsonl(folder: Path) -> Setting:
    rows = [json.dumps({"input_ids": one, "attention_mask": [1] * len(one)}) for one in LISTS]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return {"path": str(folder / "rows.jsonl")}


def _dataset(folder: Path) -> Setting:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": LISTS}).save_to_disk(str(folder / "saved"))
    return {"path": str(folder / "saved")}


def _mds(folder: Path) -> Setting:
    shutil.copytree(Path(__file__).parent / "mds" / "ids", folder / "mds")
    return {"path": str(folder / "mds")}


class Listed:
    """A class of one's own."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[Any]:
        yield from json.loads(self.path.read_text())


class Streamed(Listed):
    """A dataset that is streamed."""

    def __iter__(self) -> Iterator[Any]:
        import datasets

        rows = datasets.Dataset.from_dict({"input_ids": list(super().__iter__())}).to_iterable_dataset(num_shards=2)
        return (row["input_ids"] for row in rows)


def _own(folder: Path) -> Setting:
    (folder / "lists.json").write_text(json.dumps(LISTS))
    return {"path": str(folder / "lists.json"), "source": "tests.data.formats:Listed"}


def _streamed(folder: Path) -> Setting:
    pytest.importorskip("datasets")
    return _own(folder) | {"source": "tests.data.formats:Streamed"}


def _http(folder: Path) -> Setting:
    pytest.importorskip("aiohttp")
    _jsonl(folder)
    return {"path": "WEB"}


FORMATS: dict[str, Callable[[Path], Setting]] = {
    "bin": _bin,
    "npy": _npy,
    "parquet": _parquet,
    "jsonl": _jsonl,
    "dataset": _dataset,
    "mds": _mds,
    "own": _own,
    "streamed": _streamed,
    "http": _http,
}


@contextlib.contextmanager
def written(name: str, folder: Path) -> Iterator[Setting]:
    """Context: the settings of the ids in that format, below the folder, which a server shows if they need one."""
    (folder / name).mkdir()
    setting = FORMATS[name](folder / name)
    with serve(folder / name) if setting["path"] == "WEB" else contextlib.nullcontext() as web:
        yield setting | ({"path": f"{web.url}rows.jsonl"} if web else {})


def in_memory(name: str, sha256: str = "") -> Corpus:
    """Of the format's documents. The last fifth of each is for validation, but for one of a single token."""
    documents = [np.concatenate(DOCUMENTS)] if name in ("bin", "npy") else DOCUMENTS
    ends = [max(len(one) - -(-len(one) // 5), 1) for one in documents]

    def stream(parts: list[np.ndarray]) -> TokenStream:
        parts = [part for part in parts if len(part)]
        bounds, file_of = np.cumsum([0, *map(len, parts)]), np.zeros(len(parts), dtype=np.uint8)
        return TokenStream(tokens=np.concatenate(parts), bounds=bounds, files=("",), file_of=file_of)

    return Corpus(
        name="",
        tokenizer=load_tokenizer("ids", VOCAB),
        train=stream([one[:end] for one, end in zip(documents, ends, strict=True)]),
        validation=stream([one[end:] for one, end in zip(documents, ends, strict=True)]),
        split_by="position",
        sha256=sha256,
    )

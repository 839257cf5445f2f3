"""Tokens a second of a loader in one process: sequences of 257 ids (16 bits), from 8M, in batches of 16 (int64).

    isles             `Loader` over the stored corpus: shuffled, each block's checksum looked at once
    np.memmap         random windows of one file, as nanoGPT draws them
    datasets          a saved dataset of rows, shuffled by indices, `with_format("numpy")`
    pyarrow           Parquet, in the order of the file
    mosaicml          `StreamingDataset` of MDS, shuffled, in a DataLoader
    webdataset        tar shards of .npy, shuffled in a buffer of 1000

In turns, 15 times after one that is not counted; CPU seconds of all threads of the process, medians. What is not
installed is left out.

    python -m benchmarks.loader
"""

from __future__ import annotations

import io
import logging
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks._measure import interleaved, machine
from isles.data import DataConfig, Loader, load_corpus

ROWS, CONTEXT, BATCH, VOCAB, BATCHES = 31_000, 256, 16, 50_257, 400

Batches = Iterator[torch.Tensor]


def of_isles(folder: Path, rows: np.ndarray) -> Batches:
    rows.tofile(folder / "ids.bin")
    config = DataConfig(
        path=str(folder / "ids.bin"),
        tokenizer="ids",
        vocab=VOCAB,
        validation_fraction=0,
        batch_size=BATCH,
        cache=str(folder / "cache"),
    )
    return iter(Loader(load_corpus(config), config, context=CONTEXT))


def of_memmap(folder: Path, rows: np.ndarray) -> Batches:
    rows.tofile(folder / "memmap.bin")
    data, draw = np.memmap(folder / "memmap.bin", dtype=np.uint16, mode="r"), np.random.default_rng(0)
    while True:
        starts = draw.integers(0, len(data) - CONTEXT - 1, BATCH)
        yield torch.stack([torch.from_numpy(data[at : at + CONTEXT + 1].astype(np.int64)) for at in starts])


def of_datasets(folder: Path, rows: np.ndarray) -> Batches:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"ids": rows}).save_to_disk(str(folder / "saved"))
    table = datasets.load_from_disk(str(folder / "saved")).with_format("numpy")
    for seed in range(1000):
        for batch in table.shuffle(seed=seed).iter(batch_size=BATCH, drop_last_batch=True):
            yield torch.from_numpy(batch["ids"].astype(np.int64))


def of_pyarrow(folder: Path, rows: np.ndarray) -> Batches:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    ids = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    parquet.write_table(pa.table({"ids": ids}), folder / "rows.parquet")
    while True:
        for batch in parquet.ParquetFile(folder / "rows.parquet").iter_batches(batch_size=BATCH):
            flat = batch.column(0).flatten().to_numpy()
            yield torch.from_numpy(flat.reshape(-1, rows.shape[1]).astype(np.int64))


def of_mosaicml(folder: Path, rows: np.ndarray) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    columns = {"ids": f"ndarray:uint16:{rows.shape[1]}"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for row in rows:
            writer.write({"ids": row})
    table = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    while True:
        for batch in torch.utils.data.DataLoader(table, batch_size=BATCH, drop_last=True):
            yield batch["ids"].to(torch.int64)


def of_webdataset(folder: Path, rows: np.ndarray) -> Batches:
    import webdataset

    with tarfile.open(folder / "rows.tar", "w") as tar:
        for number, row in enumerate(rows):
            data = io.BytesIO()
            np.save(data, row)
            member = tarfile.TarInfo(f"{number:06d}.npy")
            member.size = len(data.getvalue())
            tar.addfile(member, io.BytesIO(data.getvalue()))
    while True:
        found = webdataset.WebDataset(str(folder / "rows.tar"), shardshuffle=False).shuffle(1000).decode()
        for batch in found.to_tuple("npy").batched(BATCH, partial=False):
            yield torch.from_numpy(np.asarray(batch[0]).astype(np.int64))


PARTIES: dict[str, Callable[[Path, np.ndarray], Batches]] = {
    "isles": of_isles,
    "np.memmap": of_memmap,
    "datasets": of_datasets,
    "pyarrow": of_pyarrow,
    "mosaicml": of_mosaicml,
    "webdataset": of_webdataset,
}


def measure(folder: Path) -> None:
    rows = np.random.default_rng(0).integers(0, VOCAB, (ROWS, CONTEXT + 1)).astype(np.uint16)
    parties, opened = dict[str, Callable[[], int]](), list[Any]()
    for name, batches in PARTIES.items():
        try:
            found = batches(folder, rows)
            assert next(found).shape == (BATCH, CONTEXT + 1)
        except ImportError as error:
            print(f"{name:<12} left out ({error})")
            continue
        opened.append(found)
        parties[name] = lambda found=found: sum(batch.shape[0] for batch in islice(found, BATCHES))
    times = interleaved(parties, 15)
    for found in opened:
        if hasattr(found, "close"):
            found.close()  # its threads, before the folder goes
    tokens = BATCHES * BATCH * CONTEXT
    print(f"{tokens / 1e6:.1f}M tokens a turn; {machine()}")
    for name, one in times.items():
        cpu, wall = (tokens / median(seconds) / 1e6 for seconds in (one.cpu, one.wall))
        ratio = times["np.memmap"].per(one)
        print(f"{name:<12} {cpu:7.2f}M tokens a CPU second, {ratio:5.2f} of np.memmap; {wall:7.2f}M a second")


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()

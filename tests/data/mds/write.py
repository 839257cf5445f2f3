"""Writes the folders beside this file with mosaicml-streaming (they are of 0.13.0); no test runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from streaming import MDSWriter

HERE = Path(__file__).parent
DOCUMENTS = [np.random.default_rng(seed).integers(0, 70_000, size) for seed, size in enumerate((900, 5, 400, 1, 700))]
TEXTS = ["The first text.\n", "", "Ünïcode 東京", "four\nlines\nof\ntext\n", "the end"]


def write(name: str, columns: dict[str, str], samples: list[dict[str, object]], **more: object) -> None:
    with MDSWriter(out=str(HERE / name), columns=columns, hashes=["sha1"], **more) as writer:
        for sample in samples:
            writer.write(sample)


ids = [{"input_ids": one.astype("uint32"), "kept": 1} for one in DOCUMENTS]
write("ids", {"input_ids": "ndarray:uint32", "kept": "uint8"}, ids, size_limit=6000)

short = [np.arange(number * 300, number * 300 + 5 * number) for number in (1, 50, 2)]
every = [
    {
        "any": one.astype("uint16"),
        "bytes": one.astype("int64").tobytes(),
        "fixed": one[:5].astype("int32"),
        "json": one.tolist(),
        "flat": one.astype("uint16")[None],
        "n": len(one),
        "text": text,
        "weights": one.astype("float32"),
    }
    for one, text in zip(short, TEXTS, strict=False)
]
columns = {"any": "ndarray", "bytes": "bytes", "fixed": "ndarray:int32:5", "json": "json", "flat": "ndarray:uint16"}
write("columns", columns | {"n": "int", "text": "str", "weights": "ndarray:float32"}, every)

texts = [{"text": one, "n": len(one)} for one in TEXTS]
for split, some in (("train", texts[:3]), ("val", texts[3:])):
    write(f"splits/{split}", {"text": "str", "n": "int64"}, some, size_limit=150)
for codec in ("zstd:5", "gz", "bz2", "br", "snappy"):
    write(codec.partition(":")[0], {"text": "str", "n": "str_int"}, texts, compression=codec)

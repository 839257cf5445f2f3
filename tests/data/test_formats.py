"""Every format of token ids gives the batches and the losses of the same ids in memory, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import Corpus, DataConfig, Loader, load_corpus
from isles.running.virtual import VirtualWorkers
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from isles.training.worker import train_worker
from tests.data.formats import FORMATS, VOCAB, in_memory, written
from tests.training.runs import Told, run, tiny

IDS = {"tokenizer": "ids", "vocab": VOCAB, "ids_dtype": "uint32", "validation_fraction": 0.2}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_same_batches(name: str, stored: bool, tmp_path: Path) -> None:
    right = in_memory(name)
    with written(name, tmp_path) as setting:
        config = DataConfig(**IDS, **setting, batch_size=4, cache=str(tmp_path / "cache") if stored else "auto")
        corpus = load_corpus(config)
    assert (corpus.split_by, corpus.train.tokens.dtype) == ("position", np.uint32)
    assert corpus.train.bounds.tolist() == right.train.bounds.tolist()
    for worker in range(2):
        mine, theirs = (Loader(one, config, context=16, worker=worker, workers=2) for one in (corpus, right))
        for _ in range(2 * mine.sequences // 8):
            assert next(mine).equal(next(theirs))
        for one, other in zip(mine.validation_batches(), theirs.validation_batches(), strict=True):
            assert one.equal(other)


AT, STEPS = 4, 8


def losses(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of each worker at each step, and of validation."""
    found = [tuple(line.get(key) for key in ("step", "worker", "loss", "val_loss")) for line in lines]
    return sorted((one for one in found if one[0] is not None and any(one[2:])), key=str)


def from_memory(config: Config, corpus: Corpus, out: Path | None = None, step: int | None = None) -> Any:
    lines: list[dict[str, Any]] = []
    VirtualWorkers(train_worker, config.world.workers, config, (config, out, step, corpus)).join(lines.append)
    return losses(lines)


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", ["http", "mds", "own", *sorted(set(FORMATS) - {"http", "mds", "own"})])
def test_the_same_losses_and_after_a_resume_with_four_workers(name: str, tmp_path: Path) -> None:
    """From one checkpoint of two workers, four go on, on what the format gives and on the ids in memory."""
    with written(name, tmp_path) as setting:
        settings = [f"data.{key}={value}" for key, value in (IDS | setting).items()]
        path = setting["path"]
        config = tiny(
            path, *settings, f"run.checkpoint_every={AT}", "run.log_every=1", f"model.vocab={VOCAB}", steps=STEPS
        )
        out, told = tmp_path / "run", Told()
        summary = run(config, out, told)
        corpus = in_memory(name, summary["corpus_sha256"])
        assert losses(told.lines) == from_memory(config, corpus) and len(losses(told.lines)) >= 2 * STEPS
        for file in ("summary.json", "model.safetensors"):
            (out / file).unlink()
        Checkpoints(out).go_back(AT)
        ready, told = prepare(out, 4), Told()
        shutil.copytree(out, tmp_path / "copy")
        run(ready.config, out, told, ready.step)
        assert ready.config.world.workers == 4
        assert losses(told.lines) == from_memory(ready.config, corpus, tmp_path / "copy", ready.step)
        assert {line[1] for line in losses(told.lines)} >= {0, 1, 2, 3}

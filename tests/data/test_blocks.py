"""A corpus that was spoilt on the disk is noticed: what is small when it is opened, tokens when they are first read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from isles.data import Loader, load_corpus
from isles.data import corpus as blocks
from isles.data.config import DataConfig
from isles.data.store import open_corpus, save_corpus
from isles.data.tokenizer import load_tokenizer


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus of many small blocks."""
    monkeypatch.setattr(blocks, "BLOCK", 512)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number}\n" * 60)
    corpus = load_corpus(DataConfig(path=str(texts), validation_fraction=0.2))
    save_corpus(corpus, tmp_path / "stored")
    return tmp_path / "stored"


def everything(folder: Path) -> list[np.ndarray]:
    """All that a run of one epoch reads."""
    config = DataConfig(path=str(folder), batch_size=4)
    loader = Loader(load_corpus(config), config, context=16, worker=0, workers=1, seed=0)
    batches = [next(loader).numpy() for _ in range(loader.sequences // 4 + 1)]
    return batches + [batch.numpy() for batch in loader.validation_batches()]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << random.Random(at).randrange(8)
    file.write_bytes(bytes(data))


def test_what_is_whole_is_read(stored: Path) -> None:
    before = load_corpus(DataConfig(path=str(stored)))
    assert len(everything(stored)) > 100
    assert before.train.blocks is not None and before.train.blocks._seen.sum() == 0  # nothing was read of this one


def test_a_flipped_bit_is_noticed_wherever_it_is(stored: Path) -> None:
    """Never other tokens: one line that names the file and the mend, or the same text (a bit that nobody reads)."""
    right = everything(stored)
    draw, named = random.Random(3), 0
    files = sorted(stored.iterdir())
    for _ in range(60):
        file = draw.choice(files)
        before = file.read_bytes()
        flip(file, draw.randrange(len(before)))
        try:
            seen = everything(stored)
        except ValueError as error:
            named += 1
            assert "damaged" in str(error) and "delete" in str(error) and "\n" not in str(error), error
        else:
            assert len(seen) == len(right) and all(map(np.array_equal, seen, right)), file
        file.write_bytes(before)
    assert named > 40


def test_only_what_is_read_is_looked_at(stored: Path) -> None:
    flip(stored / "train-tokens.npy", -1)
    corpus = open_corpus(stored, load_tokenizer("bytes"))
    assert corpus is not None
    corpus.train.check(0, 512)
    with pytest.raises(ValueError, match=r"train-tokens.npy: damaged in bytes [0-9]+ and on; delete its folder"):
        corpus.train.check()


def test_a_file_cut_short_is_noticed(stored: Path) -> None:
    for file in sorted(stored.iterdir()):
        before = file.read_bytes()
        file.write_bytes(before[: len(before) // 2])
        with pytest.raises(ValueError, match=r"damaged|is not|does not|Expecting|cannot"):
            everything(stored)
        file.write_bytes(before)

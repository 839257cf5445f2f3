"""A corpus of rows: sequences that were cut beforehand, read one a row, from a folder that stands as data.path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from isles.data import ByteTokenizer, DataConfig, Loader, load_corpus
from isles.data.corpus import rows_corpus
from isles.data.store import save_corpus
from isles.data.tokenizer import HuggingFaceTokenizer


@pytest.fixture
def rows() -> np.ndarray:
    """(40, 9) bytes, no two rows alike."""
    return np.random.default_rng(0).permutation(256 * 9)[: 40 * 9].reshape(40, 9).astype(np.uint8)


def test_an_epoch_gives_every_row_once_as_it_is(rows: np.ndarray, tmp_path: Path) -> None:
    made = rows_corpus("rows", ByteTokenizer(), rows[:32], rows[32:])
    save_corpus(made, tmp_path / "stored")
    config = DataConfig(path=str(tmp_path / "stored"), batch_size=8)
    corpus = load_corpus(config)
    assert (corpus.sha256, corpus.row) == (made.sha256, 9)
    loader = Loader(corpus, config, context=8)
    assert loader.sequences == 32
    read = torch.cat([next(loader) for _ in range(4)]).numpy()
    assert sorted(map(tuple, read.tolist())) == sorted(map(tuple, rows[:32].tolist()))
    assert np.array_equal(torch.cat(list(loader.validation_batches())).numpy(), rows[32:])


def test_another_context_another_tokenizer_and_no_rows_are_refused(rows: np.ndarray, tmp_path: Path) -> None:
    save_corpus(rows_corpus("rows", ByteTokenizer(), rows, rows[:0]), tmp_path / "stored")
    config = DataConfig(path=str(tmp_path / "stored"), batch_size=8)
    with pytest.raises(ValueError, match=r"sequences of 9 tokens, which needs model\.context = 8, not 16"):
        Loader(load_corpus(config), config, context=16)
    from tests.cli.test_experts import _tokenizer

    _tokenizer(tmp_path / "tokenizer.json")
    assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").vocab_size == 256
    with pytest.raises(ValueError, match="was made with another one; name that one"):
        load_corpus(DataConfig(path=config.path, tokenizer=str(tmp_path / "tokenizer.json")))
    with pytest.raises(ValueError, match="rows: has no sequence to train on"):
        rows_corpus("rows", ByteTokenizer(), rows[:0], rows)

"""`labels` and `loss_mask` of rows of token ids, and marks of documents' first tokens, in the batches of a loader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.base.marks import FIRST, IGNORED, documents_of, ids_of, learned_in, targets_of
from isles.data import Corpus, DataConfig, Loader, load_corpus
from isles.data.store import save_corpus
from isles.training.step import validation_losses
from tests.data.test_ids import DOCUMENTS, VOCAB, settings

DRAW = np.random.default_rng(7)
LABELS = (
    r"data\.path: .*rows\.jsonl line 2: labels must have, for each of 3 ids, the id if it is learned, else -100; corr"
)
LEARNED = [DRAW.random(len(one)) < 0.6 for one in DOCUMENTS]


def _rows(**columns: Any) -> list[dict[str, Any]]:
    """columns: of each, a list for each document."""
    ids = [one.tolist() for one in DOCUMENTS]
    return [dict(zip(["input_ids", *columns], row, strict=True)) for row in zip(ids, *columns.values(), strict=True)]


def _labels() -> list[list[int]]:
    return [np.where(on, one, -100).tolist() for one, on in zip(DOCUMENTS, LEARNED, strict=True)]


def _mask() -> list[list[int]]:
    return [on.astype(int).tolist() for on in LEARNED]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path / "rows.parquet")
    return path / "rows.parquet"


def _dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(str(path / "saved"))
    return path / "saved"


def _mds(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A shard, by hand: each sample is the sizes of its two columns, then the ids and, with its shape, the mask."""
    samples = [
        np.array([4 * len(row["input_ids"]), 2 + len(row["loss_mask"])], "<u4").tobytes()
        + np.array(row["input_ids"], "<u4").tobytes()
        + bytes([4, len(row["loss_mask"]), *row["loss_mask"]])
        for row in rows
    ]
    begin = 4 * (len(rows) + 2)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4")
    content = np.array([len(rows)], "<u4").tobytes() + offsets.tobytes() + b"".join(samples)
    (folder := path / "mds").mkdir()
    (folder / "shard.mds").write_bytes(content)
    columns = {"names": ["input_ids", "loss_mask"], "encodings": ["bytes", "ndarray:uint8"], "sizes": [None, None]}
    shard = {"samples": len(rows), "raw_data": {"basename": "shard.mds", "bytes": len(content)}, "zip_data": None}
    shard |= {f"column_{key}": value for key, value in columns.items()}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


class Streamed:
    """Rows of JSONL, for `data.source`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, Path(self.path).read_text().splitlines())


def _batches(corpus: Corpus, config: DataConfig) -> list[torch.Tensor]:
    """Of two epochs, and of validation."""
    loader = Loader(corpus, config, context=16)
    return [*islice(loader, 2 * loader.sequences // 4), *loader.validation_batches()]


def test_rows_of_every_format_say_what_is_learned(tmp_path: Path) -> None:
    plain = settings(_jsonl(tmp_path / "plain.jsonl", _rows()))
    right = [*map(torch.from_numpy, LEARNED)]
    several = {
        "labels": settings(_jsonl(tmp_path / "labels.jsonl", _rows(labels=_labels()))),
        "mask": settings(_jsonl(tmp_path / "mask.jsonl", _rows(loss_mask=_mask())), cache=str(tmp_path / "cache")),
        "both": settings(_parquet(tmp_path, _rows(labels=_labels(), loss_mask=[[1] * len(one) for one in LEARNED]))),
        "saved": settings(_dataset(tmp_path, _rows(loss_mask=[[*map(bool, one)] for one in _mask()]))),
        "own": settings(tmp_path / "mask.jsonl", source=f"{__name__}:Streamed"),
    }
    whole = load_corpus(plain)
    for config in several.values():
        corpus = load_corpus(config)
        assert (corpus.masks, corpus.train.tokens.dtype, whole.masks) == (True, np.int32, False)
        for masked, batch in zip(_batches(corpus, config), _batches(whole, plain), strict=True):
            assert torch.equal(ids_of(masked), batch)
    corpus = load_corpus(several["mask"])
    for number, (start, end) in enumerate(zip(corpus.train.bounds, corpus.train.bounds[1:], strict=False)):
        tokens = corpus.train.tokens[start:end].astype(np.int64)
        assert np.array_equal(tokens >= 0, LEARNED[number][: end - start])
    assert len({load_corpus(config).sha256 for config in several.values()}) == 1 and len(right) == 5


def test_a_mask_beside_ids_in_mds(tmp_path: Path) -> None:
    """Samples are numbered shard by shard: the split is another than that of one file of rows, the ids are the same."""
    rows = [{"input_ids": ids[:20].tolist(), "loss_mask": [at % 2 for at in range(len(ids[:20]))]} for ids in DOCUMENTS]
    corpus = load_corpus(settings(_mds(tmp_path, rows), validation_fraction=0.0))
    ids = np.concatenate([ids[:20] for ids in DOCUMENTS]).astype(np.int64)
    learned = np.concatenate([np.arange(len(ids[:20])) % 2 for ids in DOCUMENTS])
    assert np.array_equal(corpus.train.tokens, np.where(learned, ids, ~ids))


def test_a_mask_that_leaves_nothing_out_changes_no_bit(tmp_path: Path) -> None:
    """Type, order and hash are those of the ids alone; a row may lack what others have."""
    ones = _rows(loss_mask=[[1] * len(one) for one in DOCUMENTS], labels=[one.tolist() for one in DOCUMENTS])
    ones[2] |= {"labels": None}
    del ones[3]["labels"], ones[4]["loss_mask"]
    plain, masked = (
        load_corpus(settings(_jsonl(tmp_path / f"{len(rows[0])}.jsonl", rows))) for rows in (_rows(), ones)
    )
    assert (masked.sha256, masked.text_sha256, masked.masks) == (plain.sha256, plain.text_sha256, False)
    assert masked.train.tokens.dtype == np.uint32


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ({"labels": [5, 6, 8]}, LABELS),
        ({"labels": [-100, -1, 7]}, LABELS),
        ({"labels": [5, 6]}, LABELS),
        ({"labels": [[5], [6], [7]]}, LABELS),
        ({"labels": [5, [6], 7]}, LABELS),
        ({"labels": "567"}, LABELS),
        ({"labels": ["5", "6", "7"]}, LABELS),
        (
            {"loss_mask": [1, 0, 2]},
            "loss_mask must have, for each of 3 ids, 1 if it is learned, else 0; correct the row",
        ),
        ({"loss_mask": [1, 0.5, 0]}, "loss_mask must have, for each of 3 ids, 1 if"),
        ({"loss_mask": 1}, "loss_mask must have, for each of 3 ids, 1 if"),
    ],
)
def test_a_mask_that_does_not_fit_is_told_in_a_line(column: dict[str, Any], match: str, tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [5, 6, 7], **column}])
    with pytest.raises(ValueError, match=match) as caught:
        load_corpus(settings(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("split", ["iid", "by_file"])
def test_first_tokens_are_marked_in_windows(split: Any, tmp_path: Path) -> None:
    """Each entry against its place in the text: which document it is of, whether that begins there, and its mask."""
    config = settings(_jsonl(tmp_path / "rows.jsonl", _rows(labels=_labels())), split=split, isolate_documents=True)
    plain = settings(config.path, split=split)
    corpus = save_corpus(load_corpus(config), tmp_path / "stored")
    for worker in range(2):
        loader, other = (Loader(corpus, one, context=16, worker=worker, workers=2) for one in (config, plain))
        assert (loader.marks, other.marks) == (True, True)
        for batch, unmarked in zip(islice(loader, 40), other, strict=False):
            firsts = batch < -FIRST
            assert torch.equal(torch.where(firsts, batch + FIRST, batch)[~firsts], unmarked[~firsts])
            assert torch.equal(ids_of(batch), ids_of(unmarked))
            for row, found in zip(ids_of(batch).numpy(), firsts.numpy(), strict=True):
                text = ids_of(torch.from_numpy(corpus.train.tokens.astype(np.int64))).numpy()
                start = next(at for at in np.flatnonzero(text == row[0]) if np.array_equal(text[at : at + 17], row))
                assert np.array_equal(found, np.isin(np.arange(start, start + 17), corpus.train.bounds))


def test_what_is_made_of_marks() -> None:
    tokens = torch.tensor([[3, ~4, ~5 - FIRST, 6, 0, ~0 - FIRST, VOCAB - 1, ~(VOCAB - 1)]])
    assert ids_of(tokens).tolist() == [[3, 4, 5, 6, 0, 0, VOCAB - 1, VOCAB - 1]]
    assert targets_of(tokens).tolist() == [[IGNORED, IGNORED, 6, 0, IGNORED, VOCAB - 1, IGNORED]]
    assert documents_of(tokens).tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]]
    assert int(learned_in(tokens)) == 3


def test_the_loss_of_several_texts_counts_learned_targets(tmp_path: Path) -> None:
    """Of one window of 17 ids each, with 16 and 4 targets that are learned: the mean of 1 and 2 nats is 1.2."""
    rows = {"whole": [1] * 17, "few": [1] * 5 + [0] * 12}
    texts = {name: [{"input_ids": [7] * 17, "loss_mask": mask}] for name, mask in rows.items()}
    held = {name: str(_jsonl(tmp_path / f"{name}.jsonl", text)) for name, text in texts.items()}
    config = settings(_jsonl(tmp_path / "train.jsonl", _rows()), validation_path=held, validation_fraction=0.05)
    loader = Loader(load_corpus(config), config, context=16)
    assert loader.validation_weights == {"whole": 16, "few": 4}
    losses = iter([2.0, 1.0])  # names are sorted
    found = validation_losses(config, lambda: loader, lambda batches: next(losses))
    assert found == {"val_loss": 1.2, "val_loss.whole": 1.0, "val_loss.few": 2.0}

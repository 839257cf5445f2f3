"""Text for validation alone: `data.validation_path`, and the split of a saved dataset. All the other is trained on."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import Corpus, DataConfig, Loader, load_corpus, prepare
from isles.data.prepare import corpus_folder
from isles.data.sources import check_sample
from isles.data.store import Draft, is_stored, save_corpus
from tests.data.conftest import Write

TRAIN, HELD = ["one\n", "both\n", "three\n"], ["held out\n", "both\n"]  # "both" stands in both texts


def load(path: Path, validation: Path | str = "", **more: Any) -> Corpus:
    prepare._corpora.clear()  # as in a process that starts
    return load_corpus(DataConfig(path=str(path), validation_path=str(validation), **more))


def written(corpus: Corpus) -> tuple[list[bytes], list[bytes]]:
    """The documents of both parts, read as bytes."""
    parts = (corpus.train, corpus.validation)
    return tuple(  # type: ignore[return-value]
        [part.tokens[one:end].tobytes() for one, end in zip(part.bounds[:-1], part.bounds[1:], strict=True)]
        for part in parts
    )


def sha256_of(*parts: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for array in (np.cumsum([0, *map(len, part)], dtype=np.int64), np.concatenate(part)):
            digest.update(f"{array.dtype.name} {len(array)}\n".encode() + array.tobytes())
    return digest.hexdigest()


@pytest.fixture
def texts(write: Write) -> Path:
    root = write({f"train/{number}.txt": text for number, text in enumerate(TRAIN)})
    return write({f"held/{number}.txt": text for number, text in enumerate(HELD)}) and root


def rows(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def test_both_parts_are_whole_by_every_route(texts: Path, tmp_path: Path) -> None:
    """In memory, stored, opened, of folders and of rows: the same tokens, and the digest that they have by hand."""
    ids = [[np.frombuffer(text.encode(), dtype=np.uint8) for text in part] for part in (TRAIN, HELD)]
    right = [text.encode() for text in TRAIN], [text.encode() for text in HELD]
    one, other = texts / "train", texts / "held"
    for path in (one, rows(tmp_path / "train.jsonl", TRAIN)):
        for validation in (other, rows(tmp_path / "held.jsonl", HELD)):
            for cache in ("", "auto", str(tmp_path / "cache"), str(tmp_path / "cache")):
                corpus = load(path, validation, cache=cache)
                assert (written(corpus), corpus.split_by) == (right, "document")
                assert corpus.sha256 == sha256_of(*ids)
                names = [corpus.train.files[file] for file in corpus.train.file_of]
                assert names == (["train.jsonl"] * 3 if path.is_file() else ["0.txt", "1.txt", "2.txt"])
    alone = load(other, validation_fraction=0)
    assert written(alone)[0] == right[1]


def test_all_workers_validate_on_the_text_and_train_on_the_other(tmp_path: Path) -> None:
    numbers = {"train": np.arange(0, 200), "held": np.arange(500, 533)}
    for name, some in numbers.items():
        np.save(tmp_path / f"{name}.npy", some)
        some.astype("<u2").tofile(tmp_path / f"{name}.bin")
    for suffix in ("npy", "bin"):
        config = DataConfig(
            path=str(tmp_path / f"train.{suffix}"),
            validation_path=str(tmp_path / f"held.{suffix}"),
            tokenizer="ids",
            vocab=600,
            batch_size=4,
        )
        for worker in range(2):
            loader = Loader(load_corpus(config), config, context=8, worker=worker, workers=2)
            assert loader.sequences == 24  # (200 - 1) // 8: none is kept out
            held = np.concatenate([batch.numpy() for batch in loader.validation_batches()])
            assert held.tolist() == [list(range(start, start + 9)) for start in (500, 508, 516, 524)]
            assert int(next(loader).max()) < 200


def test_what_is_stopped_in_either_part_goes_on(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 1)
    monkeypatch.setattr(prepare, "_SAVED", -1.0)
    right, save = load(texts / "train", texts / "held", cache=str(tmp_path / "right")), Draft.save
    for stop in range(1, 6):

        def saved(draft: Draft, text: str, stop: int = stop) -> None:
            save(draft, text)
            if draft.documents == stop:
                raise KeyboardInterrupt

        cache = str(tmp_path / f"cache {stop}")
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Draft, "save", saved)
            load(texts / "train", texts / "held", cache=cache)
        read: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(prepare, "_unit_hash", lambda name, read=read: read.append(name) or 0.5)
            corpus = load(texts / "train", texts / "held", cache=cache)
        assert len(read) == 5 - stop  # what was saved is not tokenised again
        assert (corpus.sha256, corpus.text_sha256) == (right.sha256, right.text_sha256)


def test_a_changed_text_or_another_path_is_another_corpus(texts: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first = load(texts / "train", texts / "held", cache=cache)
    (texts / "held" / "1.txt").write_text("else\n")
    second = load(texts / "train", texts / "held", cache=cache)
    assert written(second)[1] == [b"held out\n", b"else\n"] and second.sha256 != first.sha256
    folders = {
        corpus_folder(DataConfig(path=str(texts / one), validation_path=str(other and texts / other), cache=cache))
        for one, other in (("train", "held"), ("held", "train"), ("train", ""), ("train", "train"), ("", "held"))
    }
    assert len(folders) == 5
    notes: list[str] = []
    stat = (texts / "held" / "1.txt").stat()
    (texts / "held" / "1.txt").write_text("same\n")
    os.utime(texts / "held" / "1.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    config = DataConfig(path=str(texts / "train"), validation_path=str(texts / "held"), cache=cache)
    assert written(load_corpus(config, notes.append, check=True))[1] == [b"held out\n", b"same\n"]
    assert notes == ["the text has changed since it was prepared: preparing it anew"]


def saved(folder: Path, splits: dict[str, list[str]]) -> Path:
    datasets = pytest.importorskip("datasets")
    made = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return folder


def test_the_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    """A note names the one that is for validation; 0 is no validation, and a path of one's own comes first."""
    right, held = [text.encode() for text in TRAIN], [text.encode() for text in HELD]
    three = saved(tmp_path / "three", {"train": TRAIN, "test": ["test\n"], "validation": HELD})
    two = saved(tmp_path / "two", {"test": HELD, "train": TRAIN})
    for folder, name in ((three, "validation"), (two, "test")):
        note = f"^data.path: validation reads the split '{name}' of the dataset, not data.validation_fraction$"
        for fraction in (0.05, 0.5):
            with pytest.warns(UserWarning, match=note):
                check_sample(DataConfig(path=str(folder), validation_fraction=fraction))
            assert written(load(folder, validation_fraction=fraction)) == (right, held)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (
            DataConfig(path=str(three), validation_fraction=0),
            DataConfig(path=str(three), validation_path=str(two / "test")),
            DataConfig(path=str(three / "train")),
        ):
            check_sample(config)
    assert written(load(three, validation_fraction=0)) == (right, [])
    assert written(load(three, three / "test")) == (right, [b"test\n"])
    assert written(load(three / "train", two)) == (right, held)
    assert load(two).sha256 == load(three).sha256 == load(rows(tmp_path / "a.jsonl", TRAIN), three).sha256
    (three / "validation" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"^data\.path: .*three/validation cannot be read \(.*\); correct it$"):
        load(three)


@pytest.mark.parametrize(
    ("files", "validation", "match"),
    [
        (
            {},
            "nowhere",
            r"data\.validation_path = .* does not exist; give .*, or leave it empty for a share of data\.path",
        ),
        ({"held/.a": ""}, "held", r"data\.validation_path = .* is a folder without a readable file; put text"),
        ({"held.txt": ""}, "held.txt", r"data\.validation_path = .* holds no text for validation \(1 files, .*; give"),
        (
            {"held/a": "", "held/b": b"\0"},
            "held",
            r"data\.validation_path = .* holds no text for validation \(2 files,",
        ),
        ({"held.csv": "a,b"}, "held.csv", r"data\.validation_path: .*held\.csv is a table; write"),
        ({"held.jsonl": "{"}, "held.jsonl", r"data\.validation_path: .*held\.jsonl line 1 is not JSON .*; correct it"),
        (
            {"held.jsonl": '{"a": 1}'},
            "held.jsonl",
            r"data\.text_key = 'text' is missing in .*held\.jsonl line 1; set it",
        ),
        (
            {"held/dataset_dict.json": '{"splits": []}'},
            "held",
            r"data\.validation_path: .* 'validation', 'val' or 'test' \(it",
        ),
        ({"held/dataset_dict.json": '{"splits": 3}'}, "held", r"data\.validation_path: .*json cannot be read .*; save"),
        ({"held.txt": "short"}, "held.txt", r"data\.validation_path gives 6 tokens for validation, fewer than context"),
    ],
)
def test_what_is_no_text_for_validation_is_told_in_a_line(
    write: Write, files: dict[str, str | bytes], validation: str, match: str
) -> None:
    root = write({"train.txt": "x" * 99, **files})
    config = DataConfig(path=str(root / "train.txt"), validation_path=str(root / validation))
    with pytest.raises(ValueError, match=f"^{match}") as caught:
        Loader(load_corpus(config), config, context=8)
    assert "\n" not in str(caught.value)
    if "no text" not in match and "gives" not in match:  # those are known once all of it was read
        with pytest.raises(ValueError, match=f"^{match}"):
            check_sample(config)


def test_no_text_for_training_beside_text_for_validation(write: Write) -> None:
    root = write({"train.txt": "", "held.txt": "text"})
    with pytest.raises(ValueError, match=r"^data\.path = .*train\.txt' holds no text \(1 files, all empty"):
        load(root / "train.txt", root / "held.txt")


def test_a_stored_corpus_has_its_own_split(texts: Path, tmp_path: Path) -> None:
    save_corpus(load(texts / "train", texts / "held"), tmp_path / "stored")
    stored, match = str(tmp_path / "stored"), r"^data\.validation_path = .*: a stored corpus has its own split; leave"
    assert written(load(tmp_path / "stored"))[1] == [text.encode() for text in HELD]
    uses: tuple[Callable[[DataConfig], Any], ...] = (load_corpus, check_sample, corpus_folder, is_stored)
    for path, validation in ((stored, str(texts / "held")), (str(texts / "train"), stored)):
        for use in uses:
            with pytest.raises(ValueError, match=match):
                use(DataConfig(path=path, validation_path=validation))


def test_what_the_sample_reads_is_of_both(write: Write) -> None:
    """The one broken file of validation is among it, however many there are to train on."""
    root = write({f"train/{number}.txt": "x" for number in range(40)} | {"held/a.txt": b"caf\xe9 au lait"})
    with pytest.raises(ValueError, match=r"^data\.validation_path: .*a\.txt is not UTF-8 text"):
        check_sample(DataConfig(path=str(root / "train"), validation_path=str(root / "held")))

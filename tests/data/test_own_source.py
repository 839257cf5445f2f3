"""`data.source`: documents from a class, with the examples of docs/data.md as printed."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import Corpus, DataConfig, load_corpus, prepare
from isles.data.sources import check_sample
from isles.data.store import save_corpus
from isles.training.config.reading import gather, resolve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TEXTS = ["Once upon a time\n", "Ünïcode 東京", "", "three\nlines\nand more"]


class Listed:
    """The lines of a file in JSON; some are to fail."""

    def __init__(self, path: str) -> None:
        if path == "broken":
            raise ZeroDivisionError("of my own making")
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        for line in Path(self.path).read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            if value == "fail":
                raise KeyError(value)
            yield np.array(value) if value == [1, 2] else value


class Marked(Listed):
    marks, read = ["1"], [0]

    @property
    def fingerprint(self) -> str:
        return self.marks[0]

    def __iter__(self) -> Iterator[Any]:
        self.read[0] += 1
        return super().__iter__()


class Needy(Listed):
    def __init__(self, path: str, seed: int) -> None: ...


class NoDocuments:
    def __init__(self, path: str) -> None: ...


class BadSize(Listed):
    size = "many"


def config(path: Path | str, name: str = "Listed", **more: Any) -> DataConfig:
    source = name if ":" in name or "." in name else f"{__name__}:{name}"
    return DataConfig(**{"path": str(path), "source": source, "validation_fraction": 0.0} | more)


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def as_rows(path: Path) -> Corpus:
    """The texts as JSONL."""
    write(path, *({"text": text} for text in TEXTS))
    return load_corpus(DataConfig(path=str(path), validation_fraction=0.3))


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, where Python finds them."""
    for name, text in re.findall(r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_streamed_dataset_of_the_page(copied: Path) -> None:
    pytest.importorskip("datasets")
    right = as_rows(copied / "stories.jsonl")
    found = load_corpus(config(copied / "stories.jsonl", "streamed:Stories", validation_fraction=0.3))
    assert (found.sha256, found.name) == (right.sha256, right.name)


def test_the_tar_shards_of_the_page(copied: Path) -> None:
    """With validation shards of their own, which the class opens in the same way."""
    right = as_rows(copied / "rows.jsonl")
    for folder in ("train", "held"):
        (copied / folder).mkdir()
        for shard in range(2):
            with tarfile.open(copied / folder / f"{shard}.tar", "w") as tar:
                for number, text in enumerate(TEXTS[2 * shard : 2 * shard + 2]):
                    for name, data in ((f"{shard}{number}.json", b"{}"), (f"{shard}{number}.txt", text.encode())):
                        member = tarfile.TarInfo(name)
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
    found = load_corpus(config(copied / "train", "tars:Tars", validation_fraction=0.3))
    assert found.sha256 == right.sha256
    apart = config(copied / "train", "tars:Tars", validation_path=str(copied / "held"), validation_fraction=0.05)
    both = load_corpus(apart)
    assert both.train.tokens.tobytes() == both.validation.tokens.tobytes()
    (copied / "train" / "2.tar").write_bytes(b"no tar")
    line = r"data\.source = 'tars:Tars' raised ReadError: .* \(tarfile\.py, line \d+\); correct it$"
    with pytest.raises(ValueError, match=line):
        load_corpus(config(copied / "train", "tars:Tars"))


def test_ids_and_a_class_without_a_path(tmp_path: Path) -> None:
    file = write(tmp_path / "ids", [5, 6, 7], [1, 2], [])
    found = load_corpus(config(file, tokenizer="ids", vocab=8))
    assert found.train.tokens.tolist() == [5, 6, 7, 1, 2] and found.train.bounds.tolist() == [0, 3, 5]
    assert load_corpus(config("", f"{__name__}:Nothing")).name == f"{__name__}:Nothing"
    save_corpus(found, tmp_path / "stored")  # a folder is what the class takes it for
    assert load_corpus(config(tmp_path / "stored", f"{__name__}:Constant")).train.tokens.tobytes() == b"constant\n"


class Constant(Listed):
    def __iter__(self) -> Iterator[str]:
        return iter(["constant"])


class Nothing(Listed):
    def __iter__(self) -> Iterator[str]:
        assert self.path == ""
        return iter(TEXTS)


def test_when_documents_are_read_again(tmp_path: Path) -> None:
    """Once in a preparation; again when the fingerprint is another, or `data prepare` looks."""
    file, Marked.read[0] = write(tmp_path / "a", *TEXTS), 0
    settings = config(file, "Marked", cache=str(tmp_path / "cache"))

    def load(**more: Any) -> Corpus:
        prepare._corpora.clear()  # as in a process that starts
        return load_corpus(settings, **more)

    first = load()
    assert load().sha256 == first.sha256 and Marked.read[0] == 1
    write(file, "another")
    assert load().sha256 == first.sha256 and Marked.read[0] == 1
    Marked.marks[0] = "2"
    second = load()
    assert second.train.tokens.tobytes() == b"another\n" and Marked.read[0] == 2
    write(file, "one more")
    assert load(check=True).train.tokens.tobytes() == b"one more\n"
    plain = config(file, cache=str(tmp_path / "cache"))
    assert load_corpus(plain).sha256 == load().sha256
    write(file, "and another")  # no fingerprint: only `data prepare` looks
    prepare._corpora.clear()
    assert load_corpus(plain).train.tokens.tobytes() == b"one more\n"
    assert load_corpus(plain, check=True).train.tokens.tobytes() == b"and another\n"


@pytest.mark.parametrize(
    ("name", "values", "more", "match"),
    [
        ("nowhere:Class", [], {}, r'data\.source = "nowhere:Class" cannot be imported: No module named .*PYTHONPATH$'),
        ("os.path", [], {}, r"data\.source = 'os\.path': write package\.module:Class, without"),
        ("os:sep", [], {}, r'data\.source = "os:sep" is a str: name a class, as isles\.DataSource describes$'),
        ("Needy", [], {}, r"data\.path\.seed is missing: .*:Needy cannot be made without it$"),
        ("NoDocuments", [], {}, r"lacks __iter__: isles\.DataSource says what the class must have$"),
        ("BadSize", ["x"], {}, r"raised ValueError: invalid literal .* \(sources\.py, line \d+\); correct it$"),
        ("Listed", ["x", "fail"], {}, r"raised KeyError: 'fail' \(test_own_source\.py, line \d+\); correct it$"),
        ("Listed", ["x", 3], {}, r"holds int instead of text in document 2 of .*:Listed"),
        ("Listed", ["x"], {"text_key": "a"}, r"write package.module:Class, without data.text_key$"),
        ("Listed", ["x"], {"tokenizer": "ids", "vocab": 9}, r'holds "x" in document 1; write one dimension'),
        (
            "Listed",
            [[3, 9]],
            {"tokenizer": "ids", "vocab": 9},
            r"data\.vocab = 9: .*:Listed has an id of 9 in document",
        ),
        ("Listed", [""], {}, r"holds no text"),
    ],
)
def test_what_is_no_source_is_a_line(
    name: str, values: list[Any], more: dict[str, Any], match: str, tmp_path: Path
) -> None:
    settings = config(write(tmp_path / "a", *values), name, **more)
    for read in (load_corpus,) if values == [""] else (check_sample, load_corpus):
        with pytest.raises(ValueError, match=match) as caught:
            read(settings)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("data.")


def test_a_class_that_cannot_open_its_path() -> None:
    with pytest.raises(ValueError, match=r"Listed\" cannot be made; .*ZeroDivisionError: of my own making \(test_own"):
        check_sample(config("broken"))


def test_the_setting_imports_nothing_before_the_text_is_read() -> None:
    resolve(gather(None, {}, ["data.source=nowhere:Class", "data.path=x"]))

import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from isles.data import Corpus, DataConfig, load_corpus

Write = Callable[[dict[str, str | bytes]], Path]


def documents(stream) -> list[bytes]:
    return [stream.tokens[a:b].tobytes() for a, b in zip(stream.bounds[:-1], stream.bounds[1:], strict=True)]


def load(path: Path, **values) -> Corpus:
    return load_corpus(DataConfig(path=str(path), **values))


def test_standard_library_is_split_by_file() -> None:
    corpus = load_corpus(DataConfig())
    assert corpus.name == "standard library"
    assert corpus.split_by == "document"
    assert corpus.train.tokens.dtype == np.uint8
    total = len(corpus.train) + len(corpus.validation)
    assert total > 3_000_000
    assert 0.025 <= len(corpus.validation) / total <= 0.1
    train = {corpus.train.files[i] for i in corpus.train.file_of}
    validation = {corpus.validation.files[i] for i in corpus.validation.file_of}
    assert not train & validation
    files = train | validation
    assert {"json/decoder.py", "os.py"} <= files
    folders = {part for file in files for part in file.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}
    where = corpus.train.files.index("os.py")
    text = documents(corpus.train)[list(corpus.train.file_of).index(where)]
    assert text == Path(os.__file__).read_bytes()


def test_sides_depend_on_the_name_alone(write: Write) -> None:
    files = {f"folder/{i}.txt": f"{i}\n" * 50 for i in range(100)}
    corpus = load(write(files), validation_fraction=0.2)
    assert corpus.split_by == "document"
    expected = [
        text.encode()
        for name, text in sorted(files.items())
        if int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < 0.2 * 2**64
    ]
    assert documents(corpus.validation) == expected
    assert sorted(documents(corpus.train) + expected) == sorted(text.encode() for text in files.values())
    grown = load(write({f"folder/x{i}.txt": "new\n" * 50 for i in range(20)}), validation_fraction=0.2)
    assert set(expected) <= set(documents(grown.validation))


def test_one_file_is_split_by_position(write: Write) -> None:
    text = "".join(f"{i:04d}\n" for i in range(400))
    corpus = load(write({"book.txt": text}) / "book.txt", validation_fraction=0.1)
    assert corpus.split_by == "position"
    assert corpus.train.tokens.tobytes() + corpus.validation.tokens.tobytes() == text.encode()
    assert len(corpus.validation) == 200


def test_few_unequal_files_give_their_ends(write: Write) -> None:
    corpus = load(write({"a.txt": "a\n" * 1000, "b.txt": "b\n" * 10, "c.txt": "c\n"}), validation_fraction=0.1)
    assert corpus.split_by == "position"
    assert documents(corpus.train) == [b"a\n" * 900, b"b\n" * 9, b"c"]
    assert documents(corpus.validation) == [b"a\n" * 100, b"b\n", b"\n"]


def test_no_validation(write: Write) -> None:
    corpus = load(write({"a.txt": "abc\n"}), validation_fraction=0)
    assert corpus.train.tokens.tobytes() == b"abc\n"
    assert len(corpus.validation) == len(corpus.validation.file_of) == 0


def test_hash_follows_the_content_and_not_the_path(write: Write, tmp_path: Path) -> None:
    root = write({"a.txt": "first\n" * 30, "b.txt": "second\n" * 30})
    first = load(root)
    assert load(root) is first
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in root.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert load(copy).sha256 == first.sha256
    assert load(root, validation_fraction=0.2).sha256 != first.sha256
    write({"b.txt": "sec0nd\n" * 30})
    assert load(root).sha256 != first.sha256
    # The same bytes under other bounds are other data: `by_file` would deal them differently.
    write({"a.txt": "ab\ncd\n", "b.txt": "ef\n"})
    cut_late = load(root, validation_fraction=0).sha256
    write({"a.txt": "ab\n", "b.txt": "cd\nef\n"})
    assert load(root, validation_fraction=0).sha256 != cut_late


def test_arrays_cannot_be_written(write: Write) -> None:
    corpus = load(write({"a.txt": "abc\n" * 20}))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.tokens[0] = 1


def test_threads_get_one_corpus(write: Write) -> None:
    root = write({f"{i}.txt": "text\n" * 100 for i in range(50)})
    found: list[Corpus] = []
    threads = [threading.Thread(target=lambda: found.append(load(root))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(corpus) for corpus in found}) == 1


def test_folder_leaves_out_hidden_empty_and_binary_files(write: Write) -> None:
    root = write(
        {
            "a.txt": "\ufefftext",  # with a byte order mark
            "deep/b.rs": "fn main() {}\n",
            "deep/empty.txt": "",
            ".git/config": "hidden",
            ".hidden": "hidden",
            "__pycache__/a.pyc": b"\0",
        }
    )
    (root / "dangling").symlink_to(root / "nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus = load(root, validation_fraction=0)
    assert documents(corpus.train) == [b"text\n", b"fn main() {}\n"]
    assert [corpus.train.files[i] for i in corpus.train.file_of] == ["a.txt", "deep/b.rs"]
    write({"image.png": b"\x89PNG\0\0"})
    with pytest.warns(UserWarning, match=r"data\.path: 1 of 4 files hold no text .* image\.png"):
        assert load(root, validation_fraction=0).sha256 == corpus.sha256


def test_cache_is_memory_mapped_and_equal(write: Write, tmp_path: Path) -> None:
    root = write({f"{i:03d}.txt": f"{i} text\n" * 20 for i in range(60)})
    cache = tmp_path / "cache"
    plain = load(root)
    stored = load(root, cache=str(cache))
    assert stored is not plain
    assert isinstance(stored.train.tokens.base, np.memmap)
    for part in ("train", "validation"):
        for array in ("tokens", "bounds", "file_of"):
            np.testing.assert_array_equal(getattr(getattr(stored, part), array), getattr(getattr(plain, part), array))
    assert (stored.sha256, stored.split_by, stored.train.files) == (plain.sha256, plain.split_by, plain.train.files)
    (folder,) = cache.iterdir()
    assert (folder / "manifest.json").is_file()


def test_cache_is_used_by_the_next_process(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isles.data import prepare as loading

    root = write({"a.txt": "text\n" * 100})
    cache = tmp_path / "cache"
    first = load(root, cache=str(cache), validation_fraction=0)  # an empty array is stored too
    loading._corpora.clear()  # as in a process that starts
    monkeypatch.setattr(loading, "_prepare", lambda *_, **__: pytest.fail("was read again"))
    again = load(root, cache=str(cache), validation_fraction=0)
    assert again is not first
    assert again.sha256 == first.sha256
    (folder,) = cache.iterdir()
    (folder / "train-tokens.npy").write_bytes(b"broken")
    loading._corpora.clear()
    with pytest.raises(ValueError, match=r"^the stored corpus .* is damaged .*; delete that folder$"):
        load(root, cache=str(cache), validation_fraction=0)
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^data\.cache: .*cannot be written .*; give another$"):
        load(root, cache=str(tmp_path / "file"))


def test_a_second_writer_of_the_cache_takes_the_first_ones(write: Write, tmp_path: Path) -> None:
    from isles.data.store import save_corpus

    corpus = load(write({"a.txt": "text\n" * 100}))
    folder = tmp_path / "cache" / "key"
    save_corpus(corpus, folder)
    assert save_corpus(corpus, folder).sha256 == corpus.sha256
    assert [entry.name for entry in folder.parent.iterdir()] == ["key"]


def test_jsonl_rows_are_documents(write: Write) -> None:
    root = write({"rows.jsonl": '{"text": "one"}\n\n{"text": "", "id": 3}\n{"text": "två\\n"}\n'})
    corpus = load(root / "rows.jsonl", validation_fraction=0)
    assert documents(corpus.train) == [b"one\n", "två\n".encode()]
    rows = "".join(f'{{"body": "row {i}", "text": 0}}\n' for i in range(300))
    many = load(write({"rows.ndjson": rows}) / "rows.ndjson", text_key="body")
    assert many.split_by == "document"
    assert not set(documents(many.train)) & set(documents(many.validation))
    assert len(many.train.file_of) + len(many.validation.file_of) == 300
    (root / "rows.ndjson").rename(root / "moved.jsonl")  # as it may be called on another machine
    assert load(root / "moved.jsonl", text_key="body").sha256 == many.sha256


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    texts = [f"row {i}" for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(300))}), file, row_group_size=64)
    corpus = load(file, validation_fraction=0)
    assert documents(corpus.train) == [f"{text}\n".encode() for text in texts]
    with pytest.raises(ValueError, match=r"^data\.text_key = 'body' is missing in .*; set it to one of: text, n$"):
        load(file, text_key="body")
    with pytest.raises(ValueError, match=r"^data\.text_key = 'n' holds int instead of text in row 1 of .*; "):
        load(file, text_key="n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(ValueError, match=r"^data\.path: .*bad\.parquet is not a Parquet file .*; write it again$"):
        load(tmp_path / "bad.parquet")


def test_saved_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is heavy and may be absent, so a stand-in with the names that are used reads the folder."""

    class Dataset(list):
        column_names = ("text",)

        def select_columns(self, names: list[str]) -> "Dataset":
            assert names == ["text"]
            return self

    class Package:
        pass

    folder = tmp_path / "saved"
    saved: dict[str, object] = {}
    for name, texts in (("train", [f"row {i}" for i in range(4)]), ("test", ["test"])):
        (folder / name).mkdir(parents=True)
        (folder / name / "data.arrow").write_bytes(b"\0")
        saved[str(folder / name)] = Dataset({"text": text} for text in texts)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test", "gone"]}')
    package = Package()
    package.load_from_disk = saved.get
    monkeypatch.setitem(sys.modules, "datasets", package)
    corpus = load(folder)
    assert documents(corpus.train) == [b"row 0\n", b"row 1\n", b"row 2\n", b"row 3\n"]
    assert documents(corpus.validation) == [b"test\n"]
    (folder / "dataset_dict.json").write_text('{"splits": ["gone", "test"]}')
    with pytest.raises(ValueError, match=r"^data\.path: .* has no split 'train' \(it has test\); give one"):
        load(folder, validation_fraction=0.5)
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match=r"^data\.text_key = 'body' is missing in .*: text$"):
        load(folder, text_key="body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'^data\.path: .* needs the package datasets; pip install "\.\[hf\]"$'):
        load(folder)


@pytest.mark.parametrize(
    ("files", "path", "match"),
    [
        ({}, "nowhere", r"data\.path = .* does not exist; give a file"),
        ({}, "", r"data\.path = .* is a folder without a readable file; put text"),
        ({".hidden": "x"}, "", r"data\.path = .* is a folder without a readable file; put text"),
        ({"a.txt": ""}, "", r"data\.path = .* holds no text \(1 files, all empty or binary\); give files"),
        ({"a.txt": ""}, "a.txt", r"data\.path = .* holds no text"),
        ({"a.bin": b"\0\1"}, "", r"data\.path = .* holds no text"),
        ({"a.txt": b"caf\xe9"}, "a.txt", r"data\.path: .*a\.txt is not UTF-8 text \(byte 0xe9 at offset 3\); convert"),
        (
            {"a.txt": "x", "b.txt": "é".encode("utf-16")},
            "",
            r"data\.path: .*b\.txt has NUL bytes and is no text: .*16",
        ),
        ({"a.bin": b"\0\xff"}, "a.bin", r"data\.path: .*a\.bin has NUL bytes and is no text: it"),
        ({"low.bin": b"h\0e\0l\0l\0o\0"}, "low.bin", r"data\.path: .*low\.bin has NUL bytes and is no text: .*nanoGPT"),
        ({"gpt.bin": b"\xf0\x0f\x02\xc4\x11\x00" * 9}, "gpt.bin", r"data\.path: .*gpt\.bin has NUL bytes .*.*nanoGPT"),
        (
            {"a.jsonl": '{"text": "x"}\n{"body": "y", "id": 1}\n'},
            "",
            r"data\.text_key = 'text' is missing in .* line 2; ",
        ),
        (
            {"a.jsonl": '{"text": "x"}\n{"text": 3}\n'},
            "",
            r"data\.text_key = 'text' holds int instead of text in line 2",
        ),
        ({"a.jsonl": '{"text": null}\n'}, "", r"data\.text_key = 'text' holds NoneType instead of text in line 1"),
        ({"a.jsonl": '{"text": "\\ud800"}\n'}, "", r"data\.text_key = 'text' holds half a surrogate pair in line 1"),
        ({"a.jsonl": '{"text": "x"\n'}, "", r"data\.path: .* line 1 is not JSON \(.*\); correct it"),
        ({"a.jsonl": '{"text": "x"}\n3\n'}, "", r'data\.path: .* line 2 is not an object; write \{"text": \.\.\.\}'),
        ({"a.jsonl": '\n["x"]\n'}, "", r"data\.path: .*a\.jsonl is a JSON array; write one object a line"),
        ({"a.jsonl": b'{"text": "\xe9"}\n'}, "", r"data\.path: .* line 1 is not UTF-8; convert it"),
    ],
)
def test_every_error_names_the_key_and_the_hint(write: Write, files: dict, path: str, match: str) -> None:
    root = write(files)
    with pytest.raises(ValueError, match=f"^{match}") as caught:
        load(root / path)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


def test_absent_extras_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'^data\.path: .* needs the package pyarrow; pip install "\.\[data\]"$'):
        load(tmp_path / "rows.parquet")


def test_a_python_without_its_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match=r"^data\.path is empty and .* holds no standard library source; give a file"):
        load_corpus(DataConfig())

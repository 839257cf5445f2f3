"""What is no list of token ids is told in a line; as is text that is none, before anything is started. What is one:
`test_formats`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import DataConfig, load_corpus
from isles.data.sources import check_sample
from tests.data.formats import DOCUMENTS, VOCAB


def settings(path: Path, **more: Any) -> DataConfig:
    values = {"tokenizer": "ids", "vocab": VOCAB, "ids_dtype": "uint32", "validation_fraction": 0.2, "batch_size": 4}
    return DataConfig(path=str(path), **(values | more))


def test_a_folder_of_ids_and_what_is_made_of_them(tmp_path: Path) -> None:
    """Files that hold no ids are left out; a run on ids can use no text."""
    (tmp_path / "readme.txt").write_text("ids")
    np.save(tmp_path / "ids.npy", np.concatenate(DOCUMENTS))
    np.arange(2000, dtype="<u4").tofile(tmp_path / "val.bin")
    with pytest.warns(UserWarning, match=r"1 of 3 files hold no text and were left out, among them readme\.txt"):
        corpus = load_corpus(settings(tmp_path, validation_fraction=0))
    assert np.array_equal(corpus.train.tokens, np.concatenate([*DOCUMENTS, np.arange(2000)]))
    for use in (corpus.tokenizer.encode, corpus.tokenizer.decode, corpus.tokenizer.encode_batch):
        with pytest.raises(ValueError, match=r'^data\.tokenizer = "ids": .*; give ids$'):
            use("text")


@pytest.mark.parametrize(
    ("name", "content", "more", "match"),
    [
        (
            "a.bin",
            b"\1\0\2",
            {"ids_dtype": "uint16"},
            r'a\.bin is not of data\.ids_dtype = "uint16" \(.*\); correct it',
        ),
        ("a.bin", b"\1\0\2\0\1\0", {}, r'a\.bin is not of data\.ids_dtype = "uint32"'),
        (
            "a.bin",
            b"\5\0\0\0\x70\x11\1\0",
            {},
            r"data\.vocab = 70000: .* has an id of 70000; raise it, or correct the ids",
        ),
        ("a.bin", b"", {}, "holds no text"),
        ("a.npy", np.zeros((2, 2), np.uint16), {}, r"a\.npy holds 2-dimensional uint16; write one dimension"),
        ("a.npy", np.zeros(4), {}, "holds 1-dimensional float64; write"),
        ("a.npy", np.array(4), {}, "holds 0-dimensional int64; write"),
        ("a.npy", np.array([1, -3]), {}, "has an id of -3; raise it"),
        ("a.npy", b"no array", {}, "is not a whole array of numbers"),
        (
            "a.jsonl",
            b'{"text": "x"}\n',
            {},
            r"data\.text_key = 'input_ids' is missing in .* line 1; set it to one of: text",
        ),
        ("a.jsonl", b'{"ids": "x"}\n', {"text_key": "ids"}, r'holds "x" in line 1; write one dimension'),
        ("a.jsonl", b'{"input_ids": [1, [2]]}\n', {}, r"holds \[1, \[2\]\] in line 1; write"),
        ("a.jsonl", b'{"input_ids": [1.5]}\n', {}, r"holds \[1\.5\] in line 1; write"),
        ("a.txt", b"text", {}, r"a\.txt holds no token ids; give \.bin or \.npy"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(
    name: str, content: Any, more: dict[str, Any], match: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(file, content)
    else:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        load_corpus(settings(file, **more))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.")
    if file.stat().st_size:
        with pytest.raises(ValueError, match=match):
            check_sample(settings(file, **more))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.pdf", b"%PDF-1.7\n", "is a PDF; extract its text"),
        ("a.txt.gz", b"\x1f\x8b\x08", "is compressed; unpack it"),
        ("a.docx", b"PK\3\4", "is a ZIP archive"),
        ("a.npy", b"\x93NUMPY", r'is a NumPy array; .* data\.tokenizer = "ids"'),
        ("a.bin", b"\1\0\2\0" * 9, r'set data\.tokenizer = "ids" and data\.vocab'),
        ("a.dat", b"\0\xff\xfe", "has NUL bytes and is no text"),
        (
            "a.txt",
            "caf\u00e9".encode("latin-1") + b" " * 99,
            r"is not UTF-8 text \(byte 0xe9 at offset 3\); convert it",
        ),
        ("a.csv", b"text,n\nx,1\n", r"is a table; write its text as JSONL or Parquet"),
        ("a.json", b' [\n{"text": "x"}]', r"is a JSON array; write one object a line"),
        ("a.jsonl", b'[{"text": "x"}]', r"is a JSON array; write one object a line"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("a.parquet", b"text", "is not a Parquet file"),
    ],
)
def test_the_beginning_of_what_is_no_text_is_enough(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for read in (check_sample, load_corpus):
        with pytest.raises(ValueError, match=match) as caught:
            read(DataConfig(path=str(tmp_path / name)))
        assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_a_sample_is_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(("é" * 3_000_000).encode() + b"\xff")
    check_sample(DataConfig(path=str(tmp_path / "long.txt")))
    check_sample(DataConfig())
    for number in range(30):
        (tmp_path / f"{number:02d}.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "00.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match=r"00\.jsonl"):
        check_sample(DataConfig(path=str(tmp_path)))

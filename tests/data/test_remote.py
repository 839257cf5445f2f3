"""Text on a server of this machine: the corpus of the folder itself, whatever the connections do; and in a line what
cannot be had.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import Corpus, DataConfig, load_corpus, prepare, remote, sources
from isles.data.sources import check_sample
from tests.data.web import Web, serve

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
MDS = Path(__file__).parent / "mds"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.01)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "web").mkdir()
    with serve(tmp_path / "web") as web:
        yield web


def load(path: str | Path, cache: Path, **more: Any) -> Corpus:
    prepare._corpora.clear()  # as in a process that starts
    check = more.pop("check", False)
    return load_corpus(DataConfig(path=str(path), cache=str(cache), **more), check=check)


def fill(folder: Path) -> None:
    """Text, rows and what is left out, in folders, with names that an address has to escape."""
    for name in ("a b", "deep/er", ".git"):
        (folder / name).mkdir(parents=True)
    (folder / "one.txt").write_text("The first.\n" * 50)
    (folder / "a b" / "größe #2.txt").write_text("Größe\n" * 30)
    (folder / "a b" / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(90)))
    (folder / "deep" / "er" / "z.txt").write_text("deep\n" * 20)
    (folder / "deep" / "picture.png").write_bytes(b"\0\1" * 100)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "empty.txt").write_text("")


def test_a_folder(web: Web, tmp_path: Path) -> None:
    """The same corpus as of the folder here; again, only the listing is read, until a file changes."""
    folder = tmp_path / "web"
    fill(folder)
    with pytest.warns(UserWarning, match=r"1 of 6 files hold no text and were left out, among them deep/picture\.png"):
        right, found = load(folder, tmp_path / "1"), load(web.url, tmp_path / "2")
    assert found.sha256 == right.sha256 and found.train.files == right.train.files
    files = [name for name in web.fetched() if "." in name[1:]]
    assert sorted(files) == sorted(set(files)) and len(files) == 6
    assert len(list((tmp_path / "2").glob("*/manifest.json"))) == 1
    web.requests.clear()
    for check in (False, True):
        assert load(web.url, tmp_path / "2", check=check).sha256 == right.sha256
    assert not [name for name in web.fetched() if "." in name[1:]]
    (folder / "one.txt").write_text("The last .\n" * 50)
    sources.os.utime(folder / "one.txt", (1, 1))
    with pytest.warns(UserWarning, match="left out"):
        assert load(web.url, tmp_path / "2").sha256 == load(folder, tmp_path / "1").sha256 != right.sha256


def test_formats_alone(web: Web, tmp_path: Path) -> None:
    """Each by the address of its file, or of its folder; MDS a shard at a time."""
    folder, cache = tmp_path / "web", tmp_path / "cache"
    np.arange(500, dtype="<u2").tofile(folder / "a.bin")
    np.save(folder / "a.npy", np.arange(500))
    (folder / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 9)
    shutil.copytree(MDS / "ids", folder / "mds")
    names = ["a.bin", "a.npy", "a.jsonl", "mds/"]
    if "pyarrow" in sys.modules or pytest.importorskip("pyarrow"):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2], [3]]}), folder / "a.parquet")
        names.append("a.parquet")
    ids = {"tokenizer": "ids", "vocab": 70_000}
    for name in names:
        check_sample(DataConfig(path=web.url + name, **ids))
        assert load(web.url + name, cache, **ids).sha256 == load(folder / name, cache, **ids).sha256
    (folder / "t").mkdir()
    (folder / "t" / "a.txt").write_text("a text\n" * 200)
    for name in ("t/a.txt", "t", "t/"):  # a folder is known without its slash, too
        assert load(web.url + name, cache).sha256 == load(folder / name, cache).sha256
    shutil.copytree(MDS / "splits", folder / "splits")
    assert load(web.url + "splits/", cache).sha256 == load(folder / "splits", cache).sha256
    apart = load(web.url + "splits/train", cache, validation_path=web.url + "splits")
    assert apart.sha256 == load(folder / "splits", cache).sha256


def test_cut_connections(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried again; after four times it is told, and the next preparation goes on there."""
    folder = tmp_path / "web"
    for name in "abcd":
        (folder / f"{name}.txt").write_text(f"{name} line\n" * 3000)
    web.cut = {"a.txt": 3, "c.txt": 4}
    monkeypatch.setattr(prepare, "_SAVED", -1.0)
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 10_000)
    with pytest.raises(ValueError, match=r"^data\.path: .*/c\.txt cannot be read \(.*\); correct it$") as caught:
        load(web.url, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert web.fetched() == ["a.txt"] * 4 + ["b.txt"] + ["c.txt"] * 4
    web.requests.clear()
    assert load(web.url, tmp_path / "cache").sha256 == load(folder, tmp_path / "1").sha256
    assert web.fetched() == ["b.txt", "c.txt", "d.txt"]  # b may have had more


def test_a_file_that_shrinks(web: Web, tmp_path: Path) -> None:
    (tmp_path / "web" / "a.txt").write_text("line\n" * 100)
    web.shrinks = {"a.txt"}
    with pytest.raises(ValueError, match=r"250 bytes came instead of 500: it was cut, or changed\); correct it$"):
        load(web.url, tmp_path / "cache")


def test_a_server_that_falls_silent(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    (tmp_path / "web" / "a.txt").write_text("line\n" * 100)
    monkeypatch.setattr(remote, "_SILENCE", 0.3)
    web.wait = threading.Event()
    try:
        with pytest.raises(ValueError, match=r"a\.txt cannot be read \(.*(silent for|[Tt]imeout).*\); correct it$"):
            load(web.url, tmp_path / "cache")
    finally:
        web.wait.set()


@pytest.mark.parametrize(
    ("page", "match"),
    [
        ('<a href="%2e%2e/x.txt">', r"it lists \.\./x\.txt, which is no file below it"),
        ('<a href="a/%2e%2e/%2e%2e/x">', r"it lists a/\.\./\.\./x, which"),
        ('<a href="a//b">', r"it lists a//b, which"),
        ('<a href="a%0ab.txt">', r"it lists a b\.txt, which is no file"),
        (
            '<a href="http://elsewhere/x.txt"><a href="/up.txt"><a href="?C=N"><a href="../">',
            "is a folder without",
        ),
        ("nothing", "is a folder without a readable file"),
    ],
)
def test_names_of_a_listing_are_checked(web: Web, page: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "web" / "in").mkdir()
    web.page["in"] = page
    with pytest.raises(ValueError, match=match) as caught:
        load(f"{web.url}in/", tmp_path / "cache")
    assert "\n" not in str(caught.value) and set(web.fetched()) <= {"in"}


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (
            "http://me:secret@127.0.0.1:1/a.txt",
            r"'http://\.\.\.127\.0\.0\.1:1/a\.txt' cannot be listed \(a run's",
        ),
        ("https://host/a.txt?sig=secret", r"'https://host/a\.txt\.\.\.' cannot be listed \(a run's"),
        ("s3://bucket/a.txt", r'nstall s3fs.*: pip install "fsspec\[s3\]"\); correct it$'),
        ("odd://bucket/a.txt", r"Protocol not known: odd\); correct it$"),
        ("http://127.0.0.1:1/a.txt", r"cannot be listed \(.*\); correct it$"),
        ("WEB/absent.txt", r"cannot be listed \(.*404.*\); correct it$"),
    ],
)
def test_what_cannot_be_had_is_a_line(path: str, match: str, web: Web, tmp_path: Path) -> None:
    for read in (check_sample, load_corpus):
        with pytest.raises(ValueError, match=match) as caught:
            read(DataConfig(path=path.replace("WEB/", web.url)))
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert len(web.requests) <= 4  # a file that is not there is not asked for again and again


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for address, package in (("https://host/a", r"\.\[remote\]"), ("s3://bucket/a", r"fsspec\[s3\]")):
        with pytest.raises(ValueError, match=rf'pip install "{package}"\); correct it$'):
            check_sample(DataConfig(path=address))


def test_a_sample_fetches_little(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files; damage that lies in them is told."""
    monkeypatch.setattr(sources, "_FETCHED", 4000)
    folder = tmp_path / "web"
    (folder / "a.txt").write_bytes(b"\xff" * 5000)
    (folder / "b.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match=r"/b\.jsonl; name another column"):
        check_sample(DataConfig(path=web.url))
    (folder / "b.jsonl").write_text('{"text": "x"}\n')
    check_sample(DataConfig(path=web.url))
    (folder / "d.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"/d\.csv is a table"):
        check_sample(DataConfig(path=web.url + "d.csv"))
    assert "a.txt" not in web.fetched()


def test_other_file_systems_of_fsspec(tmp_path: Path) -> None:
    """One that has folders and sizes, as object stores have."""
    fsspec = pytest.importorskip("fsspec")
    fill(tmp_path / "web")
    fsspec.filesystem("memory").put(str(tmp_path / "web") + "/", "/there/", recursive=True)
    with pytest.warns(UserWarning, match="left out"):
        right = load(tmp_path / "web", tmp_path / "1")
        assert load("memory://there", tmp_path / "2").sha256 == right.sha256

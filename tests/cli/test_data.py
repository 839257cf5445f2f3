"""`isles data prepare`, what a launcher prepares before its workers start, and how it is shown."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isles.base.durable import home
from isles.cli.data import prepare
from isles.cli.terminal import Progress
from isles.data import load_corpus
from isles.data import prepare as preparing
from isles.launch.nodes import NodeSpec
from isles.running.agree import meet_nodes
from isles.training.config.reading import read_config


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("some text\n" * 100)
    return file


def test_it_is_prepared_and_read_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("isles.cli.data.end_in_order", lambda: None)
    settings = [f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "data.validation_fraction=0.1"]
    prepare(set_=settings)
    (folder,) = (tmp_path / "cache").iterdir()
    shown = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert shown.err == ""
    assert lines == {
        "text": str(text),
        "tokens": "900 to train on, 100 for validation",
        "documents": "1, 1",
        "size": "1.00 kB",
        "stored": str(folder),
    }
    stat = text.stat()
    text.write_text("more text\n" * 100)
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prepare(set_=settings)
    assert "the text has changed since it was prepared" in capsys.readouterr().err
    assert b"more" in (folder / "train-tokens.npy").read_bytes()
    prepare(set_=[f"data.path={text}"])
    assert "not stored: each process reads this text itself" in capsys.readouterr().out


def test_a_launcher_prepares_what_its_workers_open(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody is met; above a size, or with a tokenizer, it is stored below home."""
    monkeypatch.setattr(preparing, "_SMALL", 10)
    config = read_config(None, {}, [f"data.path={text}"])
    with meet_nodes(config, NodeSpec(), tmp_path, None, print):
        folder = preparing.corpus_folder(config.data)
        assert folder is not None and folder.parent == home() / "corpora" and folder.is_dir()
        preparing._corpora.clear()  # as in a worker
        monkeypatch.setattr(preparing, "_prepare", lambda *_: pytest.fail("prepared again"))
        assert load_corpus(config.data).train.blocks is not None


def test_without_a_place_to_store_each_process_prepares_its_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a note; a folder that was named is an error, and so is a full disk."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISLES_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(preparing, "_SMALL", 10)
    config = read_config(None, {}, [f"data.path={text}"])
    with pytest.warns(UserWarning, match=r"data\.cache: .*corpora cannot be written .*; each process prepares its own"):
        assert len(load_corpus(config.data).train)
    named = read_config(None, {}, [f"data.path={text}", f"data.cache={tmp_path / 'file'}"])
    with pytest.raises(ValueError, match=r"data\.cache: .*file cannot be written .*; give another"):
        load_corpus(named.data)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("ISLES_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(preparing, "_prepare", full)
    preparing._corpora.clear()
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\); give another"):
        load_corpus(config.data)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_the_data_is_one_line(terminal: bool) -> None:
    """On a terminal the bar's, elsewhere no more than one in ten seconds."""
    progress = Progress("noloco", 2, 10)
    progress.console = Console(file=io.StringIO(), force_terminal=terminal)
    for done in (10, 20, 30):
        progress.notice(f"preparing data: {done}% of 90 MB, 0:01:00 left")
    (task,) = progress.bar.tasks
    assert task.description == "preparing data: 30% of 90 MB, 0:01:00 left"
    printed = progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert printed == ("" if terminal else "note: preparing data: 10% of 90 MB, 0:01:00 left\n")
    progress.notice("prepared the data in 0:01:30")
    assert task.description == "noloco"

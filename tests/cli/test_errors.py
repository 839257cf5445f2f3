"""A user's mistake: exit code 2 and one line on stderr that begins with `isles:`; the words are tested beside their
owners.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isles import cli
from tests.cli.command import isles
from tests.training.runs import TINY, write_text


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """answer(*arguments): (exit code, stderr) of the command, run in this process to save the start of another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("isles.training.server.start_server", lambda: None)

    def ask(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["isles", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capfd.readouterr().err

    return ask


def is_one_line(error: str) -> bool:
    return error.startswith("isles: ") and error.endswith("\n") and error.count("\n") == 1 and len(error) > 12


MISTAKES = [
    ["bogus"],
    ["--bogus"],
    ["train", "--metod", "diloco"],
    ["train", "--workers", "four"],
    ["train", "--workers"],
    ["train", "--workers", "0"],
    ["train", "--steps", "-5"],
    ["train", "one.toml", "two.toml"],
    ["train", "nosuch.toml"],
    ["train", "."],
    ["train", "bad.toml"],
    ["train", "--method", "nolocco"],
    ["train", "--method", "no_such_module:Class"],
    ["train", "--set", "run.steps"],
    ["train", "--set", "run.stepz=5"],
    ["train", "--set", "replicas.codec=zip"],
    ["train", "--set", "run.steps=many"],
    ["report"],
    ["report", "nosuch"],
    ["report", "."],
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_two(answer, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "bad.toml").write_text("[run\n")
    code, error = answer(*arguments)
    assert code == 2
    assert is_one_line(error), error
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]  # no run directory either


def test_what_only_the_workers_find_out(answer, tmp_path: Path) -> None:
    """A run that is refused before its first step leaves no directory, whether named or not."""
    text = write_text(tmp_path / "text.txt")
    settings = [word for setting in [*TINY, f"data.path={text}"] for word in ("--set", setting)]
    for extra in (["--steps", "5", "--out", "x"], ["--steps", "5"], ["--set", "data.path=nosuch"]):
        code, error = answer("train", *settings, *extra)
        assert code == 2 and is_one_line(error), error
        left = {path.name for path in tmp_path.iterdir()}
        assert left <= {"text.txt", "runs"}
        assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_directory_in_use(answer, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text("{}\n")
    code, error = answer("train", "--out", "used")
    assert code == 2 and is_one_line(error) and "holds a run already" in error


def test_help_answers_with_zero(answer) -> None:
    for arguments in ([], ["--help"], ["train", "--help"], ["report", "--help"]):
        code, error = answer(*arguments)
        assert (code, error) == (0, "")


def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    """The installed command itself: exit codes and streams as above."""
    code, out, error = isles("train", "--set", "run.stepz=5", folder=tmp_path)
    assert (code, out) == (2, "") and is_one_line(error)
    code, out, error = isles(folder=tmp_path)
    assert (code, error) == (0, "") and "train" in out and "report" in out

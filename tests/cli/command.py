"""Running `isles` as a user does: a process of its own, and what is left of it; or, sooner, in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.namespaces import Machine

ISLES = str(Path(sys.executable).with_name("isles"))
PATIENCE = 90.0  # seconds for what takes a few on an idle machine
_MARK = "ISLES_TEST_RUN"


class Command:
    """`isles ARGUMENTS` in `folder`, in a session of its own; its processes are marked, so that all can be found.

    machine: a namespace to run it in. program: what to run instead of the installed command.
    """

    def __init__(
        self, *arguments: str, folder: Path, machine: Machine | None = None, program: Sequence[str] = (ISLES,)
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*(machine.enter if machine else ()), *program, *arguments],
            cwd=folder,
            env={**os.environ, _MARK: self.mark, "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, patience: float = PATIENCE) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) once it and all that hold its pipes have ended; patience: seconds."""
        out, err = self.process.communicate(timeout=patience)
        return self.process.returncode, out, err

    def left(self) -> list[psutil.Process]:
        """Its processes that are still there."""
        return marked(self.mark)


def isles(*arguments: str, folder: Path, machine: Machine | None = None) -> tuple[int, str, str]:
    """Run to the end: (exit code, stdout, stderr)."""
    return Command(*arguments, folder=folder, machine=machine).end()


def marked(mark: str) -> list[psutil.Process]:
    """Living processes of the run with this mark."""
    found, word = [], f"{_MARK}={mark}".encode()
    for pid in psutil.pids():
        try:
            file, process = Path(f"/proc/{pid}/environ"), psutil.Process(pid)
            if sys.platform == "linux" and word not in file.read_bytes().split(b"\0"):  # faster than psutil's
                continue
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def gone(mark: str) -> bool:
    """Whether all processes of the run end within the patience."""
    return eventually(lambda: not marked(mark))


def eventually(condition: Callable[[], object]) -> bool:
    """Whether the condition holds within the patience."""
    ends_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.05)
    return True


def in_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """answer(*words): (exit code, stdout, stderr) of the command in `folder`, by this process; none is started."""
    from isles import cli

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("isles.running.backends.start_server", lambda: None)

    def answer(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return answer

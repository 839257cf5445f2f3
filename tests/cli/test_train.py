"""`isles train` as a process: what it shows, what it leaves, and how it ends, by itself or by force."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from isles import cli
from isles.running.backends import PRELOAD
from tests.cli.command import Command, eventually, gone, isles, marked
from tests.forked import Forked
from tests.training.runs import metrics, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("user"))


C = TypeVar("C", Command, Forked)
STARTS = [Forked, pytest.param(Command, marks=pytest.mark.long)]


def short(*more: str) -> list[str]:
    return ["train", "tiny.toml", "--workers", "2", "--steps", "6", *more]


# ---------------------------------------------------------------------------------------------------------------------
# To the end


@pytest.mark.parametrize("start", STARTS)
def test_from_a_config_to_a_report(
    start: type[Command | Forked],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit 0; progress and notes on stderr, once each; on stdout the table with loss and bytes, and the paths."""
    folder = write_folder(tmp_path)
    words = short("--set", "replicas.gamma=1.9", "--out", "deep/run [1]")
    code, out, error = start(*words, folder=folder).end()
    assert code == 0, error
    run = folder / "deep" / "run [1]"
    assert {path.name for path in run.iterdir()} == {
        *("config.toml", "metrics.jsonl", "timeline.jsonl", "summary.json", "model.safetensors"),
        *("report.html", "logs", "checkpoints"),
    }
    assert [path.name for path in (run / "logs").iterdir()] == ["worker-1.log"]  # worker 0's warning is the note below
    assert "gamma = 1.9" in (run / "logs" / "worker-1.log").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["method"], summary["backend"], summary["workers"]) == ("noloco", "distributed", 2)
    assert summary["virtual_seconds"] is None and 0 < summary["train_seconds"] <= summary["wall_seconds"]
    assert f"{summary['val_loss']:.4f} nats/token" in out and f"{summary['val_loss_replicas']:.4f} nats/token" in out
    for words in ("noloco: 2 workers, 6 steps", "sent per worker", "data parallel would have sent", "tokens"):
        assert words in out, out
    assert out.endswith("run     deep/run [1]\nreport  deep/run [1]/report.html\n")
    assert "<html" in (run / "report.html").read_text()

    lines = error.splitlines()
    assert all(line.startswith(("device: ", "note: ", "step ")) for line in lines), error
    assert sum("gamma = 1.9" in line for line in lines) == 1  # of one worker, though both found it out
    assert lines[-1].startswith("step 6/6  loss ")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["isles", "report", "deep/run [1]"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert capsys.readouterr() == ("deep/run [1]/report.html\n", "")


@pytest.mark.long
def test_refused_by_the_workers(folder: Path) -> None:
    """What only the processes find out is one line and 2 as well, and leaves nothing."""
    code, out, error = isles(*short("--set", "replicas.sync_every=7", "--out", "refused"), folder=folder)
    assert (code, out) == (2, "")
    errors = [line for line in error.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and errors[0].startswith("isles: ") and "sync_every <= 6" in errors[0]
    assert not (folder / "refused").exists()


@pytest.mark.long
def test_a_method_of_ones_own_from_this_folder_that_breaks(folder: Path) -> None:
    """Found in the working directory; its error is one line that names the worker, and the traceback in a file."""
    (folder / "none.toml").write_text((folder / "tiny.toml").read_text().replace("sync_every = 3", ""))
    arguments = ["train", "none.toml", "--workers", "2", "--steps", "6", "--method", "own:Breaks", "--out", "broken"]
    code, out, error = isles(*arguments, folder=folder)
    assert (code, out) == (1, "")
    last = error.splitlines()[-1]
    assert last.startswith(
        "isles: worker 1 failed: ZeroDivisionError: of my own making (traceback in broken/logs/worker-1.log); there "
        "was no checkpoint yet"
    )
    assert "Traceback" not in error
    text = (folder / "broken" / "logs" / "worker-1.log").read_text()
    assert "own.py" in text and "after_inner_step" in text
    assert {line["step"] for line in metrics(folder / "broken") if line["worker"] == 1} == {2}


# ---------------------------------------------------------------------------------------------------------------------
# By force


@contextmanager
def endless(start: type[C], folder: Path, name: str) -> Iterator[C]:
    """A run that has trained its first steps and would go on for hours; in the end none of its processes is left."""
    command = start(*short("--steps", "1000000", "--method", "own:Slow", "--out", name), folder=folder)
    try:
        began = eventually(lambda: (folder / name / "config.toml").exists() and metrics(folder / name))
        assert began, name if command.left() else command.end()
        yield command
    finally:
        for process in command.left():
            process.kill()


@pytest.fixture(scope="module")
def struck(folder: Path) -> Iterator[dict[str, Command]]:
    """Two of them, started together, for most of a start is waiting."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(endless(Command, folder, name)) for name in ("worker", "SIGKILL")}


@pytest.mark.long
def test_a_killed_worker_ends_the_run_with_its_name(struck: dict[str, Command]) -> None:
    """Exit 1, one line, and no process stays."""
    command = struck["worker"]
    workers = [process for process in command.left() if len(process.parents()) > 2 and _is_worker(process, command)]
    assert len(workers) == 2
    sorted(workers, key=lambda process: (process.create_time(), process.pid))[1].kill()
    code, _, error = command.end()
    errors = [line for line in error.splitlines() if not line.startswith(("device: ", "note: ", "step "))]
    assert code == 1
    assert len(errors) == 1 and errors[0].startswith("isles: worker 1 failed: ") and "-9" in errors[0], error
    assert gone(command.mark)


def _is_worker(process: psutil.Process, command: Command) -> bool:
    """A child of the fork server, which is a child of the launcher."""
    parent = process.parent()
    return parent is not None and parent.ppid() == command.process.pid


@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_stops_everything(start: type[Command | Forked], tmp_path: Path) -> None:
    """Ctrl-C: 130, how to go on, no traceback from any process; what was measured stays, and a checkpoint."""
    folder = write_folder(tmp_path)
    with endless(start, folder, "SIGINT") as command:
        os.killpg(command.process.pid or 0, signal.SIGINT)  # as a terminal does: every process of the group
        code, out, error = command.end()
        assert (code, out) == (130, "")
        *lines, last = error.splitlines()
        assert all(line.startswith(("device: ", "note: ", "step ", "isles: stopping: ")) for line in lines), error
        assert last.startswith("isles: stopped after step ") and last.endswith("isles resume SIGINT")
        assert eventually(lambda: not command.left())
    assert len(list((folder / "SIGINT" / "checkpoints").glob("step-*/manifest.json"))) == 1
    assert metrics(folder / "SIGINT") and not (folder / "SIGINT" / "summary.json").exists()


@pytest.mark.long
def test_no_worker_outlives_the_launcher(struck: dict[str, Command]) -> None:
    check_ended_by(signal.SIGKILL, struck["SIGKILL"], -9)


def check_ended_by(number: signal.Signals, command: Command, wanted: int) -> None:
    command.process.send_signal(number)
    code, _, error = command.end()
    assert code == wanted
    assert "Traceback" not in error
    assert gone(command.mark)


def test_interrupted_while_it_starts(folder: Path) -> None:
    """Before any worker trains: the same code, no words, no process, no directory."""
    command = Command(*short("--steps", "1000000", "--out", "early"), folder=folder)
    try:
        assert eventually(lambda: len(command.left()) >= 3)  # launcher, resource tracker, fork server
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.end() == (130, "", "")
        assert gone(command.mark)
    finally:
        for process in command.left():
            process.kill()
    assert not (folder / "early").exists()


# ---------------------------------------------------------------------------------------------------------------------
# On a terminal


def on_a_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit code, everything that a terminal of 80 columns was sent) of `isles`, typed in a process that has loaded
    torch already.
    """
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_typed, args=(os.ttyname(slave), folder, arguments))
    process.start()
    sent = b""
    while process.is_alive() or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            sent += os.read(master, 65536)
    os.close(slave)  # held open, so that the other end is read to its end
    os.close(master)
    process.join(60)
    return process.exitcode or 0, sent.decode("utf-8", "replace")


def _typed(terminal: str, folder: Path, arguments: tuple[str, ...]) -> None:
    """The command, with nothing but a terminal."""
    os.setsid()
    for number in range(3):
        os.dup2(os.open(terminal, os.O_RDWR), number)
    sys.stdin, sys.stdout, sys.stderr = (open(number, "r" if not number else "w") for number in range(3))  # noqa: SIM115
    for key in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(key, None)
    os.environ["TERM"] = "xterm-256color"
    os.chdir(folder)
    sys.argv = ["isles", *arguments]
    cli.main()


def test_on_a_terminal_a_bar_and_a_table(folder: Path) -> None:
    """The bar is drawn over itself, the cursor comes back, and what stays on the screen reads well."""
    code, sent = on_a_terminal(folder, *short("--set", "world.backend=virtual", "--out", "terminal"))
    assert code == 0
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l") >= 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    assert "step 6/6" in plain and "noloco" in plain and "2 workers" in plain
    assert "validation loss, consolidated model" in plain and "virtual clock" in plain
    assert "report  terminal/report.html" in plain
    assert "Traceback" not in plain
    assert all(
        len(line) <= 80
        for line in re.split(r"[\r\n]+", plain)
        if not line.startswith(("device", "note", "run", "report"))
    )


def test_marks_are_of_one_run_only(folder: Path) -> None:
    """The search for what is left finds something, or the tests above would prove nothing."""
    command = Command("--help", folder=folder)
    found = eventually(lambda: command.process.poll() is not None or bool(marked(command.mark)))
    command.end()
    assert found and not command.left()

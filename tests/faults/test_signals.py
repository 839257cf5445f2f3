"""SIGTERM, SIGHUP, SIGUSR1 and run.max_hours do what Ctrl-C does: the workers agree on a step and save; after the first
two within `run.grace`.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.running.run import Interrupted, launch
from isles.training.records.checkpoint import Checkpoints
from tests.cli.command import ISLES, Command, eventually, gone, marked
from tests.training.runs import metrics, run_apart, tiny, write_folder, write_text

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


def struck(config: Any, out: Path, number: signal.Signals) -> Interrupted:
    """How `launch` ends where this process gets the signal with a line of metrics of worker 0."""

    def line(own: dict[str, Any]) -> None:
        if (own["worker"], own["step"]) == (0, 6):
            for _ in range(1 + (number == signal.SIGUSR1)):  # a second one of these changes nothing
                os.kill(os.getpid(), number)
                time.sleep(0.1)  # a virtual worker is a thread, and the signal is heard by another

    with pytest.raises(Interrupted) as caught:
        launch(config, out, line, lambda notice: None)
    return caught.value


@pytest.fixture
def heard_by_default() -> Iterator[None]:
    """Also where the tests were begun with nohup, which a run honours."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard_by_default")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name)
def test_the_run_is_saved_and_goes_on_to_the_same_bits(tmp_path: Path, number: signal.Signals) -> None:
    """No handler and no timer stays behind in a program that calls `launch`."""
    config = tiny(write_text(tmp_path / "text.txt"), steps=12)
    before = [signal.getsignal(one) for one in HANDLED]
    stopped = struck(config, tmp_path / "run", number)
    assert stopped.step is not None and 6 <= stopped.step < 12
    assert str(stopped) == (
        f"stopped after step {stopped.step}, checkpoint saved; go on with: isles resume {tmp_path / 'run'}"
    )
    assert [signal.getsignal(one) for one in HANDLED] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    launch(config, tmp_path / "run", lambda line: None, lambda notice: None, resume=stopped.step)
    run_apart(config, tmp_path / "whole")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]


def test_hours_that_are_over_stop_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    """36 ms, which the first steps take: without the limit it goes on."""
    text, settings = write_text(tmp_path / "text.txt"), ("run.log_every=1", "run.max_hours=1e-5")
    with pytest.raises(Interrupted, match=r"stopped after step \d+, checkpoint saved") as caught:
        launch(tiny(text, *settings, steps=2000), tmp_path / "run", lambda line: None, lambda notice: None)
    (step,) = Checkpoints(tmp_path / "run").steps()
    assert caught.value.step == step < 2000
    last = step + 3
    config = tiny(text, settings[0], steps=last)
    launch(config, tmp_path / "run", lambda line: None, lambda notice: None, resume=step)
    assert [line["step"] for line in metrics(tmp_path / "run") if line["worker"] == 0] == list(range(1, last + 1))


def test_a_worker_that_is_asked_to_end_stops_the_run(tmp_path: Path) -> None:
    """Some schedulers send SIGTERM to every process of a job: one is enough, and it is no failure."""
    config = tiny(write_text(tmp_path / "text.txt"), "world.backend=distributed",
                  method="tests.faults.workers:Asked", steps=20_000)  # fmt: skip
    with pytest.raises(Interrupted, match=r"stopped after step \d+, checkpoint saved"):
        run_apart(config, tmp_path / "run")
    assert Checkpoints(tmp_path / "run").steps()


def test_who_does_not_come_to_a_step_is_ended_when_the_grace_is(tmp_path: Path) -> None:
    """Worker 1 stands still in its third step: nobody can save."""
    config = tiny(write_text(tmp_path / "text.txt"), "world.backend=distributed", "run.grace=0.5",
                  method="tests.faults.workers:Stands", steps=20)  # fmt: skip
    start = time.monotonic()
    stopped = struck(config, tmp_path / "run", signal.SIGTERM)
    assert str(stopped) == "stopped; not all had saved within 0.5 s (run.grace); there is no checkpoint"
    assert time.monotonic() - start < 30.0


def endless(folder: Path, out: str) -> list[str]:
    return ["train", "tiny.toml", "--workers", "2", "--steps", "1000000", "--method", "own:Slow", "--out", out]


def trains(run_folder: Path) -> bool:
    return (run_folder / "config.toml").exists() and bool(metrics(run_folder))


@pytest.mark.long
def test_a_scheduler_that_ends_every_process_of_a_job(tmp_path: Path) -> None:
    """SIGTERM to the whole group of processes; twice ends it at once."""
    folder = write_folder(tmp_path)
    once, twice = (Command(*endless(folder, name), folder=folder) for name in ("once", "twice"))
    assert eventually(lambda: trains(folder / "once") and trains(folder / "twice"))
    os.killpg(once.process.pid, signal.SIGTERM)
    code, _, error = once.end()
    assert code == 130 and error.splitlines()[-1].startswith("isles: stopped after step "), error
    twice.process.send_signal(signal.SIGSTOP)  # so that both are there when it wakes
    twice.process.send_signal(signal.SIGTERM)
    twice.process.send_signal(signal.SIGHUP)
    twice.process.send_signal(signal.SIGCONT)
    assert twice.end()[0] in (129, 143, 130)
    assert gone(once.mark) and gone(twice.mark)


@pytest.mark.long
def test_a_closed_terminal(tmp_path: Path) -> None:
    """Every process of the terminal gets SIGHUP, and what is printed from then on is an error: saved all the same."""
    folder = write_folder(tmp_path)
    ours, theirs = pty.openpty()
    mark = os.urandom(8).hex()
    script = (
        "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"  # nohup ignores it
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, ISLES, *endless(folder, "run")],
        cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "ISLES_TEST_RUN": mark},
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)

    def read_and_look() -> bool:
        try:
            os.read(ours, 1 << 16)
        except BlockingIOError:
            pass
        return trains(folder / "run")

    assert eventually(read_and_look)
    os.close(ours)
    assert process.wait(60.0) == 130
    assert eventually(lambda: not marked(mark))
    assert len(Checkpoints(folder / "run").steps()) == 1

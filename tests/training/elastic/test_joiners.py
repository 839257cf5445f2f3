"""What a machine that joins is spared: folders of the dead, runs beyond it, ports that nobody answers, strangers."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from isles.base import scratch as own_scratch
from isles.base.scratch import scratch
from isles.cli import main
from isles.comm.sockets.listener import MOST
from isles.membership.run_log import RoundRecord
from isles.training.elastic import needs
from isles.training.records.checkpoint import Checkpoints
from tests.membership.sessions import free_port, router
from tests.strangers.callers import ESCAPES, call, tls
from tests.training.elastic.disks import Disk, unavailable
from tests.training.elastic.runs import Run, in_run
from tests.training.elastic.test_runs import small

HOLDS = """
from isles.base.scratch import scratch
import time
with scratch() as own:
    print(own, flush=True)
    time.sleep(60)
"""


def isles(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["isles", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Run]:
    made = Run(small(tmp_path, 60, 2), tmp_path / "run")
    yield made
    made.stop()


def test_folders_of_the_dead_go_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a living process, one without a lock, one behind a link and another's name stay."""
    monkeypatch.setattr(own_scratch.tempfile, "tempdir", str(tmp_path))
    inside = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, env=inside) for _ in range(2)]
    try:
        lives, dies = (Path(process.stdout.readline().decode().strip()) for process in started if process.stdout)
        started[1].kill()
        started[1].wait()
        elsewhere = tmp_path / "elsewhere"
        for folder in (elsewhere, tmp_path / "other-1"):
            folder.mkdir()
            (folder / "lock").touch()
        (tmp_path / "isles-link").symlink_to(elsewhere)
        (tmp_path / "isles-unlocked").mkdir()
        assert dies.is_dir()
        with scratch() as mine:
            assert not dies.exists()
            there = {path.name for path in tmp_path.iterdir()}
            assert there == {lives.name, mine.name, "elsewhere", "other-1", "isles-link", "isles-unlocked"}
            assert (elsewhere / "lock").exists() and stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert not mine.exists()
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_full_disk_of_a_joiner_is_said(world: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where: it had said "[Errno 28] No space left on device"."""
    disk = Disk(tmp_path / "tmp", 1 << 16)
    try:
        disk.fill()
        monkeypatch.setattr(tempfile, "tempdir", str(disk.place))
        with pytest.raises(OSError, match=f"^{disk.place}: the disk is full; make room there, or set TMPDIR"):
            with in_run(world, world.here()):
                pass
    finally:
        disk.end()


def test_states_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Checkpoints(tmp_path, "states").take_in([0], lambda rank, path: path.write_bytes(b"a state") and 5)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "states").stat().st_mode) == 0o700


def test_no_escape_of_a_member_reaches_a_terminal_or_a_file(world: Run, tmp_path: Path) -> None:
    """In a notice, a refusal, the outcome of a round, a path, a result, a line of metrics, and as a key."""
    record = RoundRecord(
        member=0, round=1, view=-1, spare=0, steps=5, seconds=0.1, members=(0,), outcome=ESCAPES, at=0.0
    )
    events: list[Any] = [
        {"refused": [[1, ESCAPES, 2]]},
        {"paths": [[1, ESCAPES, 0.1, 1, 1]]},
        {"result": {"x": ESCAPES}},
    ]
    events += [{"step": 5, "loss": 1.0, "worker": 0, ESCAPES: 1}, {ESCAPES: 3}, {"carried": {ESCAPES: 1}}]
    events += [{"round": {**asdict(record), "members": [0]}}]
    world.keeper.lighthouse._call(lambda m, now: m.join(now, ""))
    world.keeper._on_report(0, {"notice": ESCAPES})
    for event in events:
        with pytest.raises(ValueError) as refused:
            world.keeper._on_report(0, event)
        assert str(refused.value).isprintable()
    assert any("owned" in line for line in world.notices) and all(line.isprintable() for line in world.notices)
    for path in (tmp_path / "run").glob("*.jsonl"):
        text = path.read_text()
        assert "\\u001b" not in text and all(line.isprintable() for line in text.splitlines())


def test_a_closed_port_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began, address = time.monotonic(), f"127.0.0.1:{free_port()}"
    assert isles(monkeypatch, "join", address, "--token", "0" * 64) == 2
    assert time.monotonic() - began < 5.0
    said = capsys.readouterr().err
    assert f"isles: {address}: nothing listens there (connection refused); start the lighthouse" in said
    assert said.count("\n") == 1


def test_another_secret_is_told_at_once(
    world: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first half of the token is right."""
    began = time.monotonic()
    assert isles(monkeypatch, "join", world.address, "--token", world.token[:32] + "0" * 32) == 2
    assert time.monotonic() - began < 5.0
    assert "does not take this token; copy the one that it shows" in capsys.readouterr().err


def test_what_would_run_is_shown_without_joining(
    world: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One block of width 16 and an embedding of 256 tokens: 4 d^2 + 3 d F + 3 d + V d."""
    assert isles(monkeypatch, "join", world.address, "--token", world.token, "--show") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "noloco" in rows["method"] and "60 inner steps" in rows["steps"]
    assert f"{4 * 16**2 + 3 * 16 * 24 + 3 * 16 + 256 * 16:,} parameters" in rows["model"]
    assert "MB of memory at least" in rows["memory"] and "at least" in rows["disk"]
    assert world.config.data.path in rows["data.path"]
    assert not world.keeper.lighthouse.look(lambda now: len(world.keeper.coordinator.workers))


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_run_beyond_the_machine_is_refused(
    tmp_path: Path,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    """A model of 12 TB; and states that take a billion times the model's size on the disk."""
    settings = ("model.d_model=65536", "model.layers=100") if what == "memory" else ()
    monkeypatch.setattr(needs, "_STORED", 1 << 30)
    world = Run(small(tmp_path, 60, 2, *settings), tmp_path / "run")
    stack.callback(world.stop)
    words = ("join", world.address, "--token", world.token, "--data", world.config.data.path)
    assert isles(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert f"MB of {what}" in said and "are free here; join with a machine that has more" in said
    assert not world.keeper.lighthouse.look(lambda now: len(world.keeper.coordinator.workers))


def test_who_speaks_is_not_cut_off_for_silent_ones(tmp_path: Path) -> None:
    """Of one address: a slow machine that has sent the beginning of its TLS hello, and then many that send nothing."""
    with router(tmp_path) as (_, address, _), contextlib.ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        slow = stack.enter_context(call(port, b"\x16\x03\x01"))
        time.sleep(0.3)
        silent = [stack.enter_context(call(port)) for _ in range(2 * MOST)]
        assert silent[0].recv(1) == b""
        slow.settimeout(0.5)
        with pytest.raises(TimeoutError):
            slow.recv(1)


def test_who_comes_is_not_cut_off_for_many_that_hold_tls(tmp_path: Path) -> None:
    """Of one address, without the token: as many as are handled at a time have completed TLS, and one more that goes on
    connecting. A slow machine that has said nothing yet stays.
    """
    with router(tmp_path) as (_, address, _), contextlib.ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        for _ in range(MOST):
            stack.enter_context(tls(port))
        slow, first = stack.enter_context(call(port)), stack.enter_context(call(port))
        time.sleep(0.3)
        for _ in range(8):
            stack.enter_context(call(port))
        for one in (slow, first):
            one.settimeout(0.2)
            with pytest.raises(TimeoutError):
                one.recv(1)

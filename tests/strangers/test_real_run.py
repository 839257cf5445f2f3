"""A real run of two nodes while strangers are at its rendezvous: it ends as without them, to the bit."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.cli.command import Command, gone, isles
from tests.strangers.callers import GARBAGE, call, many, reset
from tests.training.runs import write_folder

SILENT = 2000  # connections that say nothing
PATIENCE = 280.0  # seconds; they take 20 on a quiet machine


class Ended(NamedTuple):
    """How a run of two nodes ended: (exit code, stdout, stderr) of each, and what node 0's launcher took at most."""

    ends: list[tuple[int, str, str]]
    peak: int


def besiege(port: int, over: threading.Event) -> None:
    """Say all kinds of things to a port, again and again, and keep some connections open."""
    with contextlib.ExitStack() as stack:
        while not over.wait(0.05):
            for said in GARBAGE.values():
                with contextlib.suppress(OSError):
                    stack.enter_context(contextlib.closing(call(port, said)))
            with contextlib.suppress(OSError):
                reset(port)
            if len(stack._exit_callbacks) > 300:  # type: ignore[attr-defined]
                stack.close()


def two_nodes(folder: Path, name: str, *, besieged: bool, look: Callable[[], object] = lambda: None) -> Ended:
    """Node 1 comes when the strangers are there. look: called again and again while they run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["tiny.toml", "--workers", "2", "--steps", "8", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}",
             "--token", "@token.txt", "--out"]  # fmt: skip
    over, strangers = threading.Event(), threading.Thread(target=lambda: besiege(port, over))
    with contextlib.ExitStack() as stack:
        first = Command("train", *words, f"{name}0", "--node", "0", folder=folder)
        if besieged:
            ends_at = time.monotonic() + PATIENCE
            while not _listens(port):
                assert time.monotonic() < ends_at and first.process.poll() is None
                time.sleep(0.05)
            stack.callback(strangers.join)
            stack.callback(over.set)
            strangers.start()
            stack.enter_context(many(port, SILENT))
        nodes = [first, Command("train", *words, f"{name}1", "--node", "1", folder=folder)]
        launcher, peak, ends_at = psutil.Process(first.process.pid), 0, time.monotonic() + PATIENCE
        while any(node.process.poll() is None for node in nodes):
            assert time.monotonic() < ends_at, "they do not end"
            with contextlib.suppress(psutil.Error):
                peak = max(peak, launcher.memory_info().rss)
            look()
            time.sleep(0.1)
        ends = [node.end(60.0) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all(gone(node.mark) for node in nodes)
    return Ended(ends, peak)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        call(port).close()
        return True
    return False


def besieged_run(folder: Path, look: Callable[[], object] = lambda: None) -> int:
    """Asserts that it ends as without strangers. Bytes that node 0's launcher took more than without."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))  # for the callers
    write_folder(folder)
    assert isles("token", "token.txt", folder=folder)[0] == 0
    try:
        quiet = two_nodes(folder, "quiet", besieged=False)
        found = two_nodes(folder, "node", besieged=True, look=look)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    told = found.ends[0][2].splitlines()
    assert any("turned away 127.0.0.1" in line for line in told) and len(told) < 60, told
    alone = read_config(str(folder / "tiny.toml"), {"world.workers": 2, "run.steps": 8}, [
        f"data.path={folder / 'text.txt'}", "world.backend=virtual"])  # fmt: skip
    launch(alone, folder / "alone", lambda line: None, lambda notice: None)
    models = [(folder / run / "model.safetensors").read_bytes() for run in ("node0", "quiet0", "alone")]
    assert models[0] == models[1] == models[2]
    assert not (folder / "node0" / "credentials").exists() and not (folder / "node1" / "credentials").exists()
    assert found.peak - quiet.peak < 50e6, (found.peak, quiet.peak)
    return found.peak - quiet.peak


@pytest.mark.long
def test_a_besieged_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    besieged_run(tmp_path)

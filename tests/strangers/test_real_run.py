"""A real run of two nodes while strangers are at its rendezvous: it ends as without them, to the bit."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from isles.training.config.reading import read_config
from isles.training.running.run import launch
from tests.cli.command import Command, gone, isles
from tests.strangers.callers import GARBAGE, call, reset
from tests.training.runs import write_folder


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


@pytest.mark.long
def test_a_besieged_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert isles("token", "token.txt", folder=folder)[0] == 0
    over = threading.Event()
    strangers = threading.Thread(target=besiege, args=(port, over))
    words = ["tiny.toml", "--workers", "2", "--steps", "8", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}",
             "--token", "@token.txt", "--out"]  # fmt: skip
    strangers.start()
    try:
        nodes = [Command("train", *words, f"node{node}", "--node", str(node), folder=folder) for node in (0, 1)]
        ends = [node.end(300.0) for node in nodes]
    finally:
        over.set()
        strangers.join()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all(gone(node.mark) for node in nodes)
    told = ends[0][2].splitlines()
    assert any("turned away 127.0.0.1" in line for line in told) and len(told) < 40
    alone = read_config(str(folder / "tiny.toml"), {"world.workers": 2, "run.steps": 8}, [
        f"data.path={folder / 'text.txt'}", "world.backend=virtual"])  # fmt: skip
    launch(alone, folder / "alone", lambda line: None, lambda notice: None)
    models = [(folder / run / "model.safetensors").read_bytes() for run in ("node0", "alone")]
    assert models[0] == models[1]
    assert not (folder / "node0" / "credentials").exists() and not (folder / "node1" / "credentials").exists()

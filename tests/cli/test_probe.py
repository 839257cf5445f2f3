"""`isles plan --probe` and its other end: a plan from measured rates, and one clear line where nobody answers."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isles import cli
from isles.cli import app
from isles.launch import probe
from tests.cli.command import eventually
from tests.forked import Forked

Plan = Callable[..., tuple[int, str, str]]
PATIENCE = 0.5  # seconds
JOB = ["--params", "100M", "--layers", "12", "--step-time", "1", "--workers", "2", "--json"]


def quick() -> None:
    """Measurements are short."""
    probe.PATIENCE, probe._ENOUGH = PATIENCE, 0.02


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """plan(*arguments): (exit code, stdout, stderr) of the command, in this process."""
    for name in ("PATIENCE", "_ENOUGH"):
        monkeypatch.setattr(probe, name, getattr(probe, name))  # put back at the end
    quick()

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return ask


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def rates(words: str) -> tuple[float, float]:
    """Mbit/s out and back."""
    found = re.search(r"([0-9.,]+) Mbit/s out, ([0-9.,]+) Mbit/s back", words)
    assert found is not None, words
    return float(found[1].replace(",", "")), float(found[2].replace(",", ""))


def test_both_ends(plan: Plan, tmp_path: Path) -> None:
    """The planner's network is what was measured, the slower direction of the two; the other end says the same."""
    port = free_port()
    other = Forked("plan", "--listen", f"127.0.0.1:{port}", folder=tmp_path, first=quick)
    command = f"isles plan --probe 127.0.0.1:{port}"
    assert eventually(lambda: command in other.said[1].decode()), other.said
    code, out, error = plan("--probe", f"127.0.0.1:{port}", *JOB)
    assert (code, error) == (0, "")
    made = json.loads(out)
    assert made["network"].startswith("measured to 127.0.0.1: ") and len(made["rows"]) > 10
    there, back = rates(made["network"])
    assert made["slowest_mbps"] == pytest.approx(min(there, back), rel=0.01)
    code, out, _ = other.end()
    assert code == 0 and out.startswith("measured with 127.0.0.1: ") and rates(out) == (back, there)


def test_nobody_there(plan: Plan) -> None:
    code, out, error = plan("--probe", f"127.0.0.1:{free_port()}", *JOB)
    assert (code, out) == (1, "") and "connection refused: nothing listens there" in error and error.count("\n") == 1


@pytest.mark.parametrize(("answer", "said"), [(b"", "no answer within 0.5 s"), (b"HTTP/1.1 400\r\n", "not Isles")])
def test_something_else_there(plan: Plan, answer: bytes, said: str) -> None:
    """One that is silent, one that is something else: the wait has an end, and one line says it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(answer)
                done.wait(60)

        threading.Thread(target=serve, daemon=True).start()
        code, out, error = plan("--probe", f"127.0.0.1:{server.getsockname()[1]}", *JOB)
        done.set()
    assert (code, out) == (1, "") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--probe", "somewhere", *JOB], "--probe somewhere: write HOST:PORT"),
        (["--probe", "a:1", "--links", "lan", *JOB], "give one of them"),
        (["--probe", "a:1", "--latency", "1ms", *JOB], "--probe measures bandwidth and latency"),
        (["--listen", "0"], "--listen 0: choose a port"),
        (["--listen", "9", "--json"], "give it alone"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_bad_input(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(done.exception, ValueError) and said in str(done.exception)

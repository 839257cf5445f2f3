"""`--links probe:HOST:PORT` and its other end, `isles doctor --listen`: a plan from measured rates, and one clear line
where nobody answers.
"""

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
from isles.cli import app, doctor
from isles.comm.sockets import listener
from isles.launch import probe
from tests.cli.command import eventually
from tests.forked import Forked

Plan = Callable[..., tuple[int, str, str]]
PATIENCE = 0.5  # seconds
JOB = ["methods", "100M", "--gpu", "1s", "--workers", "2", "--method", "diloco", "--json"]


def quick() -> None:
    """Measurements are short."""
    probe.PATIENCE, listener._ENOUGH = PATIENCE, 0.02


def only_the_way() -> None:
    """The same, and `isles doctor` leaves out the checks of its own machine."""
    quick()
    doctor.machine = lambda: iter(())


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """plan(*arguments): (exit code, stdout, stderr) of the command, in this process."""
    for module, name in ((probe, "PATIENCE"), (listener, "_ENOUGH")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
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


def both_rates(words: str) -> tuple[float, float]:
    """Mbit/s out and back."""
    found = re.search(r"([0-9.,]+) Mbit/s out, ([0-9.,]+) Mbit/s back", words)
    assert found is not None, words
    return float(found[1].replace(",", "")), float(found[2].replace(",", ""))


def test_both_ends(plan: Plan, tmp_path: Path) -> None:
    """The planner's network is what was measured, the slower direction of the two; the other end says the same."""
    port = free_port()
    other = Forked("doctor", "--listen", f"127.0.0.1:{port}", folder=tmp_path, first=only_the_way)
    command = f"isles doctor --peer 127.0.0.1:{port}"
    assert eventually(lambda: command in other.said[1].decode()), other.said
    code, out, error = plan(*JOB, "--links", f"probe:127.0.0.1:{port}")
    assert (code, error) == (0, "")
    made = json.loads(out)
    assert made["network"].startswith("measured to 127.0.0.1: ") and len(made["rows"]) == 2
    there, back = both_rates(made["network"])
    assert made["slowest_mbps"] == pytest.approx(min(there, back), rel=0.01)
    code, out, _ = other.end()
    assert code == 0 and both_rates(out) == (back, there)


def test_nobody_there(plan: Plan) -> None:
    code, out, error = plan(*JOB, "--links", f"probe:127.0.0.1:{free_port()}")
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
        code, out, error = plan(*JOB, "--links", f"probe:127.0.0.1:{server.getsockname()[1]}")
        done.set()
    assert (code, out) == (1, "") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("place", ["somewhere", "a:0", ""])
def test_bad_input(place: str) -> None:
    done = CliRunner().invoke(app, ["plan", *JOB, "--links", f"probe:{place}"])
    assert isinstance(done.exception, ValueError) and f"--links probe: {place}: " in str(done.exception)

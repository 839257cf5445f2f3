"""`isles doctor --join`: it walks the way to a lighthouse, and its last line is the first thing that is wrong."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.base.version import __version__
from isles.cli.elastic import route as way
from isles.cli.elastic.route import walk
from isles.comm.credentials import Token, read
from isles.membership import lighthouse
from isles.membership.messages import MESSAGES, About
from tests.cli.command import Command
from tests.cli.test_doctor import TELLING
from tests.membership.sessions import free_port
from tests.membership.test_lighthouse import lit

WAY = ["name", "route", "tls", "token", "session", "version", "clock", "run", "rate", "direct"]


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Token]]:
    """A lighthouse of this version: its port and token."""
    with lit(tmp_path) as (made, guest):
        monkeypatch.setattr(made, "_version", __version__)
        assert guest.name()
        yield made._session.port, read(tmp_path / "0" / "credentials").token


def walked(
    port: int, token: Token, *, host: str = "127.0.0.1", listen: tuple[str, int] | None = None
) -> dict[str, tuple[bool, str]]:
    checks = list(walk(host, port, token, listen, listen[0] if listen else ""))
    assert all(check.good for check in checks[:-1])
    return {check.name: (check.good, check.found) for check in checks}


def test_the_whole_way(light: tuple[int, Token]) -> None:
    found = walked(*light)
    assert list(found) == WAY and all(good for good, _ in found.values()), found
    assert "to the lighthouse" in found["rate"][1] and "not tested" in found["direct"][1]
    assert found["run"][1] == "0 workers, round 0 of 0"
    port = free_port()
    assert (
        walked(*light, listen=("127.0.0.1", port))["direct"][1] == f"yes: others reach this machine at 127.0.0.1:{port}"
    )


def test_a_port_that_is_not_reached_is_no_fault(light: tuple[int, Token], monkeypatch: pytest.MonkeyPatch) -> None:
    from isles.membership import lighthouse

    async def fails(*_: object) -> str:
        return "no answer within 5 s"

    monkeypatch.setattr(lighthouse, "echo_failure", fails)
    good, found = walked(*light, listen=("127.0.0.1", free_port()))["direct"]
    assert good and found.startswith("no, relayed") and "no answer within 5 s" in found


def test_the_first_thing_that_is_wrong(light: tuple[int, Token], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its turn; nothing behind it is tried."""
    monkeypatch.setattr(way, "_PATIENCE", 0.5)
    port, token = light

    def last(**changed: object) -> tuple[str, str]:
        found = walked(**{"port": port, "token": token, **changed})  # type: ignore[arg-type]
        name, (good, words) = list(found.items())[-1]
        assert not good and list(found) == WAY[: len(found)]
        return name, words

    assert last(host="no-such-machine.invalid")[0] == "name"
    name, words = last(port=free_port())
    assert name == "route" and "is the lighthouse running" in words
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            line, _ = door.accept()
            line.close()
            line, _ = door.accept()
            line.sendall(b"220 mail.example.org ESMTP\r\n")
            line.close()

        threading.Thread(target=answer, daemon=True).start()
        name, words = last(port=door.getsockname()[1])
        assert name == "tls" and "is no lighthouse" in words
    name, words = last(token=Token("0" * 32, token.secret))
    assert name == "token" and "is not the machine of this token" in words
    name, words = last(token=Token(token.fingerprint, "0" * 32))
    assert name == "session" and "copy the whole token" in words


def test_another_version_and_another_time(light: tuple[int, Token], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        About("9.9", time.time(), 3, 17, 100, (9, 9)),
        About(__version__, time.time() - 86_400.0, 3, 17, 100, MESSAGES),
    ]
    monkeypatch.setattr(lighthouse.Lighthouse, "_about", lambda self: answers[0])
    checks = {check.name: check for check in walk("127.0.0.1", *light, None, "")}
    assert not checks["version"].good and "install 9.9 here" in checks["version"].found and "rate" not in checks
    del answers[0]
    checks = {check.name: check for check in walk("127.0.0.1", *light, None, "")}
    assert not checks["clock"].good and "set this machine's clock" in checks["clock"].found


def test_neither_the_engine_nor_torch_is_loaded_for_a_plan(tmp_path: Path) -> None:
    """Of `isles doctor` see test_doctor.py."""
    command = Command("plan", "explain", "noloco-quadratic", folder=tmp_path, program=[sys.executable, "-c", TELLING])
    code, out, error = command.end()
    assert code == 0 and out.splitlines()[-1] == "loaded", error

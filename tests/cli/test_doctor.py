"""`isles doctor` on this machine and between two: what it finds, its exit codes, and when it gives up."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isles import cli
from isles.cli.doctor import _keeps_bits
from tests.cli.command import Command
from tests.integration.namespaces import Machine, skip_unless_available, two_machines

Doctor = Callable[..., tuple[int, str, str]]
# `isles doctor` without the checks of this machine, which take most of its time, and less patient
ONLY_THE_WAY = """
from isles import cli
from isles.comm.sockets import reachable
reachable.PATIENCE = 1.5
from isles.comm.sockets import rates
rates._ENOUGH = 0.05
cli.doctor.machine = lambda: iter(())
cli.main()
"""
PROGRAM = [sys.executable, "-c", ONLY_THE_WAY]
LOCAL = ["python", "torch", "gloo", "nccl", "gpu", "cores", "memory", "loopback", "directory"]
WAY = ["peer", "out", "back", "round trip", "rate"]


def checks(out: str) -> dict[str, tuple[str, str]]:
    """name: (ok | FAIL, found)."""
    return {line[:11].strip(): (line[12:16].strip(), line[18:]) for line in out.splitlines()}


# `isles`, and what it has loaded in the end
TELLING = """
import atexit
import sys
from isles import cli
heavy = "torch", "isles.membership.hub"
atexit.register(lambda: print("loaded", *[one for one in heavy if one in sys.modules]))
cli.main()
"""


def test_this_machine(tmp_path: Path) -> None:
    """A machine that runs these tests is fit; one line a check. Neither the engine nor torch is loaded for it."""
    code, out, error = Command("doctor", folder=tmp_path, program=[sys.executable, "-c", TELLING]).end()
    assert (code, error) == (0, "")
    *lines, last = out.splitlines()
    assert last == "loaded"
    found = checks("\n".join(lines))
    assert list(found) == LOCAL and {state for state, _ in found.values()} == {"ok"}
    assert str(tmp_path) in found["directory"][1]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """doctor(*arguments): (exit code, stdout, stderr) of the command, in this process and a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.doctor, "machine", lambda: pytest.fail("checked before it was refused"))

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return ask


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "somewhere"], "--peer somewhere: write HOST:PORT"),
        (["--peer", "somewhere:70000"], "--peer somewhere:70000: write HOST:PORT"),
        (["--listen", "0"], "--listen 0: choose a port"),
        (["--listen", "29400", "--peer", "a:1"], "give one of them"),
        (["--write-links", "links.toml"], "--write-links: goes with --peer"),
        (["--peer", "a:1", "--nodes", "0,1"], "--nodes: goes with --write-links"),
        (["--peer", "a:1", "--write-links", "links.toml", "--nodes", "1,1"], "--nodes 1,1: write two different"),
        (["--write", "my.toml"], "--write: goes with --memory"),
        (["--memory", "--disk", "none"], "--disk none: there is no such folder"),
        (["--memory", "--write", "my.json"], "a machine's file ends in .toml"),
        (["--memory", "--write", "nowhere/my.toml"], "--write nowhere/my.toml: nowhere is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(doctor: Doctor, arguments: list[str], words: str) -> None:
    """Exit code 2 and one line, before any check."""
    code, out, error = doctor(*arguments)
    assert (code, out) == (2, "") and words in error and error.count("\n") == 1


def test_a_measured_line_is_written_where_a_plan_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from isles.base.version import __version__
    from isles.launch import probe

    found = probe.Findings(
        here="10.0.0.1",
        there="10.0.0.2",
        version_there=__version__,
        port_out=1,
        port_back=2,
        ports_there="1-9",
        out="",
        back="",
        round_trip=0.08,
        rate_out=80e6,
        rate_back=20e6,
    )
    monkeypatch.setattr(probe, "call", lambda host, at: found)
    monkeypatch.setattr(cli.doctor, "machine", lambda: iter(()))
    links = str(tmp_path / "links.toml")

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["isles", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0, err) == (0, "")
        return out

    ask = ["doctor", "--peer", "10.0.0.2:29400", "--write-links", links]
    assert checks(run(*ask))["links"] == ("ok", f"{links} has the line between nodes 0 and 1")
    assert "not measured yet: 1 and 2" in run(*ask, "--nodes", "0,2")
    run(*ask, "--nodes", "2,1")
    plan = ["--stages", "1,1,1", "--path-length", "2", "--microbatches", "1x2", "--task", "1s", "--message", "1MB"]
    run("plan", "paths", links, *plan, "--budget", "1s", "--out", str(tmp_path / "plan.json"))
    delays = json.loads((tmp_path / "plan.json").read_text())["delay_seconds"]
    assert (delays[0][2], delays[2][0], delays[1][2]) == pytest.approx((0.14, 0.44, 0.44))


def test_a_measured_machine_is_written_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from isles.memory import measurement
    from isles.network.machines import machine
    from tests.memory.test_measuring import LITTLE

    monkeypatch.setattr(measurement, "usual_effort", lambda cuda: LITTLE)
    monkeypatch.setattr(cli.doctor, "machine", lambda: iter(()))
    path = tmp_path / "my.toml"
    words = ["doctor", "--memory", "--disk", str(tmp_path), "--write", str(path)]
    ends = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["isles", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        ends.append((ended.value.code or 0, *capsys.readouterr()))
    assert (ends[0][0], ends[0][2]) == (0, "")
    found = checks(ends[0][1])
    assert {"device", "products", "updates", "disk", "machine"} <= found.keys()
    assert machine(str(path)).disk_read > 0
    assert (ends[1][0], ends[1][1]) == (2, "") and "exists already; name a new file" in ends[1][2]


@pytest.mark.parametrize(("fails", "detail"), [(False, "keeps them"), (True, 'choose memory.method = "checkpoint"')])
def test_a_gpu_is_tried_out(fails: bool, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(device: object) -> None:
        if fails:
            raise RuntimeError(f"on {device}, other bits")

    monkeypatch.setattr("isles.training.memory.in_use.try_out", stand_in)
    check = _keeps_bits()
    assert (check.name, check.good) == ("bits", not fails) and detail in check.found


def test_a_port_in_use(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, error = doctor("--listen", f"127.0.0.1:{port}")
    assert (code, out) == (2, "") and f":{port}: the port is taken" in error and error.count("\n") == 1


def ask(folder: Path, left: Machine, right: Machine) -> list[tuple[int, dict[str, tuple[str, str]]]]:
    """right listens, left calls: (exit code, checks) of each."""
    host = Command("doctor", "--listen", f"{right.address}:29400", folder=folder, machine=right, program=PROGRAM)
    assert host.process.stderr is not None
    assert "waiting 10 minutes" in host.process.stderr.readline()  # from now on somebody listens
    ends = [Command("doctor", "--peer", f"{right.address}:29400", folder=folder, machine=left, program=PROGRAM), host]
    return [(code, checks(out)) for code, out, _ in (end.end() for end in ends)]


def call_only(folder: Path, machine: Machine, peer: str) -> tuple[int, str]:
    code, out, _ = Command("doctor", "--peer", peer, folder=folder, machine=machine, program=PROGRAM).end()
    return code, out


@pytest.mark.long
def test_between_two_machines(tmp_path: Path) -> None:
    """Both sides say the same, each from its own end; a firewall that drops one direction is named on both, with the
    ports to open; nobody there is told from somebody who does not listen.
    """
    skip_unless_available()
    with two_machines() as (left, right):
        (code, caller), (host_code, host) = ask(tmp_path, left, right)
        assert (code, host_code) == (0, 0)
        assert list(caller) == list(host) == WAY
        assert {state for state, _ in (*caller.values(), *host.values())} == {"ok"}
        assert f"{left.address} -> {right.address} is open" in caller["out"][1]
        assert f"{left.address} -> {right.address} is open" in host["back"][1]

        code, out = call_only(tmp_path, left, f"{right.address}:29401")
        assert code == 1 and "connection refused: nothing listens there" in checks(out)["peer"][1]

        left.firewall("ct state new ip saddr", right.address, "tcp dport 32768-60999")
        (code, caller), (host_code, host) = ask(tmp_path, left, right)
        assert (code, host_code) == (1, 1)
        assert [name for name, (state, _) in caller.items() if state == "FAIL"] == ["back"]
        assert [name for name, (state, _) in host.items() if state == "FAIL"] == ["out"]
        for found, where in ((caller["back"][1], "in here"), (host["out"][1], "in there")):
            assert f"{right.address} -> {left.address} is BLOCKED" in found and "no answer within 1.5 s" in found
            assert f"let TCP ports 32768-60999 from {right.address} {where}" in found

        right.firewall("ip saddr", left.address)
        code, out = call_only(tmp_path, left, f"{right.address}:29400")
        assert code == 1 and "no answer within 1.5 s: the address is wrong, or a firewall" in checks(out)["peer"][1]

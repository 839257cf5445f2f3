"""The same with processes: the commands, killed, frozen, asked to leave, and all of them gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks._machines import Machine, machines, unavailable
from isles.comm.credentials import read
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from tests.membership.sessions import free_port
from tests.training.swarm.members import elastic_config
from tests.training.swarm.test_members import settings, undisturbed
from tests.training.swarm.test_swarm import furthest

STEPS, EVERY = 400, 20


class Commands:
    """A lighthouse of `config` and peers as processes, each with a log in `folder`. home: the machine that they are on,
    where no other is named.
    """

    def __init__(self, folder: Path, config: Config, home: Machine | None = None) -> None:
        self.folder, self.out, self.port, self.home = folder, folder / "run", str(free_port()), home
        host = "127.0.0.1" if home is None else home.address
        self.address, self.started = f"{host}:{self.port}", list[subprocess.Popen[bytes]]()
        (folder / "config.toml").write_text(to_toml(config))
        words = ["--host", host, "--port", self.port, "--out", str(self.out)]
        self.light = self.start("lighthouse", str(folder / "config.toml"), *words)
        self.until(lambda: (self.out / "lighthouse.json").exists())
        (folder / "token").write_text(str(read(self.out / "credentials").token))

    def start(self, *words: str, on: Machine | None = None) -> subprocess.Popen[bytes]:
        machine = on or self.home
        with (self.folder / f"{len(self.started)}.log").open("wb") as log:
            command = [*(machine.enter if machine else ()), sys.executable, "-m", "isles", *words]
            self.started.append(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log))
        return self.started[-1]

    def peer(self, *words: str, on: Machine | None = None) -> subprocess.Popen[bytes]:
        token = f"@{self.folder / 'token'}"
        return self.start("swarm", "peer", "--join", self.address, "--token", token, *words, on=on)

    def journal(self, event: str) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in (self.out / "members.jsonl").read_text().splitlines()]
        return [entry for entry in entries if entry["event"] == event]

    def members(self) -> list[int]:
        told = self.journal("begin") + self.journal("serve")
        return max(told, key=lambda entry: entry["at"])["members"] if told else []

    def step(self) -> int:
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def until(self, over: Callable[[], object], seconds: float = 120.0) -> None:
        ends = time.monotonic() + seconds
        while not over():
            if time.monotonic() > ends:
                raise TimeoutError(
                    "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in sorted(self.folder.glob("*.log")))
                )
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Callable[..., Commands]]:
    made: list[Commands] = []

    def make(peers: str, steps: int = STEPS, home: Machine | None = None) -> Commands:
        more = (f"run.checkpoint_every={EVERY}", "run.log_every=1", "world.elastic.lease=1.5")
        made.append(Commands(tmp_path, elastic_config(*settings(peers, steps, *more)), home))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.long
def test_killed_frozen_and_asked_to_leave(commands: Callable[..., Commands], tmp_path: Path) -> None:
    """One after the other, amid a run in exact mode: the weights are those of an undisturbed one."""
    run = commands("[1,3]")
    first, killed, frozen, asked = (run.peer("--stage", str(stage)) for stage in (0, 1, 1, 1))
    run.until(lambda: run.step() >= 3)
    killed.kill()
    run.until(lambda: len(run.members()) == 3)
    frozen.send_signal(signal.SIGSTOP)
    run.until(lambda: len(run.members()) == 2)
    frozen.send_signal(signal.SIGCONT)  # and it comes again, as somebody else
    run.until(lambda: len(run.members()) == 3)
    asked.terminate()
    assert asked.wait(60.0) == 0
    assert run.light.wait(240.0) == first.wait(30.0) == frozen.wait(30.0) == 0
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["joins"], summary["leaves"], summary["begun"]) == (5, 1, 1)
    ours = load_file(str(run.out / "model.safetensors"))
    assert furthest(ours, undisturbed(tmp_path, "[1,3]", STEPS)) < 1e-9
    assert all("Traceback" not in path.read_text() for path in run.folder.glob("*.log"))


@pytest.mark.long(cases=0)
@pytest.mark.parametrize("at", [40, 57])
def test_all_and_the_lighthouse_are_killed(commands: Callable[..., Commands], tmp_path: Path, at: int) -> None:
    """`isles resume RUN` goes on, with new peers: no more is lost than the interval, wherever in it that is."""
    run = commands("[1,1]")
    for stage in (0, 1):
        run.peer("--stage", str(stage))
    run.until(lambda: run.step() >= at)
    for process in run.started:
        process.kill()
        process.wait()
    reached, kept = run.step(), run.journal("saved")[-1]["step"]
    assert at <= reached <= kept + EVERY
    light = run.start("resume", str(run.out))
    again = [run.peer(), run.peer()]
    run.until(lambda: len(run.journal("begin")) == 2)
    assert run.journal("begin")[-1]["step"] == kept
    assert [process.wait(240.0) for process in (light, *again)] == [0, 0, 0]
    ours = load_file(str(run.out / "model.safetensors"))
    assert furthest(ours, undisturbed(tmp_path, "[1,1]", STEPS)) == 0


@pytest.mark.long
def test_ctrl_c_leaves_after_the_step(commands: Callable[..., Commands], tmp_path: Path) -> None:
    """One of a stage's two goes; the last of it, asked next, hands its state over, and another one goes on with it."""
    run = commands("[1,2]", 120)
    first, *others = (run.peer("--stage", str(stage)) for stage in (0, 1, 1))
    run.until(lambda: run.step() >= 3)
    for number, peer in enumerate(others, 2):
        peer.send_signal(signal.SIGINT)
        assert peer.wait(60.0) == 0
        told = (run.folder / f"{number}.log").read_text()
        assert "left the run after step" in told and "Traceback" not in told, told
    again = [run.peer(), run.peer()]
    assert [process.wait(240.0) for process in (run.light, first, *again)] == [0, 0, 0, 0]
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["leaves"], summary["begun"]) == (2, 2)
    ours = load_file(str(run.out / "model.safetensors"))
    assert furthest(ours, undisturbed(tmp_path, "[1,2]", 120)) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("listens", [False, True])
def test_a_network_that_is_cut(listens: bool, commands: Callable[..., Commands], tmp_path: Path) -> None:
    """A peer's machine hears nothing any more: the others go on with the exact sums after the lease. Once it hears
    again it comes again, as somebody else.
    """
    if reason := unavailable():
        pytest.skip(reason)
    with machines(2) as (home, far):
        run = commands("[1,2]", home=home)
        first, near = (run.peer("--stage", str(stage), *_door(home, listens)) for stage in (0, 1))
        away = run.peer("--stage", "1", *_door(far, listens), on=far)
        run.until(lambda: run.step() >= 3)
        far.detach()
        run.until(lambda: len(run.members()) == 2)
        step = run.step()
        run.until(lambda: run.step() >= step + 10)
        assert away.poll() is None
        far.attach()
        run.until(lambda: len(run.members()) == 3)
        assert [process.wait(240.0) for process in (run.light, first, near, away)] == [0, 0, 0, 0]
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["joins"], summary["deaths"], summary["begun"]) == (4, 1, 1)
    assert (summary["links"]["direct"] > 0) == listens
    ours = load_file(str(run.out / "model.safetensors"))
    assert furthest(ours, undisturbed(tmp_path, "[1,2]", STEPS)) < 1e-9
    assert all("Traceback" not in path.read_text() for path in run.folder.glob("*.log"))


def _door(machine: Machine, listens: bool) -> list[str]:
    return ["--listen", f"{machine.address}:{free_port()}"] if listens else []

"""Clusters over a lighthouse as commands: nodes killed, frozen, asked to leave, coming later, and all of them gone."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from isles.comm.credentials import parse_token
from isles.membership.messages import RunStatus
from isles.membership.requests import run_status
from isles.network.clusters import ClusterNode
from isles.training.clusters.node import growth_of
from tests.cli.command import isles
from tests.training.clusters.test_members import SEATED
from tests.training.swarm.members import elastic_config
from tests.training.swarm.test_member_processes import Commands

pytestmark = pytest.mark.long
EVERY = 20


class ClusterCommands(Commands):
    """Nodes have memory for half of the model, as a file says."""

    def __init__(self, folder: Path, *more: str) -> None:
        own = (f"run.checkpoint_every={EVERY}", "run.validate_every=0", "run.log_every=10", "world.elastic.lease=3.0")
        made = elastic_config(*SEATED, *own, *more)
        half = ClusterNode(name="half", memory=0.95 * growth_of(made).load.least, speed=1e9, bandwidth=1e8)
        (folder / "half.toml").write_text(half.to_toml())
        super().__init__(folder, made)

    @override
    def until(self, over: Callable[[], object], seconds: float = 400.0) -> None:
        super().until(over, seconds)

    def node(self, *fields: str) -> subprocess.Popen[bytes]:
        """One more, that says what it has."""
        return self.peer("--node", str(self.folder / "half.toml"), *fields)

    def now(self) -> RunStatus:
        """What the lighthouse says."""
        return run_status(self.address, parse_token((self.folder / "token").read_text().strip()))

    def whole(self) -> dict[int, list[int]]:
        """By cluster that trains, the members of its nodes by stage."""
        found: dict[int, dict[int, int]] = {}
        for one in self.now().members:
            if one.coordinates and one.coordinates[3]:
                found.setdefault(one.coordinates[0], {})[one.coordinates[1]] = one.member
        complete = {
            coordinates[0]: coordinates[2]
            for coordinates in (one.coordinates for one in self.now().members)
            if coordinates
        }
        return {
            number: [own[stage] for stage in sorted(own)]
            for number, own in found.items()
            if len(own) == complete.get(number)
        }

    def logs(self) -> str:
        """Of all, one after the other."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


Make = Callable[..., ClusterCommands]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Make]:
    made: list[ClusterCommands] = []

    def make(*more: str) -> ClusterCommands:
        made.append(ClusterCommands(tmp_path, *more))
        return made[-1]

    yield make
    for one in made:
        one.end()


def ended_well(run: ClusterCommands, processes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """All of these come to the end by themselves, nobody is left over; the summary."""
    assert [process.wait(600.0) for process in processes] == [0] * len(processes), run.logs()[-3000:]
    assert all(process.poll() is not None for process in run.started)
    assert "Traceback" not in run.logs() and (run.out / "model.safetensors").exists()
    return json.loads((run.out / "summary.json").read_text())


def test_killed_frozen_asked_to_leave_and_coming_later(commands: Make, tmp_path: Path) -> None:
    """One after the other, amid a run of two clusters of two."""
    run = commands("run.steps=1200", "replicas.sync_every=8", "run.checkpoint_every=40")
    founders = [run.node() for _ in range(4)]
    run.until(lambda: run.step() >= 8)
    run.until(lambda: len(run.whole()) == 2)
    founders[1].kill()
    run.until(lambda: len(run.whole()) == 1)
    run.until(lambda: any(not one.coordinates[3] for one in run.now().members if one.coordinates))  # its partner's beat
    code, descriptor, error = isles("status", run.address, "--token", f"@{tmp_path / 'token'}", folder=tmp_path)
    assert code == 0 and ", broken" in descriptor and "1 of 2" in descriptor, descriptor + error
    third = run.node()  # takes the killed one's place
    run.until(lambda: len(run.whole()) == 2)
    pair = [run.node(), run.node()]
    run.until(lambda: len(run.whole()) == 3)
    run.peer()  # says nothing of itself: it is measured, and holds the whole model alone
    run.until(lambda: len(run.whole()) == 4)
    assert "measuring this machine's memory, speed and link" in run.logs()
    pair[0].send_signal(signal.SIGSTOP)
    run.until(lambda: len(run.whole()) == 3)
    pair[0].send_signal(signal.SIGCONT)  # and it comes again, as somebody else
    run.until(lambda: len(run.whole()) == 4)
    third.send_signal(signal.SIGINT)
    founders[2].terminate()
    assert third.wait(120.0) == founders[2].wait(120.0) == 0
    run.until(lambda: len(run.whole()) <= 3)
    summary = ended_well(run, [run.light, founders[0], founders[3], *pair, run.started[-1]])
    assert summary["joins"] >= 9 and (summary["leaves"], summary["begun"]) == (2, 1)
    assert summary["val_loss"] is not None and "the link could not be measured" not in run.logs()


@pytest.mark.long(cases=0)
def test_all_and_the_lighthouse_are_killed(commands: Make) -> None:
    """`isles resume RUN` lights it again; new nodes go on from what it keeps."""
    run = commands("run.steps=300")
    for _ in range(4):
        run.node()
    run.until(lambda: len(run.journal("saved")) >= 2)
    for process in run.started:
        process.kill()
        process.wait()
    retained = run.journal("saved")[-1]["step"]
    assert run.step() - retained <= 3 * EVERY
    light = run.start("resume", str(run.out))
    again = [run.node() for _ in range(4)]
    run.until(lambda: len(run.journal("begin")) == 2)
    assert run.journal("begin")[-1]["step"] == retained
    summary = ended_well(run, [light, *again])
    assert summary["begun"] == 2 and summary["replicas"] == 2


def test_who_leaves_and_cannot_be_replaced_is_gone_within_its_grace(commands: Make) -> None:
    """Of the only cluster: what it had is at the lighthouse, the run waits, and goes on from there with who comes."""
    run = commands("run.steps=400", "pipeline.ravnest.clusters=[[2]]", "world.workers=2", "run.checkpoint_every=0")
    stays, leaves = run.node(), run.node()
    run.until(lambda: run.step() >= 20)
    leaves.terminate()
    assert leaves.wait(25.0 + 10.0) == 0
    (retained,) = run.journal("saved")
    assert retained["step"] % 4 == 0 and len(run.journal("leave")) == 1
    fresh = run.node()
    run.until(lambda: len(run.journal("begin")) == 2)
    assert run.journal("begin")[-1]["step"] == retained["step"]
    summary = ended_well(run, [run.light, stays, fresh])
    assert summary["leaves"] == 1 and summary["begun"] == 2


def test_who_leaves_does_not_wait_for_an_average_that_never_comes(commands: Make) -> None:
    """Averages lie hours apart: after `run.grace` its cluster is broken, and the other goes on."""
    run = commands("run.steps=20000", "replicas.sync_every=10000", "run.grace=4")
    nodes = [run.node() for _ in range(4)]
    aside = run.node()
    run.until(lambda: run.step() >= 50)
    nodes[3].terminate()
    aside.terminate()
    assert nodes[3].wait(30.0) == aside.wait(30.0) == 0
    before = run.step()
    run.until(lambda: run.step() > before + 100)

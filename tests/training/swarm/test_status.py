"""`isles status`: what it shows of a swarm that waits, works and refuses, and whom it cannot ask."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isles.cli.elastic import status as command
from isles.comm.collectives.message_queue import MessageHeader
from isles.membership import requests
from isles.training.records.tokens import make_token
from tests.training.swarm.members import SwarmRun, elastic_config
from tests.training.swarm.test_members import settings

Show = Callable[[SwarmRun], list[str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """The lines that the command prints."""
    monkeypatch.setattr(command, "end_in_order", lambda: None)  # pytest keeps its own handlers

    def shown(run: SwarmRun) -> list[str]:
        capsys.readouterr()
        command.status(run.address, token=run.token)
        return capsys.readouterr().out.splitlines()

    return shown


def told(lines: list[str]) -> list[list[str]]:
    """Of the peers: stage, member, step, counted."""
    heads, *rows = [re.split(r"  +", line.strip()) for line in lines[1:]]
    found = [dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads)]
    assert all(row["machine"] == socket.gethostname()[:40] and row["address"] == "127.0.0.1" for row in found)
    return [[row["role"].removeprefix("stage "), row["member"], row["step"], row["counted"]] for row in found]


@pytest.mark.long
def test_it_shows_stages_peers_and_loads(tmp_path: Path, show: Show) -> None:
    """Of a swarm that waits, of one at work, and what was refused."""
    run = SwarmRun(elastic_config(*settings("[1,2,1]", 400)), tmp_path / "run")
    assert show(run)[0] == "step 0 of 400; swarms begun: 0; " + (
        "waiting: stage 0 for 1 peer, stage 1 for 2 peers, stage 2 for 1 peer; states saved: none yet"
    )
    run.join(1)
    run.until(lambda: told(show(run)) == [["waiting", "0", "0", "0"]])
    for stage in (0, 1, 2):
        run.join(stage)
    run.until(lambda: run.step(0) > 3)
    time.sleep(1.5)  # each tells once a second
    lines = show(run)
    assert lines[0].startswith("step ") and "swarms begun: 1" in lines[0] and "waiting" not in lines[0]
    members = {int(member): (int(stage), int(step), int(counted)) for stage, member, step, counted in told(lines)}
    assert sorted(stage for stage, _, _ in members.values()) == [0, 1, 1, 2]
    assert all(step > 0 for _, step, _ in members.values())
    counts = [sum(counted for at, _, counted in members.values() if at == stage) for stage in (0, 2)]
    assert counts == [6, 6], "one peer of a stage counts all microbatches of a step"
    assert all(
        cell in next(line for line in lines if "role" in line)
        for cell in ("a microbatch", "queue", "heard", "here for")
    )
    liar = run.peers[2]
    assert liar._trainer is not None
    liar._trainer.model_step.swarm.agreement.inbox.queue.send(run.peers[1].client.member, MessageHeader(99, 0))
    run.until(lambda: any(f"worker {liar.client.member}: " in line and "kind 99" in line for line in show(run)))
    run.stop()


@pytest.mark.long
def test_a_lighthouse_that_is_gone_and_comes_back(tmp_path: Path, show: Show) -> None:
    run = SwarmRun(elastic_config(*settings("[1,1]", 400)), tmp_path / "run")
    assert show(run)[0].startswith("step 0 of 400")
    run.stop()
    with pytest.raises(OSError, match=r"no lighthouse answers there \(connection refused\): isles doctor --join"):
        show(run)
    run.keep()
    assert show(run)[0].startswith("step 0 of 400")
    run.stop()


@pytest.mark.long
def test_one_that_goes_amid_the_question(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SwarmRun(elastic_config(*settings("[1,1]", 10)), tmp_path / "run")
    ask = requests.ask

    def asked(*of: object) -> bytes | None:
        run.stop()
        return ask(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(requests, "ask", asked)
    with pytest.raises(OSError, match="the lighthouse has stopped: ask again once it is started"):
        show(run)


@pytest.mark.long
def test_who_cannot_be_asked_is_told_in_a_line(tmp_path: Path, show: Show) -> None:
    """Another token, and what is no lighthouse at all."""
    run = SwarmRun(elastic_config(*settings("[1,1]", 10)), tmp_path / "run")
    own, run.token = run.token, str(make_token())
    with pytest.raises(ValueError, match="is not the machine of this token"):
        show(run)
    run.token, run.address = own, run.address.partition(":")[0]
    with pytest.raises(ValueError, match="write HOST:PORT"):
        show(run)
    run.stop()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run.address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OSError, match="no lighthouse answers there"):
            show(run)

"""Who is there: lines at the lighthouse, and `isles status` of a lighthouse, of its directory, and of a fixed run."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from isles.cli.elastic import status as command
from isles.running.run import launch
from isles.training.elastic.connect import LocalSettings
from isles.training.lighthouse.server import LighthouseAddress
from tests.membership.sessions import free_port
from tests.training.elastic.runs import Run, in_run
from tests.training.elastic.test_runs import leisurely, small
from tests.training.elastic.test_simulated import small as simulated

__all__ = ["leisurely"]


@pytest.mark.usefixtures("leisurely")
def test_members_are_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two join, one of them with a name that would clear the screen; one is lost, one leaves, the lighthouse stops."""
    monkeypatch.setattr(command, "end_in_order", lambda: None)
    world = Run(small(tmp_path, 60_000, 2), tmp_path / "run")
    LighthouseAddress(host="127.0.0.1", port=int(world.address.rpartition(":")[2]), workers=0).write(world.out)

    def work(number: int, here: LocalSettings) -> Any:
        with in_run(world, here) as worker:
            world.workers[number] = worker
            return worker.run()

    def show(*, token: str | None = world.token) -> dict[str, Any]:
        capsys.readouterr()
        command.status(str(world.out), token=token, json=True)
        return json.loads(capsys.readouterr().out)

    attic, cellar = (
        world.start(partial(work, here=world.here(machine=name))) for name in ("attic", "cel\x1b[2Jlar" + "r" * 99)
    )
    world.until(lambda: min(map(world.step, (attic, cellar))) > 20)
    rows = {row["machine"]: row for row in show(token=None)["members"]}  # the token is in the run directory
    assert set(rows) == {"attic", ("cel?[2Jlar" + "r" * 99)[:40]}
    row = rows["attic"]
    assert row["role"] == "in" and row["address"] == "127.0.0.1" and row["way"] == "relayed" and row["round"] > 0
    assert 0 < row["a step"] < 10 and 0 <= row["behind"] < 5 and 0 < row["here for"] < 60
    assert 0 < row["last exchange"] <= row["round"] and 0 <= row["ago"] < 10
    capsys.readouterr()
    command.status(str(world.out), token=world.token)
    heads, *_ = re.findall("machine .*fingerprint.*member", capsys.readouterr().out)
    assert heads
    world.vanish(cellar)
    world.until(lambda: len(world.keeper.members()) == 1)
    short = r"- cel\?\[2Jlarr* lost \(member \d\); 1 goes on"  # at the member that goes on
    world.until(lambda: any(re.fullmatch(short, line) for line in world.notices))
    world.workers[attic].leaving.set()
    world.until(lambda: attic in world.end_reasons)
    number = world.workers[attic].client.member
    lines = [line for line in world.notices if line.startswith(("+ ", "- "))]
    assert f"+ attic (127.0.0.1) joined as member {number}" in lines and f"- attic leaves (member {number})" in lines
    assert any(re.fullmatch(r"- cel\?\[2Jlarr* lost .* \(member \d\); 1 goes on", line) for line in lines)
    world.stop()
    told = show()
    assert "its lighthouse does not answer" in told["run"]
    assert {row["machine"] for row in told["members"]} == set(rows)
    world.rest()


def test_a_fixed_run_is_shown_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "end_in_order", lambda: None)
    launch(simulated(tmp_path, 2, 8), tmp_path / "run", lambda line: None, lambda notice: None)
    command.status(str(tmp_path / "run"))
    first, heads, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'run'} is complete; step 8" and heads.split() == [
        "member",
        "step",
        "behind",
        "a",
        "step",
    ]
    assert [row.split() for row in rows] == [["0", "8", "0", "10.0", "s"], ["1", "8", "0", "10.0", "s"]]
    port = free_port()
    serving = partial(command.status, str(tmp_path / "run"), metrics_port=port)
    threading.Thread(target=serving, daemon=True).start()
    for _ in range(50):
        with suppress(OSError):
            time.sleep(0.1)
            answer = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0).read().decode().splitlines()
            break
    assert 'isles_member_step{member="1",machine=""} 8' in answer
    with pytest.raises(ValueError, match="is not a run directory"):
        command.status(str(tmp_path))

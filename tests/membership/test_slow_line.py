"""One member on a slow line, cut off, or stopped: the others do not feel it, and it is back soon after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks._machines import machines, unavailable
from isles.membership.failure_detector import SILENT

LEASE, AWAY = 3.0, 10.0  # seconds


def lines(folder: Path, name: str, since: float = 0.0) -> list[dict[str, Any]]:
    """What it has written since then."""
    text = (folder / f"{name}.jsonl").read_text()
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in found if line["at"] >= since]


@pytest.mark.long(cases=5)
@pytest.mark.parametrize("trouble", ["0.5", "1", "5", "cut", "stopped"])
def test_the_others_feel_nothing(tmp_path: Path, trouble: str) -> None:
    """Member 3 in trouble fetches 1 MB from member 0 again and again, and 0 from 3; 1 and 2 from each other. All by the
    lighthouse. Nobody on a fast line is lost, nor waits for an answer of the lighthouse; on a slow line 3 is not lost
    either, for an urgent message waits for little of the file.
    """
    if reason := unavailable():
        pytest.skip(reason)
    with ExitStack() as stack:
        light, *places = stack.enter_context(machines(5))
        names = ["light", *map(str, range(4))]
        started = []
        for name, place in zip(names, (light, *places), strict=True):
            words = [sys.executable, "-m", "tests.membership.slow_line", name, str(tmp_path), light.address, str(LEASE)]
            with (tmp_path / f"{name}.log").open("wb") as log:
                started.append(subprocess.Popen([*place.enter, *words], stdout=log, stderr=log))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
            while name == "light" and not (tmp_path / "token").exists():
                time.sleep(0.05)
        until = time.monotonic() + 90.0
        while not all(
            (tmp_path / f"{n}.jsonl").exists() and any("fetched" in l for l in lines(tmp_path, n)) for n in names[1:]
        ):
            assert time.monotonic() < until, [path.read_text()[-500:] for path in tmp_path.glob("*.log")]
            time.sleep(0.1)
        began = time.monotonic()
        if trouble == "cut":
            places[3].detach()
            time.sleep(AWAY)
            places[3].attach()
        elif trouble == "stopped":
            os.kill(started[4].pid, signal.SIGSTOP)
            time.sleep(AWAY)
            os.kill(started[4].pid, signal.SIGCONT)
        else:
            places[3].limit(1e6 * float(trouble))
        free = time.monotonic()
        time.sleep(25.0 if trouble[0].isdigit() else 15.0)
        lost = {line["member"] for line in lines(tmp_path, "light", began) if not line["there"]}
        usual = max(
            line["trip"] for n in names[1:] for line in lines(tmp_path, n) if line["at"] < began and "trip" in line
        )
        trips = {n: max(line["trip"] for line in lines(tmp_path, n, began) if "trip" in line) for n in names[1:]}
        fetched = {n: len([line for line in lines(tmp_path, n, began) if "fetched" in line]) for n in names[1:]}
        back = [line["at"] - free for line in lines(tmp_path, "3", free) if line.get("whole")][:1]
        taken = [line["at"] - free for line in lines(tmp_path, "3", free) if "fetched" in line][:1]
        late = sorted(line["trip"] for line in lines(tmp_path, "3", free + 10.0) if "trip" in line)
        print(f"{trouble}: lost {lost}, usual {usual:.2f} s, longest {trips}, fetched {fetched}")
        print(f"member 3: back after {back}, a file after {taken}, its answers later {late}")
        assert lost <= ({"3"} if trouble in ("cut", "stopped") else set())
        assert max(trips[n] for n in "012") <= usual + 1.0
        assert back and back[0] < 5.0 and late[-1] < SILENT

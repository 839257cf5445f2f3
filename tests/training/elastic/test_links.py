"""Lines that are cut, lead nowhere or carry for others: workers as processes, and as machines of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks._machines import Machine, machines, unavailable
from isles.membership.effects import RELAYED
from tests.training.elastic.processes import Diary, Processes
from tests.training.elastic.test_runs import events

ROUND = ("replicas.sync_every=50", "run.log_every=50")  # some tenths of a second
LEASE = 2.0  # seconds


@pytest.fixture
def three() -> Iterator[tuple[Machine, ...]]:
    if reason := unavailable():
        pytest.skip(reason)
    with machines(3) as made:
        yield made


def finished(world: Processes, *workers: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The summary, once all have ended."""
    assert [worker.wait(180.0) for worker in workers] == [0] * len(workers), world.logs()
    assert world.light.wait(60.0) == 0, world.logs()
    return json.loads((world.out / "summary.json").read_text())


@pytest.mark.long
def test_workers_without_a_route_to_each_other(tmp_path: Path, three: tuple[Machine, ...]) -> None:
    """The same bits over the lighthouse as directly; and what it says to have carried for them is what they sent."""
    light, one, two = three
    settings = [
        "model.d_model=128",
        "model.ffn=512",
        "replicas.sync_every=5",
        "run.log_every=50",
        "world.elastic.lease=20",
    ]
    models, ways = [], []
    for name in ("direct", "relayed"):
        (tmp_path / name).mkdir()
        if name == "relayed":
            for here, there in ((one, two), (two, one)):
                subprocess.run(
                    ["ip", "-n", here.name, "route", "add", "unreachable", f"{there.address}/32"], check=True
                )
        world = Processes(tmp_path / name, *settings, steps=200, host=light.address, on=light.enter)
        try:
            pair = [world.join("--listen", f"{place.address}:29500", on=place.enter) for place in (one, two)]
            ways.append(finished(world, *pair)["links"])
            logs = world.logs()
            said = logs.count(f": {name}"), logs.count("others reach this worker directly")
            assert said[0] == 2 or (name == "relayed" and said[0] == 1), logs  # who dials in vain says so at once
            assert said[1] == 2, logs
        finally:
            world.end()
        models.append(load_file(str(world.out / "model.safetensors")))
    direct, relayed = ways
    print(ways)
    for name, told in (("direct", direct), ("relayed", relayed)):
        assert sorted((pair["by"], pair["to"], pair["way"]) for pair in told["pairs"]) == [(0, 1, name), (1, 0, name)]
        assert all(pair["round_trip"] > 0 for pair in told["pairs"])
        assert sum(pair["sent"] for pair in told["pairs"]) == told[name]
    assert direct["relayed"] == 0 and relayed["direct"] == 0
    assert direct["direct"] == relayed["relayed"]
    assert 1.0 <= relayed["relayed_here"] / relayed["relayed"] <= 1.02
    # last: on a busy machine a worker may have to read a cell out of turn, which makes other bits and no other bytes
    assert all(models[0][key].equal(models[1][key]) for key in models[0])


@pytest.mark.long
def test_a_port_that_nobody_reaches(tmp_path: Path, three: tuple[Machine, ...]) -> None:
    """A warning, and on over the lighthouse."""
    light, one, two = three
    subprocess.run(["ip", "-n", light.name, "route", "add", "unreachable", "10.250.0.1/32"], check=True)
    subprocess.run(["ip", "-n", one.name, "address", "add", "10.250.0.1/32", "dev", "lo"], check=True)
    world = Processes(tmp_path, steps=100, host=light.address, on=light.enter)
    try:
        pair = [world.join("--listen", "10.250.0.1:29500", on=one.enter), world.join(on=two.enter)]
        assert finished(world, *pair)["links"]["direct"] == 0
        assert "warning: relayed: the lighthouse does not reach port 29500 of 10.250.0.1" in world.logs()
    finally:
        world.end()


@pytest.mark.long
def test_a_worker_that_carries_for_two_others_is_killed(tmp_path: Path) -> None:
    """It carries all that they say to each other, and they go on over the lighthouse."""
    if reason := unavailable():
        pytest.skip(reason)
    with ExitStack() as stack:
        light, *places = stack.enter_context(machines(4))
        settings = [*ROUND, "model.d_model=128", "model.ffn=512", "replicas.sync_every=10"]
        world = Processes(tmp_path, *settings, founders=3, host=light.address, on=light.enter)
        stack.callback(world.end)
        carries = world.join("--listen", f"{places[0].address}:29500", "--relay", on=places[0].enter)
        world.until(lambda: "others reach this worker directly" in world.logs())
        others = [world.join(on=place.enter) for place in places[1:]]
        ask = [*light.enter, sys.executable, "-m", "isles", "status", world.address, "--token", world.token]

        def ways() -> dict[str, str]:
            """By "0 to 1", where a round trip is known and something came."""
            told = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60.0).stdout
            rows = [re.split("  +", line.strip()) for line in told.splitlines() if " to " in line]
            return {pair: way for pair, way, trip, _, taken in rows if trip != "-" and taken != "0 B"}

        world.until(lambda: len(ways()) == 6)
        assert ways() == {
            f"{one} to {other}": "direct" if 0 in (one, other) else "relayed by worker 0"
            for one, other in permutations(range(3), 2)
        }
        assert not events(world.out, RELAYED)  # which the journal gets with the first MB
        carries.kill()
        world.until(lambda: ways().items() >= {("1 to 2", "relayed"), ("2 to 1", "relayed")})
        world.until(lambda: events(world.out, RELAYED))
        assert all(worker.poll() is None for worker in others)


def at_work(
    stack: ExitStack, world: Processes, places: Sequence[Machine], *, direct: bool
) -> tuple[list[subprocess.Popen[bytes]], Diary]:
    """A worker on each machine, and their diary, once all have done twenty rounds."""
    listen = [("--listen", f"{place.address}:29500") if direct else () for place in places]
    workers = [world.join(*more, on=place.enter) for more, place in zip(listen, places, strict=True)]
    world.until(lambda: (world.out / "metrics.jsonl").exists())
    diary = Diary(world.out)
    stack.callback(diary.close)
    world.until(lambda: len(diary.rounds) == len(places) and min(map(len, diary.rounds.values())) > 20)
    return workers, diary


def kill(worker: subprocess.Popen[bytes], _: Machine) -> None:
    worker.kill()


def freeze(worker: subprocess.Popen[bytes], _: Machine) -> None:
    os.kill(worker.pid, signal.SIGSTOP)


def cut(_: subprocess.Popen[bytes], place: Machine) -> None:
    place.detach()


@pytest.mark.long
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("how", "longest"), [(kill, 1.0), (freeze, LEASE + 1.5), (cut, LEASE + 1.5)])
def test_one_is_lost(
    tmp_path: Path, how: Callable[[subprocess.Popen[bytes], Machine], None], longest: float, direct: bool
) -> None:
    """Told in time, a view without it follows, and the others are held up for two seconds at most."""
    if reason := unavailable():
        pytest.skip(reason)
    with ExitStack() as stack:
        light, *places = stack.enter_context(machines(4))
        settings = [*ROUND, f"world.elastic.lease={LEASE}"]
        world = Processes(tmp_path, *settings, founders=3, host=light.address, on=light.enter)
        stack.callback(world.end)
        workers, diary = at_work(stack, world, places, direct=direct)
        if direct:
            assert world.logs().count(": direct") == 6
        began = time.monotonic()
        victim = workers[2]
        how(victim, places[2])
        world.until(lambda: any(event["event"] == "lost" for at, event in diary.events if at >= began))
        (member,) = {event["member"] for at, event in diary.events if at >= began and event["event"] == "lost"}
        told = diary.when("lost", member, began)
        world.until(lambda: member not in events(world.out, "view")[-1]["view"]["members"])
        others = [other for other in diary.rounds if other != member]
        reached = {other: len(diary.rounds[other]) for other in others}
        world.until(lambda: all(len(diary.rounds[other]) > reached[other] + 10 for other in others))
        usual = statistics.median(diary.gaps(others, 0.0, began))
        gap = max(diary.gaps(others, began - 1.0, time.monotonic()))
        assert told is not None
        print(f"{how.__name__} direct={direct}: told {told - began:.2f} s, gap {gap:.2f} s, median {usual:.2f} s")
        assert told - began <= longest and gap <= usual + 2.0

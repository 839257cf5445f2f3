"""Islands as members of a run whose workers come and go: one member each, several workers."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from isles.comm.errors import PeerLost
from isles.comm.gloo.transfers import PostedWork
from isles.comm.tags import Tag
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.run_log import EXCHANGES, WHOLE, RoundRecord, read_record
from isles.replicas.loop.fragment import InFlight
from isles.replicas.loop.outer import OuterSync
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from tests.training.elastic.processes import Processes
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import small
from tests.training.runs import run

BOUND, LEASE = 20.0, 2.0  # seconds; the deadline of an exchange is 60
SENT = ("bytes_sent", "bytes_received")


def islands_of(method: str) -> tuple[str, ...]:
    return f"replicas.method={method}", "world.inner=2"


@contextmanager
def processes(folder: Path, method: str, steps: int, islands: int, *settings: str) -> Iterator[Processes]:
    world = Processes(folder, *islands_of(method), *settings, founders=2 * islands, steps=steps)
    try:
        yield world
    finally:
        world.end()


def same_as_fixed(folder: Path, config: Config, backend: Any) -> None:
    """The run in `folder` has the bits of the one model, the tokens and the bytes across of a fixed one of `config`."""
    replicas = config.replicas
    if hasattr(replicas, "on_peer_failure"):
        replicas = replace(replicas, on_peer_failure="raise")
    real = replace(config, world=replace(config.world, backend=backend), replicas=replicas)
    summary, whole = json.loads((folder / "run" / "summary.json").read_text()), run(real, folder / "fixed")
    mine, other = (load_file(str(folder / name / "model.safetensors")) for name in ("run", "fixed"))
    assert mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)
    counted, should = (one["channels"]["outer"] for one in (summary, whole))
    assert {key: counted[key] for key in SENT} == {key: should[key] for key in SENT}
    assert (summary["tokens"], summary["val_loss"]) == (whole["tokens"], pytest.approx(whole["val_loss"], abs=1e-12))


@pytest.mark.parametrize(("method", "count"), [("noloco", 3), pytest.param("diloco", 2, marks=pytest.mark.long)])
def test_in_threads_they_are_those_of_the_virtual_clock(tmp_path: Path, method: str, count: int) -> None:
    """Of three in pairs one is alone in each round, as a whole."""
    config = small(tmp_path, 15, 2 * count, "inner.lr=0.001", *islands_of(method))
    world = Run(config, tmp_path / "run")
    for number in range(count):
        world.join_island(tmp_path / f"island-{number}")
    world.end()
    world.rest()
    same_as_fixed(tmp_path, config, "virtual")


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.long), "noloco"])
def test_no_place_lands_what_another_has_not(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second worker of island 0 was to receive in round 3 is lost. In pairs the island does that round alone,
    both workers of it; the other island has all of it, and lands it. One mean for all is exchanged again.

    In pairs the loss is known only when the other island has landed: what it sent later would come to a round that is
    over, and it would do that round alone as well.
    """
    landed = dict[tuple[int, int], dict[str, int]]()  # by member and round, whose mean it was at each place
    lost = list[PostedWork]()
    recv, land = ElasticTransport.recv, OuterSync.land

    def losing(transport: ElasticTransport, peer: int | None, out: Tensor, tag: Tag) -> Any:
        if (transport.rank, transport._room, tag.round, tag.attempt) == (0, "isles/rank/1", 3, 0):
            work = PostedWork(peer, out, transport.now)
            lost.append(work)
            tell()
            return work
        return recv(transport, peer, out, tag)

    def tell() -> None:
        if method == "diloco" or len(landed.get((1, 3), ())) == 2:
            while lost:
                with suppress(IndexError):  # the other place was faster
                    lost.pop().finished(PeerLost(1))

    def landing(optimizer: OuterSync, flight: InFlight, fresh: Tensor | None) -> None:
        transport = optimizer.roster.founders.transport
        assert isinstance(transport, ElasticTransport)
        told = landed.setdefault((transport.rank, flight.fragment.rounds), {})
        told[transport._room] = flight.payload.participants
        tell()
        land(optimizer, flight, fresh)

    monkeypatch.setattr(ElasticTransport, "recv", losing)
    monkeypatch.setattr(OuterSync, "land", landing)
    world = Run(small(tmp_path, 25, 4, "inner.lr=0.001", *islands_of(method)), tmp_path / "run")
    for number in range(2):
        world.join_island(tmp_path / f"island-{number}")
    world.end()
    world.rest()
    both = {"isles": 2, "isles/rank/1": 2}
    alone = dict.fromkeys(both, 1) if method == "noloco" else both
    assert landed == {
        (member, round): alone if (member, round) == (0, 3) else both for member in (0, 1) for round in range(1, 6)
    }
    assert [line.outcome == WHOLE for line in rounds(world.out)[0]] == [True, True, method == "diloco", True, True]


@pytest.mark.long
@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_nobody_waits_for_an_island_whose_leader_is_lost(tmp_path: Path, method: str) -> None:
    """Its other worker is there, and waits for its leader; so do those at its place in other islands, for their part of
    a round that it will never send. A deadline is 60 s.
    """
    world = Run(small(tmp_path, 60_000, 6, "inner.lr=0.001", *islands_of(method)), tmp_path / "run")
    leaders = [world.join_island(tmp_path / f"island-{number}")[0] for number in range(3)]
    world.until(lambda: all(world.step(number) >= 15 for number in leaders))
    lost, *others = leaders
    began, step = time.monotonic(), max(world.step(number) for number in others)
    world.vanish(lost)
    world.until(lambda: all(world.step(number) >= step + 25 for number in others), BOUND)
    print(f"{method}: five rounds after {time.monotonic() - began:.1f} s")
    members = tuple(sorted(world.workers[number].client.member for number in others))
    world.until(
        lambda: any(line.members == members and line.outcome == WHOLE for line in rounds(world.out)[members[0]][-3:])
    )
    for number in others:
        world.workers[number].leaving.set()
    world.until(lambda: all(number in world.end_reasons for number in others))
    assert [world.end_reasons[number] for number in others] == ["left", "left"]
    world.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "inside", "backend"),
    [
        ("diloco", "ddp", "virtual"),
        ("diloco", "fsdp", "distributed"),
        ("noloco", "ddp", "distributed"),
        ("noloco", "fsdp", "distributed"),
    ],
)
def test_without_churn_they_are_those_of_the_fixed_world(
    tmp_path: Path, method: str, inside: str, backend: Any
) -> None:
    """Each place is linked directly with its place in the other island; and whoever keeps the run needs no torch from
    its beginning to its end.
    """
    with processes(tmp_path, method, 10, 2, f"world.inside={inside}") as world:
        joined = [world.join("--listen", "127.0.0.1:0") for _ in range(2)]
        world.until(lambda: world.light.poll() is not None)
        world.until(lambda: all(process.poll() is not None for process in joined))
        assert [process.returncode for process in world.started] == [0, 0, 0], world.logs()
        assert all(
            re.search(rf"{line}worker [01]: direct, fingerprint [0-9a-f-]{{19}}\n", world.logs())
            for line in ("isles: ", "island rank 1: ")
        )
        links = json.loads((tmp_path / "run" / "summary.json").read_text())["links"]
        assert links["direct"] > 4 * links["relayed"], links  # it may be that they begin before they have met
        assert (tmp_path / "0.log").read_text().endswith("loaded:\n"), world.logs()
    config = small(tmp_path, 10, 4, "inner.lr=0.001", *islands_of(method), f"world.inside={inside}")
    same_as_fixed(tmp_path, config, backend)


def rounds(out: Path) -> dict[int, list[RoundRecord]]:
    """By member, as they were reported."""
    found: dict[int, list[RoundRecord]] = {}
    for text in (out / EXCHANGES).read_text().splitlines() if (out / EXCHANGES).exists() else ():  # none yet
        line = read_record(json.loads(text))
        if isinstance(line, RoundRecord):
            found.setdefault(line.member, []).append(line)
    return found


def workers_of(pid: int) -> list[int]:
    """The processes of an island, in the order of their places: grandchildren of the command, by way of what it forks
    them from.
    """
    parents: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if each.name.isdecimal():
                parents[int(each.name)] = int((each / "stat").read_text().rsplit(")", 1)[1].split()[1])
    return sorted(child for child, parent in parents.items() if parents.get(parent) == pid)


def member_of(log: Path) -> int:
    """That of the island whose log it is."""
    found = re.search(r"in: member (\d+) of", log.read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.long
@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_they_come_and_go(tmp_path: Path, method: str) -> None:
    """A third one joins and lands with the others; one that loses a worker leaves as a whole, and the others go on;
    one that is asked to leave ends its round first. All workers are killed, and the run goes on where the lighthouse's
    state was.
    """
    with processes(tmp_path, method, 600_000, 2, "run.checkpoint_every=20") as world:
        founders = [world.join() for _ in range(2)]

        def newest(member: int) -> int:
            return max((line.round for line in rounds(world.out).get(member, [])), default=0)

        world.until(lambda: min(newest(0), newest(1)) >= 10, 240.0)
        third = world.join()
        world.until(lambda: newest(2) > 0)
        since = newest(2)
        world.until(lambda: newest(2) >= since + 10)
        met = {line.members for line in rounds(world.out)[2] if line.outcome == WHOLE}
        assert met == ({(0, 1, 2)} if method == "diloco" else {(0, 2), (1, 2)})
        os.kill(workers_of(founders[1].pid)[1], signal.SIGKILL)
        world.until(lambda: founders[1].poll() is not None)
        assert founders[1].returncode == 1 and "lost a worker" in world.logs()
        assert not workers_of(founders[1].pid)
        left = member_of(tmp_path / "1.log")
        since = newest(left)
        world.until(lambda: min(newest(left), newest(2)) >= since + 12)
        assert {line.members for line in rounds(world.out)[2][-8:] if line.outcome == WHOLE} == {(left, 2)}
        third.send_signal(signal.SIGINT)
        world.until(lambda: third.poll() is not None)
        assert third.returncode == 0, world.logs()
        world.until(lambda: list((world.out / "states").glob("step-*/manifest.json")))
        for pid in workers_of(founders[0].pid):
            os.kill(pid, signal.SIGKILL)
        world.until(lambda: founders[0].poll() is not None)
        kept = max(Checkpoints(world.out, "states").steps())
        for _ in range(2):
            world.join()
        world.until(lambda: min(newest(3), newest(4)) >= kept + 10, 120.0)
        assert min(line.round for line in rounds(world.out)[3]) > kept


@pytest.mark.long
@pytest.mark.parametrize("method", ["diloco", "noloco"])
@pytest.mark.parametrize("place", [0, 1])
def test_nobody_waits_for_an_island_of_which_one_worker_stands_still(tmp_path: Path, method: str, place: int) -> None:
    """Neither at the place that stands still nor at the other one, where its partner is there and waits itself; and it
    is back once it goes on.
    """
    with processes(tmp_path, method, 600_000, 3, f"world.elastic.lease={LEASE}") as world:
        joined = [world.join() for _ in range(3)]

        def newest(member: int) -> int:
            return max((line.round for line in rounds(world.out).get(member, [])), default=0)

        world.until(lambda: min(map(newest, range(3))) >= 5, 240.0)
        round_members = workers_of(joined[2].pid)[place]
        member = member_of(tmp_path / "3.log")
        others = sorted({0, 1, 2} - {member})
        os.kill(round_members, signal.SIGSTOP)
        since = max(map(newest, others))
        world.until(lambda: min(map(newest, others)) >= since + 10)
        gaps = [
            late.at - early.at
            for other in others
            for early, late in pairwise(line for line in rounds(world.out)[other] if line.round >= since - 3)
        ]
        print(f"{method}, place {place}: longest time between two rounds {max(gaps):.1f} s")
        assert max(gaps) < BOUND
        os.kill(round_members, signal.SIGCONT)
        was = newest(member)
        world.until(lambda: newest(member) >= was + 10)
        assert rounds(world.out)[member][-1].outcome == WHOLE or method == "noloco"

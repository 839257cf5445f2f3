"""One hostile member of four, over real sessions: on the virtual clock, and as a process. It shuts out nobody, writes
no model, and stops no round for longer than docs/guarantees.md says.

Swarms and clusters have no lighthouse on the virtual clock: see tests/membership/test_hostile.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from isles.base.tables import changed
from isles.comm.errors import CommError
from isles.network.churn import ChurnEvent, write_trace
from isles.training.elastic.leader import Participant
from isles.training.simulated_churn import SimulatedElasticRun
from tests.membership.hostile import MAY_SAY, SAID, Liar, Speaker
from tests.membership.test_hostile import ROUNDS, SIEGES
from tests.training.elastic.processes import NearbyLighthouse
from tests.training.elastic.test_runs import EVERY, events
from tests.training.elastic.test_simulated import small

HONEST = {0, 1, 2}
METHODS = {
    "noloco": ("noloco", {}),
    "diloco": ("diloco", {}),
    "quorum": ("diloco", {"on_late": "quorum", "quorum": 0.6}),
}


def besieged(folder: Path, method: str, seed: int, rounds: int) -> None:
    """Three honest members, and one that joins, lies, and trains besides in half of the seeds."""
    draw = Random(seed)
    works = draw.random() < 0.5
    name, more = METHODS[method]
    config = small(folder, 3, 2 * rounds, method=name, virtual={"step_seconds": 0.5}, outer_deadline=10.0)
    config = changed(config, {f"replicas.{key}": value for key, value in more.items()})
    write_trace([ChurnEvent(2.2, "join", 1)], str(folder / "trace.jsonl"))

    def made(worker: Participant) -> None:
        client, run = worker.client, worker.run
        if client.member in HONEST:
            return
        Speaker(Liar(draw), client, lambda: simulated.simulation.membership, "127.0.0.1")
        if not works:
            client.wait(lambda: client.ended is not None, 1e6)

        def runs() -> Any:
            with suppress(CommError):
                return run()

        worker.run = runs  # type: ignore[method-assign]

    trace, out = str(folder / "trace.jsonl"), folder / "run"
    simulated = SimulatedElasticRun(config, trace, out, lambda line: None, lambda notice: None, made=made)
    simulated.run()
    assert simulated._members and {*simulated._members} <= HONEST | ({3} if works else set())
    banned = {entry["member"] for entry in simulated.simulation.journal if entry["event"] == "ban"}
    assert not banned & HONEST
    for member in HONEST:
        ends = [line["at"] for line in simulated.records if line["member"] == member and "outcome" in line]
        ends += [simulated.simulation.timeline.now] * (member not in simulated.results)  # the end came without it
        assert max(late - early for early, late in pairwise(ends)) <= ROUNDS


@pytest.mark.parametrize("method", METHODS)
def test_one_of_four_on_the_virtual_clock(tmp_path: Path, method: str) -> None:
    """In a short run. More of them: `test_five_hundred_seeds`."""
    besieged(tmp_path, method, 1, 5)


@pytest.mark.long(cases=1)
def test_five_hundred_seeds(tmp_path: Path) -> None:
    """A hundred of each world of coordinators, and of each method on the virtual clock. What was said is printed with
    `pytest -s`: each kind a thousand times, and at least half of all words were taken.
    """
    for seed in range(100):
        for siege in SIEGES.values():
            siege(seed)
        for method in METHODS:
            (folder := tmp_path / f"{method}-{seed}").mkdir()
            besieged(folder, method, seed, 12)
    said = Counter({kind.__name__: SAID[kind.__name__, True] + SAID[kind.__name__, False] for kind in MAY_SAY})
    print("\nwords (all, taken):", {kind: (said[kind], SAID[kind, True]) for kind in sorted(said)})
    assert min(said.values()) >= 1000
    assert 2 * sum(SAID[kind, True] for kind in said) >= said.total() == SAID.total()


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("seed", range(20))
def test_one_of_four_processes(tmp_path: Path, seed: int) -> None:
    """Three honest workers, and a process that lies from their third round on, and joins again when it is shut out."""
    method, more = METHODS[[*METHODS][seed % len(METHODS)]]
    settings = [f"replicas.{key}={value}" for key, value in {"method": method, **more}.items()]
    world = NearbyLighthouse(tmp_path, *settings, "world.outer_deadline=10", founders=3, steps=60 * EVERY)
    keeper, taken = world._run.keeper, list[list[int]]()
    collect = keeper._collect
    keeper._collect = lambda members: taken.append(collect(members)) or taken[-1]
    try:
        honest = [world.warm_join(pause=0.2) for _ in range(3)]
        world.until(lambda: all(len(worker.rounds()) > 3 for worker in honest))
        members = {worker.rounds()[0]["member"] for worker in honest}
        corpus = events(world.out, "join")[0]["description"]
        token = Path(world.token[1:]).read_text()
        liar = world._begin(
            [sys.executable, "-m", "tests.training.elastic.lying", world.address, token, corpus, str(seed)]
        )
        world.until(lambda: [worker.poll() for worker in honest] == [0, 0, 0], 400.0)
        liar.kill()
        assert {*taken[-1]} <= members and not members & {entry["member"] for entry in events(world.out, "ban")}
        assert max(gap for worker in honest for gap in worker.gaps()) <= ROUNDS
        said = json.loads((tmp_path / "0.log").read_text().splitlines()[-1])["said"]
        print(seed, method, said)
        assert 2 * sum(times for _, was_taken, times in said if was_taken) >= sum(times for _, _, times in said) > 50
    finally:
        world.end()

"""One hostile member of four, over real sessions: on the virtual clock, and as a process. It shuts out nobody, writes no
model, and stops no round for longer than docs/guarantees.md says.

Runs of swarms and of clusters have no lighthouse on the virtual clock: see tests/membership/test_hostile.py.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from isles.comm.errors import CommError
from isles.network.churn import ChurnEvent, write_trace
from isles.base.tables import changed
from isles.training.elastic.leader import Participant
from isles.training.simulated_churn import SimulatedElasticRun
from tests.membership.hostile import Liar, Speaker
from tests.membership.test_hostile import ROUNDS
from tests.training.elastic.test_simulated import small

HONEST = {0, 1, 2}
METHODS = {"noloco": ("noloco", {}), "diloco": ("diloco", {}), "quorum": ("diloco", {"on_late": "quorum", "quorum": 0.6})}


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
    assert HONEST <= {*simulated._members}
    banned = {entry["member"] for entry in simulated.simulation.journal if entry["event"] == "ban"}
    assert not banned & HONEST
    for member in HONEST:
        ends = [line["at"] for line in simulated.records if line["member"] == member and "outcome" in line]
        assert max(late - early for early, late in pairwise(ends)) <= ROUNDS


@pytest.mark.parametrize("method", METHODS)
def test_one_of_four_on_the_virtual_clock(tmp_path: Path, method: str) -> None:
    besieged(tmp_path, method, 0, 8)

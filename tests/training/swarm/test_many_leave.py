"""A hundred peers that are asked to leave over a lighthouse, as SIGTERM asks them: no sample is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from isles.membership import lighthouse
from isles.training.swarm.trainer import ElasticSwarmTrainer
from tests.training.swarm.members import SwarmRun, elastic_config
from tests.training.swarm.test_members import settings, weights
from tests.training.swarm.test_swarm import config, furthest, train

STEPS, ROUNDS, STAGES = 400, 25, (0, 0, 1, 1)
PACE = 0.1  # seconds a step, so that a fast machine is not done before they have all left


@pytest.mark.long
def test_a_hundred_peers_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time, all who are there, once four others have come: to the weights of a run that nobody leaves."""
    monkeypatch.setattr(lighthouse, "JOINS", 1000)  # of one address, in a minute
    over, step = threading.Event(), ElasticSwarmTrainer.step

    def paced(trainer: ElasticSwarmTrainer) -> None:
        time.sleep(0 if over.is_set() else PACE)
        step(trainer)

    monkeypatch.setattr(ElasticSwarmTrainer, "step", paced)
    words = [*settings("[2,2]", STEPS, "data.batch_size=4", "run.log_every=500"), "pipeline.microbatches=2"]
    run = SwarmRun(elastic_config(*words), tmp_path / "run")
    here = [run.join(stage) for stage in STAGES]
    reached = []
    for _ in range(ROUNDS):
        run.until(lambda: all(run.step(number) > 0 for number in here))  # noqa: B023
        comers = [run.join(stage) for stage in STAGES]
        run.until(lambda: all(run.step(number) > 0 for number in comers))  # noqa: B023
        for number in here:
            run.ask_to_leave(number)
        assert [run.end_reason(number) for number in here] == ["left"] * len(here)
        reached.append(max(run.step(number) for number in here))
        here = comers
    over.set()
    print("left by step", reached)
    summary = run.end(300)
    assert (summary["leaves"], summary["deaths"], summary["begun"]) == (ROUNDS * len(STAGES), 0, 1)
    assert summary["tokens"] == STEPS * 4 * 16
    assert furthest(weights(run), train(config(*words), tmp_path / "virtual")[1]) < 1e-9

"""Runs on the virtual clock in which a quorum is enough for a mean, through churn."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from isles.membership.late_shares import Delivery
from isles.membership.round_commit import RoundDecision
from isles.membership.run_log import RoundRecord
from isles.network.churn import ChurnEvent
from isles.running.run import launch
from isles.training.config.reading import resolve
from isles.training.config.sections import Config
from isles.training.elastic.metrics import recorded
from isles.training.elastic.support import going_on
from isles.training.simulated_churn import SimulatedElasticRun
from tests.training.elastic.test_simulated import EVERYTHING, churned, read_by, small


def late(folder: Path, workers: int, steps: int, *, every: int = 4, **world: Any) -> Config:
    config = small(folder, workers, steps, every=every, **world)
    tables = {"method": "diloco", "sync_every": every, "on_late": "quorum", "quorum": 0.6}
    return replace(config, method="diloco", replicas=resolve({"replicas": tables}).replicas)


def decisions(run: SimulatedElasticRun, outcome: str) -> list[dict[str, Any]]:
    found = [entry["decision"] for entry in run.simulation.journal if entry["event"] == "decision"]
    return [decision for decision in found if decision["outcome"] == outcome]


def outcomes(run: SimulatedElasticRun) -> dict[str, int]:
    return run.summary["outcomes"]


def same_weights(one: SimulatedElasticRun, two: SimulatedElasticRun) -> bool:
    first, second = (load_file(run.out / "model.safetensors") for run in (one, two))
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_all_deliver_in_time_and_land_the_same(tmp_path: Path) -> None:
    run = churned(late(tmp_path, 4, 24), [], tmp_path)
    assert outcomes(run) == {"whole": 24} and run.summary["replica_std"] == 0.0
    assert [decision["members"] for decision in decisions(run, "land")] == [[0, 1, 2, 3]] * 6
    assert [decision["steps"] for decision in decisions(run, "land")] == [[4, 4, 4, 4]] * 6  # each step counts once
    assert run.summary["goodput"] > 0.99


def test_a_slow_worker_delivers_into_the_next_round_and_delays_nobody(tmp_path: Path) -> None:
    """The fourth stands still now and then, for less than a lease: the others take their rounds without it."""
    pauses = [ChurnEvent(at, kind, 3) for at in (12.0, 42.0) for at, kind in ((at, "pause"), (at + 2.8, "resume"))]
    run = churned(late(tmp_path, 4, 80, every=8, virtual={"step_seconds": 1.0}), pauses, tmp_path)
    landed = {decision["round"]: decision for decision in decisions(run, "land")}
    missed = [round for round, decision in landed.items() if 3 not in decision["members"]]
    assert missed and set(landed) == set(range(1, 11))
    assert run.summary["replica_std"] == 0.0 and outcomes(run)["late"] == len(missed)
    assert [landed[round + 1]["steps"][-1] for round in missed] == [8] * len(missed)  # at once
    rounds = [line for line in recorded(run.out)[1] if isinstance(line, RoundRecord) and line.member == 0]
    assert max(after.at - before.at for before, after in pairwise(rounds)) < 1.05 * 8  # as long as their steps
    positions = read_by(run.out, recorded(run.out)[1])
    assert len(positions) == len(set(positions))  # what it skipped is owed, and read by nobody twice


def test_joins_deaths_pauses_leaves_and_outages(tmp_path: Path) -> None:
    config = late(tmp_path, 4, 40, every=2)
    one, two = churned(config, EVERYTHING, tmp_path, "one"), churned(config, EVERYTHING, tmp_path, "two")
    assert one.records == two.records and one.simulation.journal == two.simulation.journal and same_weights(one, two)
    assert set(one.results) == {2, 3, 4, 5, 6} == set(one.simulation.membership.view.members)
    assert one.summary["replica_std"] == 0.0  # all have landed the same
    landed = [decision["round"] for decision in decisions(one, "land")]
    assert landed == sorted(set(landed)) and landed[-1] == 20
    positions = read_by(one.out, recorded(one.out)[1])
    assert len(positions) - len(set(positions)) <= 2 * 3
    assert one.summary["inner_steps_counted"] <= len(set(positions))


def test_shares_count_by_their_inner_steps() -> None:
    delivery = object.__new__(Delivery)
    delivery.steps = 3
    delivery.decision = RoundDecision(1, "retry", 1, (0, 4, 5), 0, (3, 5, 4))
    assert delivery.factor == pytest.approx(3 * 3 / 12)


def test_where_nobody_comes_and_goes_it_is_refused(tmp_path: Path) -> None:
    config = late(tmp_path, 2, 8)
    with pytest.raises(ValueError, match='on_late = "quorum": in a world of fixed size all are waited for'):
        launch(config, tmp_path / "run", lambda line: None, lambda notice: None)
    for bad, named in (({"quorum": 0.0}, "quorum = 0.0"), ({"on_late": "never"}, "on_late")):
        with pytest.raises(ValueError, match=named):
            resolve({"replicas": {"method": "diloco", **bad}})
    lossy = {"method": "diloco", "sync_every": 4, "on_late": "quorum", "codec": "int4", "error_feedback": "local"}
    with pytest.raises(ValueError, match="a codec's state from round to round"):
        churned(going_on(replace(config, replicas=resolve({"replicas": lossy}).replicas)), [], tmp_path)

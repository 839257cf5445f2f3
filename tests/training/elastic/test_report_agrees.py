"""Reports of runs whose workers came and went: metrics, exchanges, journal, summary and page say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isles.network.churn import ChurnEvent
from isles.training.config.reading import tokens_a_step
from tests.training.elastic.agreeing import agree
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import EVERY
from tests.training.elastic.test_runs import small as real
from tests.training.elastic.test_simulated import churned, small
from tests.training.elastic.traces import random_trace

ROUNDS, PAUSE = 200, 0.2  # of a real run; seconds that a worker sleeps in a round
SEEDS = [pytest.param(seed, marks=pytest.mark.long(cases=28) if seed > 1 else ()) for seed in range(1, 31)]


@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_simulated_run(tmp_path: Path, seed: int) -> None:
    """Twelve random events among five founders; pairs, and a mean of all."""
    config = small(tmp_path, 5, 32, method=("noloco", "diloco")[seed % 2])
    trace = random_trace(founders=5, most=8, events=12, spacing=20.0, seed=seed)
    run = churned(config, trace, tmp_path)
    agree(run.out, tokens_a_step=tokens_a_step(config, 1), model={*run._members}, simulated=True)


def test_a_slow_worker_s_postponed_round_is_recorded_as_it_was(tmp_path: Path) -> None:
    """It does one step of two; on unassigned data, while the lighthouse is away, it does both, as everybody."""
    slow = {"step_seconds": 10.0, "step_factors": (1.0, 1.0, 1.5, 1.0)}
    config = small(tmp_path, 3, 20, method="diloco", virtual=slow)
    run = churned(config, [ChurnEvent(45.0, "join", 1), ChurnEvent(165.0, "lighthouse", 30.0)], tmp_path)
    steps = {one["view"]: one["steps"] for one in run.records if one["member"] == 2 and "outcome" in one}
    assert steps == {0: 2, 3: 1, -1: 2}
    agree(run.out, tokens_a_step=tokens_a_step(config, 1), model={*run._members}, simulated=True)


@pytest.mark.long(cases=5)
@pytest.mark.parametrize(
    ("method", "seed"), [("noloco", 0), ("diloco", 0), ("noloco", 1), ("diloco", 1), ("noloco", 2)]
)
def test_of_a_real_run(tmp_path: Path, method: str, seed: int) -> None:
    """Processes: one is killed, one joins, the lighthouse is started again, one joins, one leaves; or only the last of
    these.
    """
    world = Processes(tmp_path, f"replicas.method={method}", "run.log_every=20", founders=3, steps=ROUNDS * EVERY)
    try:
        here = [world.warm_join(pause=PAUSE) for _ in range(3)]

        def furthest() -> int:
            return max((one["round"] for worker in here for one in worker.rounds()[-1:]), default=0)

        for event in ["", *["die", "join", "outage", "join", "leave"][seed:]]:
            if event == "die":
                here.pop(1).kill()
            elif event == "join":
                here.append(world.warm_join(pause=PAUSE))
                world.until(here[-1].rounds)
            elif event == "outage":
                world.put_out()
                world.light = world.start("resume", str(world.out), "--workers", "0")
                log = world.folder / f"{len(world.started) - 1}.log"
                world.until(lambda: "to join" in log.read_text())  # noqa: B023
            elif event == "leave":
                here.pop().terminate()
            reached = furthest() + 10
            world.until(lambda: furthest() >= reached)  # noqa: B023
        world.until((world.out / "summary.json").exists, 200.0)
        said = "".join(path.read_text() for path in tmp_path.glob("[0-9].log"))
        left_out = {int(member) for member in re.findall(r"worker (\d+)'s model is left out", said)}
        ended = [worker.rounds()[-1] for worker in here]
        members = {one["member"] for one in ended if one["round"] == ROUNDS} - left_out
        agree(world.out, tokens_a_step=tokens_a_step(real(tmp_path, EVERY, 3), 1), model=members)
    finally:
        world.end()

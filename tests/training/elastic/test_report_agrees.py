"""Reports of runs whose workers came and went: metrics, exchanges, journal, summary and page say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.network.churn import ChurnEvent
from isles.training.config.reading import tokens_a_step
from tests.training.elastic.agreeing import agree
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import EVERY, leisurely
from tests.training.elastic.test_runs import small as real
from tests.training.elastic.test_simulated import churned, small
from tests.training.elastic.traces import random_trace

__all__ = ["leisurely"]
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
@pytest.mark.usefixtures("leisurely")
@pytest.mark.parametrize(
    ("method", "seed"), [("noloco", 0), ("diloco", 0), ("noloco", 1), ("diloco", 1), ("noloco", 2)]
)
def test_of_a_real_run(tmp_path: Path, method: str, seed: int) -> None:
    """One dies, one joins, the lighthouse is started again, one joins, one leaves; or only the last of these."""
    config = real(tmp_path, 120 * EVERY, 3, f"replicas.method={method}", "run.log_every=20")
    world = Run(config, tmp_path / "run")
    here = [world.join() for _ in range(3)]

    def until(round: int) -> None:
        world.until(lambda: max(map(world.step, here)) >= round * EVERY)

    until(10)
    for number, event in enumerate(["die", "join", "outage", "join", "leave"][seed:]):
        if event == "die":
            world.vanish(here.pop(1))
        elif event == "join":
            here.append(world.join())
            world.until(lambda: world.step(here[-1]) > 0)
        elif event == "outage":
            world.stop()
            world.keep()
        else:
            world.workers[here.pop()].leaving.set()
        until(20 + 15 * number)
    world.end()
    members = {world.workers[number].client.member for number in here}
    agree(world.out, tokens_a_step=tokens_a_step(config, 1), model=members)

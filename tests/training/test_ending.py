"""Runs that end by tokens: fixed worlds, resumed ones, and those whose workers come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from isles.membership.data_ledger import fresh_before, last_round
from isles.membership.messages import SampleRange, View
from isles.network.churn import ChurnEvent
from isles.running.run import launch
from isles.training.config.reading import ending_after, read_config, resolve, tokens_a_step
from isles.training.elastic.support import elastic
from tests.training.elastic.test_simulated import churned, small

A_STEP = 2 * 16  # tokens of one worker: 2 sequences of 16


def by_tokens(folder: Path, workers: int, tokens: int, every: int = 2):
    config = small(folder, workers, 4, every=every)
    return replace(config, run=replace(config.run, tokens=tokens))


def test_a_fixed_world_ends_with_the_step_that_reaches_them(tmp_path: Path) -> None:
    config = read_config(None, {"world.workers": 3}, ["run.tokens=100_001"])
    step = tokens_a_step(config, 3)
    assert config.run.steps == -(-100_001 // step)
    tables = {"replicas": {"method": "none"}, "world": {"backend": "virtual", "workers": 2}}
    text = tmp_path / "text.txt"
    text.write_text("Nobody knows when it ends. " * 500)
    tables |= {"data": {"path": str(text), "batch_size": 2}, "run": {"tokens": 7 * 2 * A_STEP - 5}}
    tables |= {"model": {"layers": 1, "d_model": 16, "heads": 2, "context": 16}}
    summary = launch(resolve(tables), tmp_path / "run", lambda line: None, lambda notice: None)
    assert (summary["steps"], summary["tokens"]) == (7, 7 * 2 * A_STEP)


def test_other_workers_go_on_for_the_tokens_that_are_left(tmp_path: Path) -> None:
    config = by_tokens(tmp_path, 2, 100 * A_STEP)
    assert ending_after(config, 4, 10).run.steps == 10 + 60 // 2
    assert ending_after(config, 4, 10).run.tokens == 0
    assert ending_after(replace(config, run=replace(config.run, tokens=0)), 4, 10).run.steps == 4


def test_two_ends_are_refused() -> None:
    with pytest.raises(ValueError, match=r"run.tokens = 500 and run.steps both say when the run ends"):
        read_config(None, {"run.steps": 5}, ["run.tokens=500"])
    with pytest.raises(ValueError, match=r"remove one of them"):
        read_config(None, {}, ["run.steps = 5", "run.tokens = 500"])
    with pytest.raises(ValueError, match=r"tokens = -1: choose 0 or more"):
        read_config(None, {}, ["run.tokens=-1"])


def test_rounds_are_whole_where_workers_come_and_go() -> None:
    made = elastic({"replicas": {"method": "noloco", "sync_every": 50}, "run": {"tokens": 1_000_000}})
    assert made.run.steps % 50 == 0


@pytest.mark.parametrize("backlog", [(), (SampleRange(0, 0, 0, 7),)])
def test_the_last_round_is_the_one_that_reaches_them(backlog: tuple[SampleRange, ...]) -> None:
    view = View(3, 10, (1, 4, 5), steps=(2, 2, 1), start=100, backlog=backlog)
    for batches in range(101, 140):
        last = last_round(view, batches)
        assert view.start + fresh_before(view, last + 1) >= batches > view.start + fresh_before(view, last)
    assert last_round(view, 100) == last_round(view, 50) == 9


def test_a_churned_run_ends_with_its_tokens(tmp_path: Path) -> None:
    """Two of four workers go: the run takes more rounds, and reads as much."""
    config = by_tokens(tmp_path, 4, 4 * 40 * A_STEP, every=2)
    trace = [ChurnEvent(100.0, "leave", 0), ChurnEvent(130.0, "kill", 1), ChurnEvent(300.0, "join", 1)]
    run = churned(config, trace, tmp_path)
    membership = run.simulation.membership
    assert membership is not None and membership.last is not None and membership.last > 20
    counted = run.summary["inner_steps_counted"]
    assert 160 <= counted + 2 < 160 + 3 * 2 + 2  # a round of the three, and what the dead one had read is owed
    assert set(run.results) == {2, 3, 4}
    assert all(step % 2 == 0 for step in [worker["tokens"] // A_STEP for worker in run.results.values()])

"""Dry runs by a plan of paths, against the runs themselves: bytes, forwards kept, seconds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.network.links import read_links
from isles.network.routing.plan import as_json, fingerprint
from isles.network.routing.problem import RoutingCosts, RoutingProblem, replay_paths
from isles.network.routing.search import blind
from isles.plan.record import RunPlan
from isles.plan.run_plan import plan_run
from isles.plan.sketch import clips_model
from isles.running.run import launch
from isles.training.config.sections import Config
from tests.network.routing.instances import drawn, held_by
from tests.training.runs import counted, metrics, tiny, write_text
from tests.training.test_partial import words, write_plan

RESTS = RoutingCosts(rest=0.05, rest_at_origin=0.02)
QUIET = ["data.validation_fraction=0", "run.log_every=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return tmp_path


def of(
    folder: Path, problem: RoutingProblem, seed: int, *more: str, steps: int = 3, **given: Any
) -> tuple[Config, float]:
    """A run by a plan of drawn legal paths, and the seconds that the plan says."""
    made = write_plan(folder, problem, blind(problem, seed))
    asked: dict[str, Any] = {"method": "ddp", "workers": problem.nodes, **given}
    config = tiny(folder / "text.txt", *words(folder, made), *QUIET, *more, steps=steps, **asked)
    return config, made.step_seconds


def check(config: Config, within: float) -> RunPlan:
    """Bytes of every worker, forwards kept, and the mean seconds of a step, exchanges included (relative)."""
    planned, results = plan_run(config), counted(config)
    assert planned.bytes_sent == tuple(result["bytes_sent"] for result in results)
    took = sum(result["compute_seconds"] + result["blocked_seconds"] for result in results)
    waits = [result["channels"].get("pipeline") for result in results]
    waited = sum(channel["blocked_seconds"] for channel in waits if channel is not None)
    found = planned.time
    assert found is not None and found.bubble is not None
    assert found.step == pytest.approx(took / config.run.steps / len(results), rel=within)
    norms = sum(result["channels"]["inner"]["blocked_seconds"] for result in results) if clips_model(config) else 0.0
    assert waited / took - within <= found.bubble <= (waited + norms) / took + within
    return planned


@pytest.mark.parametrize(
    ("seed", "sizes", "method", "more", "within"),
    [
        (
            5,
            (2, 3, 2),
            "localsgd",
            ["replicas.sync_every=2", "pipeline.boundary.kind=dct:0.75", "pipeline.boundary.codec=int8"],
            1e-9,
        ),
        (6, (2, 1, 2), "noloco", ["replicas.sync_every=2"], 1e-9),
        pytest.param(4, (2, 1, 2), "ddp", [], 1e-9, marks=pytest.mark.long),
        (3, (2, 3, 2), "ddp", ["pipeline.clip=stage"], 1e-9),
        pytest.param(4, (2, 3, 2), "ddp", [], 1e-9, marks=pytest.mark.long),
        pytest.param(7, (3, 2, 1), "none", ["pipeline.clip=stage"], 1e-9, marks=pytest.mark.long),
        pytest.param(8, (1, 4), "diloco", ["replicas.sync_every=2"], 1e-9, marks=pytest.mark.long),
    ],
)
def test_it_is_what_the_virtual_clock_shows(
    folder: Path, seed: int, sizes: tuple[int, ...], method: str, more: list[str], within: float
) -> None:
    problem = drawn(seed, sizes, costs=RESTS if seed % 2 else None, waves=1 + seed % 2, path_length=2)
    config, said = of(folder, problem, seed, *more, method=method)
    planned = check(config, within)
    assert planned.step_seconds == pytest.approx(said, abs=1e-9)


@pytest.mark.parametrize("order", ["plan", "arrival"])
def test_a_step_takes_its_replays_seconds_and_sends_its_bytes(folder: Path, order: str) -> None:
    """Between rounds a step of the clock is the plan's; lines of few bits and slow nodes count as they do there."""
    problem = drawn(3, (2, 2, 2), path_length=3, memory=1)
    more = ["pipeline.clip=stage", "inner.max_norm=0.0", "replicas.sync_every=4", f"pipeline.order={order}"]
    config, said = of(folder, problem, 1, *more, method="localsgd", steps=4)
    launch(config, folder / "run", lambda line: None, lambda notice: None)
    lines = [line for line in metrics(folder / "run") if "worker" in line]
    ends = [max(line["clock_seconds"] for line in lines if line["step"] == step) for step in (2, 3)]
    planned = plan_run(config)
    assert planned.step_seconds == pytest.approx(ends[1] - ends[0], abs=1e-9)
    assert planned.step_seconds == pytest.approx(said, abs=1e-9)
    sent = {line["worker"]: line["bytes_sent"] for line in lines if line["step"] == 3}
    before = {line["worker"]: line["bytes_sent"] for line in lines if line["step"] == 2}
    assert [node.step_bytes for node in planned.workers] == [sent[rank] - before[rank] for rank in range(problem.nodes)]


def test_narrow_lines_and_slow_nodes_are_those_of_the_run(folder: Path) -> None:
    """Where messages share lines the clock is not the plan's: the dry run says the clock's, and that they differ."""
    problem = drawn(3, (2, 2, 2), path_length=3, memory=1)
    lines = folder / "links.toml"
    made = write_plan(folder, problem, blind(problem, 1))
    lines.write_text('bandwidth = "40kbit/s"\nlatency = "25ms"\n')
    made = replace(made, links=fingerprint(read_links(str(lines)), problem.nodes))
    (folder / "plan.json").write_text(as_json(made))
    more = ["inner.max_norm=0.0", "replicas.sync_every=4", "world.virtual.step_factors=[1.0, 3.0]"]
    asked: dict[str, Any] = {"method": "localsgd", "workers": problem.nodes}
    config = tiny(folder / "text.txt", *words(folder, made), *QUIET, *more, steps=4, **asked)
    planned = check(config, 1e-6)
    assert planned.step_seconds is not None and abs(planned.step_seconds - made.step_seconds) > 0.1
    assert any("its plan says" in notice for notice in planned.notices)


def test_nodes_hold_what_the_plan_lets_them(folder: Path) -> None:
    """Forwards as in the replay, weights of the node's stage; words and JSON name every node."""
    problem = drawn(3, (2, 1, 2), path_length=2, memory=2)
    config, _ = of(folder, problem, 3)
    planned = plan_run(config)
    paths = blind(problem, 3)
    held = held_by(replay_paths(problem, paths))
    assert [node.forwards for node in planned.workers] == [held.get(node, 0) for node in range(problem.nodes)]
    assert [node.stage for node in planned.workers] == list(problem.stage_of)
    peaks = {(node.stage, node.memory.peak) for node in planned.workers}
    assert len(peaks) == len(problem.stages)
    visits = Counter(node for path in paths.values() for node in path)
    assert [node.microbatches for node in planned.workers] == [problem.waves * visits[n] for n in range(problem.nodes)]
    assert planned.tokens_per_step == 2 * config.data.batch_size * 16


def test_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isles.cli.plan_printer import show

    config, _ = of(folder, drawn(3, (2, 1, 2), path_length=2), 3)
    show(config, probe=False, as_json=False)
    words = capsys.readouterr().out
    for said in (
        "= stages of 2, 1, 2 by a plan",
        "rank  stage  blocks  parameters  microbatches",
        "from its first task to its last",
    ):
        assert said in words, words
    show(config, probe=False, as_json=True)
    assert len(json.loads(capsys.readouterr().out)["workers"]) == 5

"""Asynchronous stages against the delayed recursion in one process: losses and weights to the bit."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import isles
from isles.pipeline.compute import StageShares
from isles.pipeline.ravnest.stage import most_versions
from tests.gloo import run_gloo
from tests.pipeline.ravnest import nodes
from tests.pipeline.ravnest.nodes import Row

LONG = pytest.mark.long
ROWS = [
    Row(2),
    Row(4),
    Row(4, "adamw"),
    Row(4, "adamw", every=2, microbatches=(8, 6)),
    Row(4, "adamw", recompute=False),
    *(
        pytest.param(row, marks=LONG)
        for row in (Row(1), Row(2, "adamw"), Row(4, limit=2), Row(3, limit=5), Row(4, limit=1), Row(2, recompute=False))
    ),
]


@cache
def virtual(row: Row) -> list[dict[str, Any]]:
    links = isles.Links(bandwidth=1e7, latency=0.02, jitter=0.8)
    done = isles.run_virtual(nodes.train, row.stages, links=links, args=([row],), step_seconds=0.0)
    return [results[0] for results in done]


def check(row: Row, done: list[dict[str, Any]], used: list[list[int]] | None = None) -> None:
    losses, weights = nodes.recursion(row, used)
    for node in done:
        assert all(torch.equal(own, other) for own, other in zip(node["losses"], losses, strict=True))
        assert all(torch.equal(own, weights[name]) for name, own in node["weights"].items())
    assert {name for node in done for name in node["weights"]} == weights.keys()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_and_weights_are_those_of_the_delayed_recursion(row: Row) -> None:
    check(row, virtual(row))
    for stage, node in enumerate(virtual(row)):
        assert node["passed"] == list(nodes.schedule(row, stage))


def test_an_update_is_as_stale_as_its_oldest_gradient() -> None:
    """Of two microbatches an update, four stages: the third update of stage 0 has gradients of ages 2 and 1. Of the 3,
    2 and 1 others that are under way two at a time make a version of weights.
    """
    row = Row(4, "adamw", every=2, microbatches=(8, 6))
    for stage, node in enumerate(virtual(row)):
        ages = [applied - used for used, applied in nodes.schedule(row, stage)]
        assert node["stales"] == [max(pair) for pair in zip(ages[::2], ages[1::2], strict=True)]
    assert virtual(row)[0]["stales"][:4] == [0, 1, 2, 2]
    most = [most_versions(nodes.options(row), stage, 4) for stage in range(4)]
    assert most == [3, 2, 2, 1] == [node["versions"] for node in virtual(row)]


@pytest.mark.parametrize("stages", [2, 4])
def test_staleness_is_exactly_what_lies_ahead(stages: int) -> None:
    """S - 1 - stage with S microbatches in flight, once it has warmed up; memory of versions and inputs as it says."""
    for stage, node in enumerate(virtual(Row(stages))):
        ages = [applied - used for used, applied in node["passed"]][: Row(stages).microbatches[0]]
        assert ages == [min(u, stages - 1 - stage) for u in range(len(ages))]
        assert node["versions"] == stages - stage
        assert node["held"] == (stages - stage if stage < stages - 1 else 0)


@pytest.mark.parametrize(
    "row", [Row(4, limit=1, dropout=0.0), Row(2, "adamw", limit=1, dropout=0.0), Row(1, dropout=0.0)]
)
def test_one_in_flight_is_plain_training(row: Row) -> None:
    losses, weights = nodes.plain(row)
    for node in virtual(row):
        assert all(torch.equal(own, other) for own, other in zip(node["losses"], losses, strict=True))
        assert all(torch.equal(own, weights[name]) for name, own in node["weights"].items())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_pass_run_again_has_the_gradients_of_the_first(optimizer: str) -> None:
    """Dropout on, other weights in between: what comes of them is the same to the bit, random states too."""
    again, retained = (virtual(Row(4, optimizer, recompute=recompute)) for recompute in (True, False))
    for one, other in zip(again, retained, strict=True):
        assert all(torch.equal(own, other["weights"][name]) for name, own in one["weights"].items())
        assert one["passed"] == other["passed"] and one["versions"] == other["versions"]


def test_gloo_computes_the_same_bits() -> None:
    rows = [Row(2), Row(4, "adamw"), Row(4, "adamw", recompute=False, order="arrival")]
    real = run_gloo(nodes.train, 4, args=(rows,))
    for number, row in enumerate(rows):
        done = [results[number] for results in real if results[number] is not None]
        used = None if row.order == "plan" else [[one for one, _ in node["passed"]] for node in done]
        check(row, done, used)
        if row.order == "arrival":
            assert all(0 <= applied - old < row.in_flight for node in done for old, applied in node["passed"])


@pytest.mark.parametrize(
    ("order", "limit"),
    [("arrival", 4), *(pytest.param(order, limit, marks=LONG) for order in ("plan", "arrival") for limit in (2, 6))],
)
def test_delays_of_a_second_never_deadlock(order: str, limit: int) -> None:
    """Every message as late as it likes: it ends, by the recursion of what was used, and queues are bounded."""
    row = Row(4, limit=limit, order=order, microbatches=(12, 7), shares=StageShares(0.1, 0.3, 0.3))  # type: ignore[arg-type]
    links = isles.Links(bandwidth=1e6, latency=0.3, jitter=1.0)
    done = [one[0] for one in isles.run_virtual(nodes.train, 4, links=links, args=([row],), step_seconds=1.0)]
    check(row, done, [[used for used, _ in node["passed"]] for node in done])
    assert all(node["held"] <= limit and node["versions"] <= limit + 1 for node in done)
    for one, other in itertools.pairwise(done):
        assert 1 <= queued(one, other, "F") <= limit and (1 <= queued(other, one, "B") <= limit or other is done[-1])


def queued(sender: dict[str, Any], taker: dict[str, Any], kind: str) -> int:
    """Messages at most that were made and not yet taken, at any moment."""
    moments = [(end, 1) for own, _, _, end in sender["played"] if own == kind]
    moments += [(start, -1) for own, _, start, _ in taker["played"] if own == kind]
    return max(itertools.accumulate(change for _, change in sorted(moments)))


def test_a_steady_cluster_is_as_fast_as_its_stages() -> None:
    """No bubbles: three units a microbatch and stage, and what filling and draining take."""
    row = Row(4, microbatches=(24,), shares=StageShares(1.0, 3.0, 3.0))
    links = isles.Links(bandwidth=float("inf"))
    done = [one[0] for one in isles.run_virtual(nodes.train, 4, links=links, args=([row],), step_seconds=1.0)]
    floor = 24 * 4.0
    assert floor <= max(node["seconds"] for node in done) <= floor + 3 * 4.0

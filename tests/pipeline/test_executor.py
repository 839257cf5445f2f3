"""A pipelined step against the whole model in one process: losses and gradients to the bit, bytes by formula."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import isles
from isles.network.routing.events import in_flight
from isles.network.routing.replay import TaskSeconds
from tests.gloo import run_gloo
from tests.pipeline import workers
from tests.pipeline.workers import SEQUENCES, SHAPE, Cell

GRID = [
    Cell(stages, replicas, microbatches, routing, home)
    for stages, replicas, microbatches, routing, home in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4), range(1, 9), ("fixed", "random"), (False, True)
    )
]
CHOSEN = [
    Cell(1, 1, 3),
    Cell(4, 2, 3, "random", home=True),
    Cell(3, 2, 4, limit="1f1b"),
    Cell(2, 2, 3, "random", limit=1),
    Cell(3, 2, 4, "random", recompute=True),
    Cell(3, 1, 2, dtype=torch.float64),
    Cell(2, 2, 4, dtype=torch.bfloat16),
    Cell(3, 2, 4, "random", home=True, order="arrival", dtype=torch.float64),
    *(
        pytest.param(cell, marks=pytest.mark.long(cases=3))
        for cell in (
            Cell(2, 3, 2),
            Cell(3, 2, 4, "random", limit="all"),
            Cell(4, 1, 6, home=True, recompute=True),
        )
    ),
]


@cache
def virtual(cell: Cell) -> list[list[dict[str, Any]]]:
    links = isles.Links(bandwidth=1e7, latency=0.02, jitter=0.8)
    done = isles.run_virtual(workers.train, cell.replicas * cell.stages, links=links, args=([cell],), step_seconds=0.0)
    return [results[0] for results in done]


def check_against_one_process(cell: Cell) -> None:
    for position, steps in enumerate(virtual(cell)):
        for number, step in enumerate(steps, 1):
            losses, gradients = workers.whole(cell, position, number)
            assert step["losses"].keys() == losses.keys()
            for name, gradient in step["gradients"].items():
                if cell.order == "plan":
                    assert torch.equal(gradient, gradients[name]), name
                else:
                    assert torch.allclose(gradient, gradients[name], rtol=0, atol=1e-12), name
            # With a loss in bfloat16 logits the loss itself is float32, which is how it travels.
            assert all(torch.equal(step["losses"][m], losses[m]) for m in losses)


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_losses_and_gradients_are_those_of_one_process(cell: Cell) -> None:
    check_against_one_process(cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", GRID, ids=str)
def test_the_whole_grid_is_that_of_one_process(cell: Cell) -> None:
    check_against_one_process(cell)


ON_GLOO = [Cell(2, 2, 3, "random"), Cell(3, 2, 4, "random", home=True), Cell(3, 1, 5, recompute=True)]


def test_gloo_computes_the_same_bits_and_sends_the_same_bytes() -> None:
    real = run_gloo(workers.train, 6, args=(ON_GLOO,))
    for number, cell in enumerate(ON_GLOO):
        for position, steps in enumerate(virtual(cell)):
            for ours, theirs in zip(real[position][number], steps, strict=True):
                assert ours["sent"] == theirs["sent"]
                assert ours["losses"] == theirs["losses"]
                gradients = ours["gradients"]
                assert all(torch.equal(gradients[name], other) for name, other in theirs["gradients"].items())


@pytest.mark.parametrize("cell", [Cell(3, 2, 4, "random"), Cell(4, 2, 3, home=True), Cell(1, 3, 2)], ids=str)
def test_bytes_are_those_of_the_formula(cell: Cell) -> None:
    stream = SEQUENCES * SHAPE.context * SHAPE.d_model * 4
    ids = SEQUENCES * (SHAPE.context + 1)
    hops = cell.stages - 1
    forward, backward = hops * (stream + ids), hops * (stream + 4)
    home = (2 * stream + 4) if cell.home and hops else 0  # the stream home, its gradient and the loss back
    total = cell.replicas * cell.microbatches * (forward + backward + home)
    assert sum(steps[0]["sent"] for steps in virtual(cell)) == total


@pytest.mark.parametrize("limit", ["1f1b", "auto", "all", 2])
def test_no_more_forwards_are_held_than_allowed(limit: int | str) -> None:
    cell = Cell(4, 2, 5, "random", limit=limit)
    room = in_flight(limit, cell.replicas, cell.stages)
    held = [steps[-1]["held"] for steps in virtual(cell)]
    assert all(held[position] <= room.get(position, cell.microbatches) for position in range(8))
    if limit == "1f1b":
        assert held[::4] == [4, 4]


@pytest.mark.parametrize("cell", [Cell(1, 1, 5), Cell(2, 1, 4), Cell(4, 1, 8), Cell(4, 2, 3), Cell(3, 1, 1)], ids=str)
def test_a_step_without_latency_takes_what_the_closed_form_says(cell: Cell) -> None:
    """(M + S - 1) (F + B) with equal stages and B = 2 F."""
    forward, backward = 1.0, 2.0

    def clock(world: Any) -> float:
        torch.set_num_threads(1)
        size = cell.replicas * cell.stages
        shares = TaskSeconds(forward=[forward] * size, loss=[0.0] * size, backward=[backward] * size)
        run = workers.executor(world, cell, shares)
        run.step(1, workers.own_text(cell, world.rank, 1))
        return world.transport.now()

    free = isles.Links(bandwidth=float("inf"))
    ends = isles.run_virtual(clock, cell.replicas * cell.stages, links=free, step_seconds=1.0)
    expected = (cell.microbatches + cell.stages - 1) * (forward + backward)
    assert max(ends) == pytest.approx(expected, abs=1e-9)

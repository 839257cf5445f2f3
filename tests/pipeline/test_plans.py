"""Steps of plans: the model run in each route's order to the bit, the plan's clock, columns of unequal length."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import isles
from benchmarks._reference import paths_of
from isles.comm.layout import Layout
from isles.network.routing.events import visited
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import RoutingCosts, RoutingProblem
from isles.pipeline.partial import gains_of
from tests.network.routing.instances import drawn, reference
from tests.pipeline import planned
from tests.pipeline.planned import SHAPE, any_paths, on_virtual, one_process, sum_of_all, summed_at, whole_model

RESTS = RoutingCosts(rest=0.05, rest_at_origin=0.02)


def instance(seed: int) -> PipelinePlan:
    """3 stages of 2 nodes, memory 2, two waves; some rest, some have speeds of their own."""
    problem = drawn(seed, slowest=2.0 if seed % 2 else 0.2001, costs=RESTS if seed % 3 == 0 else None)
    return PipelinePlan(problem=problem, paths=any_paths(problem, seed), links="")


@cache
def done(seed: int) -> tuple[PipelinePlan, list[dict[str, Any]]]:
    plan = instance(seed)
    return plan, on_virtual(plan, torch.float64 if seed % 2 else torch.float32)


SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_takes_what_the_plan_says(seed: int) -> None:
    plan, results = done(seed)
    assert max(result["seconds"] for result in results) - plan.problem.costs.rest == pytest.approx(
        plan.step_seconds, abs=1e-9
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_every_route_is_the_model_run_in_its_order_to_the_bit(seed: int) -> None:
    plan, results = done(seed)
    losses, each = one_process(plan, torch.float64 if seed % 2 else torch.float32)
    for rank, result in enumerate(results):
        assert all(torch.equal(result["losses"][m], losses[m]) for m in result["losses"])
        expected = summed_at(plan, rank, each)
        for name, gradient in result["gradients"].items():
            sums = expected.get(name, torch.zeros_like(gradient))
            assert torch.equal(gradient, 2 * sums), (rank, name)  # of two nodes in every stage


def test_arrival_computes_the_same_sums_in_another_order() -> None:
    plan = instance(1)
    ordered, arrived = on_virtual(plan, torch.float64), on_virtual(plan, torch.float64, order="arrival")
    for one, other in zip(ordered, arrived, strict=True):
        assert one["losses"] == other["losses"]
        for name, gradient in one["gradients"].items():
            assert torch.allclose(gradient, other["gradients"][name], rtol=0, atol=1e-15)
    taken = max(result["seconds"] for result in arrived)
    assert taken == pytest.approx(plan.step_seconds, abs=1e-9)  # first come, first served, as the replay


def test_visits_are_the_global_gradient_over_the_visiting_fraction() -> None:
    plan = instance(5)
    count, visits = plan.problem.microbatches, visited(plan.routes)
    by_stage = [sum(visits[node] for node in nodes) for nodes in plan.problem.stages]
    assert by_stage[0] == count > min(by_stage) > 0
    both = [gains_of(plan.problem.stages, plan.routes, way) for way in ("global", "visits")]
    for came_by, whole, shared in zip(by_stage, *both, strict=True):
        assert shared * (came_by / count) == pytest.approx(whole, rel=1e-15)
    whole, shared = on_virtual(plan, torch.float64), on_virtual(plan, torch.float64, gradients="visits")
    for rank, (one, other) in enumerate(zip(whole, shared, strict=True)):
        fraction = by_stage[plan.problem.stage_of[rank]] / count
        for name, gradient in one["gradients"].items():
            assert torch.allclose(gradient, fraction * other["gradients"][name], rtol=1e-12, atol=0)


def test_a_stage_that_nobody_visits_steps_with_zeros() -> None:
    problem = drawn(4)
    plan = PipelinePlan(problem=problem, paths={slot: (slot[0], 2) for slot in problem.slots}, links="")
    results = on_virtual(plan, gradients="visits")
    for rank in (3, 4, 5):  # one node of stage 1, all of stage 2
        assert results[rank]["losses"] == {}
        assert all(torch.equal(own, torch.zeros_like(own)) for own in results[rank]["gradients"].values())
    assert all(float(own.abs().max()) > 0 for own in results[2]["gradients"].values())


def averaged_step(world: Any, plan: PipelinePlan) -> tuple[dict[str, torch.Tensor], float]:
    """The change of this worker's weights in a step of SGD with rate 1, and the norm of the whole gradient."""
    from isles.replicas.replica import StageCopy

    run = planned.pipeline_of(world, plan, torch.float64)
    before = {name: own.detach().clone() for name, own in run.stage.named_parameters()}
    holders = run.world.outer
    sgd = torch.optim.SGD(run.stage.parameters(), lr=1.0)
    inner = StageCopy(run.stage, sgd, run.world.world, holders.size)
    optimizer = isles.DDP(run.stage, inner, holders, max_norm=1e6)
    run.executor.quiet = optimizer.no_sync
    run.step(planned.own_batch(plan, world.rank))
    optimizer.step()
    assert optimizer.gradient_norm is not None
    change = {name: before[name] - own.detach() for name, own in run.stage.named_parameters()}
    return change, float(optimizer.gradient_norm)


@pytest.mark.parametrize("sizes", [(5, 3), (2, 3, 1)])
def test_unequal_columns_step_as_one_process(sizes: tuple[int, ...]) -> None:
    problem = drawn(9, sizes, path_length=len(sizes), waves=1)
    plan = PipelinePlan(problem=problem, paths=any_paths(problem, 2), links="")
    results = isles.run_virtual(
        averaged_step, problem.nodes, links=planned.wire(problem), args=(plan,), step_seconds=1.0
    )
    expected = sum_of_all(one_process(plan, torch.float64)[1])
    norm = float(torch.stack([own.square().sum() for own in expected.values()]).sum().sqrt())
    for change, told in results:
        assert told == pytest.approx(norm, rel=1e-12)
        for name, own in change.items():
            assert torch.allclose(own, expected.get(name, torch.zeros_like(own)), rtol=0, atol=1e-12), name
    for nodes in problem.stages:
        first = results[nodes[0]][0]
        assert all(torch.equal(first[name], results[node][0][name]) for node in nodes for name in first)


def test_a_skipped_block_is_one_whose_branches_are_zero() -> None:
    tokens = planned.window(0)[:, :-1]
    model, silenced = whole_model(torch.float32), whole_model(torch.float32)
    planned.silent(silenced.blocks[1])
    assert torch.equal(model.logits(tokens, order=[0, 2, 3]), silenced.logits(tokens))
    assert not torch.equal(model.logits(tokens, order=[0, 2, 3]), model.logits(tokens))
    assert not torch.equal(model.logits(tokens, order=[0, 2, 1, 3]), model.logits(tokens))
    assert torch.equal(model.logits(tokens, order=range(4)), model.logits(tokens))
    for order in ([0, 4], [0, 0], [-1]):
        with pytest.raises(ValueError, match="order"):
            model.logits(tokens, order=order)


def test_columns_of_unequal_length_have_their_places() -> None:
    layout = Layout.columns(((0, 3, 4), (1, 2), (5,)))
    assert [tuple(place) for place in layout.coordinates] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (1, 0, 0),
        (2, 0, 0),
        (0, 2, 0),
    ]
    assert [layout.reader(rank) for rank in (0, 3, 4)] == [(0, 3), (1, 3), (2, 3)]
    assert Layout.columns(((0,), (1, 2))).reader(2) == (0, 1)
    with pytest.raises(ValueError, match=r"\.\.\. once"):
        Layout.columns(((0, 1), (1, 2)))


def test_a_slow_node_keeps_to_its_clock() -> None:
    """A node four times slower than its equals: the clock is the plan's, as with equal ones."""
    problem = drawn(6, slowest=0.2001)
    slow: RoutingProblem = replace(
        problem, forward=(*problem.forward[:3], 4 * problem.forward[3], *problem.forward[4:])
    )
    plan = PipelinePlan(problem=slow, paths=any_paths(slow, 6), links="")
    results = on_virtual(plan)
    assert max(result["seconds"] for result in results) == pytest.approx(plan.step_seconds, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("table", ["paths_ca_one_per_origin", "paths_nonca_key_origin_index_times_3_plus_slot"])
def test_the_shipped_instance_runs_as_it_is_replayed(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, shipped = reference("instance_shipped")
    monkeypatch.setattr(planned, "SHAPE", replace(SHAPE, layers=6))
    monkeypatch.setattr(planned, "CUT", (1, 2, 3, 4, 5))
    plan = PipelinePlan(problem=problem, paths=paths_of(problem, shipped[table]), links="")
    results = on_virtual(plan, torch.float64)
    seconds = max(result["seconds"] for result in results) - problem.costs.rest
    assert seconds == pytest.approx(plan.step_seconds, abs=1e-9)
    losses, each = one_process(plan, torch.float64)
    for rank, result in enumerate(results):
        assert all(torch.equal(result["losses"][m], losses[m]) for m in result["losses"])
        copies = len(problem.stages[problem.stage_of[rank]])
        expected = summed_at(plan, rank, each)
        for name, gradient in result["gradients"].items():
            sums = expected.get(name, torch.zeros_like(gradient))
            assert torch.allclose(gradient, copies * sums, rtol=0, atol=1e-12), name

"""What `isles plan methods --churn` adds to its sheet: workers come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from isles.network.churn import Poisson
from isles.network.planner.churned import ChurnCosts, churn_costs
from isles.report.sheet import Sheet
from isles.report.units import format_bytes, format_percent
from isles.training.plan.method_plans import MethodPlan
from isles.training.plan.question import PlanQuestion


def with_churn(sheet: Sheet, job: PlanQuestion, plans: Sequence[MethodPlan], churn: Poisson) -> Sheet:
    """`sheet`, made of `plans`, with what `churn` costs those that go on without lost workers."""
    found = {id(one): _costs(job, one, churn) for one in plans if one.grows}
    named: dict[str, ChurnCosts] = {}
    for one in plans:
        if id(one) in found:
            named.setdefault(
                f"{one.candidate.method}, {one.candidate.settings or 'as it is'}, H = {one.every}", found[id(one)]
            )
    rows = sheet.data["rows"]
    assert isinstance(rows, list)
    told = [
        {**row, "churn": asdict(found[id(one)])} if id(one) in found else row
        for row, one in zip(rows, plans, strict=True)
    ]
    share = format_percent(churn.per_second * 3600)
    head = f"Workers come and go, {share} of them an hour (of methods that go on without the lost ones):"
    return replace(
        sheet,
        data={**sheet.data, "rows": told},
        notes=[head, *(f"{name}: {_words(costs)}" for name, costs in named.items()), *sheet.notes],
    )


def _costs(job: PlanQuestion, one: MethodPlan, churn: Poisson) -> ChurnCosts:
    return churn_costs(
        churn,
        workers=job.workers,
        parameters=job.parameters,
        computing=one.every * job.step_seconds,
        waits=one.waits,
        bytes_a_round=one.bytes_a_step * one.every,
        pairs=one.pairs,
        rounds=None if job.steps is None else max(job.steps // one.every, 1),
    )


def _words(costs: ChurnCosts) -> str:
    return (
        f"{format_percent(costs.alone)} of the rounds alone, {format_percent(costs.lost)} of the work lost, "
        f"joiners wait {format_percent(costs.waiting)} of the workers' time, Goodput {format_percent(costs.goodput)}; "
        f"{format_bytes(costs.gifts)} of states an hour to joiners; where the lighthouse relays, "
        f"{costs.relayed / 1e6:.3g} Mbit/s through it"
    )

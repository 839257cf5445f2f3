"""A plan changes where bytes are and when they move, and not one bit of what is trained."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from isles.memory.costs import ACTIVATIONS, TIERS, Placement, least_peak
from isles.memory.engines.base import Inline, ThreadEngine
from isles.memory.lanes import LaneRun
from isles.memory.plan import table
from isles.network.machines import MACHINES
from tests.memory.loops import DECODER, UNITS, Left, plan_of, profiled, train
from tests.memory.models import TASKS

STEPS = 4
LEAST = 0.9  # of the planned peak
PURE = [(Placement(tier, one),) * UNITS for tier in TIERS[:3] for one in ACTIVATIONS]
PLANS = 60
FIRST = (1, 3, 5, 7, 9)  # every place and every choice alone, and a mixed plan; the rest is long
RATE = 1e30  # bytes a second of lanes that are as quick as `Inline`'s


@dataclass(frozen=True)
class Case:
    """A plan, and what it is tried with."""

    plan: tuple[Placement, ...]
    settings: tuple[tuple[str, Any], ...]
    dropout: bool
    threads: bool
    update: str


def _case(number: int) -> Case:
    rng = random.Random(number)
    plan = tuple(Placement(rng.choice(TIERS[:3]), rng.choice(ACTIVATIONS)) for _ in range(UNITS))
    settings = {
        "max_norm": rng.choice([1.0, None]),
        "accumulation": rng.choice([1, 2]),
        "autocast": rng.choice(["none", "bf16"]),
    }
    early = settings["max_norm"] is None and number % 2
    threads, dropout = rng.random() < 0.5, rng.random() < 0.5
    return Case(
        PURE[number] if number < len(PURE) else plan,
        tuple(settings.items()),
        dropout,
        threads,
        "early" if early else "exact",
    )


@cache
def _plain(name: str, dropout: bool, settings: tuple[tuple[str, Any], ...]) -> Left:
    return train(TASKS[name, dropout], steps=STEPS, **dict(settings))


def _compare(name: str, case: Case) -> None:
    wanted, task, settings = _plain(name, case.dropout, case.settings), TASKS[name, case.dropout], dict(case.settings)
    engine = ThreadEngine() if case.threads else Inline()
    got = train(task, case.plan, engine=engine, update=case.update, steps=STEPS, **settings)
    assert got.losses == wanted.losses
    assert got.same(wanted)
    print(f"peak {got.peak / got.planned:.3f} of the plan's")
    assert LEAST * got.planned <= got.peak <= got.planned
    _moves_what_it_should(name, case, got)


def _moves_what_it_should(name: str, case: Case, got: Left) -> None:
    """What stays from one pass to the next of the same weights does not come up again."""
    settings = dict(case.settings)
    made, accumulation = profiled(TASKS[name, case.dropout], settings["autocast"]), settings["accumulation"]
    rows = table(plan_of(made, case.plan, accumulation=accumulation), made)
    assert got.moved is not None
    assert got.moved["down"] == STEPS * sum(row["down"] for row in rows)
    assert got.moved["up"] + got.stayed == STEPS * sum(row["up"] for row in rows)
    if not case.threads:  # lanes that take no time
        quick = replace(MACHINES["H100"], up=RATE, down=RATE, up_both=RATE, down_both=RATE, host_update=RATE)
        budget = least_peak(made, case.plan, accumulation)
        busy = (
            LaneRun(made, case.plan, quick, budget=budget, accumulation=accumulation, update=case.update, steps=STEPS)
            .play()
            .busy
        )
        for lane in ("up", "down"):
            assert got.moved[lane] == round(STEPS * busy[lane] * RATE)


def _grid(short: Collection[int]) -> list[Any]:
    return [pytest.param(k, marks=[] if k in short else pytest.mark.long) for k in range(PLANS)]


@pytest.mark.parametrize("number", _grid(FIRST))
def test_a_decoder(number: int) -> None:
    _compare("decoder", _case(number))


def test_tied_embeddings() -> None:
    _compare("tied", replace(_case(20), dropout=False, update="exact"))


@pytest.mark.long
@pytest.mark.parametrize("number", range(PLANS))
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers_as_they_are(name: str, number: int) -> None:
    pytest.importorskip("transformers")
    _compare(name, _case(number))


@pytest.mark.parametrize("number", _grid(range(6, 7)))
@pytest.mark.parametrize("name", ["resnet", pytest.param("preactivated", marks=pytest.mark.long)])
def test_batch_norms_move_once(name: str, number: int) -> None:
    _compare(name, _case(number))


@pytest.mark.parametrize("number", _grid(range(2)))
def test_a_run_goes_on_under_another_plan_or_none(number: int) -> None:
    """It stops after any of its steps; dropout goes on where it was."""
    case, rng = _case(number), random.Random(f"stop {number}")
    stop, after = rng.randint(1, STEPS - 1), _case(rng.randrange(PLANS)).plan if number % 2 else None
    whole, task, settings = (
        _plain("decoder", case.dropout, case.settings),
        TASKS["decoder", case.dropout],
        case.settings,
    )
    halfway: list[Any] = []
    first = train(task, case.plan, steps=stop, ends_with=halfway, update=case.update, **dict(settings))
    rest = train(task, after, steps=STEPS - stop, first=stop, start=tuple(halfway), **dict(settings))
    assert first.losses + rest.losses == whole.losses
    assert all(map(torch.equal, rest.weights, whole.weights))
    assert all(map(torch.equal, rest.state, whole.state))


def test_a_schedule_sees_the_steps(recwarn: pytest.WarningsRecorder) -> None:
    train(DECODER, PURE[3], steps=2)
    assert not [one for one in recwarn if "lr_scheduler.step()" in str(one.message)]

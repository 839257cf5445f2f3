"""A week of bad luck: whatever is done to the models between steps, all workers still hold the one model, or one line
has said what was refused.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import isles
from isles.comm.mesh import Mesh
from tests.replicas.workers import HALVES, LINKS, Net, bits, held_out, loss_of, usual_inner, weights

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, feedback": ("ddp", {"codec": "int4", "error_feedback": "local"}),
    "diloco": ("diloco", {"sync_every": 3}),
    "diloco, left out": ("diloco", {"sync_every": 2, "on_broken": "leave out", "outer_momentum": 0.5}),
    "noloco": ("noloco", {"sync_every": 2}),
    "streaming": (
        "streaming-diloco",
        {"sync_every": 3, "fragments": HALVES, "codec": "int4", "error_feedback": "local"},
    ),
    "demo": ("demo", {"check_every": 3}),
}
PARAMETERS = ("first", "bias", "second")
REFUSED = (
    "was frozen when the optimizer was made",
    "were loaded into the model after its optimizer was made",
    "the model does not have the weights of that moment",
    "was float32 when the optimizer was made",
    "gradient is not finite",
    "momentum is not finite",
    "did not answer",
    "is lost",
    "anchor hash",
    "weights hash",
    "element 0 of tensors does not require grad",  # torch's line: all is frozen
)


@dataclass(frozen=True)
class Stroke:
    """What happens before a step. at: a parameter, or a worker, or a number of batches."""

    what: str
    at: int


STROKES = st.one_of(
    st.builds(Stroke, st.sampled_from(["freeze", "thaw", "skip a part"]), st.integers(0, 2)),
    st.builds(Stroke, st.sampled_from(["nan", "inf weight", "skip all"]), st.integers(0, 1)),
    st.builds(Stroke, st.sampled_from(["save", "load both", "load model", "load optimizer"]), st.just(0)),
    st.builds(Stroke, st.sampled_from(["accumulate", "accumulate unevenly"]), st.integers(1, 2)),
)
WEEKS = st.tuples(
    st.sampled_from(sorted(METHODS)),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 12), STROKES), min_size=1, max_size=6),
)


def live_through(world: Mesh, name: str, begins_frozen: bool, strokes: list[tuple[int, Stroke]]) -> tuple[Any, ...]:
    """12 steps. Bits of the one model, its loss, whether workers agree, and spread of the replicas."""
    method, options = METHODS[name]
    model = Net()
    model.second.requires_grad_(not begins_frozen)
    if begins_frozen and "fragments" in options:
        options = {**options, "fragments": (("first",), ("bias",))}
    optimizer: Any = isles.method(method)(model, usual_inner(method)(model), world.outer, **options)
    saved: tuple[Any, Any] | None = None
    for step in range(1, 13):
        now = [stroke for at, stroke in strokes if at == step]
        batches, spoilt, without = 1, False, set()
        for stroke in now:
            parameter = getattr(model, PARAMETERS[stroke.at])
            match stroke.what:
                case "freeze" | "thaw":
                    parameter.requires_grad_(stroke.what == "thaw")
                case "skip a part":
                    without.add(stroke.at)
                case "skip all":
                    without |= {0, 1, 2} if world.rank == stroke.at else set()
                case "nan":
                    spoilt = spoilt or world.rank == stroke.at
                case "inf weight":
                    if world.rank == stroke.at and optimizer.level == "parameter":  # others send no weights
                        model.bias.data[2] = torch.inf
                case "save":
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                case "load both" | "load model" | "load optimizer" if saved is not None:
                    if stroke.what != "load optimizer":
                        model.load_state_dict(saved[0])
                    if stroke.what != "load model":
                        optimizer.settle()
                        clock = {"transport": world.transport.state_dict()}  # which cannot go back
                        optimizer.load_state_dict(saved[1] | clock)
                case "accumulate":
                    batches = 1 + stroke.at
                case "accumulate unevenly":
                    batches = 1 + (stroke.at + world.rank) % 3
        for number in range(batches - 1):
            with optimizer.no_sync():
                loss_of(model, world.rank, 100 * step + number).backward()
        loss = loss_of(model, world.rank, step)
        (loss * torch.nan if spoilt else loss).backward()
        if method not in ("ddp", "dct-dp"):  # whose gradients have left
            for place in without:
                getattr(model, PARAMETERS[place]).grad = None
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    spread = optimizer.replica_std()
    one = weights(optimizer.consolidate())
    return bits(one), held_out(model), optimizer.agrees, spread


def check(name: str, begins_frozen: bool, strokes: list[tuple[int, Stroke]]) -> None:
    """Equal bits and a finite loss; or a line that a user can do something with, on each worker that stopped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = isles.run_virtual(
            live_through, 2, links=LINKS, args=(name, begins_frozen, strokes), return_errors=True
        )
    errors = [result for result in results if isinstance(result, Exception)]
    for error in errors:
        line = str(error).partition("\nin virtual worker")[0]
        assert "\n" not in line and any(known in line for known in REFUSED), repr(error)
    if errors:
        return
    (mine, loss, agrees, spread), (theirs, *_) = results
    assert torch.tensor(loss).isfinite()
    assert mine == theirs
    assert spread == 0 or not agrees


def week(examples: int) -> Any:
    """The test of so many sequences."""
    found = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))(
        given(WEEKS)(lambda lived: check(*lived))
    )
    return seed(20250)(found)


def test_a_day_of_bad_luck() -> None:
    week(20)()


@pytest.mark.long
def test_a_week_of_bad_luck() -> None:
    week(300)()

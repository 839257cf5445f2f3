"""Compressed gradients: what ddp's codecs and error feedback keep, send and skip; dct-dp where the rule is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.mesh import Mesh
from tests.covers import cover
from tests.replicas.workers import LINKS, Net, bits, counted, loss_of, sgd, train_step, weights, wrap

SAVED = ["ddp, int4", "ddp, low rank", "dct-dp"]  # of RUNS: those that keep something of gradients
CODECS = ["none", "bf16", "int4", "fp4", "sign", "topk:40", "randk:0.5", "powersgd:1", "powersgd:1+int4"]


def run(worker: Any, workers: int, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, links=LINKS, args=args)


def saved(optimizer: Any) -> list[Tensor]:
    """All tensors that a step on gradients may change, weights too."""
    found = [weights(optimizer.model)]

    def walk(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found.append(thing.clone())
        elif isinstance(thing, dict | list):
            for one in thing.values() if isinstance(thing, dict) else thing:
                walk(one)

    walk(optimizer.outer_state())
    return found


@pytest.mark.parametrize(("name", "form"), cover(CODECS, ("local", "global"), each=1))
def test_what_was_put_in_is_in_the_means_or_saved(name: str, form: str) -> None:
    """Sum of gradients = workers x sum of means + residuals, whatever the codec does to them; all
    workers get the same bits. Nothing is lost by codec none.
    """

    def worker(world: Mesh) -> Any:
        model, total = Net(), torch.zeros(143)
        optimizer: Any = isles.DDP(model, sgd(model, 0.1), world.outer, codec=name, error_feedback=form)
        start = weights(model)
        for step in range(1, 7):
            loss = loss_of(model, world.rank, step)
            total += torch.cat(
                [g.reshape(-1) for g in torch.autograd.grad(loss, model.parameters(), retain_graph=True)]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        (bucket,) = optimizer.buckets
        held = torch.cat(bucket.split(bucket.reduction.residual)[::-1])
        return total, held, (start - weights(model)) / 0.1

    results = run(worker, 3)
    put_in, held = (sum(result[i] for result in results) for i in (0, 1))
    torch.testing.assert_close(held + 3 * results[0][2], put_in, rtol=0, atol=2e-4)
    assert len({bits(result[2]) for result in results}) == 1
    assert (name == "none" and form == "local") == (not any(bool(result[1].any()) for result in results))


def test_bytes_of_the_factors() -> None:
    """Rank 1 of two workers: 11 + 5 and 7 + 11 numbers of the matrices' factors, 11 of the vector, and three headers;
    as 4-bit numbers a half byte and a scale for each 64.
    """

    def worker(world: Mesh, name: str) -> int:
        model = Net()
        optimizer = isles.DDP(model, sgd(model), world.outer, codec=name, error_feedback="local")
        before = counted(world)["sent"]
        train_step(optimizer, world.rank, 1)
        assert optimizer.schedule(1)[0].bytes_sent[world.rank] == counted(world)["sent"] - before
        return counted(world)["sent"] - before

    assert run(worker, 2, "powersgd:1") == [3 * 32 + 4 * (11 + 7 + 5 + 11 + 11)] * 2
    assert run(worker, 2, "powersgd:1+int4") == [3 * 32 + (9 + 4) + (8 + 4) + (11 + 4)] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SAVED)
def test_a_step_that_is_not_finite_never_was(name: str, bad: float) -> None:
    """Worker 1's gradient breaks in step 3: nobody's weights, residuals, thresholds or bases change, everybody counts
    it, Adam's moments stay; the run goes on as if the step had not been. A scaler that is
    switched off changes nothing.
    """
    off = torch.amp.GradScaler("cpu", enabled=False) if bad == float("inf") else None

    def worker(world: Mesh, broken: bool) -> Any:
        optimizer: Any = wrap(world, name, Net())
        for step in (1, 2, 3, 4, 5):
            if step == 3 and not broken:
                optimizer.steps += 1  # which thresholds and headers count by
                continue
            before = saved(optimizer)
            (loss_of(optimizer.model, world.rank, step) * (bad if step == 3 and world.rank == 1 else 1.0)).backward()
            optimizer.step(scaler=off)
            optimizer.zero_grad()
            assert (step == 3) == all(torch.equal(a, b) for a, b in zip(before, saved(optimizer), strict=True))
        assert optimizer.gauges()["skipped_steps"] == optimizer.skipped == broken
        return bits(weights(optimizer.model))

    assert run(worker, 3, True) == run(worker, 3, False)


@pytest.mark.parametrize("name", SAVED)
def test_a_batch_may_be_thrown_away(name: str) -> None:
    """What left in the first backward pass of a step counts for nothing, in the means and in what is kept."""

    def worker(world: Mesh, both: bool) -> list[str]:
        optimizer: Any = wrap(world, name, Net())
        for step in range(1, 5):
            if both:
                loss_of(optimizer.model, world.rank, 50 + step).backward()
                optimizer.zero_grad()
            train_step(optimizer, world.rank, step)
        return [bits(tensor) for tensor in saved(optimizer)]

    with pytest.warns(UserWarning, match="second backward pass"):
        thrown = run(worker, 2, True)
    assert thrown == run(worker, 2, False)


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_follows_the_scale_of_the_loss(name: str) -> None:
    """A scaler that doubles its scale every other step changes no bit: residuals and thresholds are doubled with it."""

    def worker(world: Mesh, scaled: bool) -> str:
        optimizer = wrap(world, name, Net())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if scaled else None
        for step in range(1, 9):
            loss = loss_of(optimizer.model, world.rank, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step(scaler=scaler)
            optimizer.zero_grad()
        assert scaler is None or scaler.get_scale() == 64
        return bits(weights(optimizer.model))

    assert run(worker, 2, True) == run(worker, 2, False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "sign"}, "codec = sign: it takes a part of every gradient"),
        ({"codec": "powersgd:1"}, 'choose error_feedback = "local"'),
        ({"error_feedback": "local"}, "codec none loses nothing on the wire"),
        ({"codec": "powersgd:40", "error_feedback": "local"}, "lower the rank"),
        ({"codec": "int8"}, None),
        ({"codec": "powersgd:1", "error_feedback": "global"}, None),
    ],
)
def test_advice(options: dict[str, Any], says: str | None) -> None:
    """A codec that drops much without error feedback, feedback without a loss, a rank that saves nothing."""
    notices = run(lambda world: isles.DDP(model := Net(), sgd(model), world.outer, **options).advise(5), 2)[0]
    assert [says in notice for notice in notices if says] == [True] * len(notices) and bool(notices) == (
        says is not None
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "powersgd:0"}, "choose a rank of at least 1"),
        ({"error_feedback": "own"}, "unknown error_feedback 'own'"),
        ({"feedback_decay": 0.9}, "has no error feedback to act on"),
        ({"reduction": "native", "error_feedback": "local"}, 'use "two_shot"'),
    ],
)
def test_mistakes_are_one_line_with_the_hint(options: dict[str, Any], says: str) -> None:
    """ValueError names the key and what to choose."""
    with pytest.raises(ValueError, match=says):
        run(lambda world: isles.DDP(model := Net(), sgd(model), world.outer, **options), 2)

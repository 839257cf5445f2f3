"""An inner optimizer that is late changes no bit: everybody who looks at weights, states or gradients says so first."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch

import isles
from isles.base.wrapping import innermost
from isles.comm.mesh import Mesh
from tests.covers import share
from tests.replicas.deferred import CopyingNet, LateGradients, LateUpdates
from tests.replicas.workers import DIVIDED, LINKS, RUNS, Net, adamw, bits, held_out, loss_of, usual_inner, weights, wrap

Kind = Literal["prompt", "late updates", "late gradients"]
STEPS = 8
METHODS = [name for name in RUNS if name not in DIVIDED]
FIRST = list({RUNS[name][0]: name for name in reversed(METHODS)}.values())  # one of each method's


def trained(world: Mesh, name: str, kind: Kind, batches: int, max_norm: float | None) -> dict[str, Any]:
    """A run under a schedule that is looked at, saved and set back in its middle."""
    model = CopyingNet(world.rank) if kind == "late gradients" else Net(world.rank)
    inner = usual_inner(name)(model)
    late: LateUpdates | None = None
    if kind != "prompt":
        late = LateGradients(model, inner) if isinstance(model, CopyingNet) else LateUpdates(model, inner)
    optimizer = wrap(world, name, model, lambda _: late or inner, max_norm=max_norm)
    optimizer.batches = batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0 / (1 + done))
    seen: list[Any] = []

    def backward(step: int, index: int) -> float:
        loss = loss_of(model, world.rank, 10 * step + index) / batches
        loss.backward()
        return float(loss.detach())

    for step in range(1, STEPS + 1):
        for index in range(batches - 1):
            with optimizer.no_sync():
                backward(step, index)
        seen.append(backward(step, batches - 1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()
        if max_norm is not None:
            seen.append(float(optimizer.gradient_norm))  # type: ignore[arg-type]
        if step == 2:
            seen.append({key: bits(own) for key, own in optimizer.weights().items()})
        if step == 3:
            seen.append(optimizer.replica_std())
        if step == 5:
            with optimizer.evaluation_weights() as judged:
                seen.append((bits(weights(judged)), held_out(judged)))
        if step == 6:
            inner_state = copy.deepcopy(optimizer.inner_state())
            saved = {key: own.clone() for key, own in optimizer.weights().items()}
        if step == 7:  # an update is due, which must not come on top of what is restored; torch keeps what it loads
            optimizer.load_weights(saved)
            optimizer.load_inner_state(copy.deepcopy(inner_state))
        if step == 8:
            optimizer.load_inner_state(copy.deepcopy(inner_state))
            optimizer.load_weights(saved)
        if step >= 7:
            states = optimizer.state_dict()["inner"]["state"].values()
            seen.append([float(own["step"]) for own in states if "step" in own])
    optimizer.finish()
    seen += [bits(weights(model)), optimizer.gauges(), bits(weights(optimizer.consolidate())), world.transport.now()]
    if late is not None:
        assert late.calls["gradients"] >= STEPS * batches
        assert late.calls["catch_up"]
        assert not late.waiting
    return {"seen": seen}


def same(name: str, kind: Kind, batches: int, max_norm: float | None) -> bool:
    prompt, late = (
        isles.run_virtual(trained, 2, links=LINKS, args=(name, which, batches, max_norm)) for which in ("prompt", kind)
    )
    return prompt == late


@pytest.mark.parametrize("name", share(FIRST, 0, 6, ("ddp", "dct-dp", "diloco", "demo")))
def test_late_gradients_and_updates_change_no_bit(name: str) -> None:
    assert same(name, "late gradients", 2, 0.3)


@pytest.mark.long
@pytest.mark.parametrize("batches, max_norm", [(1, None), (2, 0.3)])
@pytest.mark.parametrize("kind", ["late updates", "late gradients"])
@pytest.mark.parametrize("name", METHODS)
def test_no_way_of_a_method_minds_who_is_late(name: str, kind: Kind, batches: int, max_norm: float | None) -> None:
    assert same(name, kind, batches, max_norm)


def in_the_air(world: Mesh, late: bool, steps: int) -> list[str]:
    """Ends with an answer on its way, no exchange in its last step and, if late, an update that waits."""
    model = Net(seed=world.rank)
    inner = adamw(model)
    held = LateUpdates(model, inner) if late else inner
    optimizer = isles.StreamingDiLoCo(model, held, world.outer, sync_every=5, overlap_steps=3, fragments="whole")
    for step in range(1, steps + 1):
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [bits(weights(model)), *(bits(fragment.anchor) for fragment in optimizer.fragments)]


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_finish_lands_on_weights_that_have_caught_up(steps: int) -> None:
    prompt, late = (isles.run_virtual(in_the_air, 2, links=LINKS, args=(late, steps)) for late in (False, True))
    assert prompt == late


def test_a_state_loaded_through_the_outside_reaches_the_inner_optimizer() -> None:
    model = Net()
    inner = adamw(model)
    outside = LateUpdates(model, LateUpdates(model, inner))
    assert innermost(outside) is inner
    loss_of(model, 0, 1).backward()
    outside.step()
    outside.catch_up()
    outside.inner.catch_up()  # type: ignore[attr-defined]
    saved = copy.deepcopy(outside.state_dict())
    assert saved["state"]
    other = adamw(model)
    LateUpdates(model, other).load_state_dict(saved)
    assert all(torch.equal(own["exp_avg"], saved["state"][i]["exp_avg"]) for i, own in enumerate(other.state.values()))


def test_ist_wants_an_optimizer_that_is_never_late() -> None:
    model = isles.models.Decoder(
        isles.models.Shape(d_model=8, layers=1, heads=2, ffn=16, vocab=11, context=4, tie_embeddings=False)
    )
    with pytest.raises(ValueError, match="steps when it is told to"):
        isles.IST(model, LateUpdates(model, adamw(model)), isles.init().outer)


def hashed(world: Mesh) -> int:
    """DeMo compares weights in its second step; no forward pass comes between, which would have caught up."""
    model = Net()
    late = LateUpdates(model, torch.optim.SGD(model.parameters(), lr=0.02))
    optimizer = isles.DeMo(model, late, world.outer, check_every=1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return len(late.waiting)


def test_demo_hashes_weights_that_have_caught_up() -> None:
    assert isles.run_virtual(hashed, 2, links=LINKS) == [1, 1]  # of the step after the comparison

"""A user's own hands on the gradients: torch's order for a gradient scaler, its recipe for clipping, edits between
`backward()` and `step()`, hooks. What is done between the two is done to what the step is taken by: for methods at
gradient level the mean over the workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isles
from isles.comm.mesh import Mesh
from tests.covers import cover
from tests.gloo import run_gloo
from tests.replicas.deferred import LateUpdates
from tests.replicas.test_parameters import one_of_two_kinds, two_of_a_kind
from tests.replicas.trainers import TRAINERS, plain
from tests.replicas.workers import Net, bits, loss_of, sgd, usual_inner, weights, wrap


def run(worker: Any, workers: int, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, args=args)


ALIKE = ["ddp", "ddp, small buckets", "ddp, int4", "ddp, low rank", "dct-dp", "demo"]
"""Their workers take equal steps."""
SCALED = [*ALIKE, "none", "localsgd", "diloco", "noloco", "streaming-diloco", "dilocox", "sparta", "ist", "sparseloco"]


def islands(world: Mesh, model: nn.Module, **options: Any) -> isles.ReplicaSync:
    """Two workers an island, by data parallel."""
    mesh = isles.mesh(outer=world.size // 2, inner=2)
    inside = isles.DDP(model, usual_inner("ddp")(model), mesh.inner, **options)
    return isles.DiLoCo(model, inside, mesh.outer, sync_every=3)


def trained(
    world: Mesh, name: str, order: str, broken: tuple[int, ...] = (), enabled: bool = True, accumulate: bool = False
) -> tuple[list[bool], str, float]:
    """Six steps, whose gradients are clipped to 0.1. broken: the workers whose gradient overflows in step 2. Returns
    which steps changed nothing, the weights' bits, and the scale at the end.
    """
    torch.manual_seed(0)
    model, norm = Net(), None if order.endswith("clip") else 0.1
    optimizer = islands(world, model, max_norm=norm) if name == "islands" else wrap(world, name, model, max_norm=norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    still = []
    for step in range(1, 7):
        if accumulate:
            with optimizer.no_sync():
                scaler.scale(loss_of(model, world.rank, 50 + step)).backward()
        factor = torch.inf if step == 2 and world.rank in broken else 1.0
        scaler.scale(loss_of(model, world.rank, step) * factor).backward()
        before = weights(model)
        if order == "own":
            optimizer.step(scaler=scaler)
        else:
            if order.endswith("clip"):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        still.append(torch.equal(before, weights(model)))
    return still, bits(weights(model)), scaler.get_scale()


BROKEN = cover(["islands", *SCALED], [(0,), (1,), (), (0, 1)], each=1, of=5)
BROKEN += [("ddp", (1,)), ("dct-dp", (0,)), ("demo", (1,))]


@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_torchs_order_is_step_with_a_scaler(name: str, broken: tuple[int, ...]) -> None:
    """To the bit, with torch's clipping too. After an overflow workers that take equal steps all skip, and have one
    scale; others skip their own.
    """
    if name == "ist" and broken:
        pytest.skip("a subnet's clipping is that of the whole")
    size = 4 if name == "islands" else 2
    own = run(trained, size, name, "own", broken)
    assert run(trained, size, name, "torch", broken) == own
    if name != "ist":
        assert run(trained, size, name, "torch, clip", broken) == own
    skip = [bool(broken)] * 2 if name in ALIKE else [worker in broken for worker in range(2)]
    skip = [bool(broken)] * 2 + [False] * 2 if name == "islands" else skip
    for (still, _, scale), skips in zip(own, skip, strict=True):
        assert still[1] == skips or name == "sparta"
        assert scale == (512 if skips else 1024)


@pytest.mark.parametrize(("name", "accumulate"), cover(["ddp", "demo", "diloco"], [True, False], each=1))
def test_a_scaler_changes_no_bit(name: str, accumulate: bool) -> None:
    """Nor does one that is not enabled, nor accumulation."""
    plain = run(trained, 2, name, "own", (), False, accumulate)
    for order, enabled in (("own", True), ("torch", False), ("torch", True), ("torch, clip", True)):
        found = run(trained, 2, name, order, (), enabled, accumulate)
        assert [one[:2] for one in found] == [one[:2] for one in plain]


def both(world: Mesh, name: str, broken: int) -> tuple[str, str, float]:
    """Two models, two wrappers, one scaler: the second model's gradient overflows on one worker."""
    models = Net(seed=1), Net(seed=2)
    optimizers = [wrap(world, name, model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 5):
        factor = torch.inf if (step, world.rank) == (2, broken) else 1.0
        scaler.scale(loss_of(models[0], world.rank, step) + factor * loss_of(models[1], world.rank, step)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return bits(weights(models[0])), bits(weights(models[1])), scaler.get_scale()


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_two_optimizers_on_one_scaler(name: str) -> None:
    """What the first has does not skip with the second; the scale is one, halved once."""
    first, second = run(both, 2, name, 1)
    assert first == second and first[2] == 512
    whole = run(both, 2, name, -1)[0]
    assert (first[0] == whole[0], first[1] == whole[1]) == (True, False)


@pytest.mark.parametrize("name", ["ddp", "diloco"])
def test_a_list_of_optimizers_takes_a_scaler(name: str) -> None:
    """As one optimizer with groups does, an overflow on worker 1 included."""

    def worker(world: Mesh, inner: Any) -> tuple[str, float]:
        optimizer = wrap(world, name, Net(), inner)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(1, 6):
            factor = torch.inf if (step, world.rank) == (2, 1) else 1.0
            scaler.scale(loss_of(optimizer.model, world.rank, step) * factor).backward()
            scaler.unscale_(optimizer)
            _clip(optimizer.model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return bits(weights(optimizer.consolidate())), scaler.get_scale()

    assert run(worker, 2, two_of_a_kind) == run(worker, 2, one_of_two_kinds)


def test_in_processes() -> None:
    """The same over gloo, an overflow on worker 1."""
    for name in ("ddp", "demo"):
        assert run_gloo(trained, 2, args=(name, "torch, clip", (1,))) == run(trained, 2, name, "own", (1,))


def test_demo_asks_the_others_of_overflows() -> None:
    """8 bytes to each of them, in a step with a scaler, as a plan says that is told of it."""

    def worker(world: Mesh, enabled: bool) -> int:
        optimizer, scaler = wrap(world, "demo", Net()), torch.amp.GradScaler("cpu", enabled=enabled)
        optimizer.scales_loss = enabled
        before = world.world.traffic["control"].bytes_sent, world.world.traffic.total("bytes_sent")
        scaler.scale(loss_of(optimizer.model, world.rank, 1)).backward()
        scaler.step(optimizer)
        assert world.world.traffic.total("bytes_sent") - before[1] == optimizer.outline(1).sent[world.rank]
        return world.world.traffic["control"].bytes_sent - before[0]

    assert (run(worker, 3, True), run(worker, 3, False)) == ([16] * 3, [0] * 3)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _data(model: Net) -> None:
    model.bias.grad.data.mul_(0.25)  # type: ignore[union-attr]  # bumps no version


def _numpy(model: Net) -> None:
    model.second.grad.numpy()[1:] = 0.5  # type: ignore[union-attr]


def _replaced(model: Net) -> None:
    model.first.grad = torch.ones_like(model.first)


def _dropped(model: Net) -> None:
    model.first.grad = None


EDITS: dict[str, Callable[[Net], None]] = {
    "clip": _clip,
    "data": _data,
    "numpy": _numpy,
    "replaced": _replaced,
    "dropped": _dropped,
}


def edited(world: Mesh, edit: str, megabytes: float) -> Tensor:
    model = Net(dtype=torch.float64)
    optimizer = isles.DDP(model, sgd(model), world.outer, bucket_megabytes=megabytes)
    for step in range(1, 4):
        loss_of(model, world.rank, step).backward()
        EDITS[edit](model)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(("edit", "megabytes"), cover(EDITS, [25.0, 1e-4], each=1))
def test_edits_between_backward_and_step_are_edits_of_the_mean(edit: str, megabytes: float) -> None:
    """Against one worker that has the mean of both gradients and is edited so."""
    model = Net(dtype=torch.float64)
    inner = sgd(model)
    for step in range(1, 4):
        sum((loss_of(model, worker, step) / 2 for worker in range(2)), torch.zeros(())).backward()
        EDITS[edit](model)
        inner.step()
        inner.zero_grad()
    for found in run(edited, 2, edit, megabytes):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("why", ["reentrant", "late"])
def test_means_that_come_in_step_leave_no_room_for_edits(why: str) -> None:
    """Where all of a backward pass is within one checkpoint, and with an inner optimizer that works late: what has been
    sent must not change.
    """

    def worker(world: Mesh) -> None:
        model = Net()
        inner = LateUpdates(model, sgd(model)) if why == "late" else sgd(model)
        optimizer = isles.DDP(model, inner, world.outer, bucket_megabytes=1e-4)
        x = torch.ones(4, 5, requires_grad=True)
        out = model(x) if why == "late" else checkpoint(model, x, use_reentrant=True)
        out.square().mean().backward()
        _clip(model)
        with pytest.raises(ValueError, match=r"changed between backward\(\) and step\(\).*clip with max_norm="):
            optimizer.step()

    run(worker, 2)


def test_an_edit_of_the_mean_on_one_worker_is_reported_at_the_end() -> None:
    def worker(world: Mesh) -> None:
        optimizer = isles.DDP(model := Net(), sgd(model), world.outer)
        loss_of(model, world.rank, 1).backward()
        if world.rank == 1:
            _data(model)
        optimizer.step()
        with pytest.raises(isles.Diverged, match="worker 1 diverged at step 1: bias differ where all must be equal"):
            optimizer.finish()

    run(worker, 2)


@pytest.mark.parametrize("name", ["ddp", "ddp, int4", "demo"])
def test_gradients_may_be_set_by_hand(name: str) -> None:
    """From `torch.autograd.grad`, which calls no hook: as `backward` makes them."""

    def worker(world: Mesh, by_hand: bool) -> str:
        optimizer = wrap(world, name, Net())
        for step in range(1, 5):
            loss, parameters = loss_of(optimizer.model, world.rank, step), optimizer.parameters
            if by_hand:
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = gradient
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(weights(optimizer.model))

    assert run(worker, 2, True) == run(worker, 2, False)


@pytest.mark.parametrize("name", ["ddp, small buckets", "dct-dp"])
def test_gradients_may_be_views_of_one_buffer(name: str) -> None:
    """As loops keep them that set all to zero at once: whoever writes to one has not written to the others."""

    def worker(world: Mesh, views: bool) -> str:
        optimizer = wrap(world, name, Net())
        flat = torch.zeros(sum(own.numel() for own in optimizer.parameters))
        for step in range(1, 5):
            optimizer.zero_grad()
            if views:
                parts = flat.zero_().split([own.numel() for own in optimizer.parameters])
                for own, part in zip(optimizer.parameters, parts, strict=True):
                    own.grad = part.view(own.shape)
            loss_of(optimizer.model, world.rank, step).backward()
            optimizer.step()
        return bits(weights(optimizer.model))

    assert run(worker, 2, True) == run(worker, 2, False)


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_a_gradient_may_be_expanded(name: str) -> None:
    """As `torch.autograd.grad` gives that of a sum: one entry in memory, which no mean could be written to."""

    def worker(world: Mesh, expanded: bool) -> str:
        model = nn.ParameterList([torch.zeros(3, 4), torch.zeros(5)])
        optimizer = wrap(world, name, model, sgd)
        for own in model:
            (gradient,) = torch.autograd.grad(own.sum() * (1 + world.rank), own)
            assert 0 in gradient.stride()
            own.grad = gradient if expanded else gradient.contiguous()
        optimizer.step()
        return bits(weights(model))

    assert run(worker, 2, True) == run(worker, 2, False)


def _quarter(parameter: Tensor) -> None:
    parameter.grad.data.mul_(0.25)  # type: ignore[union-attr]


def hooked(world: Mesh, megabytes: float) -> Tensor:
    model = Net(dtype=torch.float64)
    optimizer = isles.DDP(model, sgd(model), world.outer, bucket_megabytes=megabytes)
    for parameter in model.parameters():  # of the user's, after the wrapping
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(_quarter)
    for step in range(1, 4):
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("megabytes", [25.0, 1e-4], ids=["one bucket", "each its own"])
def test_hooks_on_parameters_are_hooks_of_the_own_gradient(megabytes: float) -> None:
    """What the user's hooks make of it is what travels: twice a quarter is a half."""
    model = Net(dtype=torch.float64)
    for step in range(1, 4):
        sum((loss_of(model, worker, step) / 4 for worker in range(2)), torch.zeros(())).backward()
        sgd(model).step()
        model.zero_grad()
    for found in run(hooked, 2, megabytes):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-12)


def loud(world: Mesh, name: str, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """Four steps of two backward passes, both or one outside of no_sync: what was put in, kept, and moved."""
    model, total = Net(), torch.zeros(143)
    optimizer: Any = isles.DDP(model, sgd(model, 0.1), world.outer, codec=name, error_feedback="local")
    start = weights(model)
    for step in range(1, 5):
        for number, kind in enumerate(order.split()):
            loss = loss_of(model, world.rank, 10 * step + number)
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            total += torch.cat([gradient.reshape(-1) for gradient in gradients])
            with optimizer.no_sync() if kind == "quiet" else nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (bucket,) = optimizer.buckets
    return total, torch.cat(bucket.split(bucket.reduction.residual)[::-1]), (start - weights(model)) / 0.1


@pytest.mark.filterwarnings("ignore:a second backward pass", "ignore:error_feedback", "ignore:codec")
@pytest.mark.parametrize(
    ("name", "order"), cover(["none", "int4", "topk:40"], ["loud loud", "loud quiet", "quiet loud"], each=1)
)
def test_no_backward_pass_of_a_step_is_lost(name: str, order: str) -> None:
    """Sum of gradients = workers x sum of means + residuals, however they travel; all workers have the same bits."""
    results = run(loud, 3, name, order)
    put_in, held = (sum(result[i] for result in results) for i in (0, 1))
    torch.testing.assert_close(held + 3 * results[0][2], put_in, rtol=0, atol=2e-4)
    assert len({bits(result[2]) for result in results}) == 1


PLACES = ["the optimizer", "before no_sync", "in no_sync", "the model"]


@pytest.mark.filterwarnings("ignore:a second backward pass")
@pytest.mark.parametrize(("name", "where"), cover(["ddp, int4", "ddp, low rank", "dct-dp"], PLACES, each=2))
def test_a_batch_thrown_away_counts_for_nothing(name: str, where: str) -> None:
    """Its gradients set to zero and not to None: what a codec lost of them is in no residual. And before a pass that
    only accumulates.
    """

    def worker(world: Mesh, thrown: bool) -> str:
        optimizer = wrap(world, name, Net())
        for step in range(1, 6):
            if thrown and step > 2:
                loss_of(optimizer.model, world.rank, 50 + step).backward()
                if where != "in no_sync":
                    (optimizer.model if where == "the model" else optimizer).zero_grad(set_to_none=False)
            if where.endswith("no_sync"):
                with optimizer.no_sync():
                    if where == "in no_sync":
                        optimizer.zero_grad(set_to_none=False)
                    loss_of(optimizer.model, world.rank, 70 + step).backward()
            loss_of(optimizer.model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return bits(weights(optimizer.model))

    assert run(worker, 2, True) == run(worker, 2, False)


ONE_MEAN: dict[str, dict[str, Any]] = {
    "ddp": {},
    "dct-dp": {"sparsity": 0.5, "exclude_below": 0},
    "demo": {"base": "sgd", "value_dtype": "fp32"},
    "localsgd": {"sync_every": 1},
    "diloco": {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
    "noloco": {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "gamma": 0.5},
}


@pytest.mark.filterwarnings("ignore:a second backward pass", "ignore:gamma")
@pytest.mark.parametrize("name", ONE_MEAN)
def test_only_what_was_accumulated_is_in_the_mean(name: str) -> None:
    """The gradient of a sum is its factor. 100 is thrown away; worker 0 has 1 and 2, worker 1 has 3 and 4: the mean is
    (3 + 7) / 2 = 5, by which SGD with rate 1 leads from 0 to -5.
    """

    def worker(world: Mesh) -> Tensor:
        model = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
        optimizer = isles.method(name)(model, sgd(model, 1.0), world.outer, **ONE_MEAN[name])

        def backward(factor: float) -> None:
            (factor * sum(own.sum() for own in model)).backward()  # type: ignore[union-attr]

        backward(100.0)
        optimizer.zero_grad(set_to_none=False)
        with optimizer.no_sync():
            backward(1.0 + 2 * world.rank)
        backward(2.0 + 2 * world.rank)
        optimizer.step()
        return weights(model)

    for found in run(worker, 2):
        torch.testing.assert_close(found, torch.full((5,), -5.0))


def growing(world: Mesh, name: str, scaled: bool) -> str:
    optimizer = wrap(world, name, Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
    for step in range(1, 9):
        scaler.scale(loss_of(optimizer.model, world.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return bits(weights(optimizer.model))


@pytest.mark.parametrize("name", ["ddp, int4", "dct-dp"])
def test_in_torchs_order_what_is_saved_follows_the_scale(name: str) -> None:
    assert run(growing, 2, name, True) == run(growing, 2, name, False)


SCALERS: dict[str, tuple[float | None, float | None]] = {  # of four steps, and of the next four; None: no scaler
    "another scaler": (1024.0, 16.0),
    "one from step 5 on": (None, 16.0),
    "none from step 5 on": (1024.0, None),
    "a state without the scaler's": (1024.0, 65536.0),
}


@pytest.mark.parametrize(("name", "change"), cover(["ddp, int4", "dct-dp", "ddp, low rank"], list(SCALERS), each=2))
def test_another_scale_than_what_is_saved_is_reported(name: str, change: str) -> None:
    """A residual is multiplied as the loss was: of another scaler it would count for nothing, or for all."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, name, Net())
        for scale in SCALERS[change]:
            if change.startswith("a state") and optimizer.steps:
                state, held = optimizer.state_dict(), optimizer.model.state_dict()
                optimizer = wrap(world, name, Net(5))
                optimizer.model.load_state_dict(held)
                optimizer.load_state_dict(state)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
            last = optimizer.steps + 4
            while optimizer.steps < last:
                scaler.scale(loss_of(optimizer.model, world.rank, optimizer.steps + 1)).backward()
                if optimizer.steps == 4:
                    with pytest.raises(ValueError, match=r"the loss is scaled by .*, error feedback by "):
                        scaler.step(optimizer)
                    return
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    run(worker, 2)


def checkpointed(world: Mesh, inside: str, reentrant: bool) -> tuple[str, int]:
    model, before = Net(dtype=torch.float64), world.world.traffic["outer"].bytes_sent
    optimizer = isles.DDP(model, sgd(model), world.outer, bucket_megabytes=1e-4)
    before = world.world.traffic["outer"].bytes_sent
    for step in range(1, 4):
        x = torch.full((4, 5), 0.1 * step + world.rank, dtype=torch.float64, requires_grad=True)
        if inside == "nothing":
            hidden = torch.tanh(x @ model.first.T + model.bias)
        else:
            hidden = checkpoint(lambda x: torch.tanh(x @ model.first.T + model.bias), x, use_reentrant=reentrant)
        if inside == "all":
            out = checkpoint(lambda hidden: hidden @ model.second.T, hidden, use_reentrant=reentrant)
        else:
            out = hidden @ model.second.T
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(weights(model)), world.world.traffic["outer"].bytes_sent - before


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", ["half", "all"])
def test_checkpointing_costs_no_byte(inside: str, reentrant: bool) -> None:
    """Backward passes within a backward pass end nothing: gradients travel once, and to the same bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(checkpointed, 2, inside, reentrant) == run(checkpointed, 2, "nothing", reentrant)


def failed(world: Mesh) -> str:
    model = Net()
    optimizer = isles.DDP(model, sgd(model), world.outer)
    handle = model.first.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, world.rank, 1).backward()
    handle.remove()
    model.zero_grad()
    loss_of(model, world.rank, 1).backward()
    optimizer.step()
    return bits(weights(model))


def test_a_backward_pass_that_failed_may_be_made_again() -> None:
    assert len(set(run(failed, 2))) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "demo", "diloco"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_step_the_scaler_for_their_users(trainer: str, name: str) -> None:
    """accelerate, Fabric and Lightning unscale, clip and step as torch shows, to the bit; one worker overflows."""
    pytest.importorskip({"fabric": "lightning"}.get(trainer, trainer))
    assert run_gloo(TRAINERS[trainer], 2, args=(name,)) == run(plain, 2, name)

"""DDP: the gradient of the whole batch, however it is bucketed, accumulated, clipped or unused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.gradient.bucketed import cut_buckets
from tests.replicas.workers import LINKS, Net, adamw, batch, bits, counted, loss_of, sgd, train_step, weights, wrap

BUCKETS = {"one bucket": 25.0, "two": 4e-4, "each its own": 1e-6}


def run(worker: Any, workers: int, *args: Any, **keywords: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, links=LINKS, args=args, **keywords)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("megabytes", BUCKETS.values(), ids=BUCKETS)
def test_equals_one_worker_on_the_whole_batch(workers: int, megabytes: float) -> None:
    """Oracle: w workers x batch b = one worker x batch w b; float64, 1e-12 after 8 steps of AdamW, clipped."""
    rows = 4

    def worker(world: Mesh) -> Tensor:
        model = Net(dtype=torch.float64)
        optimizer = wrap(world, "ddp", model, bucket_megabytes=megabytes, max_norm=0.5)
        for step in range(1, 9):
            train_step(optimizer, world.rank, step, rows)
        return weights(model)

    model = Net(dtype=torch.float64)
    inner = adamw(model)
    for step in range(1, 9):
        parts = [batch(rank, step, rows, torch.float64) for rank in range(workers)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # clipped after the reduction
        inner.step()
        inner.zero_grad()
    for result in run(worker, workers):
        torch.testing.assert_close(result, weights(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("megabytes", BUCKETS.values(), ids=BUCKETS)
def test_clipping_sees_the_reduced_gradient(megabytes: float) -> None:
    """`gradient_norm` is the norm of the mean gradient, before clipping, on all workers."""

    def worker(world: Mesh) -> float:
        model = Net()
        optimizer = wrap(world, "ddp", model, sgd, bucket_megabytes=megabytes, max_norm=1e-3)
        before = weights(model)
        train_step(optimizer, world.rank, 1)
        assert float((weights(model) - before).norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)
        return float(optimizer.gradient_norm)  # type: ignore[arg-type]

    model = Net()
    for rank in range(3):
        (loss_of(model, rank, 1) / 3).backward()
    whole = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
    assert run(worker, 3) == pytest.approx([float(whole)] * 3, rel=1e-5)


@pytest.mark.parametrize("megabytes", BUCKETS.values(), ids=BUCKETS)
def test_bucket_size_changes_no_bit(megabytes: float) -> None:
    """The sum of a gradient's entry has one order, whatever bucket it travels in."""

    def worker(world: Mesh, size: float) -> Any:
        model = Net()
        optimizer = wrap(world, "ddp", model, bucket_megabytes=size)
        return [train_step(optimizer, world.rank, step) for step in range(1, 6)], bits(weights(model))

    assert run(worker, 3, megabytes) == run(worker, 3, 25.0)


# Gradient accumulation.


def accumulate(world: Mesh, style: str, megabytes: float) -> tuple[Tensor, int]:
    model = Net(dtype=torch.float64)
    optimizer = wrap(world, "ddp", model, bucket_megabytes=megabytes)
    for step in range(1, 4):
        if style == "whole":
            (sum(loss_of(model, world.rank, 10 * step + part) for part in range(3)) / 3).backward()  # type: ignore[union-attr]
        elif style == "no_sync":
            with optimizer.no_sync():
                for part in range(2):
                    (loss_of(model, world.rank, 10 * step + part) / 3).backward()
            (loss_of(model, world.rank, 10 * step + 2) / 3).backward()
        else:
            for part in range(3):
                (loss_of(model, world.rank, 10 * step + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), counted(world)["sent"]


@pytest.mark.parametrize("megabytes", BUCKETS.values(), ids=BUCKETS)
def test_accumulation(megabytes: float) -> None:
    """With no_sync: one reduction a step. Without: one warning, the bytes of each pass, the same result."""
    whole = run(accumulate, 3, "whole", megabytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = run(accumulate, 3, "no_sync", megabytes)
    with pytest.warns(UserWarning, match="no_sync") as reported:
        loud = run(accumulate, 3, "plain", megabytes)
    assert len(reported) == 3, "each worker says it once"
    for (a, sent), (b, quiet_sent), (c, loud_sent) in zip(whole, quiet, loud, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(b, c, rtol=0, atol=1e-12)
        assert quiet_sent == sent and loud_sent == 3 * sent


def test_no_sync_ends_with_its_block_even_by_an_error() -> None:
    """An exception inside no_sync does not leave the optimizer deaf."""

    def worker(world: Mesh) -> int:
        model = Net()
        optimizer = wrap(world, "ddp", model)
        with pytest.raises(KeyError), optimizer.no_sync():
            raise KeyError
        loss_of(model, world.rank, 1).backward()
        sent = counted(world)["sent"]
        optimizer.step()
        return sent

    assert all(sent > 0 for sent in run(worker, 2))  # left during the backward pass


class _KeepsSigns:
    """As much of a reduction as a bucket asks for when it is filled."""

    preserves_signs = False


def test_what_the_inner_optimizer_received_it_may_take_and_hold_for_a_moment() -> None:
    """In another thread, while others' gradients are looked at; what it has not taken nobody may change."""
    taken, left = (nn.Parameter(torch.ones(3)) for _ in range(2))
    (bucket,) = cut_buckets([taken, left], 1 << 20, torch.device("cpu"))
    bucket.reduction = _KeepsSigns()  # type: ignore[assignment]
    taken.grad, left.grad = torch.ones(3), torch.ones(3)
    bucket.load()
    gradient, taken.grad = taken.grad, None
    assert bucket.is_changed(in_pass=False)  # nobody was given it
    bucket.hand_over()
    assert not bucket.is_changed(in_pass=False)
    taken.grad = gradient  # as `Optimizer.step` wants it
    assert not bucket.is_changed(in_pass=False)
    left.grad.mul_(0.5)
    assert bucket.is_changed(in_pass=False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_may_be_thrown_away(set_to_none: bool) -> None:
    """backward, zero_grad, backward, step (everywhere): only the second batch counts."""

    def worker(world: Mesh, both: bool) -> str:
        model = Net()
        optimizer = wrap(world, "ddp", model, bucket_megabytes=4e-4)
        for step in range(1, 4):
            if both:
                loss_of(model, world.rank, 50 + step).backward()
                optimizer.zero_grad(set_to_none)
            train_step(optimizer, world.rank, step)
        return bits(weights(model))

    with pytest.warns(UserWarning, match="second backward pass"):
        thrown = run(worker, 2, True)
    assert thrown == run(worker, 2, False)


def test_the_backend_s_own_reduction_is_refused_where_there_is_none() -> None:
    """reduction = "native" needs real processes, and no codec."""

    def worker(world: Mesh, **options: Any) -> None:
        wrap(world, "ddp", Net(), reduction="native", **options)

    with pytest.raises(ValueError, match='use "two_shot" on the virtual one'):
        run(worker, 2)
    with pytest.raises(ValueError, match='use "two_shot" with a codec'):
        run(lambda world: worker(world, codec="bf16"), 2)


# Parameters without a gradient.


class Branches(nn.Module):
    """Two branches of which each batch uses one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


@pytest.mark.parametrize("megabytes", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_count_as_zero(megabytes: float, set_to_none: bool) -> None:
    """Workers may use different parameters: the mean is over all workers, and nobody hangs."""

    def worker(world: Mesh) -> list[Tensor]:
        model = Branches()
        optimizer = wrap(world, "ddp", model, sgd, bucket_megabytes=megabytes)
        for step in range(1, 5):
            x, y = batch(world.rank, step)
            (model(x, left=(world.rank + step) % 3 == 0) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        return [parameter.detach() for parameter in model.parameters()]

    model = Branches()
    inner = sgd(model)
    for step in range(1, 5):
        for rank in range(3):
            x, y = batch(rank, step)
            ((model(x, left=(rank + step) % 3 == 0) - y).square().mean() / 3).backward()
        inner.step()
        inner.zero_grad()
    for result in run(worker, 3):
        for mine, theirs in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)


def test_frozen_parameters_do_not_travel() -> None:
    """Only what requires a gradient is in a bucket."""

    def worker(world: Mesh) -> int:
        model = Net()
        model.first.requires_grad_(False)
        optimizer = wrap(world, "ddp", model, sgd)
        before = counted(world)["sent"]
        train_step(optimizer, world.rank, 1)
        assert model.first.grad is None
        return counted(world)["sent"] - before

    assert run(worker, 2) == [4 * (11 + 77) + 32] * 2


def test_step_without_a_backward_pass_is_a_reduction_of_nothing() -> None:
    """No gradient anywhere: weights stay (plain SGD), nobody hangs, and the next step works."""

    def worker(world: Mesh) -> str:
        model = Net()
        optimizer = wrap(world, "ddp", model, sgd)
        before = weights(model)
        optimizer.step()
        assert torch.equal(before, weights(model))
        optimizer.zero_grad()
        train_step(optimizer, world.rank, 1)
        return bits(weights(model))

    assert len(set(run(worker, 3))) == 1


@pytest.mark.parametrize("seed", range(8))
def test_many_buckets_never_charge_more_than_a_step(seed: int) -> None:
    """A step costs step_seconds in all, however its computation is charged: shares that add up to 1 + 1e-16 once made
    a negative charge.
    """
    sizes = torch.randint(1, 60, (17,), generator=torch.Generator().manual_seed(seed)).tolist()

    def worker(world: Mesh) -> float:
        model = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])
        optimizer = wrap(world, "ddp", model, sgd, bucket_megabytes=1e-6)
        for _ in range(3):
            sum((p * p).sum() for p in model).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return world.transport.now()

    assert run(worker, 1, step_seconds=0.3)[0] == pytest.approx(0.9, rel=1e-12)


def test_a_checkpoint_between_backward_and_step_is_refused() -> None:
    """Gradients under way cannot be saved: one line says what to do."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "ddp", Net())
        loss_of(optimizer.model, world.rank, 1).backward()
        with pytest.raises(ValueError, match=r"call state_dict\(\) after step\(\)"):
            optimizer.state_dict()
        optimizer.step()
        optimizer.state_dict()

    run(worker, 2)


def test_bucket_options_are_checked() -> None:
    """Refusals name the key and the mend."""

    def worker(world: Mesh, **options: Any) -> None:
        wrap(world, "ddp", Net(), **options)

    with pytest.raises(ValueError, match="bucket_megabytes = 0"):
        run(lambda world: worker(world, bucket_megabytes=0), 1)
    with pytest.raises(ValueError, match="unknown codec 'int3'"):
        run(lambda world: worker(world, codec="int3"), 1)

    def many(world: Mesh) -> None:
        model = nn.ParameterList([nn.Parameter(torch.ones(10)) for _ in range(300)])
        wrap(world, "ddp", model, sgd, bucket_megabytes=1e-6)

    with pytest.raises(ValueError, match=r"300 buckets are too many.*raise bucket_megabytes"):
        run(many, 1)

"""DCT-DP: numbers that can be calculated by hand, on vectors and on a small model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.codecs.sparse import indices_bytes
from isles.comm.mesh import Mesh
from tests.replicas.workers import LINKS, Net, adamw, batch, bits, counted, sgd, train_step, weights

SIZES = (400, 30, 250)  # tensors; with sparsity 0.9 thresholds are to let 40, 3 and 25 entries through
SAVED = (40, 3, 25)
ALL = {"exclude_below": 0, "sparsity": 0.9}


class Vectors(nn.Module):
    """Weights that are zero at first: with SGD of rate 1 they are minus the sum of all means."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes])


def run(worker: Any, workers: int = 1, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, links=LINKS, args=args)


def wrapped(world: Mesh, model: nn.Module, lr: float = 1.0, **options: Any) -> Any:
    return isles.DCTDP(model, sgd(model, lr), world.outer, **{**ALL, **options})


def step_with(optimizer: Any, gradients: list[Tensor]) -> list[Tensor]:
    """One step on these gradients; the means."""
    for parameter, gradient in zip(optimizer.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    means = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in optimizer.parameters]
    optimizer.zero_grad()
    return means


def drawn(rank: int, step: int, sizes: tuple[int, ...] = SIZES, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return [scale * torch.randn(size, generator=draw) for size in sizes]


def residuals(optimizer: Any) -> list[Tensor]:
    """E of every parameter, in the order of the parameters."""
    parts = [part for bucket in optimizer.buckets for part in bucket.split(bucket.reduction.residual)]
    return [part.clone() for part in reversed(parts)]


def saved(optimizer: Any) -> list[Any]:
    """Everything that a step may change."""
    states = [bucket.reduction.state_dict() for bucket in optimizer.buckets]
    return [weights(optimizer.model), *residuals(optimizer), *(state["thresholds"] for state in states)]


@pytest.mark.parametrize("megabytes", [25.0, 3e-4])
def test_no_sparsity_is_ddp_to_the_bit(megabytes: float) -> None:
    """Oracle 1."""

    def worker(world: Mesh, name: str, options: dict[str, Any]) -> Any:
        method, model = isles.method(name), Net()
        optimizer = method(model, adamw(model), world.outer, bucket_megabytes=megabytes, max_norm=0.5, **options)
        losses = [train_step(optimizer, world.rank, step) for step in range(1, 9)]
        return losses, bits(weights(optimizer.model)), counted(world)

    options = {"sparsity": 0.0, "warmup_dense_steps": 0}
    assert run(worker, 3, "dct-dp", options) == run(worker, 3, "ddp", {})
    whole = {"warmup_dense_steps": 8}  # and so are steps whose gradients are sent whole
    assert run(worker, 3, "dct-dp", whole) == run(worker, 3, "ddp", {})


@pytest.mark.parametrize("feedback", ["local", "none"])
def test_what_was_put_in_is_sent_or_saved(feedback: str) -> None:
    """Oracle 2, with integers, so exactly: sum of all gradients = 4 x sum of the means + what the workers still hold.
    Without error feedback it fails.
    """

    def worker(world: Mesh) -> Any:
        optimizer = wrapped(world, Vectors(*SIZES), error_feedback=feedback, bucket_megabytes=1e-3)
        put_in = torch.zeros(sum(SIZES))
        for step in range(1, 21):
            gradients = [(100 * g).round() for g in drawn(world.rank, step)]
            step_with(optimizer, gradients)
            put_in += torch.cat(gradients)
        held = torch.cat(residuals(optimizer)) if feedback == "local" else torch.zeros(sum(SIZES))
        return put_in, held, weights(optimizer.model)

    results = run(worker, 4)
    put_in = sum(result[0] for result in results)
    found = sum(result[1] for result in results) - 4 * results[0][2]
    assert torch.equal(found, put_in) == (feedback == "local")
    assert all(torch.equal(result[2], results[0][2]) for result in results)


def test_new_thresholds_send_exactly_the_largest() -> None:
    """Oracle 3: with threshold_interval = 1 the mean of one worker is the top K of g + E, E the rest."""

    def worker(world: Mesh) -> None:
        optimizer = wrapped(world, Vectors(*SIZES), threshold_interval=1)
        before = [torch.zeros(size) for size in SIZES]
        for step in range(1, 6):
            gradients = drawn(0, step)
            sent = step_with(optimizer, gradients)
            for mean, gradient, old, new, count in zip(
                sent, gradients, before, residuals(optimizer), SAVED, strict=True
            ):
                h = gradient + old
                indices = h.abs().topk(count).indices
                assert torch.equal(mean, torch.zeros_like(h).scatter_(0, indices, h[indices]))
                assert torch.equal(new, h.scatter(0, indices, 0.0))
            before = residuals(optimizer)
        assert optimizer.gauges()["density"] == pytest.approx(sum(SAVED) / sum(SIZES))

    run(worker)


@pytest.mark.parametrize(("options", "renewed"), [({}, [1, 6, 11]), ({"warmup_steps": 3}, [1, 2, 3, 6, 11])])
def test_thresholds_are_renewed_when_due(options: dict[str, Any], renewed: list[int]) -> None:
    """Oracle 4: at the first step and every 5 after it, in each of warmup_steps, and at no other; also behind steps
    that are sent whole.
    """

    def worker(world: Mesh) -> None:
        for whole in (0, 2):
            given = {"density_guard": float("inf"), "warmup_dense_steps": whole, **options}
            optimizer = wrapped(world, Vectors(*SIZES), threshold_interval=5, **given)
            totals = []
            for step in range(1, 16 + whole):
                step_with(optimizer, drawn(0, step, scale=step))
                totals.append(optimizer.gauges()["threshold_renewals"])
            changed = [
                step for step in range(1, 16 + whole) if totals[step - 1] > (totals[step - 2] if step > 1 else 0)
            ]
            assert changed == [step + whole for step in renewed] and totals[-1] == len(renewed)

    run(worker)


@pytest.mark.parametrize("guard", [2.0, 4.0])
def test_the_density_stays_within_the_guard(guard: float) -> None:
    """What is held back grows, and gradients grow and shrink a thousandfold: without a guard the old threshold sends
    everything, or nothing; with it never more than `guard` times the target, nor less than a part of it.
    """

    def worker(world: Mesh, guard: float) -> list[float]:
        optimizer = wrapped(world, Vectors(2000, 500), density_guard=guard)
        found = []
        for step in range(1, 61):
            drift = torch.randn(2500, generator=torch.Generator().manual_seed(7))  # most is held back, and adds up
            scale = {20: 1000.0, 40: 1e-3}.get(step // 20 * 20, 1.0)
            parts = [
                scale * (g + d) for g, d in zip(drawn(0, step, (2000, 500)), drift.split([2000, 500]), strict=True)
            ]
            step_with(optimizer, parts)
            found.append(optimizer.gauges()["density"])
        return found

    guarded, free = run(worker, 1, guard)[0], run(worker, 1, float("inf"))[0]
    assert 0.1 / guard <= min(guarded) and max(guarded) <= 0.1 * guard
    assert max(free) > 0.9


def test_rows_that_were_never_seen_are_not_sent() -> None:
    """tau = 0: with fewer gradients that are not zero than K, these are sent and no zeros; where more come, the
    threshold is renewed. A gradient of zeros sends a header alone (oracle 9).
    """

    def worker(world: Mesh) -> list[int]:
        optimizer = wrapped(world, Vectors(1000))
        sent = []
        for rows in (5, 9, 0, 1000, 20):
            before = counted(world)["sent"]
            gradient = torch.zeros(1000)
            gradient[:rows] = 1 + torch.rand(rows, generator=torch.Generator().manual_seed(rows))
            step_with(optimizer, [gradient])
            sent.append(counted(world)["sent"] - before)
        return sent

    def message(count: int) -> int:
        return 40 + 8 + 4 * count + min(indices_bytes(form, count, 1000) for form in ("blocks", "bitmap"))

    # 1,000 entries of which the 100 largest go; then what is held back lets through many by the same threshold.
    five, nine, none, hundred, last = run(worker, 2)[0]
    assert [five, nine, none, hundred] == [message(5), message(9), 40, message(100)]
    assert last <= message(400)


@pytest.mark.long
def test_one_worker_finds_the_bottom_only_with_feedback() -> None:
    """Oracle 5: a quadratic of 50 unknowns, the largest 2 of its gradient sent in each step: with error feedback the
    error goes to nothing; without it, after as many steps, it is a thousand times larger.
    """

    def worker(world: Mesh, feedback: str) -> float:
        draw = torch.Generator().manual_seed(1)
        model, target = Vectors(50, dtype=torch.float64), torch.randn(50, generator=draw, dtype=torch.float64)
        curvature = torch.logspace(0, 1, 50, dtype=torch.float64)
        optimizer = wrapped(world, model, 0.01, sparsity=0.96, threshold_interval=10, error_feedback=feedback)
        for _ in range(1000):
            (curvature * (model.parts[0] - target).square()).sum().div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float((model.parts[0] - target).norm().detach() / target.norm())

    with_feedback, without = (run(worker, 1, feedback)[0] for feedback in ("local", "none"))
    assert with_feedback < 1e-3 and without > 20 * with_feedback


@pytest.mark.parametrize(
    "options",
    [
        *(
            {},
            {"indices": "bitmap"},
            {"indices": "indices"},
            {"indices": "blocks"},
            {"codec": "bf16"},
            {"codec": "int8"},
        ),
        *({"exclude_below": 100}, {"sparsity": 0.5, "codec": "int4", "exclude_below": 31}),
    ],
    ids=str,
)
def test_bytes_are_the_formulas(options: dict[str, Any]) -> None:
    """Oracle 7: to each other worker 40 for the header, 8 for form and count, the values in their codec (those of small
    tensors too), and the places; whatever the threshold lets through.
    """

    def worker(world: Mesh) -> None:
        optimizer = wrapped(world, Vectors(*SIZES), **options)
        exclude, n = optimizer.config.exclude_below, sum(SIZES)
        small = sum(size for size in SIZES if size < exclude)
        for step in range(1, 8):
            before = counted(world)["sent"]
            step_with(optimizer, drawn(world.rank, step))
            picked = round(optimizer.gauges()["density"] * (n - small))
            values = {
                "none": 4 * (picked + small),
                "bf16": 2 * (picked + small),
                "int8": picked + small + 4 * -(-(picked + small) // 256),
                "int4": -(-(picked + small) // 2) + 4 * -(-(picked + small) // 64),
            }[optimizer.config.codec]
            lengths = {"indices": 4 * picked, "blocks": 2 * picked + 4, "bitmap": -(-n // 8)}
            form = optimizer.config.indices
            indices = min(lengths.values()) if form == "auto" else lengths[form]
            assert counted(world)["sent"] - before == 2 * (40 + 8 + values + indices)
            if step == 1:  # new thresholds: as planned
                assert optimizer.schedule(1)[0].bytes_sent[world.rank] == counted(world)["sent"] - before

    run(worker, 3)


def test_what_a_codec_loses_of_the_values_is_saved() -> None:
    """E is what the rounded values leave: two workers' gradients, means and residuals add up, to rounding."""

    def worker(world: Mesh, codec: str) -> tuple[Tensor, Tensor, Tensor]:
        optimizer = wrapped(world, Vectors(*SIZES), codec=codec, exclude_below=100)
        for step in range(1, 11):
            step_with(optimizer, drawn(world.rank, step))
        put_in = sum(torch.cat(drawn(world.rank, step)) for step in range(1, 11))
        return put_in, torch.cat(residuals(optimizer)), weights(optimizer.model)  # type: ignore[return-value]

    for codec in ("bf16", "int4"):
        first, second = run(worker, 2, codec)
        torch.testing.assert_close(first[1] + second[1] - 2 * first[2], first[0] + second[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"warmup_dense_steps": 99}, {"error_feedback": "none"}], ids=str)
def test_the_model_learns_and_all_workers_stay_equal(options: dict[str, Any]) -> None:
    """On `Net`, three workers: losses fall, weights are equal to the bit."""

    def worker(world: Mesh) -> tuple[float, float, str]:
        optimizer = wrapped(world, Net(), 0.1, threshold_interval=20, **options)
        losses = [train_step(optimizer, world.rank, step, rows=16) for step in range(1, 61)]
        return losses[0], sum(losses[-5:]) / 5, bits(weights(optimizer.model))

    results = run(worker, 3)
    assert len({hashed for _, _, hashed in results}) == 1
    assert all(last < 0.8 * first for first, last, _ in results)


def test_strided_and_frozen_parameters() -> None:
    """What is transposed in memory, or wants no gradient, is as with ddp."""

    def worker(world: Mesh, name: str, options: dict[str, Any]) -> str:
        model = Net()
        model.first = nn.Parameter(model.first.data.T.contiguous().T)
        model.bias.requires_grad_(False)
        optimizer = isles.method(name)(model, sgd(model), world.outer, **options)
        for step in range(1, 4):
            x, y = batch(world.rank, step)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(weights(model))

    everything = {"sparsity": 1e-9, "exclude_below": 0, "threshold_interval": 1}  # through the thresholds, all of it
    assert run(worker, 2, "dct-dp", everything) == run(worker, 2, "ddp", {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sparsity": 1.0}, "sparsity = 1.0: choose 0 <= sparsity < 1"),
        ({"sparsity": -0.1}, "sparsity = -0.1"),
        ({"threshold_interval": 0}, "threshold_interval = 0: choose 1 or more"),
        ({"density_guard": 1.0}, "density_guard = 1.0: choose a number above 1"),
        ({"density_guard": float("nan")}, "density_guard = nan"),
        ({"warmup_dense_steps": -1}, "warmup_dense_steps = -1: choose 0 or more"),
        ({"indices": "bitmaps"}, "unknown indices 'bitmaps': did you mean 'bitmap'?"),
        ({"codec": "topk:64"}, "unknown codec 'topk:64'"),
        ({"error_feedback": "global"}, "unknown error_feedback 'global'"),
        ({"sparsity": 0.0, "codec": "bf16"}, 'use method = "ddp" with codec bf16'),
        ({"bucket_megabytes": 0}, "bucket_megabytes = 0"),
    ],
)
def test_mistakes_are_one_line_with_the_hint(options: dict[str, Any], says: str) -> None:
    """ValueError names the key, the value and what to choose."""
    with pytest.raises(ValueError) as reported:
        run(lambda world: isles.DCTDP(model := Net(), sgd(model), world.outer, **options))
    assert says in str(reported.value) and "\n" not in str(reported.value)


@pytest.mark.parametrize(
    ("options", "workers", "says"),
    [
        ({}, 2, ["exclude_below = 4096 sends every tensor of the model whole", "1.0 times the bytes of ddp"]),
        ({"exclude_below": 0, "sparsity": 0.8}, 8, ["sends 1.1 times the bytes of ddp: raise sparsity"]),
        ({"exclude_below": 0, "error_feedback": "none"}, 2, ['choose error_feedback = "local"']),
        ({"exclude_below": 0}, 2, []),
        ({"sparsity": 0.0}, 2, []),
    ],
)
def test_advice(options: dict[str, Any], workers: int, says: list[str]) -> None:
    """Settings that save nothing, or lose something for good, are told."""
    notices = run(lambda world: isles.DCTDP(model := Net(), sgd(model), world.outer, **options).advise(10), workers)[0]
    assert len(notices) == len(says) and all(message in notice for message, notice in zip(says, notices, strict=True))

"""Error feedback: conservation, the 1/T law, and rounds that are skipped because somebody's share is not finite."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.codecs import codec
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean, sent_bytes
from isles.comm.mesh import Mesh
from tests.covers import cover
from tests.replicas.workers import LINKS, Net, sgd, train_step, weights, wrap

CODECS = ["none", "bf16", "fp16", "int8", "int4", "fp4", "sign", "topk:40", "dct_topk:40", "topk:40+int4", "randk:0.01"]


def noise(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("name", "workers"), cover(CODECS, (1, 2, 3, 4, 7), each=1))
def test_residuals_and_mean_hold_what_was_put_in(name: str, workers: int) -> None:
    """Sum of residuals + N mean = sum of buffers, to 1e-6 of their norm, whatever is encoded twice; all members get
    the same mean; bytes are as promised.
    """
    n = 9001

    def worker(world: Mesh) -> tuple[Tensor, Tensor]:
        buffer = noise(n, world.rank)
        residual = buffer.clone()
        form, group = codec(name), world.outer
        before = world.world.traffic["outer"].bytes_sent
        call = group.call(round=3)
        assert group.start(mean(call, buffer, form, Stamp(1), residual=residual)).wait()
        counted = world.world.traffic["outer"].bytes_sent - before
        assert counted == sent_bytes(n, torch.float32, form, group.size, group.rank)
        return buffer, residual

    results = isles.run_virtual(worker, workers, links=LINKS)
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    put_in = torch.stack([noise(n, rank) for rank in range(workers)]).double().sum(0)
    held = sum(residual.double() for _, residual in results) + workers * results[0][0].double()
    assert float((held - put_in).norm() / put_in.norm()) < 1e-6


BOUNDS = {"topk:40": 0.25, "int4": 0.002, "sign": 0.07, "fp4": 0.004, "powersgd:2": 0.1}


QUICK = {("int4", "global")}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.long)
        for pair in itertools.product(BOUNDS, ("local", "global"))
    ],
)
def test_feedback_follows_the_law_of_1_over_t(name: str, form: str) -> None:
    """A constant outer gradient: the mean of what the anchor got in T rounds comes to it like 1/T, and without feedback
    it does not come nearer at all.
    """
    n, target = 4096, noise(4096, 5)

    def errors(feedback: str) -> list[float]:
        def worker(world: Mesh) -> list[float]:
            model = nn.Module()
            model.w = nn.Parameter(torch.zeros(64, n // 64))
            options = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": name, "error_feedback": feedback}
            optimizer: Any = isles.DiLoCo(model, sgd(model, 1.0), world.outer, sync_every=1, **options)
            found = []
            for step in range(1, 201):
                apart = (
                    0.5 if form == "local" else 0.0
                )  # a global residual also keeps what tells a worker from the mean
                model.w.grad = target.view(64, -1) * (1 - apart if world.rank else 1 + apart)
                optimizer.step()
                if step in (50, 200):
                    found.append(float((optimizer.fragments[0].anchor / -step - target).norm() / target.norm()))
            return found

        return isles.run_virtual(worker, 2, links=LINKS)[0]

    early, late = errors(form)
    without = errors("none")
    assert late < BOUNDS[name] and late < 0.55 * early
    assert without[1] > 0.9 * without[0] > 3 * late


def test_a_global_residual_keeps_how_far_a_worker_is_from_the_mean() -> None:
    """Outer gradients v and -v, whose mean is 0: after t rounds it is t v, and `feedback_ratio` is t. A local one is
    what int8 loses of one round.
    """

    def worker(world: Mesh, form: str) -> list[float]:
        model = nn.ParameterList([torch.zeros(64)])
        options = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "int8", "error_feedback": form}
        optimizer = isles.DiLoCo(model, sgd(model, 1.0), world.outer, sync_every=1, **options)
        ratios = []
        for _ in range(10):
            model[0].grad = noise(64, 5) * (1 - 2 * world.rank)
            optimizer.step()
            ratios.append(optimizer.gauges()["feedback_ratio"])
        return ratios

    for ratios in isles.run_virtual(worker, 2, links=LINKS, args=("global",)):
        assert ratios == pytest.approx(range(1, 11), rel=0.01)
    assert max(map(max, isles.run_virtual(worker, 2, links=LINKS, args=("local",)))) < 0.02


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"codec": "int4"}, {"codec": "powersgd:1+int8"}])
def test_a_share_that_is_not_finite_is_skipped_by_all(options: dict[str, Any], bad: float) -> None:
    """Worker 1's weights break once: nobody's anchor moves in that round, everybody counts it, residuals begin anew,
    and the next rounds are finite everywhere.
    """

    def worker(world: Mesh) -> tuple[int, Tensor]:
        model = Net()
        given = {"sync_every": 3, "codec": "int8", "error_feedback": "local", **options}
        optimizer: Any = wrap(world, "diloco", model, sgd, **given)
        for step in range(1, 13):
            before = optimizer.fragments[0].anchor.clone()
            if step == 6 and world.rank == 1:
                model.bias.data[3] = bad
            train_step(optimizer, world.rank, step)
            if step == 6:
                assert torch.equal(optimizer.fragments[0].anchor, before) and torch.equal(weights(model), before)
                assert not optimizer.fragments[0].residual.any()
            elif step % 3 == 0:
                assert not torch.equal(optimizer.fragments[0].anchor, before)
        return optimizer.skipped, optimizer.fragments[0].anchor

    for skipped, anchor in isles.run_virtual(worker, 3, links=LINKS):
        assert skipped == 1 and anchor.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eager", {"outer_momentum": 0.0}),
        ("eager", {"outer_momentum": 0.0, "outer_delay": 2}),
        ("dilocox", {"rank": 0, "start_compress": 0}),
        ("streaming-diloco", {"fragments": "whole", "overlap_steps": 2}),
    ],
)
def test_a_skipped_round_of_late_answers_leaves_nothing_behind(name: str, options: dict[str, Any]) -> None:
    """Worker 1's weights break once: they are whole again at the sending, not at the landing; one round is skipped;
    drained, all workers hold the same (eager: shares of that round that counted as fresh are taken back).
    """

    def worker(world: Mesh) -> Tensor:
        model = Net(dtype=torch.float64)
        given = {"codec": "none", "error_feedback": "local", **options}
        optimizer: Any = wrap(world, name, model, sgd, **given, sync_every=3)
        for step in range(1, 19):
            if step == 6 and world.rank == 1:
                model.bias.data[3] = float("nan")
            train_step(optimizer, world.rank, step)
            assert step < 6 or weights(model).isfinite().all()
        optimizer.finish()
        assert optimizer.skipped == 1
        return weights(model)

    one, other = isles.run_virtual(worker, 2, links=LINKS)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "diloco",
        "streaming-diloco",
        "delayed",
        "eager",
        "fedavg",
        "fedadam",
        "fedyogi",
        "slowmo",
        "sparseloco",
        "dilocox",
    ],
)
def test_a_lossless_codec_leaves_feedback_nothing(name: str) -> None:
    """With codec none the residual is zero after every landing and the run is the one without feedback, to the bit."""

    def worker(world: Mesh, form: str) -> list[float]:
        options: dict[str, Any] = {"codec": "none", "sync_every": 3, "error_feedback": form}
        options |= {"fragments": "whole"} if name in ("streaming-diloco", "delayed", "eager") else {}
        options |= {"rank": 0, "start_compress": 0} if name == "dilocox" else {}
        options |= {"feedback_decay": 1.0} if name == "sparseloco" else {}
        optimizer: Any = wrap(world, name, Net(), **options)
        losses = [train_step(optimizer, world.rank, step) for step in range(1, 14)]
        optimizer.finish()
        residual = optimizer.fragments[0].residual
        assert residual is None or not residual.any()
        return losses

    first, second = (isles.run_virtual(worker, 2, links=LINKS, args=(form,)) for form in ("none", "local"))
    assert first == second

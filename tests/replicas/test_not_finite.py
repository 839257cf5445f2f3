"""Numbers that are not finite: who has them is named and heals itself, and what the others do meanwhile."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.codecs import codec
from isles.comm.codecs.lowrank import LowRank
from isles.comm.collectives.averaging import averaging
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.errors import Refused, WorkerFailed
from isles.comm.mesh import Mesh
from tests.covers import share
from tests.gloo import run_gloo
from tests.replicas.workers import HALVES, LINKS, Net, adamw, held_out, loss_of, sgd, train_step, weights, wrap

CALM: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.0}  # so short a run wants none
OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "localsgd": ("localsgd", {}),
    "diloco": ("diloco", CALM),
    "diloco, feedback": ("diloco", {**CALM, "codec": "int4", "error_feedback": "local"}),
    "diloco, low rank": ("diloco", {**CALM, "codec": "powersgd:2", "error_feedback": "local"}),
    "streaming, feedback": (
        "streaming-diloco",
        {**CALM, "fragments": HALVES, "overlap_steps": 2, "codec": "int4", "error_feedback": "local"},
    ),
    "delayed": ("delayed", {**CALM, "outer_lr": 0.4}),
    "eager": ("eager", {**CALM, "outer_lr": 0.4}),
    "dilocox": ("dilocox", {**CALM, "rank": 2, "start_compress": 1, "window": 0, "error_feedback": "none"}),
    "noloco": ("noloco", {}),
    "noloco, theta only": ("noloco", {"exchange": "theta_only"}),
    "fedadam": ("fedadam", {}),
    "sparta": ("sparta", {"fraction": 0.3}),
    "nobody": ("custom", {"mixing": "nobody", "rule": "sgd"}),
}
SPARES = [name for name in OUTER if name not in ("eager", "sparta", "nobody")]


def run(worker: Any, workers: int = 3, *args: Any, **options: Any) -> Any:
    return isles.run_virtual(worker, workers, links=LINKS, args=args, **options)


def once_not_finite(world: Mesh, name: str, options: dict[str, Any], bad: float = torch.nan) -> dict[str, Any]:
    """27 steps in rounds of 3; the gradient of worker 1 in step 8 is `bad` everywhere, as behind a loss of it."""
    method, own = OUTER[name]
    model = Net()
    optimizer: Any = isles.method(method)(model, adamw(model), world.outer, **{"sync_every": 3, **own, **options})
    before, anchors = held_out(model), []
    for step in range(1, 28):
        loss = loss_of(model, world.rank, step)
        (loss * bad if step == 8 and world.rank == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        anchors.append(torch.cat([fragment.anchor for fragment in optimizer.fragments]).clone())
    optimizer.finish()
    reported = {"skipped": optimizer.skipped, "healed": optimizer.healed, "loss": (before, held_out(model))}
    return reported | {"weights": weights(model), "anchors": anchors, "agrees": optimizer.agrees}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", share(OUTER, 0, 6, ("diloco", "noloco")))
def test_the_loss_keeps_falling(name: str, bad: float) -> None:
    """By default that round is skipped, one line names the worker, which alone heals; later rounds
    count: anchors move, agreeing methods end with the same bits, everything is finite.
    """
    if bad == torch.inf and name not in ("diloco", "noloco"):
        return
    with pytest.warns(UserWarning, match=r"what worker 1 learned up to inner step \d+ is not finite: round \d"):
        results = run(once_not_finite, 3, name, {}, bad)
    for rank, own in enumerate(results):
        assert own["weights"].isfinite().all()
        assert own["loss"][1] < 0.85 * own["loss"][0]
        assert own["healed"] == (rank == 1)
        assert own["skipped"] <= 1 and (own["skipped"] == 1 or name.startswith("noloco") or name == "nobody")
        assert not torch.equal(own["anchors"][12], own["anchors"][-1])
    assert results[1]["skipped"] == 1
    if results[0]["agrees"]:
        assert all(torch.equal(own["weights"], results[0]["weights"]) for own in results)


@pytest.mark.parametrize("name", share(SPARES, 1, 3))
def test_it_may_be_left_out(name: str) -> None:
    """Nobody skips; the others' rounds go on without that share."""
    with pytest.warns(UserWarning, match=r"what worker 1 learned .* the mean is that of the others"):
        results = run(once_not_finite, 3, name, {"on_broken": "leave out"})
    for rank, own in enumerate(results):
        assert own["weights"].isfinite().all() and own["loss"][1] < 0.85 * own["loss"][0]
        assert (own["skipped"], own["healed"]) == (0 if name != "noloco" else own["skipped"], int(rank == 1))
    if results[0]["agrees"]:
        assert all(torch.equal(own["weights"], results[0]["weights"]) for own in results)


@pytest.mark.parametrize("workers", [3, 4])
def test_what_is_left_is_divided_by_who_is_left(workers: int) -> None:
    """DiLoCo by hand: the anchor moves by the mean outer gradient of all but worker 1, who starts from it too."""

    def worker(world: Mesh) -> tuple[Tensor, Tensor, Tensor]:
        model = Net()
        options = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "on_broken": "leave out"}
        optimizer: Any = isles.DiLoCo(model, sgd(model), world.outer, **options)
        start, twin = weights(model), copy.deepcopy(model)
        for step in (1, 2):  # what this worker would have sent
            loss_of(twin, world.rank, step).backward()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                    parameter.grad = None
        for step in (1, 2):
            if world.rank == 1 and step == 2:
                model.bias.data[3] = torch.nan
            train_step(optimizer, world.rank, step)
        return start, start - weights(twin), weights(model)

    with pytest.warns(UserWarning, match="worker 1"):
        results = run(worker, workers)
    left = [own for rank, (_, own, _) in enumerate(results) if rank != 1]
    expected = results[0][0] - torch.stack(left).mean(0)
    for _, _, landed in results:
        torch.testing.assert_close(landed, expected, rtol=0, atol=1e-6)
        assert torch.equal(landed, results[0][2])


def test_all_are_broken() -> None:
    """There is no mean of nobody: the round is skipped, whatever the setting."""

    def worker(world: Mesh) -> tuple[int, bool]:
        model = Net()
        optimizer: Any = isles.DiLoCo(model, adamw(model), world.outer, sync_every=2, on_broken="leave out")
        for step in range(1, 7):
            if step == 4:
                model.first.data.fill_(torch.inf)
            train_step(optimizer, world.rank, step)
        return optimizer.skipped, bool(weights(model).isfinite().all())

    with pytest.warns(UserWarning, match="workers 0, 1"):
        assert run(worker, 2) == [(1, True), (1, True)]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("eager", {}, "could not be taken back"),
        ("sparta", {}, "keeps what did not travel"),
        ("custom", {"mixing": "nobody"}, "no worker to leave out"),
    ],
)
def test_where_nobody_can_be_left_out(name: str, options: dict[str, Any], says: str) -> None:
    def worker(world: Mesh) -> None:
        model = Net()
        with pytest.raises(ValueError, match=f'on_broken = "leave out": .*{says}.*choose "skip"'):
            isles.method(name)(model, adamw(model), world.outer, on_broken="leave out", **options)
        with pytest.raises(ValueError, match="on_broken"):
            isles.method(name)(model, adamw(model), world.outer, on_broken="ignore", **options)

    run(worker, 1)


def test_healed_is_as_fresh() -> None:
    """Weights from the anchor and no moments: the steps after healing are those of an inner optimizer made anew."""

    def worker(world: Mesh, make: Any) -> None:
        model = Net()
        optimizer = isles.DiLoCo(model, make(model), world.outer, sync_every=3)
        for step in range(1, 4):
            if step == 3 and world.rank == 1:
                model.bias.data[0] = torch.nan
            train_step(optimizer, world.rank, step)
        anew = copy.deepcopy(model)
        fresh = make(anew)
        for step in (4, 5):
            train_step(optimizer, world.rank, step)
            loss_of(anew, world.rank, step).backward()
            fresh.step()
            fresh.zero_grad()
        assert torch.equal(weights(model), weights(anew)) == (world.rank == 1)

    makers = (
        adamw,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1),
    )
    for make in makers:
        with pytest.warns(UserWarning, match="worker 1"):
            run(worker, 2, make)


def test_an_island_heals_as_one() -> None:
    """Two islands of two under DDP; both workers of island 1 have the weights that broke: afterwards all four agree."""

    def worker(world: Mesh) -> Any:
        mesh = isles.mesh(outer=2, inner=2)
        model = Net()
        island = isles.DDP(model, adamw(model), mesh.inner)
        optimizer: Any = isles.DiLoCo(model, island, mesh.outer, sync_every=3)
        for step in range(1, 13):
            if step == 6:
                last = loss_of(model, world.rank, step)
                last.backward()
                optimizer.inner.zero_grad()
                if mesh.outer.rank == 1:
                    model.first.data[0, 0] = torch.nan  # a row that one of the two has for its share
            loss = loss_of(model, world.rank, step)
            (loss if step != 6 else sum(p.sum() for p in model.parameters()) * 1e-3).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        return weights(model), optimizer.healed, mesh.outer.rank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run(worker, 4)
    for own, healed, island in results:
        assert own.isfinite().all() and torch.equal(own, results[0][0])
        assert healed == (island == 1)


# Gradients.


def test_a_gradient_method_that_keeps_nothing_names_the_worker() -> None:
    """Plain ddp: on all workers, before anybody steps."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, "ddp", model)
        for step in range(1, 4):
            loss = loss_of(model, world.rank, step)
            (loss * torch.nan if step == 2 and world.rank == 1 else loss).backward()
            before = weights(model)
            try:
                optimizer.step()
            finally:
                assert torch.equal(before, weights(model)) == (step == 2)
            optimizer.zero_grad()

    errors = run(worker, 3, return_errors=True)
    for error in errors:
        assert isinstance(error, WorkerFailed) and error.rank == 1
        assert "its gradient is not finite at inner step 2" in str(error)


@pytest.mark.parametrize("name", ["ddp, int4", "ddp, low rank", "dct-dp"])
def test_a_careful_one_names_it_and_goes_on(name: str) -> None:
    def worker(world: Mesh) -> tuple[int, bool]:
        model = Net()
        optimizer: Any = wrap(world, name, model)
        for step in range(1, 5):
            loss = loss_of(model, world.rank, step)
            (loss * torch.nan if step == 2 and world.rank == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.skipped, bool(weights(model).isfinite().all())

    with pytest.warns(UserWarning, match="the gradient of worker 1 is not finite at inner step 2: all skip this step"):
        assert run(worker, 3) == [(1, True)] * 3


def test_ist_names_the_worker() -> None:
    """It keeps nothing that a broken subnet could go back to."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, "ist", model)
        for step in range(1, 4):
            loss = loss_of(model, world.rank, step)
            (loss * torch.nan if step == 3 and world.rank == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    errors = run(worker, 2, return_errors=True)
    assert isinstance(errors[1], WorkerFailed) and "worker 1 failed: its weights are not finite" in str(errors[1])


# The mean itself.


@pytest.mark.parametrize("name", ["none", "int8", "topk:40", "powersgd:2"])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("broken", [(0,), (1,), (0, 1)])
def test_a_mean_leaves_out_who_is_broken(name: str, workers: int, broken: tuple[int, ...]) -> None:
    """The same bits on all, also on those left out: the sum of the others in group order, by their number; what they
    put in is in the mean and their residuals.
    """
    n = 1200

    def worker(world: Mesh) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
        group = world.outer
        put_in = torch.randn(n, generator=torch.Generator().manual_seed(world.rank))
        if world.rank in broken:
            put_in.zero_()
        buffer, residual = put_in.clone(), put_in.clone()
        stamp, call = Stamp(1, broken=world.rank in broken), group.call(round=1)
        if name.startswith("powersgd"):
            means = averaging(LowRank(rank=2), [(30, 40)], torch.float32, torch.device("cpu"))
            protocol = means.mean(call, buffer, stamp, None, residual, 0)
        else:
            protocol = mean(call, buffer, codec(name), stamp, None, residual)
        return group.start(protocol).wait(), buffer, residual, put_in

    results = isles.run_virtual(worker, workers, links=LINKS)
    left = [rank for rank in range(workers) if rank not in broken]
    assert all(result[0] == tuple(left) for result in results)
    if not left:
        return
    assert all(torch.equal(result[1], results[0][1]) for result in results)
    held = sum(results[rank][2].double() for rank in left) + len(left) * results[0][1].double()
    expected = sum(results[rank][3].double() for rank in left)
    loose = 0.02 if name == "int8" else 1e-5  # what the second encoding loses in a broken member's shard
    assert float((held - expected).norm() / expected.norm()) < loose
    if name == "none":
        total = results[left[0]][3].clone()
        for rank in left[1:]:
            total += results[rank][3]
        assert torch.equal(results[0][1], total / len(left))


# Where nobody looks.


def stays(world: Mesh, name: str) -> bool:
    """Whether the numbers of a run are not finite after a gradient of worker 0 was not, and nothing was said."""
    model: Any = Net()
    optimizer = wrap(world, name, model, sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 7):
            loss = loss_of(model, world.rank, step)
            (loss * torch.nan if step == 2 and world.rank == 0 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return not weights(optimizer.consolidate()).isfinite().any()


def test_torchs_own_sums_are_not_looked_at() -> None:
    assert run_gloo(stays, args=("ddp, native",)) == [True, True]


def sharded(world: Mesh) -> str:
    model: Any = isles.shard(Net(), world.outer)
    optimizer = wrap(world, "fsdp", model, sgd)
    (loss_of(model, world.rank, 1) * (1.0 if world.rank else torch.nan)).backward()
    try:
        optimizer.step()
    except Refused as error:
        return str(error)
    return ""


def test_fsdp_on_cpus_names_the_worker() -> None:
    assert run_gloo(sharded) == ["", "worker 0's payload is refused: its gradient is not finite"]


@pytest.mark.parametrize("name", ["localsgd", "eager", "noloco", "diloco, int8"])
def test_one_worker_alone_is_not_looked_at(name: str) -> None:
    """By methods that exchange parameters: what it does is its inner optimizer's business."""
    assert run(stays, 1, name) == [True]


@pytest.mark.parametrize("name", ["ddp", "demo", "ist"])
def test_one_worker_alone_ends_too(name: str) -> None:
    """By the others, as in any world."""
    with pytest.raises(WorkerFailed, match=r"worker 0 failed: its .* not finite at inner step"):
        run(stays, 1, name)


@pytest.mark.parametrize("name", ["diloco, topk", "streaming, int4"])
def test_one_worker_alone_heals_where_something_is_held_back(name: str) -> None:
    """Error feedback looks at what it adds up; then the moments must go too, or each later round is skipped."""

    def worker(world: Mesh) -> tuple[bool, int, bool]:
        optimizer: Any = wrap(world, name, Net())
        for step in range(1, 13):
            loss = loss_of(optimizer.model, 0, step)
            (loss * torch.nan if step == 2 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.skipped > 0, optimizer.healed, bool(weights(optimizer.consolidate()).isfinite().all())

    with pytest.warns(UserWarning, match="what worker 0 learned up to inner step .* is not finite"):
        assert run(worker, 1) == [(True, 1, True)]

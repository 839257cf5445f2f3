"""Workers that count by their samples: the weighted mean, before it is encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.mesh import Mesh
from isles.plan.run_plan import plan_run
from isles.running.run import launch
from tests.replicas.workers import LINKS, Net, counted, sgd, train_step, weights, wrap
from tests.training.runs import Told, run, tiny, write_text

SAMPLES = {"weights": "samples"}


def trained(world: Mesh, name: str, shares: list[float] | None, options: dict[str, Any], steps: int = 7) -> Tensor:
    optimizer: Any = wrap(world, name, Net(), sgd, **options)
    if shares is not None:
        optimizer.weigh(shares[world.rank])
    for step in range(1, steps + 1):
        train_step(optimizer, world.rank, step)
    return weights(optimizer.consolidate())


WEIGHTED = [
    "localsgd",
    "diloco",
    "fedavg",
    "fedadam",
    "slowmo",
    "postlocal-sgd",
    "streaming-diloco",
    "delayed",
    "eager",
]


@pytest.mark.parametrize("name", WEIGHTED)
def test_equal_samples_are_equal_weights(name: str) -> None:
    """To the bit; and with a pair of which one has none, all follow the other alone."""
    plain = isles.run_virtual(trained, 3, links=LINKS, args=(name, None, {}))
    same = isles.run_virtual(trained, 3, links=LINKS, args=(name, [5, 5, 5], SAMPLES))
    assert all(torch.equal(one, other) for one, other in zip(plain, same, strict=True))
    if name in ("localsgd", "diloco", "fedavg", "fedadam", "slowmo", "postlocal-sgd"):
        alone = isles.run_virtual(trained, 1, links=LINKS, args=(name, None, {}))
        led = isles.run_virtual(trained, 2, links=LINKS, args=(name, [7, 0], SAMPLES))
        assert all(torch.equal(worker, alone[0]) for worker in led)


def test_the_mean_is_weighted() -> None:
    """One round: anchor - 0.5 (g_0 / 4 + 3 g_1 / 4) of outer gradients taken apart; int8 comes near."""
    options = {"sync_every": 3, "outer_lr": 0.5}
    start = weights(Net())
    apart = isles.run_virtual(
        lambda world: weights(_local(world)), 2, links=LINKS
    )  # three inner steps of each worker by itself
    g0, g1 = (start - live for live in apart)
    wanted = start - 0.5 * (g0 / 4 + 3 * g1 / 4)
    for codec, error in (("none", 1e-6), ("int8", 0.01)):
        got = isles.run_virtual(
            trained, 2, links=LINKS, args=("fedavg", [10, 30], {**SAMPLES, **options, "codec": codec}, 3)
        )
        assert torch.equal(got[0], got[1])
        assert float((got[0] - wanted).abs().max()) <= error * float((wanted - start).abs().max())


def _local(world: Mesh) -> Net:
    model = Net()
    inner = sgd(model)
    optimizer = isles.NoSync(model, inner, world.outer)
    for step in range(1, 4):
        train_step(optimizer, world.rank, step)
    return model


@pytest.mark.parametrize(
    ("name", "options", "reported"),
    [
        ("sparta", {}, "would be scaled too"),
        ("custom", {"mixing": "groups", "rule": "sgd"}, "no mean over all workers"),
        ("custom", {"mixing": "nobody", "rule": "sgd"}, "no mean over all workers"),
        ("noloco", {}, "unknown option of NoLoCo 'weights'"),
        ("ddp", {}, "unknown option of DDP 'weights'"),
        ("diloco", {"weights": "size"}, "unknown weights 'size'"),
    ],
)
def test_where_it_means_nothing_it_is_refused(name: str, options: dict[str, Any], reported: str) -> None:
    def worker(world: Mesh) -> None:
        with pytest.raises(ValueError, match=reported):
            wrap(world, name, Net(), **{**SAMPLES, **options})

    isles.run_virtual(worker, 2, links=LINKS)


def test_samples_must_be_reported() -> None:
    def worker(world: Mesh) -> None:
        optimizer: Any = wrap(world, "diloco", Net(), sgd, weights="samples")
        before = counted(world)
        with pytest.raises(ValueError, match=r"call optimizer\.weigh"):
            for step in range(1, 4):
                train_step(optimizer, world.rank, step)
        for samples in (-1, float("nan")):
            with pytest.raises(ValueError, match="number of samples"):
                optimizer.weigh(samples)
        sent = world.world.traffic["control"].bytes_sent
        with pytest.raises(ValueError, match="at least one"):
            optimizer.weigh(0)
        assert counted(world) == before and world.world.traffic["control"].bytes_sent == sent + 8  # to one other
        with pytest.raises(ValueError, match='for weights = "samples"'):
            wrap(world, "diloco", Net(), sgd).weigh(3)  # type: ignore[attr-defined]

    isles.run_virtual(worker, 2, links=LINKS)


def test_a_run_weighs_by_its_workers_shares(tmp_path: Path) -> None:
    """Of files of unequal length: other weights than with equal ones, the bytes that a dry run says, and the same bits
    after a stop; where shares are equal the user is told.
    """
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = write_text(tmp_path / "text.txt").read_text().splitlines()
    for number, last in enumerate((len(lines) // 8, len(lines) // 3, len(lines))):
        (folder / f"{number}.txt").write_text("\n".join(lines[:last]))
    split = ["data.split=by_file", "run.checkpoint_every=4"]
    config = tiny(folder, *split, "replicas.weights=samples", method="diloco", workers=3, steps=8)
    reported, out = Told(), tmp_path / "samples"
    made = run(config, out, reported)
    run(tiny(folder, *split, method="diloco", workers=3, steps=8), tmp_path / "equal")
    model = (out / "model.safetensors").read_bytes()
    assert model != (tmp_path / "equal" / "model.safetensors").read_bytes()
    assert made["bytes_sent_per_worker"] * 3 == sum(plan_run(config).bytes_sent)
    assert not any("equal shares" in notice for notice in reported.notices)
    for name in ("model.safetensors", "summary.json"):
        (out / name).unlink()
    launch(config, out, reported.lines.append, reported.notices.append, resume=4)
    assert (out / "model.safetensors").read_bytes() == model
    alike = tiny(folder / "2.txt", "replicas.weights=samples", method="diloco", steps=3)
    run(alike, tmp_path / "alike", reported)
    assert any("all workers have equal shares" in notice for notice in reported.notices)
    with pytest.raises(ValueError, match="shares are of single workers"):
        plan_run(tiny(folder / "2.txt", "replicas.weights=samples", "world.inner=2", method="diloco", workers=4))

"""DiLoCoX whole (arXiv 2506.21263): clusters of stages of workers, one round late, rank and H that adapt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isles
from isles.comm.mesh import Mesh
from isles.running.run import launch
from isles.training.config.presets import preset_file
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from tests.replicas.workers import LINKS, sgd
from tests.training.runs import Told, metrics, run, tiny, write_text

SHAPES = ((64, 48), (40, 56), (30,))  # of what the stages hold; the last one has nothing to compress
FIRST, EVERY, WINDOW, STEPS = 8, 16, 3, 150


class Part(nn.Module):
    """One tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


def adapting(world: Mesh, ranks: list[int]) -> tuple[list[tuple[int, int, int]], list[int], float, int]:
    """A stage whose gradients have so many ranks: (step, rank, H) of each round, ranks that its means used, its part of
    the matrices' entries, bytes that it sent to other stages for each round beside the first.
    """
    mesh = isles.mesh(stage=len(SHAPES))
    stage = mesh.coordinate.stage
    model = Part(SHAPES[stage])
    inner = isles.Plain(model, sgd(model, 0.01), peers=mesh.stage)
    options = {"rank": FIRST, "sync_every": EVERY, "start_compress": 0, "window": WINDOW, "codec": "none"}
    optimizer: Any = isles.DiLoCoX(model, inner, mesh.outer, **options)
    draw = torch.Generator().manual_seed(stage)
    left = torch.randn(SHAPES[stage][0], ranks[stage], generator=draw)
    right = torch.randn(ranks[stage], *SHAPES[stage][1:], generator=draw)
    log, before = [], world.transport.traffic["inner"].bytes_sent
    while optimizer.steps < STEPS:
        seed = optimizer.steps + 1000 * mesh.outer.rank
        scale = torch.randn(ranks[stage], generator=torch.Generator().manual_seed(seed))
        model.w.grad = (left * (3 + scale)) @ right
        rounds = optimizer.fragments[0].rounds
        optimizer.step()
        if optimizer.fragments[0].rounds > rounds:
            told = optimizer.gauges()
            log.append((optimizer.steps, int(told["rank"]), int(told["sync_every"])))
    bases = getattr(optimizer.fragments[0].averaging, "bases", [])
    assert all(basis.shape[1] == log[-1][1] for basis in bases) and len(bases) == (stage < 2)
    return log, world.transport.traffic["inner"].bytes_sent - before


def test_stages_take_the_same_rank_and_h() -> None:
    """Outer gradients of rank 2 at one stage, of 8 and more at the next, and of no matrix at the third: all six workers
    take the rank that both together want, weighted by their entries, and its H; 16 bytes to each other stage a round.
    """
    results = isles.run_virtual(adapting, 6, links=LINKS, args=((2, 30, 1),))
    (log, _), *others = results
    assert all(other == log for other, _ in others)
    entries = [rows * columns for rows, columns in SHAPES[:2]]
    both = -(-(2 * entries[0] + 8 * entries[1]) // sum(entries))
    assert log[:2] == [(EVERY, FIRST, EVERY), (2 * EVERY, both, EVERY * both // FIRST)]
    assert len({rank for _, rank, _ in log}) > 2 and min(rank for _, rank, _ in log) > 2, log
    assert [sent for _, sent in results] == [2 * 16 * (len(log) - 1)] * 6


def rounds(out: Path) -> list[tuple[int, int]]:
    """(rank, H) of each step of a run, after asserting that all of its workers had the same."""
    told: dict[int, set[tuple[int, int]]] = {}
    for line in metrics(out):
        told.setdefault(line["step"], set()).add((line["rank"], line["sync_every"]))
    assert all(len(one) == 1 for one in told.values()), told
    return [next(iter(told[step])) for step in sorted(told)]


def check_anchors(out: Path, step: int, workers: int, place: int) -> None:
    """Workers at the same of `place` places of their replicas hold equal anchors and momenta, and say so by hash."""
    for first in range(place):
        states = [Checkpoints(out).read_shard(step, rank) for rank in range(first, workers, place)]
        (fragment,), *others = [state["optimizer"]["outer"]["fragments"] for state in states]
        for (other,) in others:
            assert torch.equal(fragment["anchor"], other["anchor"]) and fragment["digest"] == other["digest"]


def test_clusters_take_rounds_together(tmp_path: Path) -> None:
    """2 x 2 x 2 workers of a model whose stages differ: one rank and one H in every step, equal anchors."""
    adapts = ["replicas.rank=4", "replicas.window=2", "replicas.start_compress=1", "replicas.min_compression_rate=0"]
    layout = ["model.layers=3", "pipeline.stages=2", "pipeline.microbatches=2", "world.inner=2", "pipeline.cut=[1]"]
    more = [*adapts, *layout, "replicas.sync_every=4", "run.log_every=1", "run.checkpoint_every=18"]
    config = tiny(write_text(tmp_path / "text.txt"), *more, method="dilocox", workers=8, steps=20)
    summary = run(config, tmp_path / "run")
    assert len(set(rounds(tmp_path / "run"))) > 1
    check_anchors(tmp_path / "run", 18, 8, 4)
    assert (summary["stages"], summary["replicas"], summary["islands"]) == (2, 2, 2)


@pytest.mark.long(cases=0)
def test_the_preset_trains_resumes_and_agrees(tmp_path: Path) -> None:
    """At most 0.15 nats a byte above the same layout neither delayed nor compressed; from a checkpoint in the middle
    of a round the same lines and bits.
    """

    def preset(*more: str) -> Config:
        return read_config(str(preset_file("dilocox-clusters")), {}, ["run.log_every=1", *more])

    stop = 250
    config, whole, copy = preset(f"run.checkpoint_every={stop}"), tmp_path / "whole", tmp_path / "copy"
    summary = run(config, whole)
    taken = rounds(whole)
    print("ranks and H", sorted(set(taken)), "loss", summary["val_loss"], "blocked", summary["channels"])
    assert len(set(taken)) > 3
    check_anchors(whole, stop, 8, 4)
    shutil.copytree(whole, copy)
    for name in ("summary.json", "model.safetensors"):
        (copy / name).unlink()
    told = Told()
    launch(config, copy, told.lines.append, told.notices.append, resume=stop)
    assert sorted(map(str, metrics(copy))) == sorted(map(str, metrics(whole)))
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    dense = ("rank=0", "window=0", "min_compression_rate=0", "codec=none", "error_feedback=none", "delay=none")
    plain = run(preset(*(f"replicas.{setting}" for setting in dense)), tmp_path / "plain")
    print("neither", plain["val_loss"], plain["channels"], plain["virtual_seconds"])
    assert summary["val_loss"] <= plain["val_loss"] + 0.15

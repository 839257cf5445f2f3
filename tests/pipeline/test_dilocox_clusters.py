"""DiLoCoX whole (arXiv 2506.21263): clusters of stages of workers, one round late, rank and H that adapt."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import isles
from isles.comm.mesh import Mesh
from tests.replicas.workers import LINKS, sgd

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
    stage = mesh.place.stage
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

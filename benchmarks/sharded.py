"""`isles.FSDP` against torch's own `fully_shard`, on the CPU: the same losses, and the time of a step.

    python -m benchmarks.sharded [--json]

Two processes on this machine over loopback train a 9.7M-parameter byte model with AdamW, each on data of its own. One
copy is sharded by `isles.shard`, whose messages are Isles' (counted, with deadlines); one by `fully_shard` itself over
gloo, with the same units and the same clipping. They take turns, step by step; wall seconds of the slower worker.
Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import isles
from benchmarks._measure import Row, report
from benchmarks._models import byte_model
from isles.comm.mesh import Mesh

TURNS, WARM_UP = 25, 3
TOKENS = 256  # a step and worker
MAX_NORM = 1.0


class Blocks(nn.Module):
    """`byte_model` with its blocks in a ModuleList, so that each is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, *blocks, self.last = byte_model()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _bare(world: Mesh) -> tuple[nn.Module, Callable[[], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Blocks()
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _ours(world: Mesh) -> tuple[nn.Module, Callable[[], None]]:
    model = isles.shard(Blocks(), world.outer)
    optimizer = isles.FSDP(model, torch.optim.AdamW(model.parameters(), lr=1e-3), world.outer, max_norm=MAX_NORM)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def worker(world: Mesh) -> list[tuple[float, float, float, float]]:
    """(seconds bare, seconds ours, loss bare, loss ours) of every turn."""
    parties = [_bare(world), _ours(world)]
    draw = torch.Generator().manual_seed(world.rank)
    rows = []
    for turn in range(WARM_UP + TURNS):
        data = torch.randint(256, (2, TOKENS), generator=draw)
        seconds, losses = [0.0, 0.0], [0.0, 0.0]
        for place in (0, 1) if turn % 2 else (1, 0):
            world.world.barrier()
            seconds[place], losses[place] = _timed(*parties[place], data)
        if turn >= WARM_UP:
            rows.append((*seconds, *losses))
    return rows


def _timed(model: nn.Module, step: Callable[[], None], data: Tensor) -> tuple[float, float]:
    started = time.perf_counter()
    loss = nn.functional.cross_entropy(model(data[0]), data[1])
    loss.backward()
    step()
    return time.perf_counter() - started, float(loss.detach())


def rows_of(results: list[Any]) -> list[Row]:
    """What two workers measured."""
    turns = [[max(one[place] for one in turn) for place in (0, 1)] for turn in zip(*results, strict=True)]
    apart = max(abs(one[2] - one[3]) for result in results for one in result)
    ratio = median(ours / bare for bare, ours in turns)
    return [
        Row("largest difference of a loss", apart, "nats", ("<=", 1e-4)),
        Row("bare fully_shard, a step", median(bare for bare, _ in turns), "s"),
        Row("isles.FSDP, a step", median(ours for _, ours in turns), "s"),
        Row("isles.FSDP / bare", ratio, "x", ("<=", 1.1), "wall, slower worker, median of 25 turns"),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return report(rows_of(isles.run_local(worker, 2)), parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())

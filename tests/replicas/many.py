"""Measure many virtual workers in a process of its own: `many.py WORKERS SLOTS STEPS EVERY [plain]` prints a JSON line.

CPU seconds of a step: the difference of two runs of different lengths, so that the start cancels.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import threading
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from isles.comm.mesh import Mesh


class Mlp(nn.Module):
    """256 -> 248 -> 256."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(248, 256, generator=generator) / 16)
        self.down = nn.Parameter(torch.randn(256, 248, generator=generator) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x, self.up)), self.down)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x = torch.randn(16, 256, generator=generator)
    F.mse_loss(model(x), x.roll(1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def worker(world: Mesh, steps: int, every: int) -> tuple[str, float]:
    model = Mlp()
    optimizer = isles.NoLoCo(model, torch.optim.AdamW(model.parameters(), fused=True), world.outer, sync_every=every)
    for number in range(steps):
        step(model, optimizer, world.rank, number)
    optimizer.finish()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return digest, world.transport.now()


def plain(workers: int, steps: int) -> None:
    """The same training of as many models in a loop, without Isles."""
    models = [Mlp() for _ in range(workers)]
    inner = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for number in range(steps):
        for rank in range(workers):
            step(models[rank], inner[rank], rank, number)


def main() -> None:
    torch.set_num_threads(1)
    workers, slots, steps, every = map(int, sys.argv[1:5])
    threads = threading.active_count()
    begun = time.process_time()
    if sys.argv[5:] == ["plain"]:
        plain(workers, steps)
        print(json.dumps({"cpu_seconds": time.process_time() - begun}))
        return
    results = isles.run_virtual(worker, workers, links="home-fibre", slots=slots, args=(steps, every))
    print(
        json.dumps(
            {
                "hash": hashlib.sha256("".join(digest for digest, _ in results).encode()).hexdigest(),
                "clock": max(clock for _, clock in results),
                "parameters": sum(parameter.numel() for parameter in Mlp().parameters()),
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "threads_left": threading.active_count() - threads,
                "cpu_seconds": time.process_time() - begun,
            }
        )
    )


if __name__ == "__main__":
    main()

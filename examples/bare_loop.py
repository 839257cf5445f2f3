"""A plain PyTorch training loop, made decentralised by three lines (marked 1, 2, 3).

    python examples/bare_loop.py                                                  one worker, outer steps of its own
    python -m torch.distributed.run --nproc-per-node 2 examples/bare_loop.py      two, or as many machines as you like
    python examples/bare_loop.py --workers 4                                      four processes on this machine

As in any data-parallel script, workers draw different batches: here from `world.rank`.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles

STEPS, CONTEXT, BATCH = 120, 16, 32


class Model(nn.Module):
    """Predicts a byte from the 16 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embed(x).flatten(1))


def loss_on(model: nn.Module, text: Tensor, generator: torch.Generator, batch: int = BATCH) -> Tensor:
    """Mean cross-entropy of random places, in nats a byte."""
    starts = torch.randint(len(text) - CONTEXT, (batch, 1), generator=generator)
    places = starts + torch.arange(CONTEXT + 1)
    return F.cross_entropy(model(text[places[:, :-1]]), text[places[:, -1]])


def train() -> float:
    """Train, and return the loss of the one model of the run on text that nobody has trained on."""
    world = isles.init()  # 1
    text = torch.tensor(list(pathlib.Path(pathlib.__file__).read_bytes()))
    training, validation = text[:-4000], text[-4000:]
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    optimizer = isles.NoLoCo(model, optimizer, world.outer, sync_every=10)  # 2

    generator = torch.Generator().manual_seed(world.rank)
    for step in range(1, STEPS + 1):
        loss = loss_on(model, training, generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0 and step % 40 == 0:
            print(f"step {step:4d}   loss {loss.item():.3f}", flush=True)

    model = optimizer.consolidate()  # 3
    with torch.no_grad():
        final = float(loss_on(model, validation, torch.Generator().manual_seed(0), batch=1000))
    if world.rank == 0:
        print(f"{world.size} worker(s): loss of the one model {final:.3f}", flush=True)
    return final


def worker(world: isles.Mesh) -> float:
    """For `run_local`: the same function, in a process of its own."""
    return train()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--workers"]:
        isles.run_local(worker, int(sys.argv[2]))
    else:
        train()
        isles.init().close()

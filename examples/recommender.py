"""A small recommender of the kind that DCT was made for, in two stages of four workers each, exact and sparse.

    python examples/recommender.py [SEED...]

The model is DLRM in small (Naumov et al., 2019, arXiv 1906.00091): a table of vectors for every category, a network for
the numbers, the products of all pairs of vectors, and a network on top that says how likely a click is. The first stage
has the tables and half of the network on top, the second one the rest; what crosses stands behind an activation. Four
such replicas on the simulated clock, over 1 Gbit/s, see 100 batches each of made-up clicks. With DCT the workers of a
stage send about a hundredth of their gradients (`isles.DCTDP`), and the stages a twentieth of what crosses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from isles.pipeline.config import BoundaryConfig, PipelineConfig

REPLICAS, STAGES, STEPS, BATCH = 4, 2, 100, 256
TABLES, ROWS, WIDTH, NUMBERS, TOP = 4, 1000, 16, 8, 64
PAIRS = TABLES * (TABLES + 1) // 2  # of the tables' vectors and that of the numbers
LINKS = isles.Links(bandwidth=1e9, latency=5e-5)
STEP_SECONDS = 0.005  # what computing a step is charged with


class Layer(nn.Linear):
    """A layer of the network on top, with its activation."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, 1, TOP) to the same."""
        return F.relu(super().forward(input))


class Recommender(nn.Module):
    """Logits (B, 1, 1) of a click, of rows of integers (B, TABLES + NUMBERS): categories, and the bits of float32
    numbers. It comes in pieces (`enter`, `through`, `leave`), so that it can be cut into stages.
    """

    reads = TABLES + NUMBERS

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({str(number): nn.Embedding(ROWS, WIDTH) for number in range(TABLES)})
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.first = Layer(WIDTH + PAIRS, TOP)
        self.blocks = nn.ModuleList([Layer(TOP, TOP), Layer(TOP, TOP)])
        self.head = nn.Linear(TOP, 1)
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.25)  # type: ignore[arg-type]

    def enter(self, rows: Tensor) -> Tensor:
        """The stream (B, 1, TOP)."""
        dense = self.bottom(rows[:, TABLES:].to(torch.int32).view(torch.float32))
        looked_up = [table(rows[:, column]) for column, table in enumerate(self.tables.values())]
        vectors = torch.stack([dense, *looked_up], dim=1)  # (B, 1 + TABLES, WIDTH)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.triu_indices(1 + TABLES, 1 + TABLES, offset=1)
        return self.first(torch.cat((dense, products[:, first, second]), dim=1))[:, None]

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        """A layer."""
        return block(x)

    def leave(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(x)

    @staticmethod
    def loss(logits: Tensor, clicked: Tensor) -> Tensor:
        """Log-loss of clicks (B, 1), 0 or 1."""
        return F.binary_cross_entropy_with_logits(logits.squeeze(2), clicked.to(logits.dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """All of it."""
        x = self.enter(rows)
        for block in self.blocks:
            x = self.through(block, x)
        return self.leave(x)


class Clicks:
    """Made-up clicks: every row of a table has a taste, two categories agree or do not, popular rows come often."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tastes = torch.randn(TABLES, ROWS, 3, generator=draw)
        self.weights = torch.randn(NUMBERS, generator=draw) / NUMBERS**0.5
        self.popularity = 1 / torch.arange(1, ROWS + 1)

    def batch(self, size: int, seed: int) -> Tensor:
        """Rows (size, TABLES + NUMBERS + 1): categories, numbers, and whether there was a click; of the seed alone."""
        draw = torch.Generator().manual_seed(seed)
        categories = torch.multinomial(self.popularity, size * TABLES, True, generator=draw).view(size, TABLES)
        numbers = torch.randn(size, NUMBERS, generator=draw)
        tastes = self.tastes[torch.arange(TABLES), categories]  # (size, TABLES, 3)
        agreement = (tastes[:, 0::2] * tastes[:, 1::2]).sum((1, 2)) / TABLES**0.5
        logits = agreement + tastes[..., 0].sum(1) / TABLES**0.5 + numbers @ self.weights - 1
        clicked = torch.bernoulli(logits.sigmoid(), generator=draw)
        return torch.cat((categories, numbers.view(torch.int32), clicked.long()[:, None]), dim=1)


class Form(NamedTuple):
    """One way to train: the method between replicas, and the boundary between stages."""

    name: str
    method: type[isles.ReplicaSync]
    options: dict[str, Any]
    boundary: str


FORMS = (
    Form("exact", isles.DDP, {}, "none"),
    Form("dct, 99 % and 95 %", isles.DCTDP, {"sparsity": 0.99, "exclude_below": 256}, "dct:0.95"),
)


class Result(NamedTuple):
    """Of one worker: log-loss of the trained model, where it is put together; seconds of the training; bytes that it
    sent to other replicas, and to the other stage; losses while it trained.
    """

    loss: float | None
    seconds: float
    across: int
    between: int
    losses: list[float]


def train(_: object, form: Form, seed: int, steps: int) -> Result:
    """What each worker does."""
    torch.manual_seed(seed)
    world = isles.mesh(stage=STAGES)
    boundary = BoundaryConfig(kind=form.boundary)
    clicks, settings = Clicks(), PipelineConfig(stages=STAGES, microbatches=1, boundary=boundary)
    pipeline = isles.Pipeline(
        Recommender(), world, batch_size=BATCH, context=1, columns=1, vocab=2, config=settings, seed=seed
    )
    adagrad = torch.optim.Adagrad(pipeline.stage.parameters(), lr=0.03)
    inner = isles.Plain(pipeline.stage, adagrad, peers=world.stage, charged=True)
    optimizer = form.method(pipeline.stage, inner, world.outer, **form.options)
    losses = []
    for step in range(steps):
        text = clicks.batch(BATCH, seed=1 + world.reader[0] + REPLICAS * step + 1_000_000 * seed)
        seen = pipeline.step(text if pipeline.reads else None)
        assert seen is not None
        losses.append(seen.item())
        optimizer.step()
        optimizer.zero_grad()
    seconds, traffic = world.transport.now(), world.transport.traffic
    across, between = traffic["outer"].bytes_sent, traffic["pipeline"].bytes_sent
    optimizer.consolidate()
    model, loss = pipeline.assembled(Recommender()), None
    if model is not None:
        rows = clicks.batch(20_000, seed=0)
        with torch.no_grad():
            loss = float(Recommender.loss(model(rows[:, :-1]), rows[:, -1:]))
    return Result(loss, seconds, across, between, losses)


def main(seeds: Sequence[int]) -> None:
    """Both forms, with each seed."""
    print("form                  log-loss (seeds)                 seconds   to replicas   between stages")
    for form in FORMS:
        runs = [
            isles.run_virtual(
                train, REPLICAS * STAGES, links=LINKS, step_seconds=STEP_SECONDS, args=(form, seed, STEPS)
            )
            for seed in seeds
        ]
        losses = ", ".join(f"{run[0].loss:.4f}" for run in runs)
        seconds = max(result.seconds for result in runs[0])
        across, between = (sum(getattr(result, key) for result in runs[0]) / 1e6 for key in ("across", "between"))
        print(f"{form.name:21s} {losses:32s} {seconds:7.3f} {across:10.2f} MB {between:10.2f} MB")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [0])

"""A small recommender of the kind that DCT was made for, trained data-parallel with exact and with sparse gradients.

    python examples/recommender.py

The model is DLRM in small (Naumov et al., 2019, arXiv 1906.00091): a table of vectors for every category, a network for
the numbers, the products of all pairs of vectors, and a network on top that says how likely a click is. Four virtual
workers see 100 batches each of made-up clicks; with `isles.DCTDP` they send about a hundredth of each gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles

WORKERS, STEPS, BATCH = 4, 100, 256
TABLES, ROWS, WIDTH, NUMBERS = 4, 1000, 16, 8
PAIRS = TABLES * (TABLES + 1) // 2  # of the tables' vectors and that of the numbers


class Recommender(nn.Module):
    """Logits (B,) of a click, of categories (B, TABLES) and numbers (B, NUMBERS)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(ROWS, WIDTH) for _ in range(TABLES)])
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + PAIRS, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.25)  # type: ignore[arg-type]

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(column) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        vectors = torch.stack([dense, *looked_up], dim=1)  # (B, 1 + TABLES, WIDTH)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.triu_indices(1 + TABLES, 1 + TABLES, offset=1)
        return self.top(torch.cat((dense, products[:, first, second]), dim=1)).squeeze(1)


class Clicks:
    """Made-up clicks: every row of a table has a taste, two categories agree or do not, popular rows come often."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tastes = torch.randn(TABLES, ROWS, 3, generator=draw)
        self.weights = torch.randn(NUMBERS, generator=draw) / NUMBERS**0.5
        self.popularity = 1 / torch.arange(1, ROWS + 1)

    def batch(self, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Categories, numbers and whether there was a click (0 or 1): a function of the seed."""
        draw = torch.Generator().manual_seed(seed)
        categories = torch.multinomial(self.popularity, size * TABLES, True, generator=draw).view(size, TABLES)
        numbers = torch.randn(size, NUMBERS, generator=draw)
        tastes = self.tastes[torch.arange(TABLES), categories]  # (size, TABLES, 3)
        agreement = (tastes[:, 0::2] * tastes[:, 1::2]).sum((1, 2)) / TABLES**0.5
        logits = agreement + tastes[..., 0].sum(1) / TABLES**0.5 + numbers @ self.weights - 1
        return categories, numbers, torch.bernoulli(logits.sigmoid(), generator=draw)


def train(world: isles.Mesh, method: type[isles.ReplicaSync], options: dict[str, Any]) -> tuple[float, int]:
    """Log-loss on clicks that nobody trained on, and bytes that this worker sent for its gradients."""
    torch.manual_seed(0)
    clicks, model = Clicks(), Recommender()
    inner = torch.optim.Adagrad(model.parameters(), lr=0.03)
    optimizer = method(model, inner, world.outer, **options)
    for step in range(STEPS):
        categories, numbers, clicked = clicks.batch(BATCH, seed=1 + world.rank + WORKERS * step)
        F.binary_cross_entropy_with_logits(model(categories, numbers), clicked).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, sent = optimizer.consolidate(), world.outer.traffic["outer"].bytes_sent
    with torch.no_grad():
        categories, numbers, clicked = clicks.batch(20_000, seed=0)
        loss = F.binary_cross_entropy_with_logits(model(categories, numbers), clicked)
    return float(loss), sent


def main() -> None:
    """The same training twice."""
    print("gradients              log-loss    sent by a worker")
    for name, method, options in (
        ("exact (ddp)", isles.DDP, {}),
        ("99 % left out (dct-dp)", isles.DCTDP, {"sparsity": 0.99, "exclude_below": 256}),
    ):
        results = isles.run_virtual(train, WORKERS, links="datacentres", args=(method, options))
        loss, sent = results[0]
        print(f"{name:22s} {loss:8.4f} {sent / 1e6:13.2f} MB")


if __name__ == "__main__":
    main()

"""A bare loop in two pipeline stages: four lines differ from training the whole model.

python examples/pipeline_loop.py            # four workers: two replicas of two stages
"""

from __future__ import annotations

import torch

import isles
from isles.models import Decoder, Shape

SHAPE = Shape(d_model=32, layers=4, heads=2, ffn=64, vocab=64, context=16, tie_embeddings=False)
BATCH, STEPS = 8, 40


def batch(replica: int, step: int) -> torch.Tensor:
    """Sequences that count upwards, each from a start of its own: (BATCH, context + 1)."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    starts = torch.randint(0, SHAPE.vocab, (BATCH, 1), generator=generator)
    return (starts + torch.arange(SHAPE.context + 1)) % SHAPE.vocab


def train(_: object) -> tuple[float, float]:
    """First and last loss that this worker saw, nats."""
    world = isles.mesh(stage=2)
    pipeline = isles.Pipeline(Decoder(SHAPE, seed=0), world, batch_size=BATCH, context=SHAPE.context, vocab=SHAPE.vocab)
    adamw = torch.optim.AdamW(pipeline.stage.parameters(), lr=1e-2)
    inner = isles.Plain(pipeline.stage, adamw, peers=world.stage, charged=True)
    optimizer = isles.DiLoCo(pipeline.stage, inner, world.outer, sync_every=10, outer_momentum=0.5, max_norm=1.0)
    replica, losses = world.reader[0], []
    for step in range(STEPS):
        losses.append(float(pipeline.step(batch(replica, step) if pipeline.reads else None)))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate()
    return losses[0], losses[-1]


if __name__ == "__main__":
    for rank, (first, last) in enumerate(isles.run_local(train, 4)):
        print(f"worker {rank}: {first:.3f} -> {last:.3f} nats")

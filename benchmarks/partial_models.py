"""What leaving out stages costs in loss, and what such models are worth with stages missing.

    python -m benchmarks.partial_models [--steps 300] [--seeds 0,1,2] [--json]

A decoder of 6 blocks, width 48, over bytes, on the library's own text; every block is a stage. Six microbatches a step,
in one process: each runs the model in the order of its slot's path, which is what a pipeline does to the bit (see
tests/pipeline/test_plans.py).

    full     all microbatches run all stages
    skip     each slot runs 4 of the 6 stages, in a legal order of its own for the whole run

Then stages are dropped, or left early, with no further training. Losses in nats a byte on held-out text. One bound is
held: with two stages dropped the skip-trained model's loss rises at most half as much as the other's.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from benchmarks._measure import Row, report
from isles.data import DataConfig, Loader, load_corpus
from isles.models import Decoder, Shape
from isles.models.decoder import next_token_loss
from isles.network.routing.legal import PathRules, legal_orders
from isles.training.config.inner import InnerConfig, lr_factor
from isles.training.stage_orders import dropped, order_loss

STAGES, LENGTH, SLOTS = 6, 4, 6
SHAPE = Shape(d_model=48, layers=STAGES, heads=4, ffn=128, vocab=256, context=64, tie_embeddings=True)
DATA = DataConfig(batch_size=2 * SLOTS, validation_sequences=64)


def orders_of(kind: str, seed: int) -> list[tuple[int, ...]]:
    """Of each slot."""
    if kind == "full":
        return [tuple(range(STAGES))] * SLOTS
    return random.Random(seed).sample(legal_orders(STAGES, LENGTH, PathRules()), SLOTS)


def trained(kind: str, steps: int, seed: int, loader: Loader) -> Decoder:
    """A model after so many steps."""
    model, inner = Decoder(SHAPE, seed=seed), InnerConfig()
    optimizer = torch.optim.AdamW(model.parameters(), lr=inner.lr, betas=inner.betas)
    orders = orders_of(kind, seed)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = inner.lr * lr_factor(step, steps, inner)
        for tokens, order in zip(next(loader).split(DATA.batch_size // SLOTS), orders, strict=True):
            loss = next_token_loss(model.logits(tokens[:, :-1], order=order), tokens[:, 1:])
            (loss / SLOTS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def judged(model: Decoder, loader: Loader) -> Iterator[tuple[str, float]]:
    """(what runs, mean loss over the orders of that kind)."""
    batches = list(loader.validation_batches())
    loss = partial(order_loss, model, batches, autocast=nullcontext())

    def mean(orders: Sequence[Sequence[int]]) -> float:
        return sum(loss(blocks=order) for order in orders) / len(orders)

    for count in range(4):
        yield f"{count} of 5 dropped", mean(dropped(STAGES, count))
    for left in range(1, 4):
        yield f"left {left} early", mean([range(STAGES - left)])


def rows(steps: int, seeds: Sequence[int]) -> list[Row]:
    """Means over seeds, with the smallest and the largest."""
    corpus = load_corpus(DATA)
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in seeds:
        for kind in ("full", "skip"):
            loader = Loader(corpus, DATA, context=SHAPE.context, seed=seed)
            for what, loss in judged(trained(kind, steps, seed, loader), loader):
                found[kind, what].append(loss)
    made = [
        Row(f"{kind}: {what}", sum(losses) / len(losses), "nats", None, f"{min(losses):.3f} to {max(losses):.3f}")
        for (kind, what), losses in found.items()
    ]
    means = {key: sum(losses) / len(losses) for key, losses in found.items()}
    base = "0 of 5 dropped"
    rise = {kind: means[kind, "2 of 5 dropped"] - means[kind, base] for kind in ("full", "skip")}
    return [
        *made,
        Row("skip above full", means["skip", base] - means["full", base], "nats", None, "0.10 was hoped for"),
        Row("rise with 2 dropped, skip / full", rise["skip"] / rise["full"], "", ("<=", 0.5)),
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    return report(rows(given.steps, [int(seed) for seed in given.seeds.split(",")]), given.json)


if __name__ == "__main__":
    sys.exit(main())

"""A stage lost in the middle of a run, and the loss 20 and 60 steps later, by what it was made of.

    python -m benchmarks.stage_recovery [--steps 150] [--seeds 0,1,2,3,4] [--json]

A decoder of 6 blocks, width 48, over bytes, on the library's own text; every block is a stage, and stage 3 is lost
after `--steps` steps. One process, with the means of `isles.pipeline.recovery` over the neighbours' weights, empty
moments and a rate 1.1 times as high for the stage. Losses in nats a byte on held-out text.

At this size all ways lie close together: blocks begin near the identity, so a stage more or less is a small loss. Only
one bound is held: weighted by gradient norms is not worse than drawn anew, by more than 0.01 after 20 steps.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, report
from isles.data import DataConfig, Loader, load_corpus
from isles.models import Decoder, Shape
from isles.pipeline.recovery import RATE, merged
from isles.training.config.inner import InnerConfig, lr_factor
from isles.training.evaluation import validation_loss

LOST, LATER = 3, (20, 60)
SHAPE = Shape(d_model=48, layers=6, heads=4, ffn=128, vocab=256, context=64, tie_embeddings=True)
DATA = DataConfig(batch_size=12, validation_sequences=64)
KINDS = ("nothing lost", "checkfree", "average", "copy", "random", "checkpoint")
BACK = 30
"""Steps before the loss at which "checkpoint" kept its copy."""


class Training:
    """A model, its optimizer by block, its text."""

    def __init__(self, seed: int, steps: int, loader: Loader) -> None:
        self.model, self.inner, self.loader = Decoder(SHAPE, seed=seed), InnerConfig(), loader
        self.seed, self.steps, self.done = seed, steps, 0
        blocks = [list(block.parameters()) for block in self.model.blocks]
        inside = {id(own) for block in blocks for own in block}
        others = [own for own in self.model.parameters() if id(own) not in inside]
        self.rates = [1.0] * (len(blocks) + 1)
        self.optimizer = torch.optim.AdamW([{"params": own} for own in [*blocks, others]], betas=self.inner.betas)
        self.norms = [0.0] * len(blocks)

    def go(self, steps: int) -> None:
        """Train on."""
        for _ in range(steps):
            self.done += 1
            rate = self.inner.lr * lr_factor(self.done, self.steps, self.inner)
            for group, factor in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
            self.optimizer.zero_grad()
            self.model(next(self.loader)).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.norms = [float(torch.nn.utils.get_total_norm(_gradients(block))) for block in self.model.blocks]
            self.optimizer.step()

    @torch.no_grad()
    def lose(self, kind: str, kept: Decoder) -> None:
        """Lose the stage and make it anew."""
        if kind == "checkpoint":
            self.model.load_state_dict(kept.state_dict())
            return
        before, after = self.model.blocks[LOST - 1], self.model.blocks[LOST + 1]
        drawn = Decoder(SHAPE, seed=1000 + self.seed).blocks[LOST]
        norms = (self.norms[LOST - 1], self.norms[LOST + 1]) if kind == "checkfree" else (1.0, 1.0)
        given = zip(before.parameters(), after.parameters(), drawn.parameters(), strict=True)
        for own, (one, other, fresh) in zip(self.model.blocks[LOST].parameters(), given, strict=True):
            made = {"copy": one, "random": fresh}.get(kind)
            own.copy_(merged(one, norms[0], other, norms[1]) if made is None else made)
            self.optimizer.state.pop(own, None)
        self.rates[LOST] = RATE


def _gradients(block: nn.Module) -> list[Tensor]:
    return [own.grad for own in block.parameters() if own.grad is not None]


def losses(seed: int, steps: int) -> dict[tuple[str, int], float]:
    """By kind and steps after the loss."""
    loader = Loader(load_corpus(DATA), DATA, context=SHAPE.context, seed=seed)
    start = Training(seed, steps + max(LATER), loader)
    start.go(steps - BACK)
    kept = copy.deepcopy(start.model)
    start.go(BACK)
    found = {}
    for kind in KINDS:
        run = copy.deepcopy(start)
        if kind != "nothing lost":
            run.lose(kind, kept)
        for later, before in zip(LATER, (0, *LATER), strict=False):
            run.go(later - before)
            found[kind, later] = validation_loss(run.model, run.loader.validation_batches(), nullcontext())
    return found


def rows(steps: int, seeds: Sequence[int]) -> list[Row]:
    """Means over seeds, with the smallest and the largest difference to the run that lost nothing."""
    by_kind: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for seed in seeds:
        for key, loss in losses(seed, steps).items():
            by_kind[key].append(loss)
    made = []
    for (kind, later), found in by_kind.items():
        apart = [one - whole for one, whole in zip(found, by_kind["nothing lost", later], strict=True)]
        note = "" if kind == "nothing lost" else f"{min(apart):+.4f} to {max(apart):+.4f} of nothing lost"
        made.append(Row(f"{kind}, {later} steps later", sum(found) / len(found), "nats", None, note))
    first = LATER[0]
    apart = [one - other for one, other in zip(by_kind["checkfree", first], by_kind["random", first], strict=True)]
    return [*made, Row("checkfree above random", sum(apart) / len(apart), "nats", ("<=", 0.01))]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    return report(rows(given.steps, [int(seed) for seed in given.seeds.split(",")]), given.json)


if __name__ == "__main__":
    sys.exit(main())

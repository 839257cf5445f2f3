"""A stage lost in the middle of a run, and the loss 20 and 60 steps later, by what it was made of.

    python -m benchmarks.stage_recovery [--steps 150] [--seeds 0,1,2,3,4] [--write] [--json]

A decoder of 6 blocks, width 48, over bytes, on the library's own text; every block is a stage, and stage 3 is lost
after `--steps` steps. One process, with the means of `isles.pipeline.recovery` over the neighbours' weights, empty
moments and a rate 1.1 times as high for the stage. Losses in nats a byte on held-out text. --write puts the table into
docs/partial-pipelines.md.

At this size all ways lie close together: blocks begin near the identity, so a stage more or less is a small loss. Only
one bound is held: weighted by gradient norms is not worse than drawn anew, by more than 0.01 after 20 steps.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks._measure import Row, report
from benchmarks._pages import written
from isles.data import DataConfig, Loader, load_corpus
from isles.models import Decoder, Shape
from isles.pipeline.recovery import RATE, merged
from isles.training.config.inner import InnerConfig, lr_factor
from isles.training.step import validation_loss

LOST, LATER = 3, (20, 60)
SHAPE = Shape(d_model=48, layers=6, heads=4, ffn=128, vocab=256, context=64, tie_embeddings=True)
DATA = DataConfig(batch_size=12, validation_sequences=64)
INNER = InnerConfig(lr=6e-3, warmup_steps=60)
"""The rate of a bare `isles train`, whose model is of this size."""
KINDS = ("nothing lost", "checkfree", "average", "copy", "random", "checkpoint")
BACK = 30
"""Steps before the loss at which "checkpoint" kept its copy."""


class Training:
    """A model, its optimizer by block, its text."""

    def __init__(self, seed: int, steps: int, loader: Loader) -> None:
        self.model, self.loader = Decoder(SHAPE, seed=seed), loader
        self.seed, self.steps, self.done = seed, steps, 0
        blocks = [list(block.parameters()) for block in self.model.blocks]
        inside = {id(own) for block in blocks for own in block}
        others = [own for own in self.model.parameters() if id(own) not in inside]
        self.rates = [1.0] * (len(blocks) + 1)
        self.optimizer = torch.optim.AdamW([{"params": own} for own in [*blocks, others]], betas=INNER.betas)
        self.norms = [0.0] * len(blocks)

    def go(self, steps: int) -> None:
        """Train on."""
        for _ in range(steps):
            self.done += 1
            rate = INNER.lr * lr_factor(self.done, self.steps, INNER)
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


PeerAddress = Mapping[tuple[str, int], Sequence[float]]
"""Losses, one a seed, by kind and steps after the loss."""


def measured(steps: int, seeds: Sequence[int]) -> PeerAddress:
    """All of them."""
    by_kind: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for seed in seeds:
        for key, loss in losses(seed, steps).items():
            by_kind[key].append(loss)
            print(seed, *key, loss, file=sys.stderr, flush=True)
    return by_kind


def rows(by_kind: PeerAddress) -> list[Row]:
    """Means over seeds, with the smallest and the largest difference to the run that lost nothing."""
    made = []
    for (kind, later), found in by_kind.items():
        apart = [one - whole for one, whole in zip(found, by_kind["nothing lost", later], strict=True)]
        note = "" if kind == "nothing lost" else f"{min(apart):+.4f} to {max(apart):+.4f} of nothing lost"
        made.append(Row(f"{kind}, {later} steps later", mean(found), "nats", None, note))
    first = LATER[0]
    apart = [one - other for one, other in zip(by_kind["checkfree", first], by_kind["random", first], strict=True)]
    return [*made, Row("checkfree above random", mean(apart), "nats", ("<=", 0.01))]


def table(by_kind: PeerAddress) -> str:
    """In Markdown: means over seeds, and the spread of their differences to the run that lost nothing."""
    lines = ["", f"| steps later | {' | '.join(KINDS)} |", f"|{'---|' * (1 + len(KINDS))}"]
    for later in LATER:
        whole = by_kind["nothing lost", later]
        cells = [f"{mean(whole):.3f}"]
        for kind in KINDS[1:]:
            apart = [one - other for one, other in zip(by_kind[kind, later], whole, strict=True)]
            cells.append(f"{mean(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})")
        lines.append(f"| {later} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(given.steps, [int(seed) for seed in given.seeds.split(",")])
    if given.write:
        written("partial-pipelines.md", "benchmarks.stage_recovery", table(found))
    return report(rows(found), given.json)


if __name__ == "__main__":
    sys.exit(main())

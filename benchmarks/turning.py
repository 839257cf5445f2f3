"""What turning the subspace of a boundary gives (`pipeline.boundary.update_every`), where it should give something.

    python -m benchmarks.turning [--seeds 0,1,2] [--runs FILE] [--write] [--json]

A decoder of 4 blocks of width 64 over bytes, 8 numbers a token at 3 boundaries, in one process, 300 steps of 8 x 64
tokens, learning rate 3e-3.

    begun       all is trained from the beginning, in a drawn subspace
    held        the last block, norm and head are those of a model that was trained before, and stay: they read fixed
                directions. The subspace is drawn; or the worst for them (what that model's gradients have least of); or
                the best

Each never turned, and turned every 25 steps. Every run is a line of FILE (benchmarks/turning.jsonl) as soon as it is
done, and is not done again. --write puts the table into docs/boundaries.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from benchmarks._boundary_docs import put
from benchmarks._measure import Row, report
from benchmarks.boundaries import CUTS, INNER, corpus, judged, known
from isles.data import DataConfig, Loader
from isles.models import Decoder, Shape
from isles.pipeline.boundaries.scheme import Crossings, Drift, Inside, turned
from isles.training.config.inner import lr_factor
from isles.training.optimizer import inner_optimizer

SHAPE = Shape(d_model=64, layers=4, heads=4, ffn=256, vocab=256, context=64, tie_embeddings=False)
RANK, STEPS, SEQUENCES, EVERY = 8, 300, 8, 25
Start = Literal["drawn", "worst", "best"]


@dataclass(frozen=True)
class Turning:
    """A row. held: with a last block that stays. rate: how far it is turned; 0: never."""

    held: bool
    start: Start
    rate: float

    @property
    def name(self) -> str:
        """In the table."""
        turns = f"turned by {self.rate:g}" if self.rate else "never turned"
        return f"{'held' if self.held else 'begun'}, {self.start}, {turns}"


ROWS = [
    *(Turning(False, "drawn", rate) for rate in (0.0, 0.5)),
    *(Turning(True, start, rate) for start in ("drawn", "worst") for rate in (0.0, 0.5)),
    Turning(True, "best", 0.0),
]


def loader_of(seed: int) -> Loader:
    """Text for a run."""
    data = DataConfig(batch_size=SEQUENCES, validation_sequences=128)
    return Loader(corpus(SEQUENCES), data, context=64, seed=seed)


def train(model: Decoder, loader: Loader, drift: Drift, scheme: Inside | None = None, rate: float = 0.0) -> float:
    """Loss on held-out text after `STEPS`; drift: of the gradients behind the last boundary since the last turn."""

    def gather(module: nn.Module, given: object, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(drift.add)

    hook = cast(Any, model).blocks[CUTS[-1] - 1].register_forward_hook(gather)
    optimizer = inner_optimizer(model, INNER, "adamw")
    for step in range(1, STEPS + 1):
        if scheme is not None and rate and step > 1 and (step - 1) % EVERY == 0:
            scheme.rotate(model, turned(scheme.basis, drift.total, rate))
            drift.total.zero_()
        for group in optimizer.param_groups:
            group["lr"] = INNER.lr * lr_factor(step, STEPS, INNER)
        model(next(loader)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    return judged(model, loader)


@cache
def trained_before(seed: int) -> tuple[Decoder, Tensor]:
    """A model without boundaries, and M of its gradients in all its steps."""
    model, drift = Decoder(SHAPE, seed=seed), Drift(SHAPE.d_model)
    train(model, loader_of(seed + 100), drift)
    return model, drift.total


def run(row: Turning, seed: int) -> float:
    """Loss on held-out text."""
    model = Decoder(SHAPE, seed=seed)
    scheme = Inside(Crossings(cuts=CUTS, home=False, width=64, vocab=256), RANK, "coordinates", seed, turns=True)
    if row.held:
        before, total = trained_before(seed)
        for module, theirs in (
            (model.blocks[-1], before.blocks[-1]),
            (model.norm, before.norm),
            (model.head, before.head),
        ):
            cast(nn.Module, module).load_state_dict(cast(nn.Module, theirs).state_dict())
            cast(nn.Module, module).requires_grad_(False)
        if row.start != "drawn":
            axes = torch.linalg.eigh(total).eigenvectors  # the least first
            scheme.basis = (axes[:, :RANK] if row.start == "worst" else axes[:, -RANK:]).contiguous()
    scheme.fit(model)
    assert scheme.drift is not None
    return train(model, loader_of(seed), scheme.drift, scheme, row.rate)


def all_runs(seeds: Sequence[int], path: Path) -> list[dict[str, Any]]:
    """Those of FILE, and of it the ones that were not there."""
    done = known(path)
    have = {(one["name"], one["seed"]) for one in done}
    for seed, row in product(seeds, ROWS):
        if (row.name, seed) not in have:
            done.append({"table": "turning", "name": row.name, "seed": seed, "loss": run(row, seed)})
            with path.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(done[-1], file=sys.stderr, flush=True)
    return done


def rows(runs: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Means over the seeds, with all of them."""
    losses: defaultdict[str, list[float]] = defaultdict(list)
    for one in sorted(runs, key=lambda one: one["seed"]):
        losses[one["name"]].append(one["loss"])
    for row in ROWS:
        if own := losses.get(row.name):
            yield Row(row.name, mean(own), "nats", None, ", ".join(f"{loss:.3f}" for loss in own))


def main() -> int:
    """The command."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",") if seed]
    found = list(rows(all_runs(seeds, given.runs)))
    if given.write:
        lines = [f"| {row.name} | {row.value:.3f} | {row.note} |" for row in found]
        put("benchmarks.turning", ["| what is trained, subspace, turning | loss | seeds |", "|---|---|---|", *lines])
    return report(found, given.json)


if __name__ == "__main__":
    sys.exit(main())

"""What a swarm's steps are worth in loss and seconds, beside fixed pipelines: a table of docs/swarm.md.

    python -m benchmarks.swarm_losses --tune      then commit tuned.jsonl
    python -m benchmarks.swarm_losses [--seeds 0] [--write] [--json]

Six workers, three blocks over bytes (the embedded text and rates) in three stages, on the simulated network: every two
over home fibre, one of them twice as slow, times drawn anew for each task (sigma 0.3). A swarm of two peers a stage and
two pipelines read 16 sequences a step; one pipeline of three workers reads 8, in twice as many steps. --tune makes the
runs by which "best rate" is chosen, on a seed and on text that are not judged (`benchmarks._once`).

Bound: a swarm's sums learn as much a step as two pipelines that average every gradient, within 0.02 nats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

from benchmarks._measure import Row, report
from benchmarks._once import Found, at, best, coursed, judging
from benchmarks._pages import written
from benchmarks.comparison.text import table
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

PAGE, STEPS = "swarm.md", 400
BASE = (
    "model.layers=3",
    "model.tie_embeddings=false",
    "world.backend=virtual",
    "world.virtual.links=home-fibre",
    "world.virtual.step_jitter=0.3",
    "run.validate_every=40",
)
SWARM = (
    "pipeline.routing=swarm",
    "pipeline.swarm.peers=[2,2,2]",
    "pipeline.microbatches=8",
    "data.batch_size=16",
    "world.virtual.step_seconds=2.0",
    "world.workers=6",
)
FIXED = (
    "pipeline.stages=3",
    "pipeline.loss_at=last",
    "pipeline.microbatches=4",
    "data.batch_size=8",
    "world.virtual.step_seconds=1.0",
)
TWO, ONE = ("world.workers=6", *FIXED), ("world.workers=3", *FIXED, f"run.steps={2 * STEPS}")
OUTER = ("replicas.method=diloco", "replicas.sync_every=20")
NOBODY = ("replicas.method=none",)
FACTORS = (1.0, 1.0, 1.0, 1.0, 2.0, 1.0)
SUMS, DDP, TUNED = "swarm, sums in every step", "two pipelines, `ddp`", "one pipeline, the text of both, best rate"
ROWS: Mapping[str, tuple[str, ...]] = {
    SUMS: (*SWARM, *NOBODY),
    "swarm, `diloco`, H = 20": (*SWARM, *OUTER),
    DDP: (*TWO, "replicas.method=ddp"),
    "two pipelines, `diloco`, H = 20": (*TWO, *OUTER),
    "two pipelines that never talk": (*TWO, *NOBODY),
    "one pipeline, the text of both": (*ONE, *NOBODY),
    TUNED: (*ONE, *NOBODY),
}
RATES = (3e-3, 6e-3, 1.2e-2)
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the time that the swarm takes that sums in every step, when losses are compared."""


def configured(row: str, seed: int) -> Config:
    """Of a row."""
    workers = 3 if ROWS[row][0] == "world.workers=3" else 6
    speeds = f"world.virtual.step_factors={list(FACTORS[-workers:])}"
    config = read_config(None, {}, [f"run.steps={STEPS}", f"run.seed={seed}", *BASE, speeds, *ROWS[row]])
    if row != TUNED:
        return config
    tried = {rate: replace(config, inner=replace(config.inner, lr=rate)) for rate in RATES}
    return tried[best(PAGE, row, tried)]


def shown(found: Mapping[str, list[Found]]) -> str:
    """For the page."""
    made = []
    for row, own in found.items():
        ends = [one["seconds"] for one in found[SUMS]]
        ahead = [mean(at(one, share * end) for one, end in zip(own, ends, strict=True)) for share in SHARES]
        made.append(
            [
                row if row != TUNED else f"{row} ({configured(row, 0).inner.lr:g})",
                f"{mean(one['loss'] for one in own):.3f}",
                ", ".join(f"{loss:.3f}" for loss in ahead),
                f"{mean(one['seconds'] for one in own):.0f}",
                f"{mean(one['sent'][0] for one in own) / 1e6:.1f}, {mean(one['sent'][1] for one in own) / 1e6:.1f}",
            ]
        )
    heads = ["row", "loss, nats/byte", "loss at 25, 50, 75, 100 % of the first row's time", "virtual s"]
    return table([*heads, "sent by a worker: to stages, to replicas, MB"], made)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--write", action="store_true", help="put the table into docs/swarm.md")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    if given.tune:
        print(configured(TUNED, 0).inner.lr)
        return 0
    seeds = [int(seed) for seed in given.seeds.split(",")]
    found = {row: [judging(PAGE, row, configured(row, seed), coursed) for seed in seeds] for row in ROWS}
    print(shown(found))
    if given.write:
        written(PAGE, "benchmarks.swarm_losses", f"Seed{'s' * (len(seeds) > 1)} {given.seeds}:\n\n{shown(found)}")
    made = [Row(f"{row}: loss", mean(one["loss"] for one in own), "nats/byte") for row, own in found.items()]
    apart = mean(abs(a["loss"] - b["loss"]) for a, b in zip(found[SUMS], found[DDP], strict=True))
    made.append(Row("sums of a swarm from `ddp`", apart, "nats/byte", ("<=", 0.02)))
    return report(made, given.json)


if __name__ == "__main__":
    sys.exit(main())

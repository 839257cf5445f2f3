"""Goodput of elastic runs: members of which one fails every five minutes and is back after ten, on the virtual clock.

    python benchmarks/goodput.py [--members 64] [--seeds 0,1,2] [--rounds 12]

Real training of a tiny model in rounds of 10 steps of 30 s; each run ends by tokens, the same for all. Printed for each
way: Goodput (share of the time for which members were there in steps whose work is in the weights at the end), the same
of all of the fleet's time (repairs count, too), work lost, rounds alone, failures, the loss and its spread over seeds,
and both without failures.

A fixed world that restarts from checkpoints is reckoned, not run (`fixed_world`).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from isles.training.config.reading import read_config
from isles.training.config.tokens import tokens_a_step
from isles.training.elastic.churned import ChurnedRun
from isles.training.elastic.terms import going_on

EVERY, STEP = 10, 30.0  # steps a round, seconds a step
FAILS, REPAIR = 300.0, 600.0  # seconds between failures in the fleet; until the next one joins
RESTART, SAVE = 60.0, 5.0  # seconds of a fixed world: to start again; to write a checkpoint
WAYS: dict[str, list[str]] = {
    "pairs (noloco)": ["replicas.method=noloco"],
    "quorum (diloco)": ["replicas.method=diloco", "replicas.on_late=quorum"],
    "retry (diloco)": ["replicas.method=diloco"],
}
MODEL = [
    "model.layers=1",
    "model.d_model=16",
    "model.heads=2",
    "model.context=16",
    "data.batch_size=2",
    "inner.lr=0.01",
    "inner.warmup_steps=10",
    f"replicas.sync_every={EVERY}",
    f"run.log_every={EVERY}",
    "run.validate_every=0",
    "world.backend=virtual",
    f"world.step_seconds={STEP}",
    "world.step_jitter=0.05",
]


def run(way: str, members: int, rounds: int, seed: int, churn: str, folder: Path) -> dict[str, Any]:
    """The summary of one run."""
    settings = [*MODEL, *WAYS[way], f"run.seed={seed}", f"world.workers={members}"]
    config = read_config(None, {}, settings)
    tokens = rounds * EVERY * tokens_a_step(config, members)
    config = going_on(replace(config, run=replace(config.run, tokens=tokens)))
    summary = ChurnedRun(config, churn, folder, lambda line: None, lambda notice: None).run()
    steps = summary["inner_steps_counted"] * STEP
    return {**summary, "of_all": steps / (members * summary["virtual_seconds"])}


def fixed_world(seconds: float = 30 * 86400.0, *, repair: float = 0.0, seed: int = 0) -> float:
    """Goodput of a world that stops at each failure, waits for the repair (0: there are spares), starts again and
    repeats what came after its last checkpoint; these are as far apart as is best (Young: sqrt(2 save mean)).
    """
    draw, interval = random.Random(seed), (2 * SAVE * FAILS) ** 0.5
    now = done = 0.0
    while now < seconds:
        up = draw.expovariate(1 / FAILS)
        done += interval * (up // (interval + SAVE))
        now += up + repair + RESTART
    return done / now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    churn = f"{100 * 3600 / FAILS / asked.members:.6f}%/h, repair {REPAIR:g}"
    print(f"{asked.members} members, {churn}, {asked.rounds} rounds' worth of tokens, seeds {asked.seeds}")
    heads = ("Goodput", "of all", "lost", "alone", "fails", "loss", "+-", "calm", "+-")
    print(" " * 24 + "".join(f"{head:>9}" for head in heads))
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            stormy = [run(way, asked.members, asked.rounds, s, churn, Path(folder) / f"{s}") for s in seeds]
            calm = [run(way, asked.members, asked.rounds, s, "0%/h", Path(folder) / f"calm-{s}") for s in seeds]
        keys = ("goodput", "of_all", "work_lost", "rounds_alone", "losses")
        told = [mean(one[key] for one in stormy) for key in keys]
        for runs in (stormy, calm):
            losses = [one["val_loss"] for one in runs]
            told += [mean(losses), stdev(losses) if len(losses) > 1 else 0.0]
        print(f"{way:24}" + "".join(f"{figure:9.4f}" for figure in told), flush=True)
    print(f"{'fixed, with spares':24} {fixed_world():8.3f}")
    print(f"{'fixed, waits for repair':24} {fixed_world(repair=REPAIR):8.3f}")


if __name__ == "__main__":
    main()

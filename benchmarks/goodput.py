"""Goodput of elastic runs: members of which one fails every five minutes and is back after ten, on the virtual clock.

    python benchmarks/goodput.py [--members 64] [--seeds 0,1,2] [--rounds 36] [--steps 10] [--seconds 10] [--calm]
    python benchmarks/goodput.py --members 1024 --seeds 0 --rounds 12 --idle

Real training of a tiny model in rounds of --steps steps of --seconds; each run ends by tokens, the same for all. With
--calm each run is done without failures too, to compare losses. Printed for each way: Goodput (share of the time for
which members were there in steps whose work is in the weights at the end), the same of all of the fleet's time (repairs
count, too), work lost, rounds alone, failures, the loss and its spread over seeds; CPU seconds of all runs of a way.

--idle: nobody computes, for hundreds of members: inner steps only take their time, and the messages of one mean are
reckoned (`Reckoned`). The rest, who is in which round, is what it is otherwise.

A fixed world that restarts from checkpoints is reckoned, not run (`fixed_world`).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks._reckoned import MeetingPlaces, Reckoned
from isles.training.config.reading import read_config, tokens_a_step
from isles.training.config.sections import Config
from isles.training.elastic.leader import Participant
from isles.training.elastic.support import going_on, lands_together
from isles.training.simulated_churn import SimulatedElasticRun

FAILS, REPAIR = 300.0, 600.0  # seconds between failures in the fleet; until the next one joins
RESTART, SAVE = 60.0, 5.0  # seconds of a fixed world: to start again; to write a checkpoint
WAYS: dict[str, list[str]] = {
    "pairs": ["replicas.method=noloco"],
    "quorum": ["replicas.method=diloco", "replicas.on_late=quorum"],
    "retry": ["replicas.method=diloco"],
}
MODEL = [
    "model.layers=1",
    "model.d_model=16",
    "model.heads=2",
    "model.context=16",
    "data.batch_size=2",
    "inner.lr=0.01",
    "inner.warmup_steps=10",
    "run.validate_every=0",
    "world.backend=virtual",
    "world.virtual.step_jitter=0.05",
]


def settings(asked: argparse.Namespace, way: str, seed: int) -> Config:
    """Of one run."""
    given = [
        *MODEL,
        *WAYS[way],
        f"replicas.sync_every={asked.steps}",
        f"run.log_every={asked.steps}",
        f"run.seed={seed}",
        f"world.workers={asked.members}",
        f"world.virtual.step_seconds={asked.seconds}",
    ]
    config = read_config(None, {}, given)
    tokens = asked.rounds * asked.steps * tokens_a_step(config, asked.members)
    return going_on(replace(config, run=replace(config.run, tokens=tokens)))


def run(config: Config, churn: str, folder: Path, *, idle: bool) -> dict[str, Any]:
    """The summary of one run."""
    places = MeetingPlaces()

    def made(worker: Participant) -> None:
        if idle:
            worker.trainer.model_step.run = _idle  # type: ignore[method-assign]
            worker.trainer.validates = False
            if lands_together(config):
                (fragment,) = worker.optimizer.fragments
                fragment.averaging = Reckoned(fragment.averaging, places)

    one = SimulatedElasticRun(config, churn, folder, lambda line: None, lambda notice: None, made=made)
    summary = one.run()
    steps = summary["inner_steps_counted"] * config.world.virtual.step_seconds
    return {**summary, "of_all": steps / (config.world.workers * summary["virtual_seconds"])}


def _idle(batches: Iterable[torch.Tensor]) -> torch.Tensor:
    """In the place of a model's forward and backward pass."""
    return torch.zeros(())


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


def row(asked: argparse.Namespace, way: str, churn: str, seeds: list[int]) -> list[float]:
    """What is printed of one way."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(settings(asked, way, s), churn, Path(folder) / f"{s}", idle=asked.idle) for s in seeds]
    keys = ("goodput", "of_all", "work_lost", "rounds_alone", "losses")
    losses = [one["val_loss"] or 0.0 for one in runs]
    spread = stdev(losses) if len(losses) > 1 else 0.0
    return [*(mean(one[key] for one in runs) for key in keys), mean(losses), spread, time.process_time() - began]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=36, help="so many rounds' worth of tokens")
    parser.add_argument("--steps", type=int, default=10, help="inner steps a round")
    parser.add_argument("--seconds", type=float, default=10.0, help="of an inner step")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--calm", action="store_true", help="also without failures")
    parser.add_argument("--idle", action="store_true", help="nobody computes, and means are reckoned")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    churn = f"{100 * 3600 / FAILS / asked.members:.6f}%/h, repair {REPAIR:g}"
    length = asked.steps * asked.seconds
    print(f"{asked.members} members, {churn}, {asked.rounds} rounds of {length:g} s, seeds {asked.seeds}")
    heads = ("Goodput", "of all", "lost", "alone", "fails", "loss", "+-", "CPU s")
    print(" " * 16 + "".join(f"{head:>9}" for head in heads))
    for way in asked.ways.split(","):
        for name, rate in ((way, churn), (f"{way}, calm", "0%/h"))[: 1 + asked.calm]:
            print(f"{name:16}" + "".join(f"{figure:9.4f}" for figure in row(asked, way, rate, seeds)), flush=True)
    print(f"{'fixed, with spares':24} {fixed_world():.3f}")
    print(f"{'fixed, waits for repair':24} {fixed_world(repair=REPAIR):.3f}")


if __name__ == "__main__":
    main()

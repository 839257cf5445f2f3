"""DiLoCo's adaptive pools (arXiv 2311.08105): the same computing in all, spread over time in five ways.

    python benchmarks/pools.py [--method diloco] [--workers 8] [--steps 200] [--sync-every 4] [--seeds 0,1,2]

Real training of a small model on the virtual clock, by the pools of `isles simulate --churn NAME`. A pool's sizes are
shares of --workers; a view comes three rounds after it is asked for, so rounds are many. Printed for each pool: the
smallest and the largest size, inner steps of all workers whose work is in the model, the loss of the one model at the
end on held-out text with its spread over seeds, MB that all workers sent, and CPU seconds. What the paper says is that
the loss depends on how much is computed and not on when: then pools differ by no more than seeds do. The last line says
whether these do. --pools names some of them, to run them side by side.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

from isles.network.churn import POOLS
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.elastic.support import going_on
from isles.training.simulated_churn import SimulatedElasticRun

MODEL = [
    "model.layers=1",
    "model.d_model=32",
    "model.heads=2",
    "model.context=32",
    "data.batch_size=4",
    "inner.lr=0.01",
    "inner.warmup_steps=20",
    "run.validate_every=0",
    "world.backend=virtual",
    "world.virtual.step_seconds=10",
    "world.virtual.links=home-fibre",
]


def settings(asked: argparse.Namespace, seed: int) -> Config:
    """Of one run."""
    given = [
        *MODEL,
        f"replicas.method={asked.method}",
        f"replicas.sync_every={asked.sync_every}",
        f"run.log_every={asked.sync_every}",
        f"run.steps={asked.steps}",
        f"run.seed={seed}",
        f"world.workers={asked.workers}",
    ]
    return going_on(read_config(None, {}, given))


def one_run(config: Config, pool: str, folder: Path) -> tuple[float, float, float]:
    """(the loss at the end, inner steps that count, MB sent by all)."""
    run = SimulatedElasticRun(config, pool, folder, lambda line: None, lambda notice: None)
    summary = run.run()
    loss = summary["val_loss"]
    assert loss is not None, "the one model was not judged"
    return loss, summary["inner_steps_counted"], run.simulation.wire.sent / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="diloco")
    parser.add_argument("--workers", type=int, default=8, help="the largest size of a pool")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of a worker that is always there")
    parser.add_argument("--sync-every", type=int, default=4, help="inner steps a round")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--pools", default=",".join(POOLS))
    asked = parser.parse_args()
    seeds, pools = [int(seed) for seed in asked.seeds.split(",")], asked.pools.split(",")
    if not set(pools) <= POOLS.keys():
        parser.error(f"--pools: choose from {', '.join(POOLS)}")
    print(f"{asked.method}, {asked.steps} steps in rounds of {asked.sync_every}, seeds {asked.seeds}")
    print(f"{'':12}" + "".join(f"{head:>10}" for head in ("workers", "steps", "loss", "+-", "MB sent", "CPU s")))
    losses: dict[str, list[float]] = {}
    for pool in pools:
        shares = POOLS[pool]
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            runs = [one_run(settings(asked, seed), pool, Path(folder) / f"{seed}") for seed in seeds]
        losses[pool], steps, sent = (list(figures) for figures in zip(*runs, strict=True))
        sizes = "-".join(str(max(round(share * asked.workers), 1)) for share in sorted({min(shares), max(shares)}))
        figures = f"{mean(steps):10.0f}{mean(losses[pool]):10.4f}{spread(losses[pool]):10.4f}{mean(sent):10.1f}"
        print(f"{pool:12}{sizes:>10}{figures}{time.process_time() - began:10.0f}", flush=True)
    if len(pools) == 1:
        return
    means = {pool: mean(found) for pool, found in losses.items()}
    best, worst = (choose(means, key=means.__getitem__) for choose in (min, max))
    between, within = means[worst] - means[best], max(spread(found) for found in losses.values())
    verdict = "no more" if between <= within else "more"
    print(f"from {best} to {worst} {between:.4f}, {verdict} than the largest spread over seeds, {within:.4f}")


def spread(figures: list[float]) -> float:
    """Their standard deviation; 0 of one."""
    return stdev(figures) if len(figures) > 1 else 0.0


if __name__ == "__main__":
    main()

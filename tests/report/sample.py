"""Run directories as a run would write them, made up from a seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

PARAMETERS = 1_234_567
SYNC_EVERY = 50


def write_records(run_dir: Path, *, workers: int = 4, rounds: int = 30) -> None:
    """Add the spread of the replicas (proportional to a falling learning rate) and a timeline to a sample: a second of
    computing a round, then a wait of 0.1 s in an exchange of 0.2 s.
    """
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"lr": 1 / line["step"]} if "loss" in line else {}
    lines += [{"step": step, "replica_std": 0.01 / step} for step in sorted({line["step"] for line in lines})]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (run_dir / "timeline.jsonl").open("w") as file:
        for worker in range(workers):
            for start in (1.1 * number for number in range(rounds)):
                for kind, channel, begin, end in (
                    ("transfer", "outer", 1.0, 1.2),
                    ("blocked", "outer", 1.0, 1.1),
                    ("compute", "", 0.0, 1.1),
                ):
                    span = {"kind": kind, "channel": channel, "start": start + begin, "end": start + end}
                    file.write(json.dumps({"step": 1, "worker": worker, **span}) + "\n")


def write_sample(
    run_dir: Path, *, workers: int = 4, steps: int = 400, seed: int = 0, finished: bool = True, **changed: Any
) -> dict[str, Any]:
    """Write a run directory and return its summary; `changed` overrides keys of the summary."""
    rng = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(
        f'[replicas]\nmethod = "noloco"\nsync_every = {SYNC_EVERY}\n\n'
        f'[world]\nworkers = {workers}\nbackend = "gloo"\n\n'
        f"[run]\nsteps = {steps}\nseed = {seed}\n"
    )
    per_sync = 8 * PARAMETERS
    compute, blocked = [0.0] * workers, [0.0] * workers
    sent = 0
    with (run_dir / "metrics.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            synced = step % SYNC_EVERY == 0
            sent += per_sync if synced else 0
            for worker in range(workers):
                compute[worker] += 0.05 * (1 + 0.02 * worker) * rng.uniform(0.9, 1.1)
                blocked[worker] += rng.uniform(0.1, 0.6) if synced else 0.0
                record = {
                    "step": step,
                    "worker": worker,
                    "loss": 1.6 + 3.9 * math.exp(-step / 60) + rng.gauss(0, 0.08),
                    "lr": 1e-3,
                    "tokens": step * 2048,
                    "bytes_sent": sent,
                    "bytes_received": sent,
                    "blocked_seconds": blocked[worker],
                    "compute_seconds": compute[worker],
                    "clock_seconds": compute[worker] + blocked[worker],
                }
                lines.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                lines.write(json.dumps({"step": step, "val_loss": 1.65 + 3.9 * math.exp(-step / 60)}) + "\n")
    mean_compute, mean_blocked = sum(compute) / workers, sum(blocked) / workers
    summary = {
        "isles_version": "0.1.0",
        "method": "noloco",
        "backend": "gloo",
        "workers": workers,
        "steps": steps,
        "tokens": steps * 2048 * workers,
        "parameters": PARAMETERS,
        "val_loss": 1.6512,
        "val_loss_replicas": 1.6633,
        "replica_std": 0.00012345,
        "bytes_sent_per_worker": sent,
        "bytes_received_per_worker": sent,
        "ddp_bytes_per_worker": int(2 * (workers - 1) / workers * 4 * PARAMETERS * steps),
        "compute_seconds": mean_compute,
        "blocked_seconds": mean_blocked,
        "compute_utilisation": mean_compute / (mean_compute + mean_blocked),
        "wall_seconds": mean_compute + mean_blocked + 3.2,
        "virtual_seconds": None,
        "seed": seed,
        "corpus_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    } | changed
    if finished:
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    return summary

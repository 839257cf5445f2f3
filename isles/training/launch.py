"""From a configuration to a run directory: start the workers, write their metrics live, put the summary together.

RUN/config.toml        resolved          at the start
RUN/metrics.jsonl      one object a line live, by this process alone
RUN/model.safetensors  consolidated      by worker 0 at the end
RUN/summary.json                         at the end: its presence means the run is complete
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles import __version__
from isles.comm.local import LocalWorkers, raise_first
from isles.comm.simulated import run_virtual
from isles.comm.transport import Deadlines
from isles.training.border import to_toml
from isles.training.config import Config
from isles.training.trainer import train_worker

Summary = dict[str, Any]


def launch(
    config: Config, out: Path, on_line: Callable[[dict[str, Any]], None], on_notice: Callable[[str], None]
) -> Summary:
    """Run `config` into the new directory `out`.

    on_line: sees each line of metrics.jsonl as it comes. on_notice: is told what a user should know about the settings.

    ValueError: `out` holds a run already. A worker's failure is raised as it is; what was written until then stays.
    """
    if (out / "metrics.jsonl").exists():
        raise ValueError(f"--out {out}: holds a run already; name another directory or remove it")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.toml").write_text(to_toml(config), encoding="utf-8")
    started = time.perf_counter()
    with (out / "metrics.jsonl").open("w", encoding="utf-8") as metrics:

        def on_event(line: dict[str, Any]) -> None:
            if "notice" in line:
                on_notice(line["notice"])
                return
            metrics.write(json.dumps({key: value for key, value in line.items() if value is not None}) + "\n")
            metrics.flush()
            on_line(line)

        results = _start(config, str(out), on_event)
    summary = summarise(config, results, time.perf_counter() - started)
    partial = out / "summary.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, out / "summary.json")
    return summary


def _start(config: Config, out: str, on_event: Callable[[Any], None]) -> list[dict[str, Any]]:
    world, args = config.world, (config, out)
    deadlines = Deadlines(outer=world.outer_deadline, slowest_link=world.slowest_link)
    if world.backend == "virtual":
        return run_virtual(
            train_worker,
            world.workers,
            args=args,
            links=world.links,
            step_seconds=world.step_seconds,
            seed=config.run.seed,
            deadlines=deadlines,
            on_event=on_event,
        )
    pool = LocalWorkers(train_worker, world.workers, args=args, threads=world.threads, deadlines=deadlines)
    results = pool.join(on_event)
    raise_first(results, pool.failures)
    return results


def summarise(config: Config, results: list[dict[str, Any]], wall_seconds: float) -> Summary:
    """The contents of summary.json from what the workers returned. Means are over workers."""

    def mean(key: str) -> float:
        return sum(result[key] for result in results) / len(results)

    compute, blocked = mean("compute_seconds"), mean("blocked_seconds")
    first = results[0]
    return {
        "isles_version": __version__,
        "method": config.method,
        "backend": config.world.backend,
        "workers": len(results),
        "steps": config.run.steps,
        "tokens": sum(result["tokens"] for result in results),
        "parameters": first["parameters"],
        "val_loss": first["val_loss"],
        "val_loss_replicas": mean("val_loss_replica"),
        "replica_std": first["replica_std"],
        "bytes_sent_per_worker": mean("bytes_sent"),
        "bytes_received_per_worker": mean("bytes_received"),
        "ddp_bytes_per_worker": first["ddp_bytes"],
        "compute_seconds": compute,
        "blocked_seconds": blocked,
        "compute_utilisation": compute / (compute + blocked) if compute + blocked else 1.0,
        "train_seconds": max(result["train_seconds"] for result in results),
        "wall_seconds": wall_seconds,
        "virtual_seconds": max(r["virtual_seconds"] for r in results) if config.world.backend == "virtual" else None,
        "seed": config.run.seed,
        "corpus_sha256": first["corpus_sha256"],
    }

"""Runs from Python, with the settings, checks and run directories of the commands; see docs/python.md. `ready` and
`new_directory` are what both share before a run starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from isles.base.memory import free_memory
from isles.base.parsing import parse_json, parse_toml
from isles.base.schema import backend_of
from isles.comm.environment import world_variables
from isles.training.config.reading import ConfigSource, Tables, gather, read_config, resolve, settings_named, to_toml
from isles.training.config.sections import Config


@dataclass(frozen=True)
class Run:
    """A run directory `path`, and the configuration of its run."""

    path: Path
    config: Config

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json holds, such as val_loss in nats per token. ValueError before the run is complete."""
        file = self.path / "summary.json"
        if not file.is_file():
            raise ValueError(f"{self.path}: not complete, it has no summary.json; go on with isles resume {self.path}")
        return parse_json(file.read_text(encoding="utf-8"))

    @property
    def metrics(self) -> Any:
        """The lines of metrics.jsonl: a pandas DataFrame if pandas is installed, else a list of dicts."""
        text = (self.path / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [parse_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        try:
            from pandas import DataFrame
        except ImportError:
            return lines
        return DataFrame(lines)

    def model(self, device: str = "auto") -> Any:
        """The consolidated model, an nn.Module in evaluation mode. ValueError if the run has not written it yet."""
        from isles.training.records.saved_run import load_saved

        return load_saved(self.path, device=device).model


def train(
    config: Config | Path | ConfigSource = None,
    *,
    out: str | Path | None = None,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
    **changes: Any,
) -> Run:
    """Train as `isles train` does, and return when the run is complete.

    Args:
        config: the path of a CONFIG.toml, its tables as a dict, or a Config; None: the built-in small run.
        out: the new run directory; None: runs/METHOD-DATE-TIME.
        on_metrics: called with each line of metrics.jsonl as it is written.
        **changes: settings over those of `config`, by name (sync_every=10) or by key (**{"inner.lr": 0.01}); method,
            data, lr, model and tokens as the options of the command.

    Raises:
        ValueError: a setting is wrong or cannot be had here: the line that the command prints.
        isles.WorkerFailed, isles.PeerLost: workers failed.
    """
    several = (world_variables(os.environ) or {}).get("WORLD_SIZE", "1") != "1"
    if several or "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "isles.train starts its workers itself: run this without torchrun, srun -n and mpirun, or these with -m "
            "isles train"
        )
    from isles.running.run import launch

    if not isinstance(config, Config | Path | str | dict | None):
        raise ValueError(f"config = {config!r}: give the path of a CONFIG.toml, its tables as a dict, or run.config")
    if not isinstance(out, Path | str | None):
        raise ValueError(f"out = {out!r}: give the path of the new run directory")
    tables = parse_toml(to_toml(config)) if isinstance(config, Config) else config
    tables = gather(str(tables) if isinstance(tables, Path) else tables, settings_named(changes), [])
    resolved = ready(tables)
    folder = new_directory(resolved.method) if out is None else Path(out)
    launch(resolved, folder, on_metrics or (lambda line: None), lambda text: print(f"note: {text}", file=sys.stderr))
    return Run(folder, resolved)


def simulate(config: Config | Path | ConfigSource = None, **arguments: Any) -> Run:
    """Train on the virtual clock, as `isles simulate` does: all workers in this process. Arguments as of `train`."""
    arguments["world.backend"] = "virtual"
    return train(config, **arguments)


def load_run(path: str | Path, *, trust: bool = False) -> Run:
    """The run in the directory `path`. trust: import code that its config.toml names, whoever made it.

    Raises ValueError if it is no run directory.
    """
    file = Path(path) / "config.toml"
    if not file.is_file():
        raise ValueError(f"{path}: no run directory, it has no config.toml; name the folder that isles train wrote")
    return Run(Path(path), read_config(str(file), {}, [], trust=trust))


def ready(tables: Tables, machines: int = 1) -> Config:
    """The configuration of `tables`, to start on so many `machines`; ValueError for all that can be refused before."""
    if backend_of(tables).has_processes:
        from isles.running.backends import start_server

        own = tables.get("world", {}).get("workers", 1)
        if isinstance(own, int):
            refuse_too_many(-(-own // machines))
        start_server()  # it loads torch while this process does
    from isles.plan.run_plan import refuse

    resolved = resolve(tables)
    refuse(resolved)
    return resolved


def new_directory(method: str) -> Path:
    """runs/METHOD-DATE-TIME, made here, so that no other run can take it."""
    name = f"{method.replace(':', '.')}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        out = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            out.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"{out}: cannot be made ({error.strerror}); name a directory with --out") from error
        return out
    raise AssertionError


_A_CORE = 8
_A_PROCESS = 200e6  # bytes that a worker takes before it has a model: torch and its libraries, after sharing


def refuse_too_many(
    workers: int, option: str = "world.workers =", mend: str = 'world.backend = "virtual" trains them in one process'
) -> None:
    """ValueError for more workers of this machine than 8 a core, or than its free memory holds. option: how they were
    asked for.
    """
    cores = os.cpu_count() or 1
    if workers > _A_CORE * cores:
        raise ValueError(f"{option} {workers}: more than {_A_CORE} a core of this machine's {cores}; {mend}")
    free = free_memory()
    if workers * _A_PROCESS > free:
        mend = mend if workers > 1 else "end other programs here, or use a machine with more memory"
        raise ValueError(
            f"{option} {workers}: each takes 0.2 GB before it has a model, {free / 1e9:.1f} GB are free; {mend}"
        )

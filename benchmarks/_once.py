"""Runs that are made once: each is a line of a file as soon as it has ended, and whoever asks again is given that line.

tuned.jsonl     runs on seed SEED and on text that no judged run is judged by: settings are chosen by these
judged.jsonl    runs whose losses the pages tell; none is made before all lines of the first file are committed

{"page", "run": run_name of its configuration, "row", "seed", "loss", ...: what was read off the run}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from benchmarks.comparison.runs import append
from benchmarks.comparison.tuning import SEED, committed, training_text
from isles.report.comparison import validation_loss_of
from isles.running.run import launch
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.records.shard import NotFinite

HERE = Path(__file__).parent
TUNED, JUDGED = HERE / "tuned.jsonl", HERE / "judged.jsonl"
TEXT = Path("runs", "tuning-text.txt")
Found = dict[str, Any]
Read = Callable[[Path, dict[str, Any]], Found]
"""(run directory, summary) -> what of it is kept."""
K = TypeVar("K")


def summed(_: Path, summary: dict[str, Any]) -> Found:
    """What most pages tell of a run."""
    own = {"seconds": "virtual_seconds", "bytes": "bytes_sent_per_worker", "tokens": "tokens"}
    return {"loss": validation_loss_of(summary), **{name: summary[key] for name, key in own.items()}}


def coursed(folder: Path, summary: dict[str, Any]) -> Found:
    """Of a pipeline: the loss as it came, and bytes of a worker to stages and to other replicas."""
    seconds: dict[int, float] = {}
    losses: dict[int, list[float]] = {}
    for line in lines(folder / "metrics.jsonl"):
        if "compute_seconds" not in line:  # of a round
            continue
        step = line["step"]
        seconds[step] = max(seconds.get(step, 0.0), line["compute_seconds"] + line["blocked_seconds"])
        if line.get("val_loss") is not None:
            losses.setdefault(step, []).append(line["val_loss"])
    loss = summary["val_loss"] if summary.get("replicas") == 1 else validation_loss_of(summary)
    assert loss is not None
    losses[summary["steps"]] = [loss]
    channels = {name: own["bytes_sent"] for name, own in summary["channels"].items()}
    return {
        "loss": loss,
        "seconds": seconds[summary["steps"]],
        "course": [(seconds[step], sum(own) / len(own)) for step, own in sorted(losses.items())],
        "sent": (channels.get("pipeline", 0.0), channels.get("outer", 0.0)),
    }


def at(line: Found, second: float) -> float:
    """Loss of a line of `coursed` then, between validations along a straight line."""
    return float(np.interp(second, *zip(*line["course"], strict=True)))


def elsewhere(config: Config, seed: int = SEED) -> Config:
    """`config` on another seed, and on the text that judged runs train on, whose own end is kept out of training."""
    text = str(training_text(config.data, TEXT))
    return replace(config, data=replace(config.data, path=text), run=replace(config.run, seed=seed))


def lines(file: Path) -> list[Found]:
    """Of a file that may not be there yet."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def tuning(page: str, row: str, config: Config, read: Read = summed, *, file: Path = TUNED) -> Found:
    """The line of a run that settings are chosen by: `elsewhere`'s. "loss" is None where its numbers did not stay
    finite.
    """
    return _run(file, page, row, elsewhere(config), read, None)


def judging(page: str, row: str, config: Config, read: Read = summed, *, settings: Path = TUNED) -> Found:
    """The line of a run that is told. ValueError where it is to be made, and `settings` holds what no commit has."""
    return _run(JUDGED, page, row, config, read, settings)


def best(page: str, row: str, configs: Mapping[K, Config]) -> K:
    """The key of the configuration that did best where it is not judged."""
    found = {key: tuning(page, f"{row}, {key}", config)["loss"] for key, config in configs.items()}
    return min((loss, place, key) for place, (key, loss) in enumerate(found.items()) if loss is not None)[2]


def kept(file: Path, key: Found, make: Callable[[], Found], *, settings: Path | None = None) -> Found:
    """The line of `file` that begins with `key`; made where there is none, and where all of `settings` is committed."""
    for one in lines(file):
        if one.items() >= key.items():
            return one
    if settings is not None:
        committed(settings)
    one = {**key, **make()}
    append(file, one)
    print(*one.values(), file=sys.stderr, flush=True)
    return one


def _run(file: Path, page: str, row: str, config: Config, read: Read, settings: Path | None) -> Found:
    def make() -> Found:
        with TemporaryDirectory() as folder:
            out = Path(folder, "run")
            try:
                found = read(out, launch(config, out, lambda line: None, lambda notice: None))
            except NotFinite:
                found = {"loss": None}
        return {"row": row, "seed": config.run.seed, **found}

    return kept(file, {"page": page, "run": run_name(config)}, make, settings=settings)

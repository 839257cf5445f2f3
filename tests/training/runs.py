"""Small runs for these tests; in a module of its own, so that fresh processes can import what they do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from isles.comm.mesh import Mesh
from isles.data import load_corpus
from isles.replicas import METHODS
from isles.replicas.methods.localsgd import LocalSGD
from isles.replicas.methods.none import NoSync
from isles.running.run import launch
from isles.running.virtual import VirtualWorkers
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.worker import train_worker
from tests import gloo

CONTEXT, BATCH = 16, 2
TINY = [
    "model.d_model=16",
    "model.layers=1",
    "model.heads=2",
    "model.ffn=24",
    f"model.context={CONTEXT}",
    f"data.batch_size={BATCH}",
    "data.validation_sequences=7",
    "inner.warmup_steps=2",
    "inner.lr=0.01",
    "run.log_every=2",
    "world.backend=virtual",
]
VOCAB = 30
ROWS = ["data.tokenizer=ids", f"data.vocab={VOCAB}", f"model.vocab={VOCAB}", "data.validation_fraction=0.2"]
"""Of a run on `write_rows`."""
OWN = """
import time
import isles

class Breaks(isles.NoSync):
    def after_inner_step(self):
        if self.steps == 3 and self.group.rank == 1:
            raise ZeroDivisionError("of my own making")

class Slow(isles.NoLoCo):
    def after_inner_step(self):
        time.sleep(0.05)  # leaves the machine to the others
        super().after_inner_step()
"""
POISONED, SPOILED = "tests.training.runs:Poisoned", "tests.training.runs:Spoiled"
ON_VIRTUAL = [name for name in METHODS if name != "fsdp"]  # which torch shards between processes
EVERY_3 = set(METHODS) - {"none", "ddp", "fsdp", "dct-dp", "demo"}  # the methods with sync_every
COMPOSED = {
    "fedavg",
    "fedadam",
    "fedyogi",
    "slowmo",
    "postlocal-sgd",
    "sparseloco",
    "streaming-noloco",
}  # of parts that others here have
APART = {"none", "eager", "noloco", "streaming-noloco", "sparta"}  # replicas differ in the end
DIVIDED = {"ist"}  # workers hold different parts of the model
OWN_SETTINGS = {
    # Thresholds that are always new, of few enough entries that a small batch has them: as many bytes as planned.
    "dct-dp": ["replicas.sparsity=0.97", "replicas.threshold_interval=1", "replicas.exclude_below=100"],
    "sparseloco": ["replicas.outer_lr=1.0", "replicas.codec=topk:2048+int4"],  # some hundred steps' learning in twenty
    "sparta": ["replicas.fraction=0.3"],
    "dilocox": ["replicas.rank=2", "replicas.start_compress=1", "replicas.window=0"],
    "ist": ["replicas.split=ffn"],
    "custom": ["replicas.codec=powersgd:2+int4", "replicas.error_feedback=local", "replicas.outer_momentum=0.5"],
}
# What these send leaves behind the computation, at a time of its own.
LATE = {"streaming-diloco", "delayed", "eager", "streaming-noloco", "dilocox"}
CLOCKS = (
    "clock_seconds",
    "blocked_seconds",
    "compute_seconds",
    "train_seconds",
    "virtual_seconds",
    "tokens_per_second",
)


def write_text(path: Path, characters: int = 4000, seed: int = 0) -> Path:
    """A file of words in lines: little to learn, but something."""
    draw = random.Random(seed)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "again"]
    text = ""
    while len(text) < characters:
        text += draw.choice(words) + draw.choice([" ", " ", " ", ".\n"])
    path.write_text(text[:characters], encoding="utf-8")
    return path


def write_rows(path: Path, *, learned: float = 0.5) -> Path:
    """Short documents; where `learned` is less than 1 some tokens, and all of some documents, are not learned."""
    draw, rows = np.random.default_rng(0), []
    for number in range(120):
        ids = draw.integers(0, VOCAB, draw.integers(1, 30))
        labels = np.where(draw.random(len(ids)) < (learned if number % 5 else np.floor(learned)), ids, -100)
        rows.append(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}))
    path.write_text("\n".join(rows))
    return path


def write_folder(folder: Path) -> Path:
    """A user's folder with a text, a configuration for it (tiny.toml, real processes), and methods of their own."""
    write_text(folder / "text.txt")
    (folder / "own.py").write_text(OWN)
    tables: dict[str, list[str]] = {"data": ['path = "text.txt"'], "replicas": ["sync_every = 3"]}
    for setting in TINY:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        if section != "world":
            tables.setdefault(section, []).append(f"{name} = {value}")
    lines = [line for section, own in tables.items() for line in (f"[{section}]", *own)]
    (folder / "tiny.toml").write_text("\n".join(lines) + "\n")
    return folder


def tiny(text: Path, *assignments: str, method: str = "noloco", workers: int = 2, steps: int = 6) -> Config:
    """The configuration of a run of a fraction of a second: sync_every = 3 where the method has it."""
    every = ["replicas.sync_every=3"] if method in EVERY_3 else []
    every += OWN_SETTINGS.get(method, [])
    flags = {"replicas.method": method, "world.workers": workers, "run.steps": steps}
    return read_config(None, flags, [f"data.path={text}", *TINY, *every, *assignments])


class Poisoned(NoSync):
    """Worker 1 trains a weight to pieces in its third step."""

    def after_inner_step(self) -> None:
        if self.steps == 3 and self.group.rank == 1:
            self.parameters[0].data.fill_(float("nan"))


class Spoiled(LocalSGD):
    """The last weights of worker 1 are not what the mean made them, as where memory fails."""

    def land_all(self) -> None:
        super().land_all()
        if self.group.rank == 1:
            self.parameters[0].data.view(-1)[0] += 1e-3


class Told:
    """What `launch` told while it ran."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.notices: list[str] = []


def run(config: Config, out: Path, told: Told | None = None, resume: int | None = None) -> dict[str, Any]:
    """`launch`, into `told`. Processes are those of the tests' pool, which stay: see `run_apart`."""
    start = gloo.train if config.world.backend == "distributed" else None
    return _launched(config, out, told, resume, start)


def run_apart(config: Config, out: Path, told: Told | None = None) -> dict[str, Any]:
    """`launch`, into `told`, with processes of its own: for what is about their start, logs or end."""
    return _launched(config, out, told, None, None)


def _launched(config: Config, out: Path, told: Told | None, resume: int | None, start: Any) -> dict[str, Any]:
    told = told or Told()
    return launch(config, out, told.lines.append, told.notices.append, resume, start_workers=start)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The workers' lines of a run directory's metrics.jsonl."""
    return [line for line in lines_of(out / "metrics.jsonl") if "worker" in line]


def spreads(out: Path) -> dict[int, float]:
    """By step, the spread of the replicas in a run directory's metrics.jsonl."""
    return {line["step"]: line["replica_std"] for line in lines_of(out / "metrics.jsonl") if "replica_std" in line}


def train_all(world: Mesh, configs: list[Config], outs: list[str]) -> list[dict[str, Any]]:
    """Several runs after each other in one world: starting processes costs more than training."""
    results = []
    for config, out in zip(configs, outs, strict=True):
        results.append(train_worker(world, config, Path(out)))
        world.world.barrier()
    return results


def without_clocks(values: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics, or a worker's result, without what a clock measured."""
    kept = {key: value for key, value in values.items() if key not in CLOCKS}
    if "channels" in kept:
        channels = kept["channels"].items()
        kept["channels"] = {name: without_clocks(told) for name, told in channels}
    return kept


def counted(config: Config) -> list[dict[str, Any]]:
    """What each worker counts on the virtual clock."""
    args = (config, None, None, load_corpus(config.data))
    return VirtualWorkers(train_worker, config.world.workers, config, args).join()

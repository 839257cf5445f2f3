"""Reading a run directory: `config.toml`, `metrics.jsonl`, `timeline.jsonl` and `summary.json`, also while the run is
still going.

In `metrics.jsonl` some keys (`isles.base.schema.TOTALS`) are running totals of their worker since step 0, so a lost or
thinned line loses no bytes. A step that occurs twice (a resumed run repeats the steps after its checkpoint) counts
once, as written last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from isles.base.parsing import parse_json, parse_toml
from isles.base.schema import COURSE, TASK_KINDS, TOTALS, USAGE, backend_of
from isles.report.panels import Point, mean_over

FILES = ("config.toml", "metrics.jsonl", "summary.json")


@dataclass(slots=True)
class WorkerLog:
    """What one worker wrote: losses, `COURSE`, bytes and clock by step, and its latest running totals."""

    loss: dict[int, float] = field(default_factory=dict)
    course: dict[str, dict[int, float]] = field(default_factory=lambda: {key: {} for key in COURSE})
    bytes_sent: dict[int, float] = field(default_factory=dict)
    clock: dict[int, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    """And the newest of `USAGE`."""
    last_step: int = -1


class TimelineSpan(NamedTuple):
    """A line of timeline.jsonl: `kind` compute, blocked or transfer; seconds of the run's clock."""

    kind: str
    channel: str
    start: float
    end: float


class TaskSpan(NamedTuple):
    """A line of timeline.jsonl about a task of a step: `kind` forward, loss or backward."""

    kind: str
    microbatch: int
    start: float
    end: float


@dataclass(slots=True)
class RunFiles:
    """A run directory as read. `summary` is None while the run has not ended; `notes` say what could not be used.

    validation: losses by their keys in metrics.jsonl. spread: (step, standard deviation between the replicas). spans:
    by worker, in the order of the file. tasks: of the newest step that has such, by worker; task_step: which one.
    """

    path: Path
    summary: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    workers: dict[int, WorkerLog] = field(default_factory=dict)
    validation: dict[str, list[Point]] = field(default_factory=dict)
    spread: list[Point] = field(default_factory=list)
    spans: dict[int, list[TimelineSpan]] = field(default_factory=dict)
    tasks: dict[int, list[TaskSpan]] = field(default_factory=dict)
    task_step: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The highest step that any worker wrote; 0 before the first."""
        return max((log.last_step for log in self.workers.values()), default=0)

    @property
    def is_simulated(self) -> bool:
        """Whether its seconds are those of a simulated clock."""
        return bool(self.price) or backend_of(self.config).is_simulated

    @property
    def price(self) -> str:
        """What a title says of the model that its time is of, where that is another one."""
        return f", priced as {self.summary['priced_as']}" if self.summary and "priced_as" in self.summary else ""

    def mean_total(self, name: str) -> float | None:
        """The mean over workers of a running total; None when no worker wrote it."""
        values = [log.totals[name] for log in self.workers.values() if name in log.totals]
        return math.fsum(values) / len(values) if values else None

    def number(self, key: str) -> float | None:
        """A finite number of the summary; None when it is absent or something else."""
        return finite((self.summary or {}).get(key))

    def setting(self, section: str, key: str) -> Any:
        """A value of `config.toml`; None when it is not there."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, dict) else None


def read_run(run_dir: str | Path, summary: dict[str, Any] | None = None) -> RunFiles:
    """Read a run directory. summary: in the place of its own, such as one that is priced otherwise.

    A run that is still going (no `summary.json`, a last line of `metrics.jsonl` cut in two) is read as far as it got.
    Files or lines that cannot be used are left out, and `RunFiles.notes` says so.

    Raises ValueError when `run_dir` is no folder or holds none of the three files.
    """
    path = Path(run_dir)
    if not path.exists():
        raise ValueError(f"no run directory at {path}; name the folder that `isles train --out` wrote")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; name the run directory that holds it")
    if not any((path / name).is_file() for name in FILES):
        raise ValueError(f"{path} is not a run directory: it has none of {', '.join(FILES)}")
    run = RunFiles(path)
    _read_summary(run)
    _read_config(run)
    _read_metrics(run)
    _read_timeline(run)
    run.summary = summary or run.summary
    if run.price:  # in equal steps; the timeline is of its own model
        run.spans, run.tasks, each = {}, {}, (run.number("virtual_seconds") or 0.0) / (run.number("steps") or 1.0)
        for log in run.workers.values():
            log.clock = {step: each * step for step in log.clock}
    return run


def _read_summary(run: RunFiles) -> None:
    file = run.path / "summary.json"
    if not file.is_file():
        return
    try:
        summary = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        run.notes.append(f"summary.json is damaged and was left out ({error}).")
        return
    if isinstance(summary, dict):
        run.summary = summary
    else:
        run.notes.append("summary.json holds no table and was left out.")


def _read_config(run: RunFiles) -> None:
    file = run.path / "config.toml"
    if not file.is_file():
        return
    run.config_text = file.read_text(encoding="utf-8", errors="replace")
    try:
        run.config = parse_toml(run.config_text)
    except ValueError as error:
        run.notes.append(f"config.toml is damaged ({error}); it is shown below as it is.")


def _read_metrics(run: RunFiles) -> None:
    file = run.path / "metrics.jsonl"
    if not file.is_file():
        run.notes.append("There is no metrics.jsonl, so there are no curves.")
        return
    unusable = not_finite = 0
    validation: dict[str, dict[int, dict[int | None, float]]] = {}
    spread: dict[float, float] = {}
    for record in _records(file):
        step = None if record is None else finite(record.get("step"))
        if record is None or step is None:
            unusable += 1
            continue
        if (std := finite(record.get("replica_std"))) is not None:
            spread[step] = std
        worker = finite(record.get("worker"))
        for key in (key for key in record if key.partition(".")[0] == "val_loss"):
            if (val_loss := finite(record[key])) is not None:
                by_step = validation.setdefault(key, {})
                by_step.setdefault(int(step), {})[None if worker is None else int(worker)] = val_loss
        if worker is not None:
            log = run.workers.setdefault(int(worker), WorkerLog())
            not_finite += _take(log, int(step), record)
    run.workers = dict(sorted(run.workers.items()))
    run.validation = {key: _validation_points(by_step) for key, by_step in sorted(validation.items())}
    run.spread = sorted(spread.items())
    if unusable:
        run.notes.append(f"{unusable} line{'s' * (unusable > 1)} of metrics.jsonl could not be read and were left out.")
    if not_finite:
        run.notes.append(f"{not_finite} loss{'es' * (not_finite > 1)} not finite (nan or inf): not drawn.")


def _read_timeline(run: RunFiles) -> None:
    file = run.path / "timeline.jsonl"
    for record in _records(file) if file.is_file() else []:
        record = record or {}
        worker, start, end = (finite(record.get(key)) for key in ("worker", "start", "end"))
        if worker is None or start is None or end is None or start > end:
            continue
        kind = str(record.get("kind"))
        if kind in TASK_KINDS.values():
            step, microbatch = (int(finite(record.get(key)) or 0) for key in ("step", "microbatch"))
            if step > run.task_step:
                run.tasks, run.task_step = {}, step
            if step == run.task_step:
                run.tasks.setdefault(int(worker), []).append(TaskSpan(kind, microbatch, start, end))
            continue
        run.spans.setdefault(int(worker), []).append(TimelineSpan(kind, str(record.get("channel")), start, end))
    run.spans, run.tasks = dict(sorted(run.spans.items())), dict(sorted(run.tasks.items()))


def _records(file: Path) -> Iterator[dict[str, Any] | None]:
    """Every line as a dict, None for one that is none. A last line without its newline is still being written."""
    with file.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError:
                if line.endswith(b"\n"):
                    yield None
                continue
            yield record if isinstance(record, dict) else None


def _take(log: WorkerLog, step: int, record: dict[str, Any]) -> bool:
    """Add one line to its worker's log; True when its loss is not finite."""
    raw = record.get("loss")
    loss = finite(raw)
    if loss is not None:
        log.loss[step] = loss
    else:
        log.loss.pop(step, None)
    for name in (*TOTALS, *USAGE):
        value = finite(record.get(name))
        if value is not None:
            log.totals[name] = value
    named = {"bytes_sent": log.bytes_sent, "clock_seconds": log.clock}
    for name, by_step in (log.course | named).items():
        value = finite(record.get(name))
        if value is not None:
            by_step[step] = value
    log.last_step = max(log.last_step, step)
    return loss is None and "loss" in record and (raw is None or isinstance(raw, float))


def _validation_points(by_step: dict[int, dict[int | None, float]]) -> list[Point]:
    """One point a step: the consolidated model's (a line without a worker) when there is one, else the mean."""
    series = []
    for step, by_worker in by_step.items():
        values = [by_worker[None]] if None in by_worker else list(by_worker.values())
        series += [[(float(step), value)] for value in values]
    return mean_over(series)


def finite(value: object) -> float | None:
    """`value` when it is a finite number, else None: what a file holds is not trusted to have the right type."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None

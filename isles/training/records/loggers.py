"""The lines of metrics.jsonl for tools that draw them live: TensorBoard and Weights & Biases.

    launcher: each line of metrics.jsonl -> `Loggers.log` -> RUN/tensorboard, RUN/wandb
              summary.json at the end    -> `Loggers.summary`

One process writes, and nothing is opened before the first line, so a run that is refused leaves nothing behind. A tool
is an extra of this package: `require` names the command that installs it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from isles.training.config.sections import Config

MetricsRecord = Mapping[str, Any]


class TensorBoard:
    """RUN/tensorboard: a TensorBoard run for each worker, one for what concerns them all; tags as in metrics.jsonl.

    A resumed run adds files, which tell TensorBoard to drop what it has beyond the checkpoint.
    """

    def __init__(self, config: Config, out: Path, resume: int | None) -> None:
        self._folder, self._purge = out / "tensorboard", None if resume is None else resume + 1
        self._steps = config.run.steps
        self._writers: dict[str, Any] = {}

    def log(self, record: MetricsRecord) -> None:
        """Each number under its name, at the line's step."""
        for key, value in record.items():
            if key not in ("step", "worker"):
                self._writer(record).add_scalar(key, value, record["step"])

    def summary(self, summary: MetricsRecord) -> None:
        """The numbers of summary.json under summary/..., at the last step."""
        for key, value in _numbers(summary).items():
            self._writer({}).add_scalar(f"summary/{key}", value, self._steps)

    def finish(self, ok: bool) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, record: MetricsRecord) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        name = f"worker-{record['worker']}" if "worker" in record else "all"
        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self._folder / name), purge_step=self._purge)
        return self._writers[name]


class WandB:
    """RUN/wandb: one W&B run, offline unless the environment says otherwise (WANDB_MODE=online).

    A worker's numbers are named worker-0/loss and so on, against the metric `step`. To upload them:
    `wandb sync RUN/wandb/offline-run-*`. A resumed run goes on under the same id (RUN/wandb/id.txt); steps beyond the
    checkpoint, trained twice, are there twice. W&B numbers rows by itself, from 0 in each process, and drops those of a
    number that it has passed: RUN/wandb/rows.txt says how many there are.
    """

    def __init__(self, config: Config, out: Path, resume: int | None) -> None:
        import wandb

        folder = out / "wandb"
        folder.mkdir(exist_ok=True)
        mark = folder / "id.txt"
        if not mark.exists():
            mark.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "isles"),
            name=os.environ.get("WANDB_NAME", out.resolve().name),
            id=mark.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(out),
            mode=None if "WANDB_MODE" in os.environ else "offline",
            config=asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._counted = folder / "rows.txt"
        before = int(self._counted.read_text(encoding="utf-8") or 0) if self._counted.exists() else 0
        self._rows = max(before, self._run.step)  # online W&B knows, too
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: MetricsRecord) -> None:
        prefix = f"worker-{record['worker']}/" if "worker" in record else ""
        numbers = {f"{prefix}{key}": value for key, value in record.items() if key not in ("step", "worker")}
        self._run.log({"step": record["step"], **numbers}, step=self._rows)
        self._rows += 1
        self._counted.write_text(str(self._rows), encoding="utf-8")

    def summary(self, summary: MetricsRecord) -> None:
        """The numbers of summary.json as the run's summary."""
        self._run.summary.update(_numbers(summary))

    def finish(self, ok: bool) -> None:
        import wandb

        self._run.finish(exit_code=0 if ok else 1)
        wandb.teardown()


LOGGERS: dict[str, type[TensorBoard | WandB]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


def require(names: Sequence[str]) -> None:
    """ValueError with the pip command where a logger's package cannot be imported."""
    for name in names:
        try:
            import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError as error:
            raise ValueError(
                f'run.loggers: "{name}" cannot be imported ({error}): pip install ".[{name}]", or take it out'
            ) from error


class Loggers:
    """The loggers of a run, opened at its first line; a context manager that closes them. resume: as in `launch`."""

    def __init__(self, config: Config, out: Path, resume: int | None) -> None:
        self._where = (config, out, resume)
        self._open: list[TensorBoard | WandB] = []

    def log(self, record: MetricsRecord) -> None:
        config = self._where[0]
        if not self._open:
            self._open = [LOGGERS[name](*self._where) for name in config.run.loggers]
        for logger in self._open:
            logger.log(record)

    def summary(self, summary: MetricsRecord) -> None:
        for logger in self._open:
            logger.summary(summary)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger in self._open:
            logger.finish(error is None)


def _numbers(record: MetricsRecord) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, (int, float))}

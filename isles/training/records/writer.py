"""Writes a run's files during the run: all reports of workers go through here, in one process."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from isles.base.durable import write_text
from isles.base.parsing import parse_json
from isles.base.schema import SpreadMetrics
from isles.base.tables import read_toml
from isles.launch.nodes import NodeGroup
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.config.trust import referenced_files, referenced_names
from isles.training.kinds import kind_of, layout_of
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.loggers import Loggers
from isles.training.records.replica_spread import Spread
from isles.training.records.reshard import run_facts
from isles.training.records.rundir import CONFIG, METRICS, SUMMARY, TIMELINE, RunLock, as_json, save_config


class Records:
    """Handles the workers' reports: lines of metrics.jsonl, notices, and shards, which are committed once those of all
    remaining workers are written.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        on_metrics: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
        node_group: NodeGroup,
        loggers: Loggers,
        resume: int | None,
        lock: RunLock,
    ) -> None:
        self.config, self.out, self.on_metrics, self.on_notice = config, out, on_metrics, on_notice
        self.node_group, self.loggers, self.resume, self.lock = node_group, loggers, resume, lock
        self.file: TextIO | None = None
        self.left = set(range(config.world.workers))
        self.shards: defaultdict[int, set[int]] = defaultdict(set)  # step: the workers that have written theirs
        self.corpora: dict[str, int] = {}  # hash of what is read: a worker that reads it
        self.spread = Spread(_sampling(config))

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def take(self, event: dict[str, Any]) -> None:
        """One event of one worker, or of the launcher about one that is lost."""
        for key in ("lost", "left"):
            if key in event:
                self._lose(event[key])
        if "notice" in event:
            self.on_notice(event["notice"])
        elif "checkpoint" in event:
            self.shards[event["checkpoint"]].add(event["worker"])
            self._commit(event["checkpoint"])
        elif "corpus" in event:
            self._same_corpus(event["corpus"], event["rank"])
        elif "sample" in event:
            self._spread(self.spread.take(event["step"], event["worker"], event["sample"], event["weights"]))
        elif "spans" in event:
            with (self.out / TIMELINE).open("a", encoding="utf-8") as file:
                file.writelines(as_json(span) + "\n" for span in event["spans"])
        else:
            write_config(self.config, self.out)
            self._log({key: value for key, value in event.items() if value is not None})
            self.on_metrics(event)

    def _opened(self) -> TextIO:
        """The file of metrics, from the first event on: a resume that is refused has changed nothing."""
        self.lock.keep(self.on_notice)
        if self.file is None:
            if self.resume is not None:
                for name in (METRICS, TIMELINE):
                    truncate_metrics(self.out / name, self.resume)
                reopen(self.config, self.out)
            self.file = (self.out / METRICS).open("a", encoding="utf-8")
        return self.file

    def _log(self, record: dict[str, Any]) -> None:
        file = self._opened()
        file.write(as_json(record) + "\n")
        file.flush()
        self.loggers.log(record)

    def _commit(self, step: int) -> None:
        """Commit `step` once all remaining workers have written it. A lost worker's shard is not part of it."""
        if self.left and self.shards[step] >= self.left:
            self._opened()
            del self.shards[step]
            ranks = sorted(self.left)
            self.node_group.tell({"command": {"commit": step, "ranks": ranks}})
            commit(self.config, self.out, step, ranks, self.node_group)

    def _lose(self, worker: int) -> None:
        """Commit the steps that only waited for `worker`."""
        self.left.discard(worker)
        for step in sorted(self.shards):
            self._commit(step)
        self._spread(self.spread.lose(worker))

    def _spread(self, spreads: dict[int, float]) -> None:
        for step, spread in spreads.items():
            self._log(asdict(SpreadMetrics(step=step, replica_std=spread)))

    def _same_corpus(self, sha256: str, rank: int) -> None:
        self.corpora.setdefault(sha256, rank)
        if len(self.corpora) > 1:
            (one, first), (other, second) = sorted(self.corpora.items(), key=lambda item: item[1])
            raise ValueError(
                f"data.path = {self.config.data.path!r}: worker {second} reads another text (sha256 {other[:8]}...) "
                f"than worker {first} ({one[:8]}...): put the same files on both machines"
                + ("" if self.config.data.path else "; without data.path it is the standard library of their Pythons")
            )


def _sampling(config: Config) -> dict[int, int]:
    """The stage of each worker that sends samples: one per island, if there are several replicas. Clusters, whose cuts
    may differ, send none.
    """
    if kind_of(config.pipeline).has_peers:
        return {}
    stages = {rank: at.stage for rank, at in enumerate(layout_of(config).coordinates) if at.inner == 0}
    replicas = Counter(stages.values())
    return {rank: stage for rank, stage in stages.items() if replicas[stage] > 1}


def write_config(config: Config, out: Path) -> None:
    """Write RUN/config.toml, once, with the files that it names and a record that its user typed their names here."""
    path = out / CONFIG
    if not path.exists():
        names = referenced_names(config)
        for key, file in referenced_files(config).items():
            if not (out / names[key]).exists():
                write_text(out / names[key], file.read_text(encoding="utf-8"))
        save_config(to_toml(config, names), out)


def reopen(config: Config, out: Path) -> None:
    """Make the run in `out` one that goes on to the last step of `config`: it is complete no more."""
    if read_toml(str(out / CONFIG))["run"].get("steps") != config.run.steps:
        write_text(out / CONFIG, to_toml(config, referenced_names(config)))
    (out / SUMMARY).unlink(missing_ok=True)


def commit(config: Config, out: Path, step: int, ranks: Sequence[int], node_group: NodeGroup) -> None:
    """Make the checkpoint of `step`, which the workers `ranks` have all written, exist on this machine."""
    write_config(config, out)
    keep, spec = config.run.keep_checkpoints, node_group.spec
    if keep and spec.nodes > 1:
        keep = max(keep, 2)  # machines commit a moment apart: the one before stays until all have come to the next
    own = None if spec.shared_directory else node_group.shares(config.world.workers)[spec.node]
    Checkpoints(out).commit(step, ranks, run_facts(config), keep=keep, own=own)


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl (or timeline.jsonl) beyond `step`, and a half-written last one: they will be
    written again.
    """
    saved = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        try:
            if parse_json(line)["step"] <= step:
                saved.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    write_text(path, "".join(saved))

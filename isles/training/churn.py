"""Workers that come and go on the virtual clock, as a trace says: who is there when, whatever they do together.

RUN/config.toml       at once
RUN/churn.jsonl       what happens to whom when, as `isles.network.churn` reads it
RUN/metrics.jsonl     what the workers report
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.transport import VirtualTransport
from isles.modes import torch_threads
from isles.network.churn import POOLS, ChurnEvent, churn, founders, returns, write_trace
from isles.network.pauses import KnownPauses
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.memory.planned import step_seconds
from isles.training.records.rundir import METRICS, as_json, claim, held
from isles.training.records.writer import write_config

CHURN = "churn.jsonl"
_LONGER = 2.0  # a trace by rate goes on for so many times the time of the steps: exchanges and pauses take time too


class ChurnedWorkers:
    """The workers of a run of `config` through the changes of `churn_name`. founders: with how many it begins; trace:
    what happens; begins: by worker, when it comes (s). lease: seconds after which one that stands still is gone, and
    comes again as somebody else (`isles.network.churn`); None: it is waited for. saves: whether it keeps the
    checkpoints that `config` asks for; else it asks for none, which `notices` tell. ValueError as `trace_of`.
    """

    def __init__(self, config: Config, churn_name: str, lease: float | None = None, *, saves: bool = False) -> None:
        self.notices: list[str] = []
        if config.run.checkpoint_every and not saves:
            self.notices.append(
                f"run.checkpoint_every = {config.run.checkpoint_every}: such a run of --churn cannot be gone on with, "
                "so nothing is saved"
            )
            config = replace(config, run=replace(config.run, checkpoint_every=0))
        self.config = config
        self.founders, self.trace = trace_of(config, churn_name)
        self.begins = [0.0] * self.founders
        for event in self.trace:
            self.begins += [event.at] * (int(event.number) if event.kind == "join" else 0)
        self.events: Sequence[ChurnEvent] = self.trace
        """What happens to whom then."""
        self._machines: Sequence[int] = range(len(self.begins))
        if lease is not None:
            found = returns(self.trace, self.begins, lease)
            self.events, self.begins, self._machines = found.events, list(found.begins), found.machines

    @contextmanager
    def directory(
        self, out: Path, on_line: Callable[[dict[str, Any]], None]
    ) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """`out` as this run's alone, with its first files; what a line of metrics is given to, which `on_line` sees
        too. ValueError: it holds a run already, or cannot be made.
        """
        with held(out):
            claim(out)
            write_config(self.config, out)
            write_trace(self.trace, str(out / CHURN))
            with (out / METRICS).open("a", encoding="utf-8") as metrics:

                def write(told: Mapping[str, Any]) -> None:
                    line = {key: value for key, value in told.items() if value is not None}
                    metrics.write(as_json(line) + "\n")
                    metrics.flush()
                    on_line(line)

                yield write

    def train(self, work: Callable[[VirtualTransport], None], before: Callable[..., None]) -> None:
        """Have each worker do `work`, from when it comes. before: see `VirtualCluster.run`."""
        config, world, workers = self.config, self.config.world, len(self.begins)
        factors = replace(world, workers=workers).factors
        cluster = VirtualCluster(
            workers,
            links=world.virtual.links,
            step_seconds=step_seconds(config),
            speeds=[factors[machine] for machine in self._machines],
            compute_jitter=world.virtual.step_jitter,
            pauses=KnownPauses(_pauses(self.events)),
            begins=self.begins,
            seed=config.run.seed,
        )
        with torch_threads(world.start_threads):
            cluster.run(work, before=before)


def trace_of(config: Config, name: str) -> tuple[int, list[ChurnEvent]]:
    """(with how many workers a run of `config` begins, what happens in it), for `churn` called `name`. ValueError as
    `isles.network.churn.churn` and `refuse_conflicts`, and where workers would pause twice.
    """
    world = config.world
    refuse_conflicts(config, "--churn")
    seconds = config.run.steps * step_seconds(config)
    longer = 1.0 if name in POOLS else _LONGER * max(world.virtual.step_factors, default=1.0)
    return founders(name, world.workers), churn(
        name, workers=world.workers, seconds=seconds * longer, seed=config.run.seed
    )


def _pauses(trace: Iterable[ChurnEvent]) -> dict[int, list[tuple[float, float]]]:
    """By worker, when it stands still; one that does not resume does so for good."""
    found: dict[int, list[tuple[float, float]]] = {}
    for event in trace:
        stretches = found.setdefault(int(event.number), []) if event.kind in ("pause", "resume") else []
        if event.kind == "pause":
            stretches.append((event.at, float("inf")))
        elif event.kind == "resume":
            stretches[-1] = stretches[-1][0], event.at
    return found

"""The backend `virtual`: all workers in this process, on the simulated network and clock of [world]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from isles.base.errors import notify_warnings
from isles.comm.stopping import SharedStopControl
from isles.comm.virtual.cluster import run_virtual
from isles.data import load_corpus
from isles.launch.nodes import NodeGroup
from isles.training.config.sections import Config
from isles.training.memory.plans import step_seconds
from isles.training.worker import deadlines, train_worker


class VirtualWorkers:
    """All workers of a call, as `isles.launch.workers.Workers`; they run during `join`."""

    def __init__(self, worker: Callable[..., Any], workers: int, config: Config, args: Sequence[Any]) -> None:
        world = config.world
        self.failures: list[int] = []  # always empty: a failure ends the call
        self._stop_control = SharedStopControl(workers)
        self._run = partial(
            run_virtual,
            worker,
            workers,
            args=args,
            links=config.network,
            inner=config.island,
            inner_links=world.virtual.inner_links,
            threads=world.start_threads,
            step_seconds=step_seconds(config),
            speeds=replace(world, workers=workers).factors,
            compute_jitter=world.virtual.step_jitter,
            pauses=world.virtual.pauses,
            seed=config.run.seed,
            deadlines=deadlines(config),
            stop_control=self._stop_control,
        )

    def stop(self) -> None:
        """Ask all workers to stop after a common inner step."""
        self._stop_control.ask()

    def join(
        self,
        on_event: Callable[[Any], None] | None = None,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> list[Any]:
        """Run the workers; an error is raised unchanged. Their warnings go to `on_event`."""
        with notify_warnings(on_event) if on_event else nullcontext():
            return self._run(on_event=on_event)


def train(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> VirtualWorkers:
    """The workers of a run."""
    corpus = load_corpus(config.data)  # once for all workers: to read its files takes longer than a small step
    return VirtualWorkers(train_worker, config.world.workers, config, (config, out, resume, corpus))


def call(worker: Callable[..., Any], workers: int, config: Config, args: Sequence[Any], out: Path) -> VirtualWorkers:
    """The workers of `worker(world, *args)`."""
    return VirtualWorkers(worker, workers, config, args)

"""A run on a machine that is not node 0: start this machine's workers, save their shards, follow node 0's commands.

OUT/checkpoints/           shards of this machine's workers, committed when node 0 reports that all machines have theirs
OUT/config.toml            for `isles resume`
OUT/logs/worker-N.log      what this machine's workers printed, if anything

Metrics, summary and model are node 0's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles.base.parsing import Port, value_of
from isles.launch.handles import RemoteWorkers
from isles.launch.nodes import NodeGroup, NodeSpec
from isles.launch.workers import worker_specs
from isles.running.agree import meet_nodes
from isles.running.backends import start_server, train_process
from isles.running.run import Interrupted
from isles.training.config.sections import Config
from isles.training.config.trust import settled
from isles.training.interrupts import GraceOver, first_interrupt
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.events import begun, checks_host_messages, committed
from isles.training.records.rundir import LOGS, METRICS, run_directory
from isles.training.records.tokens import forget
from isles.training.records.writer import commit, reopen, write_config
from isles.training.worker import deadlines


def follow(
    config: Config,
    out: Path,
    on_metrics: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None,
    node_spec: NodeSpec,
) -> str:
    """Take part in node 0's run; returns node 0's address when it is done. Arguments and errors as in `launch`;
    on_metrics sees this machine's workers only.
    """
    assert node_spec.node > 0
    with run_directory(out, resume, node_spec):
        if resume is None:
            (out / METRICS).unlink()
        with (
            meet_nodes(config, node_spec, out, resume, on_notice) as node_group,
            settled(config, out) as config,
        ):
            try:
                results = _work(config, out, on_metrics, node_group)
            except GraceOver as late:
                raise Interrupted(out, node_spec, late.seconds) from None
            if None in results:
                raise Interrupted(out, node_spec)
        forget(out)
    return node_group.host


def _work(config: Config, out: Path, on_metrics: Callable[[dict[str, Any]], None], node_group: NodeGroup) -> list[Any]:
    """The results of this machine's workers, without those that have left."""
    left_ranks = set[int]()

    def take(event: Any) -> None:
        if isinstance(event, dict) and "left" in event:
            left_ranks.add(event["left"])
        if isinstance(event, dict) and "loss" in event:
            write_config(config, out)
            on_metrics(event)

    def obey(command: Any) -> None:
        if isinstance(command, dict) and "commit" in command:
            with checks_host_messages():
                step, ranks = committed(command, config)
            commit(config, out, step, ranks, node_group)

    world = config.world
    start_server()
    with checks_host_messages():
        store, step = value_of(node_group.facts, "store", Port), begun(node_group.facts, config)
    # Before the workers start, which write the checkpoints after `step` again.
    if step is not None:
        Checkpoints(out).go_back(step)
        reopen(config, out)
    specs = worker_specs(
        node_group,
        world.workers,
        store,
        threads=world.start_threads,
        deadlines=deadlines(config),
        logs=out / LOGS,
    )
    pool = RemoteWorkers(train_process, specs, args=(config, out, step), node_group=node_group)
    with first_interrupt(pool.stop, config.run.grace):
        results = pool.join(take, obey)
    return [result for spec, result in zip(specs, results, strict=False) if spec.rank not in left_ranks]

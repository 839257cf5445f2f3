"""How a trial's run is launched: by `isles train` on one machine, on two nodes, under torchrun; by `run_local`."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.comm.errors import WorkerFailed
from isles.launch import workers as launching
from isles.launch.nodes import SINGLE_NODE, NodeGroup, NodeSpec
from isles.launch.workers import LocalWorkers, Workers, raise_first, run_local
from isles.running import follow as following
from isles.running.backends import start_server
from isles.running.run import Interrupted, launch
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.records.events import Schema
from isles.training.worker import deadlines
from tests.cli.command import Command, gone
from tests.faults import striking
from tests.faults.striking import SIGNALS
from tests.faults.trials import WORKERS, Trial

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
TORCHRUN += ["--nproc-per-node", str(WORKERS), "-m"]


def ended(action: Callable[[], Any]) -> BaseException | None:
    """The error with which `action` ends."""
    try:
        action()
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def launched(trial: Trial, config: Config, out: Path, resume: int | None = None) -> None:
    """The run to its end, and the fault in it if out/../fault.json says so. resume: go on from that step.

    Raises the run's error.
    """
    _LAUNCHERS[trial.launcher](trial, config, out, resume)


def _one_machine(trial: Trial, config: Config, out: Path, resume: int | None) -> None:
    launch(config, out, _nothing, _nothing, resume, start_workers=_starter(trial))


def _two_nodes(trial: Trial, config: Config, out: Path, resume: int | None) -> None:
    with _token(out.parent) as (host, guest):
        ends: list[BaseException | None] = []
        node_1 = threading.Thread(
            target=lambda: ends.append(
                ended(lambda: following.follow(config, out.parent / "run1", _nothing, _nothing, resume, guest))
            )
        )
        node_1.start()
        try:
            launch(config, out, _nothing, _nothing, resume, host, _starter(trial))
        finally:
            node_1.join(60.0)
        if not ends:
            raise AssertionError("node 1 hangs")


def _run_local(trial: Trial, config: Config, out: Path, resume: int | None) -> None:
    """What a program does that is no command: its workers train, and nobody keeps their checkpoints."""
    start_server()
    out.mkdir()
    before = launching.LocalWorkers
    launching.LocalWorkers = lambda *a, **k: _struck(trial, out, before(*a, **k))  # type: ignore
    try:
        results = run_local(
            striking.struck_process,
            WORKERS,
            args=(config, out, resume),
            deadlines=deadlines(config),
            return_errors=trial.returns_errors,
        )
    finally:
        launching.LocalWorkers = before  # type: ignore[misc]
    errors = [rank for rank, result in enumerate(results) if isinstance(result, Exception)]
    if errors and (trial.method != "solo" or len(errors) == WORKERS):
        raise_first(results, errors)
    if any(result is None for result in results):
        raise Interrupted(out, SINGLE_NODE)


def _torchrun(trial: Trial, config: Config, out: Path, resume: int | None) -> None:
    """As a user types it; its words are those of the command, or where it could say none, those of torchrun."""
    (out.parent / "trial.toml").write_text(to_toml(config))
    words = ["train", "trial.toml", "--out", str(out)] if resume is None else ["resume", str(out)]
    command = Command(*words, folder=out.parent, program=[*TORCHRUN, "tests.faults.struck_command"])
    code, _, said = command.end()
    if not gone(command.mark):
        raise AssertionError("processes are left")
    if code == 0:
        return
    told = [line.removeprefix("isles: ") for line in said.splitlines() if line.startswith("isles: ")]
    if trial.method == "solo" and told and "the run is complete" in told[-1]:
        return  # an error only so that torchrun ends what is left of the lost worker
    if told and told[-1].startswith("stopped after step"):
        raise Interrupted(out, SINGLE_NODE)
    raise WorkerFailed(0, told[0] if told else said)


_LAUNCHERS: dict[str, Callable[[Trial, Config, Path, int | None], None]] = {
    "one machine": _one_machine,
    "two nodes": _two_nodes,
    "run_local": _run_local,
    "torchrun": _torchrun,
}


@contextmanager
def _token(folder: Path) -> Iterator[tuple[NodeSpec, NodeSpec]]:
    """Two nodes on loopback."""
    from isles.comm import credentials
    from isles.comm.tcp import listen

    with listen(0, "127.0.0.1") as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as kept:
        mine = Path(kept, "credentials")
        token = credentials.found(mine).token
        common = NodeSpec(nodes=2, node=0, rendezvous=where, token=token, credentials=mine)
        before = following.train_process
        following.train_process = striking.struck_process  # type: ignore[assignment]
        try:
            yield common, replace(common, node=1, credentials=None)
        finally:
            following.train_process = before  # type: ignore[assignment]


def _struck(trial: Trial, out: Path, pool: LocalWorkers) -> LocalWorkers:
    """A worker is hit while it joins, if that is the moment."""
    if trial.moment == "join" and (out.parent / "fault.json").exists():
        process = pool.processes[trial.worker]
        assert process.pid is not None
        striking.note_time(out)
        os.kill(process.pid, SIGNALS[trial.kind])
    return pool


def _starter(trial: Trial) -> Any:
    def start(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
        start_server()
        pool = LocalWorkers(
            striking.struck_process,
            config.world.workers,
            args=(config, out, resume),
            deadlines=deadlines(config),
            logs=out / "logs",
            node_group=node_group,
            check=Schema(config),
        )
        return _struck(trial, out, pool)

    return start


def _nothing(*_: Any) -> None:
    pass

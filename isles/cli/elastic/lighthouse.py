"""`isles lighthouse`: the meeting point of a run whose workers come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.base.parsing import parse_toml
from isles.cli.terminal import ComingAndGoing, Log, Set, end_in_order, say, takes_settings
from isles.training.interrupts import first_interrupt, time_limit

if TYPE_CHECKING:
    from isles.training.config.sections import Config
    from isles.training.lighthouse.server import LighthouseAddress

_ALONE = "127.0.0.1"


@takes_settings
def lighthouse(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.toml|RUN]", help="Or the directory of a run that was stopped: it goes on."),
    ] = None,
    port: Annotated[int, typer.Option(help="Where workers join; 0: at any free one.")] = 29400,
    host: Annotated[
        str | None, typer.Option(help="This machine's address. Default: that of its default route.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers to start on this machine too.")] = 0,
    founders: Annotated[
        int | None, typer.Option(help="Workers that the first round waits for. Default: world.workers.")
    ] = None,
    max_members: Annotated[
        int | None, typer.Option(help="Workers that may be there at once. Default: world.elastic.max_members.")
    ] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="New run directory. Default: runs/METHOD-DATE-TIME.")] = None,
    log: Log = "text",
) -> None:
    """Keep a run that workers join and leave (`isles join`, `isles swarm peer`), and show the command that they join
    with.
    """
    from isles.comm.tcp import outward_address, refuse_unknown
    from isles.running.python import new_directory, refuse_too_many
    from isles.training.lighthouse.server import LighthouseAddress

    end_in_order()
    if not 0 <= port < 65536:
        raise ValueError(f"--port {port}: choose 0 to 65535")
    if workers < 0:
        raise ValueError(f"--workers {workers}: choose 0 or more")
    refuse_too_many(workers, "--workers", "start fewer")
    with suppress(ValueError):  # no default route: this machine alone, which a line says once it listens
        host = host or outward_address()
    host = host or _ALONE
    refuse_unknown(host, "--host ")
    ours = {"world.workers": founders, "world.elastic.max_members": max_members}
    drawn_up, there = _drawn_up(config, ours, set_ or [], out)
    _keep(drawn_up, there or new_directory(drawn_up.method), LighthouseAddress(host=host, port=port, workers=workers))


def restart_lighthouse(run: Path, workers: int | None) -> None:
    """Go on with the run of a lighthouse where it stood, with `workers` on this machine; None: as many as it had."""
    from isles.training.lighthouse.server import read_address

    stand = read_address(run)
    config, _ = _drawn_up(str(run), {}, [], None)
    _keep(config, run, stand if workers is None else replace(stand, workers=workers))


def _keep(config: Config, run: Path, stand: LighthouseAddress) -> None:
    """Keep the run until it ends, or is stopped."""
    from isles.cli.train import print_summary
    from isles.comm.tcp import written
    from isles.training.kinds import kind_of

    with ExitStack() as stack:
        progress = stack.enter_context(ComingAndGoing(config.method, config.run.steps))
        started: list[subprocess.Popen[bytes]] = []

        def show_token(token: str) -> None:
            here = replace(stand, port=server.session.port)
            here.write(run)
            address = written(here.host, here.port)
            whom = f"use --host {_ALONE} to keep it to this machine"
            if stand.host in (_ALONE, "localhost"):
                whom = "only this machine reaches it; for others name its address with --host"
            progress.notice(f"listens at {address}; {whom}")
            joins = f"{kind.joins_with} {address} --token {token}"
            progress.notice(f"to join, on a machine that has isles (pip install .): {joins}")
            count = server.rules.founders
            workers = "a worker is" if count == 1 else f"{count} workers are"
            progress.notice(f"it begins once {workers} there; what becomes of it: {run}")
            progress.notice(_states(config, server.disk))
            for number in range(stand.workers):
                if not server.stopping.is_set():
                    started.append(_start(config, kind.joins_with, address, run, number))

        kind = kind_of(config.pipeline).lighthouse_server
        server = kind(config, run, written(stand.host, stand.port), show_token, progress.line, progress.notice)
        progress.members = server.members
        stack.callback(lambda: _end(started, at_once=server.stopping.is_set()))
        stop = server.stopping.set
        with time_limit(config.run.max_hours, stop), first_interrupt(stop, config.run.grace):
            summary = server.run()
    if summary is None:
        again = f"stopped; workers that stay go on by themselves and come back to: isles resume {run}"
        say(again, "warning", "isles: ")
        raise typer.Exit(130)
    print_summary(summary, run)


def _states(config: Config, disk: int) -> str:
    """A line on the states that the lighthouse saves. disk: bytes of one."""
    from isles.report.units import format_bytes
    from isles.training.lighthouse.schedule import RETAINED

    every = config.run.checkpoint_every
    if not every:
        return "no states are saved (run.checkpoint_every = 0): if all workers are lost, the run begins again at step 0"
    often = "10 minutes, or every 5 % of the run if that is shorter," if every == "auto" else f"{every} steps"
    size = f"up to {format_bytes(disk)}" if disk else "an unknown size"
    return f"states every {often} in RUN/states: {RETAINED} x {size}"


def _drawn_up(
    config: str | None, ours: dict[str, int | None], assignments: list[str], out: Path | None
) -> tuple[Config, Path | None]:
    """The run's configuration, and the run directory where it is that of a run that goes on."""
    from isles.training.config.reading import gather
    from isles.training.elastic.support import elastic

    goes_on = config is not None and Path(config).is_dir()
    if goes_on:
        if out is not None or assignments or any(value is not None for value in ours.values()):
            raise ValueError(f"{config}: goes on as it was; leave --out, --set, --founders and --max-members out")
        out = Path(str(config))
        config = str(out / "config.toml")
        if not Path(config).exists():
            raise ValueError(f"{out}: holds no run of a lighthouse; name one, or a CONFIG.toml")
    return elastic(gather(config, ours, assignments)), out


def _start(config: Config, joins_with: str, address: str, out: Path, number: int) -> subprocess.Popen[bytes]:
    """A worker on this machine, with a log of its own, that the others here reach directly. It reads the token from a
    file: arguments can be seen.
    """
    from isles.comm.credentials import read, write_private
    from isles.training.config.reading import to_toml
    from isles.training.elastic.connect import as_arguments

    token = out / "credentials" / "token"
    write_private(token, str(read(token.parent).token).encode("ascii"))
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / f"join-{number}.log").open("ab") as log:
        command = [sys.executable, "-m", *joins_with.split(), address, "--token", f"@{token}"]
        command += ["--listen", "127.0.0.1:0", *as_arguments(parse_toml(to_toml(config)))]
        own = {**os.environ, "LOCAL_RANK": str(number)}  # each takes a GPU of its own
        return subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _end(started: list[subprocess.Popen[bytes]], *, at_once: bool) -> None:
    """They go by themselves once the run is over, and are asked to where it was stopped; who does not is ended."""
    for process in started if at_once else ():
        process.terminate()
    until = time.monotonic() + 20.0
    for process in started:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

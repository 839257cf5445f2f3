"""Take part in a run of a lighthouse: `isles join`, and `isles swarm peer` for runs whose peers serve stages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.terminal import Log, OwnDevice, end_in_order, log_event, say
from isles.training.interrupts import first_interrupt

if TYPE_CHECKING:
    from isles.comm.credentials import Token
    from isles.network.clusters import ClusterNode
    from isles.training.config.reading import Tables
    from isles.training.config.sections import Config

RunToken = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN|@FILE", help="The run's token, as the lighthouse shows it. Or ISLES_TOKEN."),
]
OwnData = Annotated[
    str | None, typer.Option(metavar="PATH", help="The run's text on this machine: --set data.path=PATH.")
]
OwnSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="A setting of this machine's; repeatable."),
]

OwnRelay = Annotated[
    bool, typer.Option("--relay", help="With --listen: relay, unread, for workers that cannot reach each other.")
]

Show = Annotated[
    bool, typer.Option("--show", help="Print what would run here, and what it takes of this machine; do not join.")
]


OwnName = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help='This machine, as others see it; "": unnamed. Default: its host name.'),
]


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The lighthouse's address.")],
    token: RunToken = None,
    workers: Annotated[int, typer.Option(help="Workers to start on this machine.")] = 1,
    data: OwnData = None,
    device: OwnDevice = None,
    set_: OwnSettings = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Let other workers reach this one directly, at this port; further workers: the next ports.",
        ),
    ] = None,
    relay: OwnRelay = False,
    name: OwnName = None,
    show: Show = False,
    log: Log = "text",
    apart: Annotated[int, typer.Option(hidden=True, help="Ports from one worker of an island to the next.")] = 1,
) -> None:
    """Join a run: the configuration comes from the lighthouse, the state from another worker. Ctrl-C leaves the run
    after the present round.
    """
    from isles.running.python import refuse_too_many
    from isles.training.elastic.connect import as_arguments

    end_in_order()
    parsed = read_token(token)
    if workers < 1:
        raise ValueError(f"--workers {workers}: choose 1 or more")
    refuse_too_many(workers, "--workers", "start fewer")
    settings = own(data, device, set_)
    there = places(listen, workers, relay)
    if show:
        from isles.training.elastic.support import in_rounds

        return _show(address, parsed, settings, in_rounds)
    if workers > 1:
        more = [*["--relay"] * relay, *(["--name", name] if name is not None else []), "--log", log]
        raise typer.Exit(_several(address, parsed, there, [*as_arguments(settings), *more]))
    from isles.training.elastic.connect import LocalSettings, take_part

    listening, announced = place(there[0], address)
    here = LocalSettings(own=settings, listen=listening, announced=announced, apart=apart, relays=relay, machine=name)
    _end(take_part(address, parsed, here, notify=notify))


def _show(address: str, token: Token, settings: Tables, fit: Callable[[Config], Config]) -> None:
    from isles.training.elastic.connect import LocalSettings, show

    print(show(address, token, LocalSettings(own=settings), notify=notify, fit=fit), flush=True)


def own(data: str | None, device: str | None, assignments: list[str] | None) -> Tables:
    """The settings of --data, --device and --set. ValueError for a setting that is not this machine's, or no such
    GPU.
    """
    from isles.models import ModelConfig, choose_device
    from isles.training.config.reading import merged_tables
    from isles.training.elastic.connect import with_own

    said = with_own({}, merged_tables(None, {"data.path": data, "model.device": device}, assignments or []))
    choose_device(ModelConfig(device=said.get("model", {}).get("device", "auto")))
    return said


def read_token(token: str | None) -> Token:
    """The token of --token or ISLES_TOKEN. ValueError if there is none."""
    from isles.comm.credentials import parse_token

    text = token if token is not None else os.environ.get("ISLES_TOKEN")
    if not text:
        raise ValueError("--token is missing: give the one that the lighthouse shows, or ISLES_TOKEN, or --token @FILE")
    return parse_token(text)


def place(listen: str | None, lighthouse: str) -> tuple[tuple[str, int] | None, str]:
    """((address of this machine, port; 0: any), the address for others; "": as the lighthouse sees this machine).

    HOST may be the router in front of this machine. lighthouse: HOST:PORT; this machine may reach it by another
    interface than others. (None, "") without --listen.
    """
    from isles.comm.tcp import is_own, outward_address, parse_address

    if listen is None:
        return None, ""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not is_own(host):
        return (outward_address(parse_address(lighthouse, "HOST:PORT")[0]), int(port)), host
    return (host, int(port)), host


def places(listen: str | None, workers: int, relay: bool = False) -> list[str | None]:
    """The --listen option of each worker of this machine: consecutive ports."""
    if listen is None:
        if relay:
            raise ValueError("--relay: others must reach this machine; add --listen PORT")
        return [None] * workers
    host, colon, port = listen.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65536 - workers or bool(host) != bool(colon):
        raise ValueError(f"--listen {listen}: choose a port from 1 to {65536 - workers}, or write HOST:PORT")
    return [f"{host}{colon}{int(port) + number if int(port) else 0}" for number in range(workers)]


def notify(line: str) -> None:
    """Print a line for the user, apart from a command's output."""
    say(line, prefix="isles: ")


def _end(text: str) -> None:
    """Print how a member's part ended."""
    if not log_event("end", text=text):
        print(text, flush=True)


def _several(address: str, token: Token, listening: list[str | None], settings: list[str]) -> int:
    """Run several workers, each in a process of its own; returns the worst exit code. Signals such as Ctrl-C reach this
    process alone, which asks each worker once to leave: a second signal would end them within the round.
    """
    command = [sys.executable, "-m", "isles", "join", address, *settings]
    environment = {**os.environ, "ISLES_TOKEN": str(token), "LOCAL_WORLD_SIZE": str(len(listening))}
    started: list[subprocess.Popen[bytes]] = []

    def leave() -> None:
        for process in started:
            process.terminate()

    try:
        with first_interrupt(leave):
            for number, one in enumerate(listening):
                words = command if one is None else [*command, "--listen", one, "--apart", str(len(listening))]
                own = {**environment, "LOCAL_RANK": str(number)}  # each takes a GPU of its own
                started.append(subprocess.Popen(words, env=own, stdin=subprocess.DEVNULL, process_group=0))
            codes = [process.wait() for process in started]
    except BaseException:
        leave()
        for process in started:
            process.wait()
        raise
    return max(code if code >= 0 else 128 - code for code in codes)


swarm = typer.Typer(help="Serve a stage of a run whose peers come and go.", no_args_is_help=True)


@swarm.command("peer")
def peer(
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="The lighthouse's address.")],
    token: RunToken = None,
    stage: Annotated[
        int | None, typer.Option(help="A wish. Default: the stage that most needs a peer.", show_default=False)
    ] = None,
    data: OwnData = None,
    device: OwnDevice = None,
    set_: OwnSettings = None,
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Let other peers reach this one directly, at this port.")
    ] = None,
    relay: OwnRelay = False,
    name: OwnName = None,
    show: Show = False,
    log: Log = "text",
    node: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="This node in a run in clusters: a file of isles doctor --describe --peer. Default: measured.",
        ),
    ] = None,
) -> None:
    """Serve a stage: the configuration comes from the lighthouse, the state from another peer. Ctrl-C leaves the run
    after the present step.
    """
    end_in_order()
    parsed = read_token(token)
    described = None if node is None else _described(node)
    there = places(listen, 1, relay)[0]
    if stage is not None and stage < 0:
        raise ValueError(f"--stage {stage}: choose 0 or more, or leave it out")
    settings = own(data, device, set_)
    if show:
        from isles.training.elastic.support import among_peers

        return _show(join, parsed, settings, among_peers)
    from isles.training.elastic.connect import LocalSettings
    from isles.training.swarm.connect import take_part
    from isles.training.swarm.trainer import ANYWHERE

    listening, announced = place(there, join)
    here = LocalSettings(
        own=settings, listen=listening, announced=announced, relays=relay, node=described, machine=name
    )
    _end(take_part(join, parsed, here, ANYWHERE if stage is None else stage, notify=notify))


def _described(path: str) -> ClusterNode:
    """The single node of a file."""
    from isles.network.clusters import read_nodes

    nodes = read_nodes(path)
    if len(nodes) != 1:
        raise ValueError(f"--node {path}: it describes {len(nodes)} nodes; give only this machine's")
    return nodes[0]

"""`isles doctor`: is this machine fit for a run, and can it and another one reach each other?

One line a check: its name, ok or FAIL, what was found. Every check is made, whatever the ones before it found.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.base.version import __version__
from isles.cli.terminal import Check, of_torch
from isles.report.units import format_bytes, format_percent, format_seconds, format_short

if TYPE_CHECKING:
    from isles.launch.probe import Findings

LISTEN_FOR = 600.0  # seconds until a listening doctor gives up


def doctor(
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Check the connection to a machine that runs --listen PORT.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Wait at this address of this machine for the other's --peer; with --join: whether others reach it.",
        ),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Check the way to a run's lighthouse there.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN|@FILE", help="With --join: the run's. Or ISLES_TOKEN.")
    ] = None,
    write_links: Annotated[
        str | None,
        typer.Option(metavar="LINKS.toml", help="With --peer: write what was measured into this matrix of pairs."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="HERE,THERE", help="With --write-links: which nodes the two machines are. Default: 0,1."),
    ] = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print this machine's table for `isles plan clusters`, nothing else.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure what plans of memory go by: host, disk, link to a GPU.")
    ] = False,
    disk: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --memory: where the disk is measured. Default: here.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="MY.toml", help="With --memory: write what was found as a machine.")
    ] = None,
) -> None:
    """Check this machine; with --listen on one and --peer on the other, both directions between two."""
    from isles.comm.tcp import listen as open_port
    from isles.comm.tcp import listen_address, parse_address

    if join is not None:
        others = (peer, write_links, nodes, disk, write)
        if any(option is not None for option in others) or describe or memory:
            raise ValueError("--join: goes with --token and --listen; leave the other options out")
        _check_route(join, token, listen)
        return
    if token is not None:
        raise ValueError("--token: goes with --join HOST:PORT; add it, or take it out")
    if peer is not None and listen is not None:
        raise ValueError("--peer and --listen: one machine listens, the other one names it; give one of them")
    if nodes is not None and write_links is None:
        raise ValueError("--nodes: goes with --write-links LINKS.toml; add it, or take it out")
    pair = None if write_links is None else _pair(write_links, nodes or "0,1", peer)
    if describe and (listen is not None or write_links is not None or memory):
        raise ValueError("--describe: goes with --peer alone, whose link it describes; leave the others out")
    _refuse_memory(memory, disk, write)
    # Both before the checks that take a while: a slip is answered at once.
    target = None if peer is None else parse_address(peer, "--peer")
    if describe:
        _describe(target)
        return
    listener = None
    if listen is not None:
        host, port = listen_address(listen)
        listener = open_port(port, host)
    with listener or nullcontext():
        _print_checks(
            machine(),
            of_memory(disk or ".", write) if memory else (),
            () if target is None else call(*target, pair),
            () if listener is None else wait_for_call(listener),
        )


def _check_route(join: str, token: str | None, listen: str | None) -> None:
    from isles.cli.elastic.join import place, places, read_token
    from isles.cli.elastic.route import walk
    from isles.comm.tcp import parse_address

    target, parsed = parse_address(join, "--join"), read_token(token)
    (here,) = places(listen, 1)
    listening, announced = place(here, join)
    _print_checks(machine(), walk(*target, parsed, listening, announced))


def _describe(target: tuple[str, int] | None) -> None:
    """Print the table [[node]] of this machine. target: whose line to it is measured; None: nobody is asked."""
    from isles.comm.sockets.connection import LinkLost
    from isles.launch import probe
    from isles.models import ModelConfig, choose_device
    from isles.network.clusters import ClusterNode
    from isles.training.clusters.stage_server import forward_speed
    from isles.training.elastic.needs import free_on

    device = choose_device(ModelConfig())
    try:
        found = None if target is None else probe.call(*target)
    except LinkLost as error:
        raise ValueError(f"--peer: {error}") from error
    node = ClusterNode(
        name=platform.node() or "here",
        memory=free_on(device),
        speed=forward_speed(device),
        bandwidth=1e6 if found is None else min(found.rate_out, found.rate_back),
        latency=0.0 if found is None else found.round_trip / 4,  # half of one way: the other half is the other's
    )
    lines = node.to_toml().splitlines()
    if found is None:
        lines = [line for line in lines if not line.startswith(("bandwidth", "latency"))]
        lines.append(
            '# bandwidth = "40Mbit/s"   # not measured: add --peer HOST:PORT of a machine that runs --listen PORT'
        )
    print("\n".join(lines))


def _print_checks(*parts: Iterable[Check]) -> None:
    """Print every check, once it is made. typer.Exit(1) where one is not good."""
    good = True
    for check in chain(*parts):
        print(f"{check.name:<11} {'ok  ' if check.good else 'FAIL'}  {check.found}", flush=True)
        good = good and check.good
    if not good:
        raise typer.Exit(1)


def machine() -> Iterator[Check]:
    """What a run on this machine alone needs."""
    yield Check("python", sys.version_info >= (3, 11), f"{platform.python_version()}, {sys.executable}")
    yield from of_torch()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("cores", True, str(cores))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Check("memory", True, format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    yield _loopback()
    yield _directory(format_bytes(shutil.disk_usage(".").free))


def _loopback() -> Check:
    from isles.comm.sockets import loop
    from isles.comm.sockets.listener import EchoServer, echo_failure

    with EchoServer("127.0.0.1") as echo:
        why = loop.run(echo_failure("127.0.0.1", echo.port))
    mend = f"port {echo.port} of 127.0.0.1: {why}; bring the loopback interface up and let it through the firewall"
    return Check("loopback", not why, mend if why else "processes of this machine reach each other")


def _refuse_memory(asked: bool, disk: str | None, write: Path | None) -> None:
    """ValueError, one line, for what cannot be, before anything is measured."""
    if not asked and (disk is not None or write is not None):
        raise ValueError(f"--{'write' if disk is None else 'disk'}: goes with --memory; add it, or take it out")
    if write is not None and write.suffix != ".toml":
        raise ValueError(f"--write {write}: a machine's file ends in .toml; name it so")
    if write is not None and write.exists():
        raise ValueError(f"--write {write}: exists already; name a new file")
    if write is not None and not os.access(write.parent, os.W_OK):
        raise ValueError(f"--write {write}: {write.parent} is no folder that can be written to; name another file")
    if disk is not None and not os.path.isdir(disk):
        raise ValueError(f"--disk {disk}: there is no such folder; make it, or name another one")


def of_memory(disk: str, write: Path | None) -> Iterator[Check]:
    """What plans of memory go by, measured in some seconds, and what this machine lacks."""
    from isles.memory.measurement import measure_machine
    from isles.network.machines import to_toml

    try:
        found = measure_machine(disk)
    except OSError as error:  # a disk that is full, or fails
        yield Check("disk", False, str(error))
        return
    here = found.machine
    rate = lambda amount: f"{format_bytes(amount)}/s"  # noqa: E731
    yield Check("device", True, f"{here.name}: {format_bytes(here.device_bytes)} at {rate(here.device_rate)}")
    reached = f"{format_percent(here.mfu)} of it by a decoder"
    yield Check("products", True, f"{format_short(here.peak)} FLOP/s, {reached}")
    yield Check("updates", True, f"{format_short(here.host_update)} parameters/s, fused AdamW on the host")
    if here.up:
        both = f"{rate(here.up_both)} and {rate(here.down_both)} at once"
        yield Check("link", True, f"{rate(here.up)} up, {rate(here.down)} down; {both}")
        yield _keeps_bits()
    read, written = rate(here.disk_read), rate(here.disk_write)
    yield Check("disk", True, f"{read} read, {written} written at once; {format_bytes(here.disk_bytes)} free in {disk}")
    for note in found.notes:
        yield Check("note", True, note)
    if write is not None:
        try:
            write.write_text(to_toml(here), encoding="utf-8")
        except OSError as error:
            yield Check("machine", False, f"{write} cannot be written ({error.strerror}): name another file")
        else:
            yield Check("machine", True, f"{write}, for `isles plan memory --machine {write}` and memory.machine")


def _keeps_bits() -> Check:
    """Whether plans that move bytes can be trusted on the first GPU."""
    import torch

    from isles.training.memory.in_use import try_out

    try:
        try_out(torch.device("cuda", 0))
    except (RuntimeError, OSError) as error:
        return Check("bits", False, f'{error}; choose memory.method = "checkpoint"')
    return Check("bits", True, "a small model keeps them, with copies beside kernels and without")


def _directory(free: str) -> Check:
    here = os.getcwd()
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"isles")
    except OSError as error:
        return Check("directory", False, f"{here} cannot be written to ({error.strerror}): use --out or another one")
    return Check("directory", True, f"{here} can be written to, {free} free")


@dataclass(frozen=True)
class MeasuredPair:
    """Where a measured line is written: a links file, and the numbers of this node and the other one."""

    path: str
    here: int
    there: int


def _pair(path: str, nodes: str, peer: str | None) -> MeasuredPair:
    from isles.network.measured_links import refuse_file

    if peer is None:
        raise ValueError("--write-links: goes with --peer HOST:PORT, whose link is measured")
    parts = nodes.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal() and len(part) < 4]
    if len(parts) != 2 or len(set(numbers)) != 2:
        raise ValueError(f"--nodes {nodes}: write two different numbers, 0 to 999, this machine's first, such as 0,3")
    refuse_file(path)
    return MeasuredPair(path, *numbers)


def _write(pair: MeasuredPair, found: Findings) -> Check:
    from isles.network.measured_links import write_pair

    rates = {"out": found.rate_out, "back": found.rate_back}
    try:
        unknown = write_pair(pair.path, pair.here, pair.there, **rates, latency=found.round_trip / 2)
    except OSError as error:
        return Check("links", False, f"{pair.path} cannot be written ({error.strerror}): name another file")
    more = ", ".join(f"{u} and {v}" for u, v in unknown)
    missing = f"; not measured yet: {more}" if more else ""
    return Check("links", True, f"{pair.path} has the line between nodes {pair.here} and {pair.there}{missing}")


def call(host: str, port: int, pair: MeasuredPair | None = None) -> Iterator[Check]:
    """The checks with a doctor that listens at `host`:`port`. pair: where the line between the two is written."""
    from isles.comm.sockets.connection import LinkLost
    from isles.launch import probe

    try:
        findings = probe.call(host, port)
    except LinkLost as error:
        yield Check("peer", False, f"{host}:{port}: {error}")
        return
    yield from format_findings(findings)
    if pair is not None:
        yield _write(pair, findings)


def wait_for_call(listener: socket.socket) -> Iterator[Check]:
    """The checks with the first doctor that calls at the socket `listener`."""
    from isles.comm.sockets.connection import LinkLost
    from isles.comm.tcp import written
    from isles.launch import probe

    command = f"isles doctor --peer {written(*listener.getsockname()[:2])}"
    waiting = f"waiting {LISTEN_FOR / 60:g} minutes; on the other machine: {command}"
    print(waiting, file=sys.stderr, flush=True)
    try:
        findings = probe.wait_for_call(listener, LISTEN_FOR, lambda text: print(text, file=sys.stderr, flush=True))
    except LinkLost as error:
        yield Check("peer", False, str(error))
        return
    yield from format_findings(findings)


def format_findings(found: Findings) -> Iterator[Check]:
    """One line for the peer, one a direction, one for the round trip, one for the rates."""
    from isles.comm.sockets.listener import port_range

    same = found.version_there == __version__
    versions = f"isles {__version__}" if same else f"isles {__version__} here, {found.version_there} there: a run needs"
    yield Check("peer", same, f"{found.there}, {versions}{'' if same else ' the same on both'}")
    yield _direction("out", found.here, found.there, found.port_out, found.out, found.ports_there, "there")
    yield _direction("back", found.there, found.here, found.port_back, found.back, port_range(), "here")
    yield Check("round trip", True, f"{format_seconds(found.round_trip)} (median)")
    yield Check("rate", True, format_rates(found))


def format_rates(found: Findings) -> str:
    """Both directions."""
    rates = ((found.rate_out, "out"), (found.rate_back, "back"))
    return ", ".join(f"{_three(rate / 1e6)} Mbit/s {name}" for rate, name in rates)


def _direction(name: str, source: str, target: str, port: int, why: str, ports: str, where: str) -> Check:
    pair = f"{source} -> {target}"
    if not why:
        return Check(name, True, f"{pair} is open (port {port} answers)")
    mend = f"let TCP ports {ports} from {source} in {where} (see docs/two-machines.md)"
    return Check(name, False, f"{pair} is BLOCKED (port {port}: {why}): {mend}")


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

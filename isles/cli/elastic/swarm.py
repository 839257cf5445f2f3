"""`isles swarm`: peers that serve the stages of a run, and come and go."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.elastic.join import OwnData, OwnSettings, RunToken, given_token, own, place, places, tell
from isles.cli.options import OwnDevice
from isles.cli.signals import end_in_order

if TYPE_CHECKING:
    from isles.comm.elastic.swarm.words import SwarmNow
    from isles.network.clusters.nodes import ClusterNode

app = typer.Typer(help="Serve a stage of a run whose peers come and go, or look at it.", no_args_is_help=True)


@app.command("peer")
def peer(
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="Where the lighthouse is.")],
    token: RunToken = None,
    stage: Annotated[
        int | None, typer.Option(help="A wish; left out: the stage that wants a peer most.", show_default=False)
    ] = None,
    data: OwnData = None,
    device: OwnDevice = None,
    set_: OwnSettings = None,
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Let other peers reach this one directly, at this port.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A run in clusters: this machine's table, of isles doctor --describe --peer. Default: it is measured.",
        ),
    ] = None,
) -> None:
    """Serve a stage: the configuration comes from the lighthouse, the state from another peer. Ctrl-C leaves after the
    step under way.
    """
    end_in_order()
    parsed = given_token(token)
    described = None if node is None else _described(node)
    there = places(listen, 1)[0]
    if stage is not None and stage < 0:
        raise ValueError(f"--stage {stage}: choose 0 or more, or leave it out")
    settings = own(data, device, set_)
    from isles.training.clustered.peering import SeatedClusterPeer
    from isles.training.elastic.entering import Here
    from isles.training.swarmed.peering import take_part
    from isles.training.swarmed.seated import ANYWHERE

    listening, announced = place(there, join)
    here = Here(own=settings, listen=listening, announced=announced)
    kinds = {"ravnest": partial(SeatedClusterPeer, node=described)}
    print(take_part(join, parsed, here, ANYWHERE if stage is None else stage, tell=tell, kinds=kinds), flush=True)


def _described(path: str) -> ClusterNode:
    """The one node of a file."""
    from isles.network.clusters.nodes import read_nodes

    nodes = read_nodes(path)
    if len(nodes) != 1:
        raise ValueError(f"--node {path}: it tells of {len(nodes)} nodes; give this machine's alone")
    return nodes[0]


@app.command("status")
def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the lighthouse is.")],
    token: RunToken = None,
) -> None:
    """Who serves which stage, how fast and how far, and what was refused."""
    from isles.cli.elastic.asking import swarm_now

    end_in_order()
    _show(swarm_now(address, given_token(token)))


def _show(now: SwarmNow) -> None:
    from isles.cli.table import print_table
    from isles.report.panels import Table
    from isles.report.units import format_seconds

    step = f"step {now.step} of {now.last}"
    step += f", {format_seconds(now.since)} ago" if now.since >= 0 else ""
    kept = f"step {now.kept}" if now.kept else "none yet"
    begun = "clusters" if now.clustered else "swarms"
    print(f"{step}; states are kept of: {kept}; {begun} begun: {now.epoch}" + (f"; {now.wanted}" if now.wanted else ""))
    if now.clustered:
        print(_clusters(now))
    heads, rows = _by_cluster(now) if now.clustered else _by_stage(now)
    print_table(Table(heads=heads, rows=rows, names=0))
    for seat, why, times in now.refused:
        print(f"refused {times} times: {'somebody' if seat < 0 else f'worker {seat}'}: {why}")


def _by_stage(now: SwarmNow) -> tuple[list[str], list[list[str]]]:
    from isles.report.units import format_seconds

    rows = []
    for one in sorted(now.peers, key=lambda one: (one.stage < 0, one.stage, one.seat)):
        stage = str(one.stage) if one.stage >= 0 else "waits"
        seconds = format_seconds(one.seconds) if one.seconds else "-"
        counts = [str(one.seat), str(one.step), str(one.counted)]
        rows.append([stage, *counts, seconds, f"{one.queue:.1f}", f"{format_seconds(one.heard)} ago"])
    return ["stage", "seat", "step", "counted", "a microbatch", "queue", "heard"], rows


def _by_cluster(now: SwarmNow) -> tuple[list[str], list[list[str]]]:
    from isles.report.units import format_seconds

    rows = []
    for one in sorted(now.peers, key=lambda one: (not one.place, one.place, one.stage < 0, one.seat)):
        cluster, stage = "stands by" if one.stage >= 0 else "waits", "-"
        if one.place:
            number, at, stages, is_whole = one.place
            cluster, stage = f"{number}" if is_whole else f"{number}, broken", f"{at} of {stages}"
        seconds = format_seconds(one.seconds) if one.seconds else "-"
        rows.append([cluster, stage, str(one.seat), str(one.step), seconds, f"{format_seconds(one.heard)} ago"])
    return ["cluster", "stage", "seat", "step", "a microbatch", "heard"], rows


def _clusters(now: SwarmNow) -> str:
    """How many of what there are."""
    whole = {one.place[0] for one in now.peers if one.place and one.place[3]}
    broken = {one.place[0] for one in now.peers if one.place} - whole
    aside = sum(not one.place for one in now.peers)
    told = f"{len(whole)} cluster{'s' * (len(whole) != 1)} at work"
    told += f", {len(broken)} broken" if broken else ""
    return told + (f"; {aside} node{'s' * (aside > 1)} without a place" if aside else "")

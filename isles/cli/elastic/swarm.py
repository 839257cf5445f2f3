"""`isles swarm`: peers that serve the stages of a run, and come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.elastic.join import OwnData, OwnRelay, OwnSettings, RunToken, notify, own, place, places, read_token
from isles.cli.terminal import OwnDevice, end_in_order

if TYPE_CHECKING:
    from isles.network.clusters.nodes import ClusterNode

app = typer.Typer(help="Serve a stage of a run whose peers come and go.", no_args_is_help=True)


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
    relay: OwnRelay = False,
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
    parsed = read_token(token)
    described = None if node is None else _described(node)
    there = places(listen, 1, relay)[0]
    if stage is not None and stage < 0:
        raise ValueError(f"--stage {stage}: choose 0 or more, or leave it out")
    settings = own(data, device, set_)
    from isles.training.elastic.connect import LocalSettings
    from isles.training.swarm.connect import take_part
    from isles.training.swarm.trainer import ANYWHERE

    listening, announced = place(there, join)
    here = LocalSettings(own=settings, listen=listening, announced=announced, relays=relay, node=described)
    print(take_part(join, parsed, here, ANYWHERE if stage is None else stage, notify=notify), flush=True)


def _described(path: str) -> ClusterNode:
    """The one node of a file."""
    from isles.network.clusters.nodes import read_nodes

    nodes = read_nodes(path)
    if len(nodes) != 1:
        raise ValueError(f"--node {path}: it tells of {len(nodes)} nodes; give this machine's alone")
    return nodes[0]

"""`isles doctor --describe`: this machine in the words of `isles ravnest plan`."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isles.launch.probe import Findings


def describe(found: Findings | None) -> str:
    """Its table [[node]]. found: what was measured of the line to another machine; None: nobody was asked."""
    from isles.network.clusters.nodes import ClusterNode
    from isles.training.clustered.describing import forward_speed, memory

    node = ClusterNode(
        name=platform.node() or "here",
        memory=memory(),
        speed=forward_speed(),
        bandwidth=1e6 if found is None else min(found.rate_out, found.rate_back),
        latency=0.0 if found is None else found.round_trip / 4,  # half of one way: the other half is the other's
    )
    if found is not None:
        return node.to_toml()
    kept = [line for line in node.to_toml().splitlines() if not line.startswith(("bandwidth", "latency"))]
    unknown = '# bandwidth = "40Mbit/s"   # not measured: add --peer HOST:PORT of a machine that runs --listen PORT'
    return "\n".join([*kept, unknown]) + "\n"

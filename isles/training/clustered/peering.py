"""Taking part in clusters over a lighthouse, as one node: `isles.training.swarmed.peering` for clusters.

A node that comes later tells what its machine has, by which a new cluster is cut.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any

from typing_extensions import override

from isles.comm.elastic.keys import STATUS
from isles.comm.elastic.links.echo import echo_line
from isles.comm.elastic.swarm.words import Begin, Enter, SwarmNow
from isles.models import choose_device
from isles.network.clusters.nodes import ClusterNode
from isles.network.clusters.telling import SILENT, told
from isles.training.clustered.cuts import cluster_cuts, run_number
from isles.training.clustered.describing import forward_speed, memory
from isles.training.clustered.seated import SeatedNode
from isles.training.swarmed.peering import SeatedPeer

_AGAIN = 0.2  # seconds


class SeatedClusterPeer(SeatedPeer):
    """One node in one seat. node: what its machine has; None: as its user says, or measured."""

    def __init__(self, *of: Any, node: ClusterNode | None = None) -> None:
        self._told, self._closed = node or of[1].here.node, threading.Event()
        super().__init__(*of)
        stack: ExitStack = of[0]
        stack.callback(self._closed.set)

    @override
    def number(self) -> int:
        cluster_cuts(self.config)  # refuses what cannot be
        return run_number(self.config)

    @override
    def made(self, part: Begin | Enter) -> SeatedNode:
        return SeatedNode(
            self.seat(),
            part,
            told=told(self._told or self._measured()) if isinstance(part, Enter) else SILENT,
            members_now=self._members_now,
            await_kept=lambda step: self.line.await_kept(step, self.config.run.grace / 2),
        )

    @override
    def leave(self) -> None:
        """After the next average, or without it after `run.grace`: what waits for the others waits no longer then."""
        super().leave()
        threading.Thread(target=self._tear, name="isles-grace", daemon=True).start()

    def _tear(self) -> None:
        """In a thread of its own, until this seat is given back: what is begun later is torn as well."""
        wait = self.config.run.grace
        while not self._closed.wait(wait):
            wait = _AGAIN
            for seat in [*self._there]:
                self._transport.give_up(seat, "this worker leaves, and could not wait for the next average")

    def _members_now(self) -> set[int] | None:
        now = self.line.ask(b"", key=STATUS)
        return {peer.seat for peer in now.peers if peer.stage >= 0} if isinstance(now, SwarmNow) else None

    def _measured(self) -> ClusterNode:
        """Its line is that to the lighthouse, which lies between any two."""
        self.tell("measuring this machine's memory and speed, and its line")
        line, rate, latency = echo_line(self._session), self.config.world.slowest_link, 0.0
        if line is None:
            self.tell(f"its line could not be measured: it counts as world.slowest_link, {rate / 1e6:g} Mbit/s")
        else:
            rate, latency = 8 * min(line.out, line.back), line.round_trip / 2
        device = choose_device(self.config.model, int(os.environ.get("LOCAL_RANK", 0)))
        return ClusterNode(
            name="here", memory=memory(device), speed=forward_speed(device), bandwidth=rate, latency=latency
        )

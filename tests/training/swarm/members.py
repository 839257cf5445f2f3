"""Swarms over real sessions on loopback: the lighthouse and its peers in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import override

from isles.comm.credentials import parse_token
from isles.membership.messages import Over
from isles.training.config.reading import gather
from isles.training.config.sections import Config
from isles.training.elastic.connect import LocalSettings, admit
from isles.training.elastic.support import among_peers, elastic
from isles.training.lighthouse.peers import SwarmLighthouseServer
from isles.training.swarm.connect import SwarmParticipant
from isles.training.swarm.trainer import ANYWHERE
from tests.membership.sessions import vanish
from tests.training.lit import LitRun


def elastic_config(*settings: str) -> Config:
    """A configuration as `isles lighthouse` takes it."""
    return elastic(gather(None, {}, settings))


class SwarmRun(LitRun):
    """A lighthouse in a thread. `peers`, `end_reasons`: by the order in which they were started. kind, keeps: what they
    are.
    """

    kind: Any = SwarmParticipant
    keeps: Any = SwarmLighthouseServer

    def __init__(self, config: Config, out: Path) -> None:
        self.peers: dict[int, SwarmParticipant] = {}
        self._killed: set[int] = set()
        self.own: dict[str, Any] = {}
        super().__init__(config, out)

    @override
    def made(self, last_reason: Callable[[str], None]) -> SwarmLighthouseServer:
        return self.keeps(self.config, self.out, self.address, last_reason, self.lines.append, self.notices.append)

    def join(self, stage: int = ANYWHERE, *, listens: bool = False, again: bool = True) -> int:
        """Start a peer; its number. listens: for direct links; again: it comes again where it is told to."""
        here = LocalSettings(own=self.own)
        if listens:
            here = LocalSettings(own=self.own, listen=("127.0.0.1", 0), announced="127.0.0.1")
        notify = self.notices.append

        def work(number: int) -> Any:
            end_reason: Any = "again"
            while end_reason == "again":
                with ExitStack() as stack:
                    token = parse_token(self.token)
                    connection = admit(stack, self.address, token, here, notify=notify, fit=among_peers)
                    peer = self.kind(stack, connection, stage, threading.Event(), notify)
                    self.peers[number] = peer
                    end_reason = peer.run()
                if number in self._killed or not again:
                    break
            return end_reason

        return self.start(work)

    def ask_to_leave(self, number: int) -> None:
        """As Ctrl-C does."""
        self.peers[number].leaving.set()
        self.peers[number].leave()

    def end_reason(self, number: int) -> Any:
        """What becomes of a peer."""
        self.until(lambda: number in self.end_reasons)
        return self.end_reasons[number]

    def vanish(self, number: int) -> None:
        """Its connections break, as when its process is killed; then it ends."""
        peer = self.peers[number]
        transport = peer.transport
        peer.client.ended = Over("killed")
        self._killed.add(number)
        vanish(transport)

    def step(self, number: int) -> int:
        """Steps that a peer has done."""
        return 0 if number not in self.peers else self.peers[number].step

    def end(self, seconds: float = 60.0) -> Any:
        """Wait for the end of the run; its summary."""
        self.until(lambda: not self._keeping.is_alive(), seconds)
        for thread in self._threads:
            thread.join(20.0)
        return self.ended()

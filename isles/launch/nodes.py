"""The machines of a run, once they have met: who is where, which workers are whose, and the links between launchers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from isles.comm.credentials import Token
from isles.comm.errors import CommError, to_plain
from isles.comm.sockets.addresses import parse_address
from isles.comm.sockets.connection import LinkLost
from isles.comm.tcp import interface_of, loopback
from isles.launch.link import Link


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """Which of several machines this is: `--nodes`, `--node`, `--rendezvous`. One node needs no rendezvous."""

    nodes: int = 1
    node: int = 0
    rendezvous: str = ""
    token: Token | None = field(default=None, repr=False)
    """As given by a person; None: what this machine has kept, or on node 0 a new one."""
    shared_directory: bool = False
    """Whether all nodes write into the same run directory, as the processes of one torchrun do."""
    credentials: Path | None = None
    """Where node 0 has those of the run; None: in its run directory."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"--nodes {self.nodes}: choose 1 or more")
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"--node {self.node}: with --nodes {self.nodes} it is one of 0 to {self.nodes - 1}")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(
                f"--nodes {self.nodes} needs --rendezvous HOST:PORT, an address of node 0 and a free port there"
            )
        if self.nodes == 1 and self.rendezvous:
            raise ValueError(f"--rendezvous {self.rendezvous} needs --nodes: how many machines meet there")
        if self.rendezvous:
            parse_address(self.rendezvous, "--rendezvous")

    @property
    def flags(self) -> str:
        """As typed, with a space in front; empty for a run that was started otherwise."""
        typed = self.nodes > 1 and not self.shared_directory
        return f" --nodes {self.nodes} --node {self.node} --rendezvous {self.rendezvous}" if typed else ""


def split(workers: int, nodes: int) -> list[range]:
    """The ranks of each node: neighbours, as evenly as possible, the first nodes taking the rest."""
    each, rest = divmod(workers, nodes)
    starts = [node * each + min(node, rest) for node in range(nodes + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeGroup:
    """One machine's view of it. Node 0 has a link to each of the others, they have one to node 0.

    spec: this machine's. here: the address under which the others know this machine. host: node 0's.
    descriptions: what the others (by node) said of themselves; facts: what node 0 told when all were there.
    """

    spec: NodeSpec = field(default_factory=NodeSpec)
    here: str = "127.0.0.1"
    host: str = "127.0.0.1"
    links: Mapping[int, Link] = field(default_factory=dict)
    descriptions: Mapping[int, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return self.spec.nodes

    @property
    def node(self) -> int:
        return self.spec.node

    @property
    def interface(self) -> str | None:
        """The network interface that this machine's workers use."""
        return loopback() if self.nodes == 1 else interface_of(self.here)

    def shares(self, workers: int) -> list[range]:
        """The ranks of each node."""
        return split(workers, self.nodes)

    def go(self, **facts: Any) -> None:
        """Node 0: let all begin, with what they need to know."""
        self.facts.update(facts)
        self.tell({"go": self.facts})

    def tell(self, message: Any) -> None:
        """To all links; one that is gone is not told."""
        for link in self.links.values():
            with contextlib.suppress(LinkLost):
                link.send(message)

    def part(self, error: BaseException | None = None) -> None:
        """Close the links. Node 0 says first how the run ended; another node why it leaves, if it does so early."""
        if self.node == 0:
            self.tell({"over": None if error is None else to_plain(_worded(error))})
        elif error is not None:
            self.tell([-1, "leaving", to_plain(_worded(error))])
        for link in self.links.values():
            link.close()


def _worded(error: BaseException) -> Exception:
    """What the other machines are told: the error itself where they know its class, else its words."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return CommError("stopped by hand on another node")
    if isinstance(error, CommError | ValueError):
        return error
    return CommError(f"on another node: {error}")


SINGLE_NODE = NodeSpec()  # of a run on one machine

"""Which peer of a stage gets the next microbatch: interleaved weighted round robin by measured speed. Loads no torch.

After SWARM (arXiv 2301.11913). Every sender has a balancer for each stage that it sends to. A peer's load is the
second at which it would finish all microbatches from this sender if it had no others; the next microbatch goes to the
peer of the lowest load, so in the long run shares are proportional to speeds. Peers report their compute seconds in the
headers of their answers. Time on the wire is averaged separately, as it counts only where a link is slower than its
peer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

ALPHA = 0.1
"""Weight of the newest measurement in a moving average."""


class MovingAverage:
    """Exponential moving average with bias correction: after n equal measurements it is that measurement.

    The weights of n measurements, alpha (1 - alpha)^(n-1) ... alpha, are divided by their sum. The corrected mean is
    stored, so that equal measurements leave it unchanged, to the bit.
    """

    def __init__(self, alpha: float = ALPHA) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha = {alpha}: choose a weight above 0, at most 1")
        self.alpha = alpha
        self.value: float | None = None
        """None before the first measurement."""
        self._weight = 0.0

    def add(self, value: float) -> None:
        self._weight += self.alpha * (1.0 - self._weight)
        self.value = value if self.value is None else self.value + self.alpha / self._weight * (value - self.value)

    def state(self) -> list[float | None]:
        return [self.value, self._weight]

    def restore(self, state: Sequence[Any]) -> None:
        self.value, self._weight = state


@dataclass(slots=True)
class PeerSpeed:
    """A sender's measurements of one peer. compute, wire: seconds per sample of its work and its link; queue: its last
    reported number of waiting microbatches. load: seconds; picks: microbatches sent to it.
    """

    load: float = 0.0
    picks: int = 0
    queue: int = 0
    compute: MovingAverage = field(default_factory=MovingAverage)
    wire: MovingAverage = field(default_factory=MovingAverage)

    @property
    def cost(self) -> float | None:
        """Seconds per sample: the slower of compute and link. None: never measured."""
        if self.compute.value is None:
            return None
        return max(self.compute.value, self.wire.value or 0.0)


class PeerBalancer:
    """The peers of one stage, as one sender knows them. Peers are any integers; seed: for ties.

    Guarantee: among peers of constant costs c_i that are present from the start, microbatches are assigned in the order
    of the sorted multiples of all c_i: of the first 7, costs 1, 2, 4 get 4, 2, 1. A peer that joins is chosen next; one
    that is lost is not chosen again.
    """

    def __init__(self, seed: int = 0) -> None:
        self._peers: dict[int, PeerSpeed] = {}
        self._random = random.Random(seed)

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def peers(self) -> dict[int, PeerSpeed]:
        """The peers that may be chosen, with their measurements."""
        return dict(self._peers)

    def join(self, peer: int) -> None:
        """Add `peer`, with the lowest load of all, so that it is tried at once."""
        if peer not in self._peers:
            self._peers[peer] = PeerSpeed(load=min((known.load for known in self._peers.values()), default=0.0))

    def lose(self, peer: int) -> None:
        """Remove `peer`, until it joins again as a new one."""
        self._peers.pop(peer, None)

    def choose(self, samples: int = 1, *, besides: int | None = None) -> int:
        """Choose the peer for a microbatch of `samples` samples, and add it to its load. besides: a peer to avoid if
        there is another. LookupError if the stage has no peer.
        """
        able = [peer for peer in self._peers if peer != besides] or list(self._peers)
        if not able:
            raise LookupError("no peer serves this stage")
        # Among equal loads an untried peer goes first: a joining peer starts with the load of another one.
        peer = min(able, key=lambda peer: (self._peers[peer].load, self._peers[peer].picks > 0, self._random.random()))
        known = self._peers[peer]
        known.load += samples * self.cost(peer)
        known.picks += 1
        return peer

    def cost(self, peer: int) -> float:
        """Estimated seconds per sample at `peer`; before it is measured, the median of the measured peers."""
        own = self._peers[peer].cost
        if own is not None:
            return own
        measured = [cost for known in self._peers.values() if (cost := known.cost) is not None]
        return median(measured) if measured else 1.0

    def answered(self, peer: int, seconds: float, samples: int, *, wire: float = 0.0, queue: int = 0) -> None:
        """Record an answer of `peer` on a microbatch of `samples` samples: its compute `seconds`, the `wire` seconds of
        the message, and its `queue` length. Ignored if the peer was lost meanwhile.
        """
        known = self._peers.get(peer)
        if known is None:
            return
        known.compute.add(seconds / samples)
        known.wire.add(wire / samples)
        known.queue = queue

    def late(self, peer: int, seconds: float, samples: int) -> None:
        """Record that `peer` has not answered within `seconds`, as if it needed that long: otherwise it would be chosen
        again and again by its former cost.
        """
        known = self._peers.get(peer)
        if known is None:
            return
        before = self.cost(peer)
        known.compute.add(seconds / samples)
        known.load += max(seconds - samples * before, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The state of the next choices, JSON-able."""
        version, numbers, gauss = self._random.getstate()
        peers = {
            str(peer): [known.load, known.picks, known.queue, known.compute.state(), known.wire.state()]
            for peer, known in self._peers.items()
        }
        return {"peers": peers, "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._peers = {}
        for peer, (load, picks, queue, compute, wire) in state["peers"].items():
            known = self._peers[int(peer)] = PeerSpeed(load=load, picks=picks, queue=queue)
            known.compute.restore(compute)
            known.wire.restore(wire)
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))

"""Which peer of a stage gets the next microbatch: interleaved weighted round robin by measured speed. Loads no torch.

After SWARM (arXiv 2301.11913). Every sender keeps a balancer for each stage that it sends to. A peer's load is the
moment at which it would be done with all that was given to it, had it nothing else to do; the next microbatch goes to
the least, so in the long run a peer's share is as its speed. What it is measured by comes from the peer itself: the
seconds that it computed, which ride in the header of its answers. Time on the wire is kept apart, for it counts only
where a line is slower than the peer behind it.
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
    """Exponential, with the bias of its first values taken out: after n equal measurements it is that measurement.

    The weights of n measurements, alpha (1 - alpha)^(n-1) ... alpha, are divided by their sum; kept as the mean itself,
    so that equal measurements leave it as it is, to the bit.
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
    """What is known of one peer. compute, wire: seconds a sample, of its work and of its line; queue: microbatches that
    it said were waiting there. load: seconds; picks: microbatches given to it.
    """

    load: float = 0.0
    picks: int = 0
    queue: int = 0
    compute: MovingAverage = field(default_factory=MovingAverage)
    wire: MovingAverage = field(default_factory=MovingAverage)

    @property
    def cost(self) -> float | None:
        """Seconds a sample at which microbatches get through: the slower of work and line. None: never measured."""
        if self.compute.value is None:
            return None
        return max(self.compute.value, self.wire.value or 0.0)


class PeerBalancer:
    """The peers of one stage, as one sender knows them. Peers are any numbers; seed: of ties.

    Guarantee: among peers of constant costs c_i that are there from the start, each has been given at every moment the
    microbatches that a list of all multiples of all c_i has in front, which no sender's luck changes: costs 1, 2, 4
    take 4, 2, 1 of the first 7. A peer that joins is chosen next; one that is lost is not chosen again.
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
        """Who may be chosen, and what is known of each."""
        return dict(self._peers)

    def join(self, peer: int) -> None:
        """`peer` serves the stage from now on: with the least load of all, so that it is tried at once."""
        if peer not in self._peers:
            self._peers[peer] = PeerSpeed(load=min((known.load for known in self._peers.values()), default=0.0))

    def lose(self, peer: int) -> None:
        """`peer` is chosen no more, until it joins again as a new one."""
        self._peers.pop(peer, None)

    def choose(self, samples: int = 1, *, besides: int | None = None) -> int:
        """The peer for a microbatch of so many samples, which is added to its load. besides: not this one, if there is
        another. LookupError where the stage has no peer.
        """
        able = [peer for peer in self._peers if peer != besides] or list(self._peers)
        if not able:
            raise LookupError("no peer serves this stage")
        # Among equal loads whoever was never tried goes first: a joiner has the load of another one.
        peer = min(able, key=lambda peer: (self._peers[peer].load, self._peers[peer].picks > 0, self._random.random()))
        known = self._peers[peer]
        known.load += samples * self.cost(peer)
        known.picks += 1
        return peer

    def cost(self, peer: int) -> float:
        """Seconds a sample that `peer` is taken to need; before it is measured, the median of those who are."""
        own = self._peers[peer].cost
        if own is not None:
            return own
        measured = [cost for known in self._peers.values() if (cost := known.cost) is not None]
        return median(measured) if measured else 1.0

    def answered(self, peer: int, seconds: float, samples: int, *, wire: float = 0.0, queue: int = 0) -> None:
        """`peer` has answered about a microbatch of so many samples, for which it computed `seconds`; its bytes took
        `wire` seconds to come in, and `queue` microbatches were waiting there. Who was lost meanwhile is not measured.
        """
        known = self._peers.get(peer)
        if known is None:
            return
        known.compute.add(seconds / samples)
        known.wire.add(wire / samples)
        known.queue = queue

    def late(self, peer: int, seconds: float, samples: int) -> None:
        """`peer` has not answered within `seconds`: it is taken to need at least as long, or it would be chosen again
        and again at the cost that it once had.
        """
        known = self._peers.get(peer)
        if known is None:
            return
        before = self.cost(peer)
        known.compute.add(seconds / samples)
        known.load += max(seconds - samples * before, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what the next choices depend on."""
        version, numbers, gauss = self._random.getstate()
        peers = {
            str(peer): [known.load, known.picks, known.queue, known.compute.state(), known.wire.state()]
            for peer, known in self._peers.items()
        }
        return {"peers": peers, "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Choose on as the one whose `state_dict` it is."""
        self._peers = {}
        for peer, (load, picks, queue, compute, wire) in state["peers"].items():
            known = self._peers[int(peer)] = PeerSpeed(load=load, picks=picks, queue=queue)
            known.compute.restore(compute)
            known.wire.restore(wire)
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))

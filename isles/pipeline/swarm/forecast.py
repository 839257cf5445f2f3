"""The duration of a swarm's step and the microbatches that a peer has in flight, by a simulation of known peers and
links with the peers' own balancer (`isles.pipeline.swarm.balancer`). Loads no torch.

    simulated  each forward and backward pass and each message of a microbatch, over the links of `isles.network.engine`
    counted    the agreements at the end of a step, and the sum of a stage: their bytes and latencies

No peer is lost, late, or moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from isles.network.engine import LAST, EventQueue, Wire, WireMessage
from isles.network.links import Topology
from isles.pipeline.swarm.balancer import PeerBalancer


@dataclass(frozen=True, kw_only=True)
class SwarmLoad:
    """stages: by peer. forward, backward: seconds of a microbatch, by peer; the last stage does both passes one after
    the other. down, up: bytes of a microbatch's messages forward and backward, with headers. room: the most that an
    origin has in flight; None: no limit. words: bytes that a peer sends in each agreement of a step. sums: by peer,
    bytes of its gradients. topology: the links.
    """

    stages: Sequence[int]
    forward: Sequence[float]
    backward: Sequence[float]
    down: int
    up: int
    microbatches: int
    room: int | None
    words: Sequence[int]
    sums: Sequence[int]
    topology: Topology


@dataclass(frozen=True, kw_only=True)
class SwarmForecast:
    """Means over steps in which peers know each other's speeds. counted: microbatches, by peer; held: the most that
    each had in flight at once.
    """

    seconds: float
    counted: tuple[float, ...]
    held: tuple[int, ...]


def forecast(
    load: SwarmLoad, share: Callable[[dict[int, float]], dict[int, list[int]]], *, steps: int
) -> SwarmForecast:
    """Simulate `steps` + 1 steps, and average all but the first, in which peers do not know each other's speeds yet.

    share: by origin (a peer of stage 0) its microbatches, from the seconds that each origin takes for one.
    """
    player, peers = _Player(load), range(len(load.stages))
    player.play(share(player.origins))
    seconds, counted, held = 0.0, [0.0] * len(peers), [0] * len(peers)
    for _ in range(steps):
        seconds += player.play(share(player.origins)) / steps
        counted = [counted[peer] + len(player.seen[peer]) / steps for peer in peers]
        held = [max(held[peer], player.held[peer]) for peer in peers]
    return SwarmForecast(seconds=seconds + _settling(load), counted=tuple(counted), held=tuple(held))


class _Message(WireMessage):
    """act: called on arrival."""

    __slots__ = ("act",)

    def __init__(self, source: int, target: int, nbytes: int, act: Callable[[], None]) -> None:
        super().__init__(source, target, "pipeline", 8.0 * nbytes)
        self.act = act


class _Player(Wire[_Message]):
    """Simulates the peers: a peer is idle or at one pass; gradients go first, then own microbatches, then forward
    passes.
    """

    def __init__(self, load: SwarmLoad) -> None:
        super().__init__(load.topology, 0, EventQueue())
        self.load, self.stages = load, max(load.stages) + 1
        self.peers = [[peer for peer, at in enumerate(load.stages) if at == stage] for stage in range(self.stages)]
        self.origins = dict.fromkeys(self.peers[0], 1.0)
        """Seconds that each needs for a microbatch."""
        self.balancers = [PeerBalancer(peer) for peer in range(len(load.stages))]
        for peer, stage in enumerate(load.stages):
            for following in self.peers[stage + 1] if stage + 1 < self.stages else ():
                self.balancers[peer].join(following)

    def play(self, begins: dict[int, list[int]]) -> float:
        """Seconds until all gradients are home. begins: microbatches of each origin."""
        workers, began = len(self.load.stages), self.timeline.now
        self._busy = [False] * workers
        self._waiting = [deque(begins.get(peer, ())) for peer in range(workers)]
        self._forwards = [deque[tuple[int, int]]() for _ in range(workers)]
        self._backwards = [deque[tuple[int, int]]() for _ in range(workers)]
        self._under = [dict[int, int | None]() for _ in range(workers)]
        self.seen, self.held = [list[int]() for _ in range(workers)], [0] * workers
        for peer in self.peers[0]:
            self._look(peer)
        self.timeline.run()
        self.origins = {peer: self._seconds(peer) for peer in self.peers[0]}
        return self.timeline.now - began

    def arrived(self, message: _Message) -> None:
        """What it leads to."""
        message.act()

    def _seconds(self, peer: int) -> float:
        return self.load.forward[peer] + self.load.backward[peer]

    def _work(self, peer: int, seconds: float, act: Callable[[], None]) -> None:
        def done() -> None:
            self._busy[peer] = False
            act()
            self._look(peer)

        self._busy[peer] = True
        self.timeline.at(self.timeline.now + seconds, LAST, peer, done)

    def _look(self, peer: int) -> None:
        """What `peer` does next, if it is idle."""
        if self._busy[peer]:
            return
        under, room = self._under[peer], self.load.room
        if self._backwards[peer]:
            number, sender = self._backwards[peer].popleft()
            queue = len(self._forwards[sender]) + len(self._backwards[sender])
            self.balancers[peer].answered(sender, self._seconds(sender), 1, queue=queue)
            self._work(peer, self.load.backward[peer], partial(self._counted, peer, number))
        elif self._waiting[peer] and (room is None or len(under) < room):
            self._begin(peer, self._waiting[peer].popleft(), None)
        elif self._forwards[peer]:
            self._begin(peer, *self._forwards[peer].popleft())

    def _begin(self, peer: int, number: int, sender: int | None) -> None:
        self._under[peer][number] = sender
        self.held[peer] = max(self.held[peer], len(self._under[peer]))
        if self.load.stages[peer] == self.stages - 1:
            self._work(peer, self._seconds(peer), partial(self._counted, peer, number))
        else:
            self._work(peer, self.load.forward[peer], partial(self._pass_on, peer, number))

    def _pass_on(self, peer: int, number: int) -> None:
        target = self.balancers[peer].choose()
        act = partial(self._arrive, self._forwards, target, number, peer)
        self.carry(_Message(peer, target, self.load.down, act))

    def _counted(self, peer: int, number: int) -> None:
        self.seen[peer].append(number)
        sender = self._under[peer].pop(number)
        if sender is not None:
            act = partial(self._arrive, self._backwards, sender, number, peer)
            self.carry(_Message(peer, sender, self.load.up, act))

    def _arrive(self, queues: list[deque[tuple[int, int]]], peer: int, number: int, sender: int) -> None:
        queues[peer].append((number, sender))
        self._look(peer)


def _settling(load: SwarmLoad) -> float:
    """Seconds from the last gradient to the step: the messages HOME, the agreement on counts, the sum, the final
    agreement.
    """
    workers, topology = range(len(load.stages)), load.topology
    away = [
        max(topology.latency(peer, other, number=0, seed=0) for other in workers if other != peer) for peer in workers
    ]
    rates = [topology.rates[topology.up(peer, (peer + 1) % len(workers))] for peer in workers]
    words = max(8 * load.words[peer] / rates[peer] for peer in workers)
    counts = [load.stages.count(load.stages[peer]) for peer in workers]
    shared = [
        8 * 2 * (alike - 1) / alike * nbytes / rate + 2 * wait if alike > 1 else 0.0
        for alike, nbytes, rate, wait in zip(counts, load.sums, rates, away, strict=True)
    ]
    return 3 * max(away) + 2 * words + max(shared)

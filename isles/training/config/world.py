"""The `[world]` section: who trains, and over what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Literal

from isles.base.errors import demand
from isles.base.schema import BACKENDS, known_backend
from isles.base.tables import refuse
from isles.network.links import links
from isles.network.pauses import Pauses

_MOST_JITTER = 3.0  # beyond it one step in a thousand takes longer than all others together
_LEAST_SILENCE = 30.0  # seconds
_SIMULATED = ("inner_links", "shares_uplink", "step_factors", "step_jitter", "pause_every")
JoinState = Literal["full", "anchors"]
LEASE, _LEAST_LEASE, _MOST_LEASE = 3.0, 0.5, 60.0  # seconds


@dataclass(frozen=True, kw_only=True)
class VirtualConfig:
    """The simulated network and clock of world.backend = "virtual"."""

    links: str = "home-fibre"
    """A preset of `isles.network.links`, a rate and a latency such as "40Mbit/s, 25ms", or a file of your own
    (`isles.network.links`).
    """
    inner_links: str = "lan"
    """The same inside islands."""
    shares_uplink: bool = False
    """An island is a site with one line: its workers share that; a file of links then says of each site what it says of
    each worker else.
    """
    step_seconds: float = 0.1
    """What an inner step is charged with."""
    step_factors: tuple[float, ...] = ()
    """Factor on the step of worker r, the list repeated over all workers; [1.0, 1.0, 1.0, 2.0] makes every fourth half
    as fast; empty: all alike.
    """
    step_jitter: float = 0.0
    """Sigma of a log-normal factor (mean 1) on every step."""
    pause_every: float = 0.0
    """Mean seconds from a worker's return to its next pause, exponential; 0: nobody pauses."""
    pause_seconds: float = 60.0
    """Mean length of a pause, exponential; NoLoCo with on_peer_failure = "solo" goes on without a paused partner after
    world.outer_deadline, all other methods wait.
    """

    def __post_init__(self) -> None:
        links(self.links), links(self.inner_links)  # refuses an unknown name
        for factor in self.step_factors:
            if not 0 < factor < math.inf:
                raise ValueError(f"step_factors: {factor}: choose positive factors, such as [1.0, 1.0, 2.0]")
        demand(self, "step_jitter", lambda x: 0 <= x <= _MOST_JITTER, f"choose 0 to {_MOST_JITTER:g}, such as 0.2")
        demand(self, "step_seconds pause_every pause_seconds", lambda x: 0 <= x < math.inf, "choose 0 or more seconds")
        if self.pause_every and not self.pause_seconds:
            raise ValueError("pause_seconds = 0.0: choose how long a pause is, or pause_every = 0 for none")
        if not self.pause_every:
            refuse(self, "acts with pause_every: choose that, such as 600, or leave it out", "pause_seconds")

    @property
    def pauses(self) -> Pauses | None:
        """When workers are away."""
        return Pauses(every=self.pause_every, seconds=self.pause_seconds) if self.pause_every else None


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Of runs in which workers join a lighthouse, or come and go by a trace."""

    lease: float = LEASE
    """Seconds of silence until one that is stopped or cut off counts as lost; raise it for lines that stall longer."""
    max_members: int = 1024
    """How many may be there at once; whoever comes then is refused a seat."""
    join_state: JoinState = "full"
    """What a joiner is given, "full": all that its donor trains with; "anchors": the anchors and outer momenta alone,
    about a third of that for AdamW: its inner rate rises over two rounds.
    """
    connections: int = 1
    """TLS connections of a pair in each direction, over which messages of 1 MB and more are spread. More help on long
    lines that lose packets, and where one core is too slow to encrypt.
    """

    state_deadline: float = 3600.0
    """Longest transfer of a state or a model, seconds; raise it for a big model over a slow line."""
    stall: float = 60.0
    """Seconds without an inner step, and ten usual ones, until a worker counts as hanging; raise it if steps vary."""

    def __post_init__(self) -> None:
        demand(self, "state_deadline stall", lambda x: 0 < x < math.inf, "choose a positive number of seconds")
        demand(self, "connections", lambda x: 1 <= x <= 16, "choose 1 to 16")
        demand(self, "max_members", lambda x: x >= 1, "choose 1 or more")
        demand(self, "lease", lambda x: _LEAST_LEASE <= x <= _MOST_LEASE, "choose 0.5 to 60 seconds")


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Who trains, and over what."""

    workers: int = 4
    """All of them; replicas, unless inner is above 1. "auto", or left out: one a GPU of each machine, 4 without GPUs or
    on a simulated clock.
    """
    inner: int = 1
    """Workers of an island, which are one replica and share its batch; across islands the run's method exchanges, each
    worker its part.
    """
    inside: Literal["ddp", "fsdp"] = "ddp"
    """The method inside islands: ddp or fsdp."""
    backend: str = "distributed"
    """What the workers are: "distributed" starts real processes here that talk over gloo; "virtual" runs all workers in
    this process on a simulated network, with the same results.
    """
    threads: int = 0
    """Torch threads a worker; 1: the same bits on any machine. 0 or "auto": 1, but a share of the cores near its GPU
    where each worker of a machine has one of its own.
    """
    drop_outer: float = 0.0
    """Probability that a worker's outer gradient of a round is dropped, drawn from run.seed: the mean is of those that
    came (also where one is not finite), the worker goes on from its own weights. 1: nothing is ever exchanged.
    """
    outer_deadline: float = 60.0
    """Longest wait for a peer's part of a round, seconds; raise it if workers differ much in speed."""
    pipeline_deadline: float = 75.0
    """Longest wait of a stage for another one's microbatch, seconds; raise it if stages are slow: the last waits for
    all others' first forward passes.
    """
    eval_deadline: float = 600.0
    """Longest wait for a peer in validation and at the end, seconds; raise it if one validates for minutes longer."""
    join_deadline: float = 300.0
    """Longest wait for the other machines at the start, and then for the workers to meet, seconds; raise it if they are
    started at different times.
    """
    silence: float = 60.0
    """Seconds without a sign of life after which a worker or a machine counts as lost, 30 or more; raise it to ride out
    longer cuts of a line. Deadlines count from the last byte that moved.
    """
    slowest_link: float = 10e6
    """Bits per second; long transfers get five times what such a link would need, and where the system does not tell
    whether a line moves what one of 0.5 Mbit/s would need; lower it if a big model's peers are called late.
    """
    trust_ratio: float = 10.0
    """What a peer sends in a round may be so many times as large as such payloads usually are (a gradient of one step
    100 times that, and all in runs by a plan); more, or what is not finite, is refused. Raise it if honest workers
    differ that much.
    """
    virtual: VirtualConfig = field(default_factory=VirtualConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        known_backend(self.backend)
        demand(self, "trust_ratio", lambda x: x > 1, "choose more than 1, such as 10")
        demand(self, "workers inner", lambda x: x >= 1, "choose 1 or more")
        demand(self, "threads", lambda x: x >= 0, "choose 0 or more")
        if self.workers % self.inner:
            raise ValueError(
                f"inner = {self.inner}: {self.workers} workers are no whole islands; choose a divisor of world.workers"
            )
        if self.inside != "ddp" and self.inner == 1:
            raise ValueError(f'inside = "{self.inside}" acts within islands only: set world.inner, or method = "fsdp"')
        demand(self, "slowest_link", lambda x: 0 < x < math.inf, "choose a positive rate in bits/s, such as 10e6")
        keys = "outer_deadline pipeline_deadline eval_deadline join_deadline"
        demand(self, keys, lambda x: 0 < x < math.inf, "choose a positive number of seconds")
        mend = f"choose {_LEAST_SILENCE:g} seconds or more, for a full slow line can stand still for 16"
        demand(self, "silence", lambda x: _LEAST_SILENCE <= x < math.inf, mend)
        demand(self, "drop_outer", lambda x: 0 <= x <= 1, "choose a probability, 0 to 1")
        if not self.is_simulated:
            why = "is of the virtual clock; real networks, speeds and pauses are as they are: take it out, or set "
            keys = (f"virtual.{key}" for key in _SIMULATED)
            refuse(self, f'{why}world.backend = "virtual"', *keys)
            return
        if not self.virtual.shares_uplink:
            links(self.virtual.links).check(self.workers)
        links(self.virtual.inner_links).check(self.workers)

    @property
    def is_simulated(self) -> bool:
        """Whether messages and computing take the time of a model of them."""
        return BACKENDS[self.backend].is_simulated

    @property
    def has_processes(self) -> bool:
        """Whether every worker is a process of its own."""
        return BACKENDS[self.backend].has_processes

    @property
    def start_threads(self) -> int:
        """Torch threads that a worker begins with: `isles.training.setup` may add some."""
        return self.threads or 1

    @property
    def factors(self) -> tuple[float, ...]:
        """Of every worker's step."""
        return tuple(islice(cycle(self.virtual.step_factors or (1.0,)), self.workers))

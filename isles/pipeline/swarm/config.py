"""The `[pipeline.swarm]` table: stages served by peers that come and go. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from isles.errors import demand
from isles.tables import refuse

Consistency = Literal["exact", "strict", "relaxed"]


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """With pipeline.routing = "swarm"."""

    peers: tuple[int, ...] = ()
    """Workers of every stage at the start, such as [3, 2], the first of them of stage 0; empty: shared out evenly."""
    consistency: Consistency = "exact"
    """What a step is worth where peers are lost: "exact", the gradient of the same microbatches once each, mended from
    what neighbours have kept; "strict", the same by beginning the step again; "relaxed", what a lost peer had counted
    is run again, and counts twice at other stages.
    """
    forward_deadline: float = 30.0
    """Seconds after which a microbatch whose forward pass was not told to be done goes to another peer."""
    backward_deadline: float = 75.0
    """The same from there until its gradient is back."""
    rebalance: Literal["none", "queue", "throughput"] = "none"
    """Who goes to another stage between two steps: nobody; whoever has the shortest queue, to the stage with the
    longest ("queue"); whoever helps the slowest stage most ("throughput").
    """
    rebalance_every: float = 300.0
    """Seconds from one look at that to the next."""
    hysteresis: float = 0.25
    """By how much a move must help, as a share of what there is."""
    stage_lost: Literal["stop", "rebuild"] = "stop"
    """Where a stage has lost all of its peers: "stop", the run ends, and goes on from its last checkpoint with the
    weights that it had; "rebuild", somebody goes there and makes the stage of its two neighbours (CheckFree). The first
    stage and the last, which hold embedding and head, are not made anew.
    """
    stage_patience: float = 30.0
    """With stage_lost = "rebuild": seconds that the others wait for a new peer, where one can come, before one of
    another stage goes there.
    """
    delay_updates: int = 0
    """1: a stage adds up a step's gradients behind the next step's microbatches, whose weights are then one update
    older; 0, before them.
    """

    def __post_init__(self) -> None:
        if self.peers and min(self.peers) < 1:
            raise ValueError(f"peers = {list(self.peers)}: every stage needs at least 1 at the start")
        demand(self, "delay_updates", lambda x: x in (0, 1), "choose 0, or 1 step")
        demand(self, "hysteresis", lambda x: x >= 0, "choose 0 or more, such as 0.25")
        keys = "forward_deadline backward_deadline rebalance_every"
        demand(self, keys, lambda x: 0 < x < math.inf, "choose seconds above 0")
        demand(self, "stage_patience", lambda x: 0 <= x < math.inf, "choose 0 seconds or more, such as 30")
        if self.consistency == "strict":
            why = 'does not go with consistency = "strict": no microbatch goes to another peer, and '
            why += "world.pipeline_deadline ends the run; leave it out"
            refuse(self, why, "forward_deadline", "backward_deadline")
        if self.stage_lost == "stop":
            refuse(self, 'acts with stage_lost = "rebuild": set that, or leave it out', "stage_patience")
        if self.rebalance == "none":
            refuse(self, 'acts with rebalance = "queue" or "throughput": set that', "rebalance_every", "hysteresis")

"""What peers tell each other at the end of a step, and what all know then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from isles.pipeline.swarm.arrangement import PeerTold


class PeerWord(NamedTuple):
    """What a peer says in a verdict. Floats as the bits of a double."""

    holds: int
    square: int
    counted: int
    nanoseconds: int
    queue: int
    clock: int
    leaves: int


@dataclass(frozen=True, slots=True)
class SwarmStep:
    """What all peers know of a step that counts. loss: mean of the microbatches, nats; norm: of the whole gradient;
    stage_norm: of this stage's.
    """

    loss: float
    norm: float
    stage_norm: float
    members: tuple[int, ...]
    told: Mapping[int, PeerTold]

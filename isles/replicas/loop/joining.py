"""How a worker takes part in rounds that others have begun: with the state of one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isles.replicas.loop.fragment import Exchange, Flight
from isles.replicas.loop.outer import OuterSync


def given(optimizer: OuterSync) -> dict[str, Any]:
    """The live state right after a landing, for whoever is to `adopt` it. What has been sent ahead is not waited for:
    its partner may be the very worker that waits for this state before it begins its first round.
    """
    ahead = [fragment.ahead for fragment in optimizer.fragments]
    for fragment in optimizer.fragments:
        fragment.ahead = None
    try:
        return optimizer.shared_state()
    finally:
        for fragment, exchange in zip(optimizer.fragments, ahead, strict=True):
            fragment.ahead = exchange


def adopt(optimizer: OuterSync, state: dict[str, Any]) -> None:
    """Begin with the state of another worker (`given`), whose weights are here already: what this worker has counted,
    and its clock, stay its own; what it had under way is nobody's. ValueError for another method or config.
    """
    optimizer.flights = []
    for fragment in optimizer.fragments:
        fragment.ahead = None
    optimizer.load_state_dict({name: state[name] for name in state if name not in ("traffic", "transport")})


@torch.no_grad()
def follow(optimizer: OuterSync, round: int, mean: Tensor, participants: int, *, whole: bool) -> int:
    """Land the mean (n,) of a round that others landed without this worker; the hash of its anchor then.

    participants: whose mean it is; not whole: the round was skipped by all.
    """
    (fragment,) = optimizer.fragments
    fragment.rounds = round
    answer = Exchange(mean, None, participants=participants, whole=whole)
    optimizer.land(Flight(fragment, optimizer.steps, answer, None), None)
    return fragment.digest


def enter(optimizer: OuterSync, round: int, steps: int) -> None:
    """Take part from `round` on, after `steps` inner steps: those before went on without this worker, and what it had
    under way with its partners of then is nobody's.
    """
    optimizer.steps, optimizer.flights = steps, []
    optimizer.courier = optimizer.new_courier()
    for fragment in optimizer.fragments:
        fragment.rounds, fragment.sent = round - 1, steps
        fragment.latest = None
        if optimizer.parts.prefetch_anchors and round > 1:
            fragment.ahead = optimizer.courier.send_anchor(fragment, round, steps)

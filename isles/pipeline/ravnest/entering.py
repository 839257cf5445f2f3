"""How a node comes to clusters that are at work, as `isles.pipeline.swarm.entering` has it.

asks with     what it offers (`isles.network.clusters.telling`)
is told       `ClusterWelcome`, right after the average at which all agreed that it has come
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from isles.comm.collectives.mail import MailNote
from isles.comm.collectives.same import numbers
from isles.fields import Int, Str, read_json
from isles.pipeline.ravnest.agreement import ClusterAgreement
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.pipeline.swarm.entering import ask
from isles.pipeline.swarm.post import WELCOME, Post

_Told = tuple[Annotated[Int, Field(ge=0)], Any, dict[Str, Int]]


@dataclass(frozen=True, kw_only=True)
class ClusterWelcome:
    """What a node needs to take part in clusters at work. turn: of agreements so far. facts: of the run, by name."""

    turn: int
    seats: ClusterSeats
    facts: Mapping[str, int]

    def packed(self) -> Tensor:
        """As bytes (n,) uint8."""
        told = [self.turn, self.seats.to_plain(), dict(self.facts)]
        return torch.frombuffer(bytearray(json.dumps(told).encode("ascii")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, body: Tensor, size: int) -> ClusterWelcome:
        """From `packed`. size: positions of the world. ValueError for what is no welcome there."""
        turn, seats, facts = read_json(_Told, body.numpy().tobytes())
        return cls(turn=turn, seats=ClusterSeats.of_plain(seats, size), facts=facts)


def let_in(agreement: ClusterAgreement, facts: Mapping[str, int]) -> list[int]:
    """Right after an agreement: welcome those who have come, as all have agreed; their positions."""
    comers, post = agreement.admit(), agreement.post
    body = ClusterWelcome(turn=post.turn, seats=agreement.seats, facts=facts).packed()
    for position in comers:
        post.mail.send(position, MailNote(WELCOME, 0), body)
    return comers


def ask_in(
    post: Post, others: Sequence[int], told: int, gives_up: Callable[[], bool] = lambda: False
) -> ClusterWelcome | None:
    """Tell `others` what this node offers, and wait to be let in; see `isles.pipeline.swarm.entering.ask`."""
    group = post.mail.group
    welcome = ask(
        post,
        others,
        lambda body: ClusterWelcome.unpacked(body, group.size),
        group.deadlines.outer,
        body=numbers(told).view(torch.uint8),
        gives_up=gives_up,
    )
    if welcome is not None:
        post.turn = welcome.turn
    return welcome

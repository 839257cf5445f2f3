"""How a node comes to clusters that are at work: it tells everybody of itself, and is told where they are.

    HELLO      to all, once it is here: what it offers (`isles.network.clusters.telling`)
    WELCOME    from all who were there before, right after the average at which they agreed that it has come; one is
               enough. From then on it swaps words with them

What a comer says is data: a letter of another run, of a length or with numbers that cannot be, ends the mail from its
sender, and nothing else. What it tells travels in words, so all know of the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isles.comm.collectives.mail import Mail, MailLetter, MailNote
from isles.comm.collectives.same import numbers
from isles.comm.errors import DeadlinePassed, Malformed, PeerLost
from isles.comm.group import Group
from isles.network.clusters.telling import is_told
from isles.parsing import parse_json
from isles.pipeline.ravnest.quorum import Quorum
from isles.pipeline.ravnest.seats import ClusterSeats

HELLO, WELCOME = range(2)
_PATIENCE = 100  # times the deadline of an average: the others train meanwhile
_LOOK = 1.0  # seconds
_LONGEST = 1 << 20  # bytes of a welcome


@dataclass(frozen=True, kw_only=True)
class ClusterWelcome:
    """What a node needs to take part in clusters at work. swaps: of words so far. facts: of the run, by name."""

    swaps: int
    seats: ClusterSeats
    facts: Mapping[str, int]

    def packed(self) -> Tensor:
        """As bytes (n,) uint8."""
        told = {"swaps": self.swaps, "seats": self.seats.to_plain(), "facts": dict(self.facts)}
        return torch.frombuffer(bytearray(json.dumps(told).encode("ascii")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, body: Tensor, size: int) -> ClusterWelcome:
        """From `packed`. size: positions of the world. ValueError for what is no welcome there."""
        told: Any = parse_json(body.numpy().tobytes())
        if not isinstance(told, dict) or told.keys() != {"swaps", "seats", "facts"}:
            raise ValueError("no welcome")
        swaps, facts = told["swaps"], told["facts"]
        if not isinstance(swaps, int) or not isinstance(facts, dict):
            raise ValueError("no welcome")
        if swaps < 0 or not all(isinstance(value, int) and value >= 0 for value in facts.values()):
            raise ValueError("no welcome")
        return cls(swaps=swaps, seats=ClusterSeats.of_plain(told["seats"], size), facts=facts)


class ClusterEntrance:
    """Where one node meets those who come later, or asks to come itself.

    world: all positions, also of nodes that are not here yet. run: a number that all nodes of this run share and others
    do not. met: positions that it listens to from the start; None: all others.
    """

    def __init__(self, world: Group, run: int, met: Sequence[int] | None = None) -> None:
        group = world.among(range(world.size), "inner")  # which nodes of clusters use for nothing else
        self.mail = Mail(group, run=run, lengths={HELLO: range(8, 9), WELCOME: range(2, _LONGEST)}, met=met)

    def hear(self, quorum: Quorum, *, leaving: bool) -> None:
        """Right before an agreement: bring into it who has said hello by now, and whether this node leaves."""
        self.mail.wait(0.0)
        for letter in self._letters(HELLO):
            told = int(letter.body.view(torch.int64))
            if is_told(told):
                quorum.meet(letter.sender, told)
            else:
                self._refuse(letter, "numbers that no node tells of itself")
        if leaving:
            quorum.leave()

    def let_in(self, quorum: Quorum, facts: Mapping[str, int]) -> list[int]:
        """Right after an agreement: welcome those who have come, as all have agreed; their positions."""
        comers = quorum.admit()
        body = ClusterWelcome(swaps=quorum.swaps, seats=quorum.seats, facts=facts).packed()
        for position in comers:
            self.mail.send(position, MailNote(WELCOME, 0), body)
        return comers

    def ask(
        self, others: Sequence[int], told: int, gives_up: Callable[[], bool] = lambda: False
    ) -> ClusterWelcome | None:
        """Say hello to `others`, some of whom are there, and wait for a welcome; None once this node `gives_up`.

        told: what it offers, see `isles.network.clusters.telling`. PeerLost where all of them are lost first;
        DeadlinePassed where nobody answers.
        """
        mail, group = self.mail, self.mail.group
        for other in others:
            mail.send(other, MailNote(HELLO, 0), numbers(told).view(torch.uint8))
        patience = _PATIENCE * group.deadlines.outer
        until = group.transport.now() + patience
        while not gives_up():
            for letter in self._letters(WELCOME):
                try:
                    return ClusterWelcome.unpacked(letter.body, group.size)
                except ValueError as error:
                    self._refuse(letter, str(error))
            if set(others) <= mail.lost.keys():
                raise PeerLost(-1, "everybody who was asked to let this node in")
            if group.transport.now() >= until:
                raise DeadlinePassed(-1, "inner", patience)
            mail.wait(min(_LOOK, until - group.transport.now()))
        return None

    def _letters(self, kind: int) -> Iterator[MailLetter]:
        """Those of one kind; the others are nobody's."""
        while (letter := self.mail.take()) is not None:
            if letter.note.kind == kind:
                yield letter

    def _refuse(self, letter: MailLetter, why: str) -> None:
        self.mail.refuse(letter.sender, Malformed(self.mail.group.ranks[letter.sender], why))

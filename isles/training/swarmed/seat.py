"""What a peer has in its seat of a lighthouse's run, and what its peer asks of whatever trains there.

Ranks are seats, so its world has as many ranks as a run can give seats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.comm.call import Ledger
from isles.comm.elastic.gifts.giving import Gifts
from isles.comm.elastic.swarm.muster import MOST_SEATS
from isles.comm.elastic.swarm.words import SwarmBeat
from isles.comm.errors import Malformed, Refused
from isles.comm.group import Group
from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh
from isles.comm.transport import Transport
from isles.data import Corpus
from isles.pipeline.swarm.post import Post
from isles.training.config.sections import Config
from isles.training.running.starting import deadlines

KeptParts = Callable[[int], tuple[Path, dict[str, Any]]]
"""Fetches a part of the state that the lighthouse keeps: its file, and the facts told beside it."""
_KEPT = 2  # steps of which a peer goes on to offer its state


@dataclass
class OwnSeat:
    """What a seated trainer is made with.

    transport: between seats. gifts: through which this peer gives its states. folder: for files on their way. report:
    called with events for the lighthouse. stop_here: asked after each step whether this peer ends.
    """

    config: Config
    transport: Transport
    corpus: Corpus
    gifts: Gifts
    folder: Path
    report: Callable[[Any], None]
    stop_here: Callable[[int], bool]
    _offered: list[str] = field(default_factory=list)

    def mesh(self, stages: Mapping[int, int]) -> Mesh:
        """The world as this peer sees it. stages: of the seats that are known, its own included."""
        seats = range(MOST_SEATS)
        places = [Coordinate(seat, stages.get(seat, 0), 0 if seat in stages else 1) for seat in seats]
        world = Group(self.transport, tuple(seats), "control", deadlines(self.config), Ledger())
        return Mesh(world=world, layout=Layout(tuple(places)), report=self.report, stop_here=self.stop_here)

    def offer(self, name: str, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Offer a state under `name` in place of the one before the last. facts: told beside it, JSON-able. write: puts
        the state into a file.
        """
        self.gifts.offer(name, self.folder / f"{name}.safetensors", facts, write)
        self._offered.append(name)
        for old in self._offered[:-_KEPT]:
            self.gifts.withdraw(old)
        del self._offered[:-_KEPT]


class SeatedWork(ABC):
    """What trains in one seat. post: its letters to those in the others."""

    post: Post

    @property
    @abstractmethod
    def done(self) -> int:
        """The newest step that it has done."""

    @property
    @abstractmethod
    def has_left(self) -> bool:
        """Whether it is to leave, and has: the others know, or all that nobody else has is at the lighthouse."""

    @property
    @abstractmethod
    def first(self) -> int:
        """The seat that puts the model together at the end."""

    @abstractmethod
    def go_on_from(self, step: int, kept: KeptParts) -> None:
        """Begin after `step`. ValueError where what is kept is none of this run's."""

    @abstractmethod
    def run(self, out: Path | None) -> dict[str, Any] | None:
        """To the end; None where it has left, or has been told to stop."""

    @abstractmethod
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Put the model together again, with who is left: who was to do it is lost."""

    @abstractmethod
    def leave(self) -> None:
        """As soon as the others can do without it. May be called in any thread."""

    @abstractmethod
    def beat(self) -> SwarmBeat | None:
        """How it is at work now; None before it is. May be called in any thread."""

    def meet(self, seat: int) -> None:
        """Listen to `seat` from now on. May be called in any thread."""
        self.post.mail.meet(seat)

    def lost(self, seat: int) -> bool:
        """Whether nothing comes from `seat` any more."""
        return seat in self.post.mail.lost

    def refusals(self) -> dict[int, str]:
        """By seat, why nothing of it is read any more, where it sent what cannot be."""
        lost = [*self.post.mail.lost.items()]
        return {seat: why.detail for seat, why in lost if isinstance(why, Malformed | Refused)}

"""What a peer has in its seat of a lighthouse's run, whichever stage it serves.

Ranks are seats, so its world has as many ranks as a run can give seats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.comm.call import Ledger
from isles.comm.elastic.gifts.giving import Gifts
from isles.comm.elastic.swarm.muster import MOST_SEATS
from isles.comm.group import Group
from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh
from isles.comm.transport import Transport
from isles.data import Corpus
from isles.training.config.sections import Config
from isles.training.running.starting import deadlines

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

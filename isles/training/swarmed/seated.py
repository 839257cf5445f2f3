"""What a peer has in its seat of a lighthouse's run, what its peer asks of whatever trains there, and the trainer of a
swarm there, which offers its states to the lighthouse.

Ranks are seats, so its world has as many ranks as a run can give seats. Who serves in the other seats the peers agree
on among themselves.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from isles.comm.call import Ledger
from isles.comm.elastic.gifts.giving import Gifts
from isles.comm.elastic.swarm.muster import MOST_SEATS
from isles.comm.elastic.swarm.words import Begin, Enter, SwarmBeat
from isles.comm.group import Group
from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh
from isles.comm.transport import Transport
from isles.data import Corpus
from isles.pipeline.swarm.post import Post
from isles.training.config.sections import Config
from isles.training.elastic.given import state_of
from isles.training.running.starting import deadlines
from isles.training.swarmed.trainer import SwarmTrainer

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

    @abstractmethod
    def steps_done(self) -> int:
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


HOLDERS = 2
"""Peers of a stage that offer its state to the lighthouse, so that one of them may be lost meanwhile."""
ANYWHERE = -1


class SeatedTrainer(SwarmTrainer, SeatedWork):
    """A `SwarmTrainer` whose ranks are seats.

    part: who begin together and at which stages, or whom of a swarm that is at work this peer asks to be let in. wish:
    the stage that it wants to serve. await_kept: see `SwarmLine.await_kept`.

    No step begins that would take the run further than `run.checkpoint_every` steps from the newest states that the
    lighthouse keeps, so no more is lost with all peers. States are offered twice in so many steps: those of before are
    on their way while the next half is trained. A lighthouse that is away, or slower than half of
    `world.pipeline_deadline`, is not waited for: peers without a word of each other for longer end the run.
    """

    def __init__(
        self, seat: OwnSeat, part: Begin | Enter, *, wish: int = ANYWHERE, await_kept: Callable[..., bool]
    ) -> None:
        stages = dict(zip(part.seats, part.stages, strict=True)) if isinstance(part, Begin) else {}
        self._asked = part.members if isinstance(part, Enter) else ()
        self.epoch, self._wish = part.epoch, wish
        self._await_kept = await_kept
        self._not_awaited = self._told_until = 0  # steps
        self._seat = seat
        self._ended_at, self.handed_over = seat.transport.now(), 0
        """The step of which all gave their states, for a stage's last peer wants to go."""
        world = seat.mesh(stages or {seat.transport.rank: max(wish, 0)})
        super().__init__(seat.config, world, seat.corpus, present=sorted(stages), met=sorted(stages))
        self.post = self.model_step.swarm.agreement.post

    @override
    def _enter(self) -> None:
        self.model_step.enter(self._asked, self._wish)

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """With who is left."""
        self.workers = len(self.model_step.swarm.agreement.members)
        return super().conclude(out)

    @override
    def go_on_from(self, step: int, kept: KeptParts) -> None:
        given = torch.frombuffer(bytearray(kept(self.world.place.stage)[0].read_bytes()), dtype=torch.uint8)
        stepped = self.model_step
        stepped.serve(*self._become(stepped.cut, self.world.place.stage, given))
        stepped.step = step

    @property
    @override
    def has_left(self) -> bool:
        swarm = self.model_step.swarm
        if swarm.is_needed:
            return self.handed_over > 0
        return swarm.leaving and self.model_step.last is not None and swarm.is_gone

    @property
    @override
    def first(self) -> int:
        return self.model_step.swarm.peers(0)[0]

    @override
    def step(self) -> None:
        self._hold_back()
        super().step()
        self._ended_at, swarm = self.world.transport.now(), self.model_step.swarm
        if swarm.bare and not self.handed_over:
            self.handed_over = self.optimizer.steps
            self._save(self._seat.folder, self.handed_over)
            self._await_kept(self.handed_over, self.config.run.grace / 2, though_away=True)
        elif not swarm.bare:
            self.handed_over = 0

    @override
    def beat(self) -> SwarmBeat | None:
        step = self.model_step
        swarm, last, me = step.swarm, step.last, self.world.rank
        members = swarm.agreement.members
        if me not in members:
            return None
        stages = tuple(swarm.stages[seat] for seat in members)
        told = None if last is None else last.told.get(me)
        seconds, queue, counted = (0.0, 0.0, 0) if told is None else (told.seconds, told.queue, told.counted)
        since = round(self.world.transport.now() - self._ended_at, 1)
        return SwarmBeat(self.epoch, self.optimizer.steps, members, stages, seconds, queue, counted, since, ())

    def _hold_back(self) -> None:
        """Where the next step would be too far from what is kept."""
        every = self.config.run.checkpoint_every
        done, seconds = self.optimizer.steps, self.config.world.pipeline_deadline / 2
        oldest = done + 1 - every
        if not every or oldest <= self._not_awaited:
            return
        began = time.monotonic()
        if self._await_kept(oldest, seconds):
            return
        if time.monotonic() - began >= seconds:
            self._not_awaited = done  # the states after that are waited for again
        if self.world.rank == self.model_step.swarm.agreement.members[0] and done >= self._told_until:
            self._told_until = done + every
            told = f"the lighthouse does not keep the states of step {oldest} or a later one: training goes on without"
            self.world.report({"notice": f"{told}, and more than run.checkpoint_every = {every} steps may be lost"})

    @override
    def _saves_after(self, step: int) -> bool:
        every = (self.config.run.checkpoint_every + 1) // 2
        return bool(every) and step % every == 0

    @override
    def _save(self, out: Path, step: int) -> None:
        """The first peers of a stage offer its state."""
        swarm, me = self.model_step.swarm, self.world.rank
        swarm.close()
        stage = swarm.stages[me]
        if me not in swarm.peers(stage)[:HOLDERS]:
            return
        self._refuse_broken(step, {"model": self.optimizer.weights()})
        self._seat.offer(state_of(stage, step), {"step": step}, self._state().write)
        self.world.report({"offered": {"step": step, "stage": stage, "parts": len(self.model_step.cut.pieces)}})

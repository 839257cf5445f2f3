"""The trainer of a swarm's peer in a seat that a lighthouse gave, and the states that it offers to the lighthouse.

Who serves in the other seats the peers agree on among themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from typing_extensions import override

from isles.comm.elastic.swarm.words import SwarmBeat
from isles.training.elastic.given import state_of
from isles.training.swarmed.seat import KeptParts, OwnSeat, SeatedWork
from isles.training.swarmed.trainer import SwarmTrainer

HOLDERS = 2
"""Peers of a stage that offer its state to the lighthouse, so that one of them may be lost meanwhile."""
ANYWHERE = -1


class AwaitKept(Protocol):
    """See `SwarmLine.await_kept`."""

    def __call__(self, step: int, seconds: float, *, though_away: bool = False) -> bool: ...


class SeatedTrainer(SwarmTrainer, SeatedWork):
    """A `SwarmTrainer` whose ranks are seats.

    epoch: which of the run's swarms this is, counted by the lighthouse. stages: by seat, the stage of all who begin
    together; {}: a swarm is at work already, of which `members` are asked to let this peer in. wish: the stage that it
    wants to serve. await_kept: see `SwarmLine.await_kept`.

    No step begins that would take the run further than `run.checkpoint_every` steps from the newest states that the
    lighthouse keeps, so no more is lost with all peers. States are offered twice in so many steps: those of before are
    on their way while the next half is trained. A lighthouse that is away, or slower than half of
    `world.pipeline_deadline`, is not waited for: peers without a word of each other for longer end the run.
    """

    def __init__(
        self,
        seat: OwnSeat,
        *,
        epoch: int,
        stages: dict[int, int],
        members: Sequence[int] = (),
        wish: int = ANYWHERE,
        await_kept: AwaitKept,
    ) -> None:
        self.epoch, self._asked, self._wish = epoch, members, wish
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
    def leave(self) -> None:
        self.model_step.swarm.leaving = True

    @override
    def go_on_from(self, step: int, kept: KeptParts) -> None:
        given = torch.frombuffer(bytearray(kept(self.world.place.stage)[0].read_bytes()), dtype=torch.uint8)
        stepped = self.model_step
        stepped.serve(*self._become(stepped.cut, self.world.place.stage, given))
        stepped.step = step

    @property
    @override
    def done(self) -> int:
        return self.optimizer.steps

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
        self.world.report({"offered": {"step": step, "stage": stage}})

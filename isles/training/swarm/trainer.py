"""One peer of a run in a swarm: `Trainer`, whose steps are the swarm's.

What a peer has in its member of a lighthouse's run, what its peer asks of whatever trains there, and the trainer of a
swarm there, which offers its states to the lighthouse.

Ranks are members, so its world has as many ranks as a run can give members. Who serves in the other members the peers
agree on among themselves.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from isles.base.parsing import Nonnegative, integer, value_of
from isles.comm.call import Ledger
from isles.comm.errors import Malformed
from isles.comm.group import Group
from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.membership.messages import JoinSwarm, StartSwarm, SwarmBeat
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.state_transfer import StateTransfer, state_of
from isles.membership.swarm_coordinator import MAX_MEMBERS
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.peers.inbox import PeerInbox
from isles.pipeline.pipeline import Cut
from isles.pipeline.recovery import RATE, block_parameters, merged, sources
from isles.pipeline.swarm.outer import SwarmRoster
from isles.replicas.sync import ReplicaSync
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.optimizer import rate_schedule, wrapped
from isles.training.records.shard import StateCopy, state_from_bytes
from isles.training.stage_runner import broadcast_from_first, build_stage, run_scheme
from isles.training.step import Left, StepRunner, Text
from isles.training.swarm.step import NewStage, Swarmed, begin_alike
from isles.training.trainer import Trainer
from isles.training.worker import PartsMaker, deadlines

_FAREWELL = 2.0
"""Seconds in which what a peer has sent before it leaves must be gone. The others need none of it by then."""


class SwarmParts(PartsMaker):
    """What a `SwarmTrainer` is handed. See there."""

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None, *, present: Sequence[int], met: Sequence[int] | None
    ) -> None:
        super().__init__(config, world, corpus)
        self._present, self._met = present, met
        alone = world.world.among([world.rank])  # what it knows of others the swarm tells it
        self._peers = alone if config.method == "none" else SwarmRoster(alone)

    @override
    def read(self) -> Text:
        return Text(self.config, self.world, self.corpus, share=(0, 1))

    @override
    def wrapped(self, model: nn.Module) -> tuple[ReplicaSync, list[str]]:
        return wrapped(self.config, model, self._peers, self.world, norm=lambda: cast(Swarmed, self.runner).norm)

    @override
    def _validates(self) -> bool:
        if self.world.rank not in self._present:
            return self.read().validates
        coordinates = self.world.layout.coordinates
        everyone = self.world.world.among(
            sorted(self._present, key=lambda rank: coordinates[rank].stage)
        )  # who reads first
        return broadcast_from_first(everyone, self.text is not None and self.text.validates)

    @override
    def _stage(self, cut: Cut, scheme: Scheme) -> Stage:
        stage = super()._stage(cut, scheme)
        if self.world.rank in self._present:
            begin_alike(self.config, self.world, cut, stage, self._present)
        return stage

    @override
    def _staged(self, cut: Cut, scheme: Scheme) -> StepRunner:
        made = Swarmed(self, cut, scheme, present=self._present, met=self._met)
        if isinstance(self._peers, SwarmRoster):
            self._peers.serve(made.swarm)
        return made


class SwarmTrainer(Trainer):
    """A `Trainer` whose steps are those of a swarm.

    Without an outer method all peers of a stage have the same gradient, so their weights are equal after every step,
    and there is nothing to compare or to average. With one, their weights differ between its exchanges, which go by
    messages among the peers that the swarm has agreed on.

    present: ranks that are there from the start; None: all. met: ranks that this worker listens to from the start;
    None: all.
    """

    model_step: Swarmed
    _is_concluded = False

    def __init__(
        self,
        config: Config,
        world: Mesh,
        corpus: Corpus | None = None,
        present: Sequence[int] | None = None,
        met: Sequence[int] | None = None,
    ) -> None:
        self._present = range(world.size) if present is None else present
        self._maker = SwarmParts(config, world, corpus, present=self._present, met=met)
        super().__init__(config, world, self._maker.made())
        self.model_step.owner = self

    @override
    def run(self, out: Path | None) -> dict[str, Any] | None:
        """As `Trainer.run`; None also where this peer was asked to leave, or has come too late."""
        self.world.leaving.can(self.leave)
        try:
            if self.world.rank not in self._present:
                with self.step_clock.step():  # it is blocked for so long
                    self._enter()
            return super().run(out)
        except Left:
            self._depart()
            return None

    def _enter(self) -> None:
        """Come to a swarm that is at work; here ranks are numbered in the order in which workers come."""
        self.model_step.enter(range(self.world.rank))

    def leave(self) -> None:
        """As soon as the others can do without it. May be called in any thread."""
        self.model_step.swarm.leaving = True

    @property
    def has_departed(self) -> bool:
        return self.model_step.swarm.has_departed

    def _depart(self) -> None:
        """Leave for good; the others know, and nothing that this peer has begun is left undone."""
        self.model_step.swarm.agreement.inbox.queue.settle(_FAREWELL)
        self.world.leaving.has_left = True
        if self.model_step.last is not None:
            notice = f"worker {self.world.rank} has left after step {self.optimizer.steps}, as it was asked to"
            self.world.report({"left": self.world.rank, "notice": notice})

    @override
    def step(self) -> None:
        super().step()
        self.tokens = self.model_step.tokens

    def state_bytes(self) -> bytes:
        return self._state().to_bytes()

    def _state(self) -> StateCopy:
        """This peer's state between two steps; what another one `become`s from."""
        optimizer = self.optimizer
        held = {"model": optimizer.weights(), "inner": optimizer.inner_state(), "steps": optimizer.steps}
        held |= {"outer": optimizer.outer_state(), "norm": self.model_step.block_norm}
        held["late"] = self.model_step.swarm.late
        return StateCopy({**held, "schedule": self.schedule.state_dict()})

    def become(self, stage: int, received: Tensor) -> NewStage:
        """Serve `stage` from now on, with the state that a peer of it gave."""
        state = _read(received, self.config.run.steps)
        served = self._rebuilt(stage)
        self.optimizer.load_weights(state["model"])
        self.optimizer.load_inner_state(state["inner"])
        self.optimizer.load_outer_state(state["outer"])
        self.optimizer.steps = state["steps"]
        self.schedule.load_state_dict(state["schedule"])
        self.model_step.block_norm = state["norm"]
        self.model_step.swarm.late = state["late"]
        return served

    def revive(self, stage: int, received: Sequence[Tensor]) -> NewStage:
        """Serve `stage`, which nobody does any more, made of the states that peers of its neighbours gave: CheckFree's
        mean of their blocks, empty moments, a higher rate.
        """
        states = [_read(each, self.config.run.steps) for each in received]
        served, cut = self._rebuilt(stage), self.model_step.cut
        whole = sketch(self.config.model)
        run_scheme(self.config, cut).fit(whole)
        found = [
            [state["model"][name] for name in block_parameters(Stage(whole, cut.pieces[source]))]
            for state, source in zip(states, sources("checkfree", stage, len(cut.pieces)), strict=True)
        ]
        norms = [state["norm"] for state in states]
        with torch.no_grad():
            for own, before, after in zip(block_parameters(served[0]).values(), *found, strict=True):
                own.copy_(merged(before, norms[0], after, norms[1]))
        self.optimizer.take_in()
        self.optimizer.steps = states[0]["steps"]
        self.schedule.load_state_dict(
            states[0]["schedule"] | {"base_lrs": [RATE * each for each in self.schedule.base_lrs]}
        )
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["lr"] = rate * lr_factor(self.optimizer.steps + 1, self.config.run.steps, self.config.inner)
        return served

    def _rebuilt(self, stage: int) -> NewStage:
        cut = self.model_step.cut
        scheme = run_scheme(self.config, cut)
        if stage == 0 and self.text is None:
            self.text = self._maker.read()
        made = build_stage(self.config, cut, scheme, stage, self.world.local_rank)
        self.optimizer, _ = self._maker.wrapped(made)
        self.model = self.optimizer.model
        self.schedule = rate_schedule(self.optimizer, self.config)
        return made, scheme, self.text if stage == 0 else None

    @override
    def state_dict(self) -> dict[str, Any]:
        self.model_step.swarm.close()
        self.model_step.swarm.agreement.inbox.queue.settle()  # whoever resumes finds the lines as idle
        return super().state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        stage = state["step"]["stages"][self.world.rank]
        if stage != self.model_step.swarm.stages[self.world.rank]:
            self.model_step.serve(*self._rebuilt(stage))
        super().load_state_dict(state)

    @override
    def _gauges(self) -> dict[str, float]:
        return super()._gauges() | self.model_step.gauges()

    @override
    def _evaluate(self) -> float | None:
        if not self.validates:
            return None
        with self.step_clock.step():  # waits of the swarm count as those of steps
            return self.model_step.evaluate(())

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Tokens are those of the steps, told by who puts the model together: some who read them may be gone. If that
        one is lost before the model is written and judged, the next of stage 0 does it all.
        """
        self._take_last()
        read = self.config.run.steps * self.model_step.rows * limits(self.config.model)[0]
        agreement = self.model_step.swarm.agreement
        agreement.patience = max(agreement.patience, self.config.world.eval_deadline)  # a whole model takes its time
        while True:
            result = super().conclude(out)
            has_model = int(result["parameters"] > 0)
            if any(vote[0] for vote in agreement.agree([has_model]).values()):
                return result | {"tokens": has_model * read}

    def _take_last(self) -> None:
        """The last update, where it is still to come."""
        with self.step_clock.step():
            if not self._is_concluded and self.model_step.take_last():
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.optimizer.steps = self.config.run.steps
        self._is_concluded = True


def _read(received: Tensor, last: int) -> Any:
    """What `SwarmTrainer._state` made, in a run of `last` steps. Malformed where it is not."""
    try:
        state = state_from_bytes(received.numpy().tobytes())
        integer(state, "steps", 0, last)
        value_of(state, "norm", Nonnegative)
        return state
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(-1, f"an invalid state of a stage: {str(error).splitlines()[0][:120]}") from error


FetchPart = Callable[[int], tuple[Path, dict[str, Any]]]
"""Fetches a part of the state that the lighthouse keeps: its file, and the facts told beside it."""
_RETAINED = 2  # steps of which a peer goes on to offer its state


class OwnMember(ABC):
    """What a member of a run trains with.

    transport: between members. transfers: through which this peer serves its states. folder: for files on their way.
    """

    config: Config
    transport: ElasticTransport
    corpus: Corpus
    transfers: StateTransfer
    folder: Path

    def __init__(self) -> None:
        self._offered: list[str] = []

    @abstractmethod
    def report(self, event: Any) -> None:
        """What the trainer tells whoever started it."""

    @abstractmethod
    def stop_here(self, step: int) -> bool:
        """Whether this peer ends after `step` without the others' leave."""

    def mesh(self, stages: Mapping[int, int]) -> Mesh:
        """The world as this peer sees it. stages: of the members that are known, its own included."""
        members = range(MAX_MEMBERS)
        coordinates = [Coordinate(member, stages.get(member, 0), 0 if member in stages else 1) for member in members]
        world = Group(self.transport, tuple(members), "control", deadlines(self.config), Ledger())
        return Mesh(world=world, layout=Layout(tuple(coordinates)), report=self.report, stop_here=self.stop_here)

    def publish(self, name: str, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Offer a state under `name` in place of the one before the last. facts: told beside it, JSON-able. write: puts
        the state into a file.
        """
        self.transfers.publish(name, self.folder / f"{name}.safetensors", facts, write)
        self._offered.append(name)
        for old in self._offered[:-_RETAINED]:
            self.transfers.unpublish(old)
        del self._offered[:-_RETAINED]


class PeerWork(ABC):
    """What trains as one member. inbox: its messages to those in the others."""

    inbox: PeerInbox

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
        """The member that puts the model together at the end."""

    @abstractmethod
    def go_on_from(self, step: int, retained: FetchPart) -> None:
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


class ElasticSwarmTrainer(SwarmTrainer, PeerWork):
    """A `SwarmTrainer` whose ranks are members.

    part: who begin together and at which stages, or whom of a swarm that is at work this peer asks to be let in. wish:
    the stage that it wants to serve. await_saved: see `SwarmClient.await_saved`.

    No step begins that would take the run further than `run.checkpoint_every` steps from the newest states that the
    lighthouse keeps, so no more is lost with all peers. States are offered twice in so many steps: those of before are
    on their way while the next half is trained. A lighthouse that is away, or slower than half of
    `world.pipeline_deadline`, is not waited for: peers without a word of each other for longer end the run.
    """

    def __init__(
        self, member: OwnMember, part: StartSwarm | JoinSwarm, *, wish: int = ANYWHERE, await_saved: Callable[..., bool]
    ) -> None:
        stages = dict(zip(part.members, part.stages, strict=True)) if isinstance(part, StartSwarm) else {}
        self._asked = part.members if isinstance(part, JoinSwarm) else ()
        self.epoch, self._wish = part.epoch, wish
        self._await_saved = await_saved
        self._not_awaited = self._noticed_until = 0  # steps
        self._member = member
        self._ended_at, self.handed_over = member.transport.now(), 0
        """The step of which all gave their states, for a stage's last peer wants to go."""
        world = member.mesh(stages or {member.transport.rank: max(wish, 0)})
        super().__init__(member.config, world, member.corpus, present=sorted(stages), met=sorted(stages))
        self.inbox = self.model_step.swarm.agreement.inbox

    @override
    def _enter(self) -> None:
        self.model_step.enter(self._asked, self._wish)

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        self.workers = len(self.model_step.swarm.agreement.members)
        return super().conclude(out)

    @override
    def go_on_from(self, step: int, retained: FetchPart) -> None:
        received = torch.frombuffer(bytearray(retained(self.world.coordinate.stage)[0].read_bytes()), dtype=torch.uint8)
        self.model_step.serve(*self.become(self.world.coordinate.stage, received))
        self.model_step.step = step

    @property
    @override
    def has_left(self) -> bool:
        swarm = self.model_step.swarm
        if swarm.is_needed:
            return self.handed_over > 0
        return swarm.leaving and self.model_step.last is not None and swarm.has_departed

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
            self._save(self._member.folder, self.handed_over)
            self._await_saved(self.handed_over, self.config.run.grace / 2, though_away=True)
        elif not swarm.bare:
            self.handed_over = 0

    @override
    def beat(self) -> SwarmBeat | None:
        step = self.model_step
        swarm, last, me = step.swarm, step.last, self.world.rank
        members = swarm.agreement.members
        if me not in members:
            return None
        stages = tuple(swarm.stages[member] for member in members)
        stats = None if last is None else last.stats.get(me)
        seconds, queue, counted = (0.0, 0.0, 0) if stats is None else (stats.seconds, stats.queue, stats.counted)
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
        if self._await_saved(oldest, seconds):
            return
        if time.monotonic() - began >= seconds:
            self._not_awaited = done  # the states after that are waited for again
        if self.world.rank == self.model_step.swarm.agreement.members[0] and done >= self._noticed_until:
            self._noticed_until = done + every
            notice = (
                f"the lighthouse does not keep the states of step {oldest} or a later one: training goes on without"
            )
            self.world.report({"notice": f"{notice}, and more than run.checkpoint_every = {every} steps may be lost"})

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
        self._member.publish(state_of(stage, step), {"step": step}, self._state().write)
        self.world.report({"offered": {"step": step, "stage": stage, "parts": len(self.model_step.cut.pieces)}})

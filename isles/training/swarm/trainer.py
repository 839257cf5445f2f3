"""One peer of a run in a swarm: a `Trainer` whose steps are the swarm's.

Also for a member of a lighthouse's run: `OwnMember` (its transport, data and files), `PeerWork` (the interface of what
trains there), and `ElasticSwarmTrainer`, which publishes its states for the lighthouse. There ranks are member ids, so
the world has as many ranks as a run can assign ids; the peers agree among themselves on each member's stage.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from isles.training.loop import checkpoint_steps, rate_schedule
from isles.training.optimizer import wrapped
from isles.training.records.shard import StateCopy, state_from_bytes
from isles.training.stage_runner import broadcast_from_first, build_stage, run_scheme
from isles.training.step import Left, Losses, StepRunner, Text, validation_losses
from isles.training.swarm.step import NewStage, Swarmed, begin_alike
from isles.training.trainer import Trainer
from isles.training.worker import PartsMaker, deadlines

_FAREWELL = 2.0
"""Seconds a leaving peer waits for its pending sends. The others need none of them by then."""


class SwarmParts(PartsMaker):
    """Builds the parts of a `SwarmTrainer`. Arguments as there."""

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None, *, present: Sequence[int], met: Sequence[int] | None
    ) -> None:
        super().__init__(config, world, corpus)
        self._present, self._met = present, met
        alone = world.world.among([world.rank])  # the swarm supplies the other peers later
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
        )  # in order of stages: the first one has the text
        return broadcast_from_first(everyone, self.text is not None and self.text.validates)

    @override
    def _stage(self, cut: Cut, scheme: Scheme) -> Stage:
        stage = super()._stage(cut, scheme)
        if self.world.rank in self._present:
            begin_alike(self.config, self.world, cut, stage, self._present)
        return stage

    @override
    def _staged(self, cut: Cut, scheme: Scheme) -> StepRunner:
        runner = Swarmed(self, cut, scheme, present=self._present, met=self._met)
        if isinstance(self._peers, SwarmRoster):
            self._peers.serve(runner.swarm)
        return runner


class SwarmTrainer(Trainer):
    """A `Trainer` whose steps are those of a swarm.

    Without an outer method all peers of a stage have the same gradient, so their weights are equal after every step,
    and there is nothing to average. With one, their weights differ between its exchanges, which are among the peers
    that the swarm has agreed on.

    present: ranks that take part from the start; None: all. met: ranks that this worker receives from at the start;
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
        """As `Trainer.run`; None also if this peer was asked to leave, or has joined too late."""
        self.world.leaving.can(self.leave)
        try:
            if self.world.rank not in self._present:
                with self.step_clock.step():  # so that the wait counts as blocked time
                    self._enter()
            return super().run(out)
        except Left:
            self._depart()
            return None

    def _enter(self) -> None:
        """Join a running swarm; ranks are numbered in the order in which workers join, so lower ones are there."""
        self.model_step.enter(range(self.world.rank))

    def leave(self) -> None:
        """Ask to leave as soon as the others can go on without this peer. Thread-safe."""
        self.model_step.swarm.leaving = True

    @property
    def has_departed(self) -> bool:
        return self.model_step.swarm.has_departed

    def _depart(self) -> None:
        """Complete pending sends and report that this peer has left, once the others know."""
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
        """This peer's state between two steps, the input of another peer's `become`."""
        optimizer = self.optimizer
        state = {"model": optimizer.weights(), "inner": optimizer.inner_state(), "steps": optimizer.steps}
        state |= {"outer": optimizer.outer_state(), "norm": self.model_step.block_norm}
        state["late"] = self.model_step.swarm.late
        return StateCopy({**state, "schedule": self.schedule.state_dict()})

    def become(self, stage: int, received: Tensor) -> NewStage:
        """Serve `stage` with the state `received` from one of its peers, (n,) uint8."""
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
        """Serve `stage`, which has no peer left, rebuilt from the `received` states of its neighbours: CheckFree's mean
        of their blocks, empty moments, a higher learning rate.
        """
        states = [_read(each, self.config.run.steps) for each in received]
        served, cut = self._rebuilt(stage), self.model_step.cut
        whole = sketch(self.config.model)
        run_scheme(self.config, cut).fit(whole)
        neighbours = [
            [state["model"][name] for name in block_parameters(Stage(whole, cut.pieces[source]))]
            for state, source in zip(states, sources("checkfree", stage, len(cut.pieces)), strict=True)
        ]
        norms = [state["norm"] for state in states]
        with torch.no_grad():
            for own, before, after in zip(block_parameters(served[0]).values(), *neighbours, strict=True):
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
        model = build_stage(self.config, cut, scheme, stage, self.world.local_rank)
        self.optimizer, _ = self._maker.wrapped(model)
        self.model = self.optimizer.model
        self.schedule = rate_schedule(self.optimizer, self.config)
        return model, scheme, self.text if stage == 0 else None

    @override
    def state_dict(self) -> dict[str, Any]:
        self.model_step.swarm.close()
        self.model_step.swarm.agreement.inbox.queue.settle()  # a resumed run starts with idle links too
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
    def _evaluate(self) -> Losses:
        if not self.validates:
            return {}
        with self.step_clock.step():  # waits of the swarm count as those of steps
            return validation_losses(self.config.data, lambda: self.model_step.text, self.model_step.evaluate)

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """The peer that writes the model reports the tokens of all steps, as peers that read some may be lost. If that
        peer is lost before the model is written and validated, the next one of stage 0 does it again.
        """
        self._take_last()
        read = self.config.run.steps * self.model_step.rows * limits(self.config.model)[0]
        agreement = self.model_step.swarm.agreement
        # the others wait while one peer gathers, writes and validates the whole model
        agreement.patience = max(agreement.patience, self.config.world.eval_deadline)
        while True:
            result = super().conclude(out)
            has_model = int(result["parameters"] > 0)
            if any(vote[0] for vote in agreement.agree([has_model]).values()):
                return result | {"tokens": has_model * read}

    def _take_last(self) -> None:
        """Apply the last update if it is still pending (delayed updates)."""
        with self.step_clock.step():
            if not self._is_concluded and self.model_step.take_last():
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.optimizer.steps = self.config.run.steps
        self._is_concluded = True


def _read(received: Tensor, last: int) -> Any:
    """Decode a `SwarmTrainer._state` of a run of `last` steps. Malformed if it is none."""
    try:
        state = state_from_bytes(received.numpy().tobytes())
        integer(state, "steps", 0, last)
        value_of(state, "norm", Nonnegative)
        return state
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(-1, f"an invalid state of a stage: {str(error).splitlines()[0][:120]}") from error


FetchPart = Callable[[int], tuple[Path, dict[str, Any]]]
"""Fetches a part of the state that the lighthouse has: returns its file and its facts."""
_RETAINED = 2  # a peer serves its states of this many steps


class OwnMember(ABC):
    """A member's resources for training.

    transport: between members. transfers: serves this peer's states. folder: for temporary files of states.
    states_wanted: returns the step from which on the lighthouse asks for all states; 0: it does not. watched: the
    context of each step.
    """

    config: Config
    transport: ElasticTransport
    corpus: Corpus
    transfers: StateTransfer
    folder: Path
    states_wanted: Callable[[], int]
    watched: Callable[[], AbstractContextManager[None]]

    def __init__(self) -> None:
        self._offered: list[str] = []

    @abstractmethod
    def report(self, event: Any) -> None:
        """Report an event of the trainer to the user and the lighthouse."""

    @abstractmethod
    def stop_here(self, step: int) -> bool:
        """Whether this peer stops after `step` at once, without an agreement."""

    def mesh(self, stages: Mapping[int, int]) -> Mesh:
        """The mesh of all member ids. stages: of the known members, including this one."""
        members = range(MAX_MEMBERS)
        coordinates = [Coordinate(member, stages.get(member, 0), 0 if member in stages else 1) for member in members]
        world = Group(self.transport, tuple(members), "control", deadlines(self.config), Ledger())
        return Mesh(world=world, layout=Layout(tuple(coordinates)), report=self.report, stop_here=self.stop_here)

    def publish(self, name: str, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Serve a state under `name`, and stop serving the one before the last. facts: JSON-able, sent with it. write:
        writes the state to a file.
        """
        self.transfers.publish(name, self.folder / f"{name}.safetensors", facts, write)
        self._offered.append(name)
        for old in self._offered[:-_RETAINED]:
            self.transfers.unpublish(old)
        del self._offered[:-_RETAINED]


class PeerWork(ABC):
    """Interface of the trainer of one member. inbox: for its messages to other members."""

    inbox: PeerInbox

    @abstractmethod
    def steps_done(self) -> int:
        """The last completed step."""

    @property
    @abstractmethod
    def has_left(self) -> bool:
        """Whether this peer was asked to leave and may go: the others know, or the lighthouse has its state."""

    @property
    @abstractmethod
    def first(self) -> int:
        """The member that gathers and writes the model at the end."""

    @abstractmethod
    def go_on_from(self, step: int, retained: FetchPart) -> None:
        """Start from the lighthouse's states of `step`. ValueError if they are not of this run."""

    @abstractmethod
    def run(self, out: Path | None) -> dict[str, Any] | None:
        """Train to the end and return the results; None if this peer has left or was stopped."""

    @abstractmethod
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Gather the model again with the remaining peers, after the loss of the one that was to do it."""

    @abstractmethod
    def trained(self) -> nn.Module | None:
        """What this peer holds of the model, by names in the whole; None if its weights are written in another form."""

    @abstractmethod
    def leave(self) -> None:
        """Ask to leave as soon as the others can go on without this peer. Thread-safe."""

    @abstractmethod
    def beat(self) -> SwarmBeat | None:
        """The current status for the lighthouse; None before training. Thread-safe."""


HOLDERS = 2
"""Number of peers of a stage that serve its state for the lighthouse: one of them may be lost meanwhile."""
ANYWHERE = -1


class ElasticSwarmTrainer(SwarmTrainer, PeerWork):
    """A `SwarmTrainer` whose ranks are members.

    part: the members that start together and their stages, or those of a running swarm that this peer asks to join.
    wish: the stage that it wants to serve. await_saved: see `SwarmClient.await_saved`.

    A step waits while it is more than `run.checkpoint_every` steps after the newest states at the lighthouse, so the
    loss of all peers costs no more than these steps. States are published twice in that many steps, so that one
    transfer runs while the next half is trained. The wait ends if the lighthouse is away, or after half of
    `world.pipeline_deadline`: peers that hear nothing of each other for longer than the deadline end the run. With
    "auto" peers wait for no state, and publish theirs when the lighthouse asks for them.
    """

    def __init__(
        self, member: OwnMember, part: StartSwarm | JoinSwarm, *, wish: int = ANYWHERE, await_saved: Callable[..., bool]
    ) -> None:
        stages = dict(zip(part.members, part.stages, strict=True)) if isinstance(part, StartSwarm) else {}
        self._asked = part.members if isinstance(part, JoinSwarm) else ()
        self.epoch, self._wish = part.epoch, wish
        self._await_saved = await_saved
        self._not_awaited = self._noticed_until = self._saved_at = 0  # steps
        self._member = member
        self._ended_at, self.handed_over = member.transport.now(), 0
        """`handed_over`: the step whose states all peers published, as a stage's last peer wants to leave."""
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
    def trained(self) -> nn.Module | None:
        step = self.model_step
        return step.stage if type(step.scheme).unsplit is Scheme.unsplit else None

    @override
    def step(self) -> None:
        self._hold_back()
        self.model_step.swarm.wants_states = self._saved_at < self._member.states_wanted() <= self.optimizer.steps + 1
        with self._member.watched():
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
        """Wait while the next step would be too far from the states at the lighthouse."""
        every = checkpoint_steps(self.config.run)
        done, seconds = self.optimizer.steps, self.config.world.pipeline_deadline / 2
        oldest = done + 1 - every
        if not every or oldest <= self._not_awaited:
            return
        began = time.monotonic()
        if self._await_saved(oldest, seconds):
            return
        if time.monotonic() - began >= seconds:
            self._not_awaited = done  # do not wait again for states up to this step
        if self.world.rank == self.model_step.swarm.agreement.members[0] and done >= self._noticed_until:
            self._noticed_until = done + every
            notice = f"the lighthouse has no states of step {oldest} or later: training continues without them"
            self.world.report({"notice": f"{notice}, and more than run.checkpoint_every = {every} steps may be lost"})

    @override
    def _saves_after(self, step: int) -> bool:
        every = (checkpoint_steps(self.config.run) + 1) // 2
        return step % every == 0 if every else self.model_step.swarm.saves

    @override
    def _saves_last(self) -> bool:
        return False

    @override
    def _save(self, out: Path, step: int) -> None:
        """Publish the stage's state, at the first `HOLDERS` peers of the stage."""
        swarm, me = self.model_step.swarm, self.world.rank
        swarm.close()
        stage, self._saved_at = swarm.stages[me], step
        if me not in swarm.peers(stage)[:HOLDERS]:
            return
        self.refuse_broken(step, {"model": self.optimizer.weights()})
        # Published before it is offered: the lighthouse fetches what is offered.
        self._member.publish(state_of(stage, step), {"step": step}, self._state().write)
        self.world.report({"offered": {"step": step, "stage": stage, "parts": len(self.model_step.cut.pieces)}})

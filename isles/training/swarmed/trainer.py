"""One peer of a run in a swarm: `Trainer`, whose steps are the swarm's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from isles.comm.errors import Malformed
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.fields import Nonnegative, integer, value_of
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut
from isles.pipeline.recovery import RATE, block_parameters, merged, sources
from isles.pipeline.swarm.roster import SwarmRoster
from isles.replicas.sync import ReplicaSync
from isles.training.assemble import wrapped
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.inner_optimizer import rate_schedule
from isles.training.parts import PartsMaker
from isles.training.records.shard import StateCopy, state_from_bytes
from isles.training.staged import build_stage, run_scheme, told_by_first
from isles.training.step import Left, StepRunner
from isles.training.swarmed.step import NewStage, Swarmed, begin_alike
from isles.training.text import Text
from isles.training.trainer import Trainer

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
    def _judges(self) -> bool:
        if self.world.rank not in self._present:
            return self.read().judges
        places = self.world.layout.coordinates
        everyone = self.world.world.among(sorted(self._present, key=lambda rank: places[rank].stage))  # who reads first
        return told_by_first(everyone, self.text is not None and self.text.judges)

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
    letters among the peers that the swarm has agreed on.

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
        cut = self.model_step.cut
        self.model_step.serve_others(
            lambda: self._state().to_bytes(), become=partial(self._become, cut), revive=partial(self._revive, cut)
        )

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
    def is_gone(self) -> bool:
        """Whether it has left."""
        return self.model_step.swarm.is_gone

    def _depart(self) -> None:
        """Leave for good; the others know, and nothing that this peer has begun is left undone."""
        self.model_step.swarm.agreement.post.mail.settle(_FAREWELL)
        self.world.leaving.has_left = True
        if self.model_step.last is not None:
            told = f"worker {self.world.rank} has left after step {self.optimizer.steps}, as it was asked to"
            self.world.report({"left": self.world.rank, "notice": told})

    @override
    def step(self) -> None:
        super().step()
        self.tokens = self.model_step.tokens

    def _state(self) -> StateCopy:
        """This peer's state between two steps; what another one `_become`s from."""
        optimizer = self.optimizer
        held = {"model": optimizer.weights(), "inner": optimizer.inner_state(), "steps": optimizer.steps}
        held |= {"outer": optimizer.outer_state(), "norm": self.model_step.block_norm}
        held["late"] = self.model_step.swarm.late
        return StateCopy({**held, "schedule": self.schedule.state_dict()})

    def _become(self, cut: Cut, stage: int, given: Tensor) -> NewStage:
        """Serve `stage` from now on, with the state that a peer of it gave."""
        state = _read(given, self.config.run.steps)
        served = self._rebuilt(cut, stage)
        self.optimizer.load_weights(state["model"])
        self.optimizer.load_inner_state(state["inner"])
        self.optimizer.load_outer_state(state["outer"])
        self.optimizer.steps = state["steps"]
        self.schedule.load_state_dict(state["schedule"])
        self.model_step.block_norm = state["norm"]
        self.model_step.swarm.late = state["late"]
        return served

    def _revive(self, cut: Cut, stage: int, given: Sequence[Tensor]) -> NewStage:
        """Serve `stage`, which nobody does any more, made of the states that peers of its neighbours gave: CheckFree's
        mean of their blocks, empty moments, a higher rate.
        """
        states = [_read(each, self.config.run.steps) for each in given]
        served = self._rebuilt(cut, stage)
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

    def _rebuilt(self, cut: Cut, stage: int) -> NewStage:
        """What serves `stage`, as drawn."""
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
        self.model_step.swarm.agreement.post.mail.settle()  # whoever resumes finds the lines as idle
        return super().state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        stage = state["step"]["stages"][self.world.rank]
        if stage != self.model_step.swarm.stages[self.world.rank]:
            self.model_step.serve(*self._rebuilt(self.model_step.cut, stage))
        super().load_state_dict(state)

    @override
    def _gauges(self) -> dict[str, float]:
        return super()._gauges() | self.model_step.gauges()

    @override
    def _judge(self) -> float | None:
        if not self.judges:
            return None
        with self.step_clock.step():  # waits of the swarm count as those of steps
            return self.model_step.judge(())

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
            holds = int(result["parameters"] > 0)
            if any(word[0] for word in agreement.agree([holds]).values()):
                return result | {"tokens": holds * read}

    def _take_last(self) -> None:
        """The last update, where it is still to come."""
        with self.step_clock.step():
            if not self._is_concluded and self.model_step.take_last():
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.optimizer.steps = self.config.run.steps
        self._is_concluded = True


def _read(given: Tensor, last: int) -> Any:
    """What `SwarmTrainer._state` made, in a run of `last` steps. Malformed where it is not."""
    try:
        state = state_from_bytes(given.numpy().tobytes())
        integer(state, "steps", 0, last)
        value_of(state, "norm", Nonnegative)
        return state
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(-1, f"a stage's state that is none: {str(error).splitlines()[0][:120]}") from error

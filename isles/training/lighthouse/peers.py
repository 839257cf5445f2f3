"""The lighthouse of a swarm, or of a run in clusters. Peers agree among themselves; see
`isles.membership.swarm_coordinator`.

RUN/states/             the states of every stage, twice in run.checkpoint_every steps, or when this asks for them; a
                        step is valid once the journal records that all of its stages are here. In clusters: one part
                        per node of the source cluster
RUN/model.safetensors   gathered by the first peer of stage 0, at the end
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import override

from isles.base.durable import settle
from isles.base.parsing import integer, read, table
from isles.membership.effects import Coordinator
from isles.membership.lighthouse import Journal
from isles.membership.run_log import read_history
from isles.membership.state_transfer import MODEL, StateUnavailable, state_of
from isles.membership.swarm_coordinator import SwarmCoordinator, SwarmRules
from isles.training.elastic.metrics import recorded
from isles.training.lighthouse.mean import digests, drift, form_of
from isles.training.lighthouse.schedule import RETAINED, StateSchedule
from isles.training.lighthouse.server import LOOK, MODEL_FILE, LighthouseServer
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.checksums import is_whole
from isles.training.records.rundir import METRICS, read_lines
from isles.training.records.summary import SummaryTable, of_everybody, parallel_bytes, summarise

_MOST_PARTS = 1 << 16  # most parts of a state: nodes of its source cluster
_SLOW = 30.0  # seconds without a part of a state, after which its transfer fails
_TRIES = 3  # transfers of the model from one peer
_PATIENCE = 10.0  # seconds for the last reports of peers


_Digests = dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(pattern="^[0-9a-f]{16}$")]]


class SwarmLighthouseServer(LighthouseServer):
    """Peers of stages: `SwarmCoordinator`."""

    coordinator: SwarmCoordinator
    joins_with, vectors = "isles swarm peer --join", 0

    @override
    def assembly(self, journal: Journal, until: float, stack: ExitStack) -> Coordinator:
        self.coordinator = SwarmCoordinator(self.swarm_rules(), journal.entries, until)
        self._failures = Counter[int]()  # by peer, of its model
        self._held: dict[int, dict[str, str]] = {}  # by peer, digests of the tensors that it came to
        self._parts: dict[int, int] = {}  # by step, the reported number of parts of its state
        self._offers: dict[int, dict[int, list[int]]] = {}  # by step and part: the members that serve it
        self._offering = threading.Lock()  # reports add offers in the session's thread while `_save` takes them
        self._states = Checkpoints(self.out, "states")
        for step in sorted({self.coordinator.saved} - {0}):
            self._offer_states(step)
        return self.coordinator

    def swarm_rules(self) -> SwarmRules:
        rules = self.rules
        peers = tuple(len(ranks) for ranks in self.config.pipeline.peers_of(rules.founders))
        return SwarmRules(peers=peers, most=rules.most, last=self.config.run.steps)

    def parts(self, step: int) -> int:
        """Number of files of the state after `step`."""
        there = self._states.manifest(step)["workers"] if step in self._states.steps() else 0
        return self._parts.get(step, there)

    @override
    def serve(self) -> SummaryTable | None:
        holder, schedule = None, StateSchedule(self.config.run, self.coordinator.step, time.perf_counter())
        while holder is None:
            self.lighthouse.wait(self._is_asked, LOOK)
            self.refused.look()
            if self.stopping.is_set():
                return None
            if self.lighthouse.look(lambda now: self._holder()) is not None:
                holder = self._collect()
            else:
                self._ask(schedule)
                self._save()
        self.lighthouse.wait(lambda: all(member in self.results for member in self.coordinator.alive()), _PATIENCE)
        summary = self.conclude(self._summary(holder, time.time() - self.began))
        self.lighthouse.act(self.coordinator.end)
        self.lighthouse.wait(lambda: not self.coordinator.alive(), _PATIENCE)  # until they have heard it and left
        return summary

    def _is_asked(self) -> bool:
        with self._offering:
            is_offered = self._newest() is not None
        return is_offered or self.stopping.is_set() or self._holder() is not None

    @override
    def saved(self) -> int:
        return self.coordinator.saved

    # The model

    def _holder(self) -> int | None:
        """A peer of stage 0 that has gathered the model; None: there is none, or the swarm has not done its last step
        by the word of at least half of its peers.
        """
        if self.coordinator.step < self.config.run.steps:
            return None
        stages = self.coordinator.members
        finished = {one for one in self.coordinator.alive() if stages[one] == 0} & self.lighthouse.finished
        return min((member for member in finished if self.results.get(member, {}).get("parameters")), default=None)

    def _collect(self) -> int | None:
        """Fetch the model, and judge it; returns its source. None if it could not be fetched: once its source is lost
        the next peer gathers it again. None too if it is no model: the run begins again without that peer.
        """
        member, partial = self.lighthouse.look(lambda now: self._holder()), self.out / f"{MODEL_FILE}.partial"
        if member is None:
            return None
        try:
            self.fetch(str(member), MODEL, partial, _SLOW, copies=1)
            self.lighthouse.wait(lambda: all(one in self._held for one in self.coordinator.alive()), _PATIENCE)
            if form_of(partial) is None or (judged := self.judge([partial])).losses == [None]:
                raise ValueError("its tensors are not those of this run's model, or not finite")
            self._refuse_others(partial)
        except (StateUnavailable, ValueError) as why:
            self.lighthouse.finished.discard(member)
            self._failures[member] += _TRIES if isinstance(why, ValueError) else 1
            partial.unlink(missing_ok=True)
            self.on_notice(f"worker {member}'s model is not written ({why}): the others gather it again")
            if self._failures[member] >= _TRIES:
                self.lighthouse.act(
                    lambda now: self.coordinator.dissolve(now, member, "it delivered a false model, or none")
                )
            return None
        if judged.why:
            self.on_notice(f"the model is a worker's word: this machine cannot judge it ({judged.why})")
        else:
            self.judged = judged.losses[0] or {}
        settle(partial, self.out / MODEL_FILE)
        return member

    def _refuse_others(self, model: Path) -> None:
        """ValueError for a model with another tensor than most of its peers hold, or too far from the last states."""
        votes, alive = self.coordinator.peers.votes, self.coordinator.alive()
        for name, mark in digests(model).items():
            holders = {one: self._held[one][name] for one in alive if name in self._held.get(one, {})}
            others = [one for one, held in holders.items() if held != mark]
            if 2 * votes(others) > votes(holders) and len({holders[one] for one in others}) == 1 < votes(holders):
                raise ValueError(f"{name} is not what most peers of its stage came to")
        step, most = self.coordinator.saved, self.config.world.trust_ratio
        if step and (far := drift(model, self._states.shards(step))) > most:
            raise ValueError(f"it is {far:.3g} times its norm from the states after step {step} (world.trust_ratio)")

    def _summary(self, holder: int, seconds: float) -> SummaryTable:
        every = {holder: self.results[holder], **self.results}
        results = of_everybody(every, every.keys(), read_lines(self.out / METRICS))
        summary = summarise(self.config, results, seconds)
        peers = self.coordinator.peers.values()
        there = read_history(recorded(self.out)[0])
        summary |= self.judged | {
            "replicas": 1,
            "replica_std": 0.0,
            "ddp_bytes_per_worker": parallel_bytes(summary["parameters"], len(results), self.config.run.steps),
            "joins": len(peers),
            "deaths": sum(not peer.connected and not peer.left for peer in peers),
            "leaves": sum(peer.left for peer in peers),
            "begun": self.coordinator.epoch,
            "steps_lost": sum(reached - step for reached, step in there.again),
            "outages": len(there.outages),
        }
        return summary

    # States

    @override
    def on_event(self, member: int, kind: str, value: Any) -> bool:
        if kind == "held":
            self._held[member] = read(_Digests, value, "invalid digests")
            return True
        if kind != "offered":
            return False
        reported, stages = table(value, "offered"), self.config.pipeline.stages
        step = integer(reported, "step", 1, self.config.run.steps)
        parts = integer(
            reported, "parts", *((1, _MOST_PARTS) if self.coordinator.rules.clustered else (stages, stages))
        )
        stage = integer(reported, "stage", 0, parts - 1)
        with self._offering:
            if step > self.coordinator.saved and member in self.coordinator.members:
                if self._parts.setdefault(step, parts) != parts:  # from another cluster: its parts fit no earlier ones
                    self._parts[step] = parts
                    self._offers.pop(step, None)
                self._offers.setdefault(step, {}).setdefault(stage, []).append(member)
        return True

    def _newest(self) -> int | None:
        """The newest step of which all stages' states are offered. Call it under `_offering`."""
        offered = self._offers.items()
        complete = [step for step, offers in offered if all(stage in offers for stage in range(self.parts(step)))]
        return max(complete, default=None)

    def _ask(self, schedule: StateSchedule) -> None:
        """With run.checkpoint_every = "auto", ask all peers for their states when they are due."""
        step, now = self.coordinator.step, time.perf_counter()
        if self.config.run.checkpoint_every == "auto" and schedule.is_due(step, now):
            self.lighthouse.act(lambda now: self.coordinator.ask_states(now, schedule.ahead(step)))
            schedule.saved(step, now)

    def _save(self) -> None:
        """Fetch the states of all stages of the newest complete step."""
        with self._offering:
            step = self._newest()
            if step is None:
                return
            stages = range(self.parts(step))
            offers = self._offers[step]
            self._offers = {other: each for other, each in self._offers.items() if other > step}
        try:
            self._states.take_in(stages, lambda stage, path: self._fetch_state(offers[stage], step, stage, path))
        except StateUnavailable:
            self.on_notice(f"could not fetch the states of step {step}: the previous ones are kept")
            return
        # Served before the journal names the step: from then on a new swarm starts from it.
        self._offer_states(step)
        self.lighthouse.act(lambda now: self.coordinator.keep(now, step))
        for old in self._states.steps()[:-RETAINED]:
            for stage in self._states.ranks(old):
                self.state_server.unpublish(state_of(stage, old))
        self._states.thin(RETAINED)

    def _fetch_state(self, members: list[int], step: int, stage: int, path: Path) -> int:
        """Fetch a stage's state from the first of `members` that sends it; returns its step. StateUnavailable if none
        does.
        """
        for member in members:
            with contextlib.suppress(StateUnavailable):
                self.fetch(str(member), state_of(stage, step), path, _SLOW)
                if is_whole(path):
                    return step
        raise StateUnavailable(f"no member sent the state of stage {stage}")

    def _offer_states(self, step: int) -> None:
        """Serve the states of `step` to peers that start from them. ValueError if they are missing or damaged."""
        if step not in self._states.steps():
            raise ValueError(
                f"{self._states.folder}: lacks the states after step {step}, from which the run goes on: restore them, "
                "or start a new run"
            )
        for stage, path in enumerate(self._states.shards(step)):
            if not is_whole(path):
                raise ValueError(f"{path}: is damaged, and the run goes on from it: restore it, or start a new run")
            self.state_server.publish(state_of(stage, step), path, {"step": step, "parts": self.parts(step)})


class ClusterLighthouseServer(SwarmLighthouseServer):
    """A `SwarmLighthouseServer` for clusters; the nodes agree among themselves on their assignment to clusters."""

    @override
    def swarm_rules(self) -> SwarmRules:
        pipeline, rules = self.config.pipeline, self.rules
        least = min(map(len, pipeline.ravnest.clusters)) + 1 if pipeline.ravnest.clusters else pipeline.stages
        peers = (rules.founders,)
        return SwarmRules(peers=peers, least=least, most=rules.most, last=self.config.run.steps, clustered=True)

    @override
    def _summary(self, holder: int, seconds: float) -> SummaryTable:
        summary = super()._summary(holder, seconds)
        roots = sum(1 for one in self.results.values() if one["val_loss_replica"] is not None)
        return summary | {"replicas": roots or None}

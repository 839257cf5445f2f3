"""One node of clusters in a lighthouse's run: `isles.training.swarm.connect` for clusters, with ranks as in
`isles.training.swarm.trainer`. A node that joins later sends its machine's memory and speed, by which new clusters are
cut.

At a checkpoint, and when a node of the last intact cluster wants to leave without a successor, the nodes of the first
intact cluster publish their states, one part each:

    parameters      by names in the whole model: a parameter, and its moments
    step, read      inner steps, and sequences of the data's order, until then
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from isles.base.parsing import integer
from isles.membership.keys import STATUS
from isles.membership.messages import JoinSwarm, RunStatus, StartSwarm, SwarmBeat
from isles.membership.requests import measure_lighthouse_link
from isles.membership.state_transfer import state_of
from isles.models import choose_device
from isles.network.clusters import NO_FIGURES, ClusterNode, encode_node
from isles.training.clusters.node import ClusterWorker, enter, found_clusters, growth_of
from isles.training.clusters.stage_server import cluster_cuts, forward_speed, inbox_of, run_number
from isles.training.elastic.needs import free_on
from isles.training.records.shard import State, StateCopy, read_state
from isles.training.step import Left, seed_draws
from isles.training.swarm.connect import SwarmParticipant
from isles.training.swarm.trainer import FetchPart, OwnMember, PeerWork

_LOOK = 2.0  # seconds between requests to the lighthouse


class ElasticClusterNode(PeerWork):
    """The trainer of one member of a run in clusters.

    part: the members that start together, or those of running clusters that this node asks to join. descriptor: this
    machine's resources (`isles.network.clusters`). members_now: the members that train, as the lighthouse knows them;
    None if it does not answer. await_saved: waits until the lighthouse has all parts of the state after a step, or
    times out.
    """

    def __init__(
        self,
        member: OwnMember,
        part: StartSwarm | JoinSwarm,
        *,
        descriptor: int,
        members_now: Callable[[], Collection[int] | None],
        await_saved: Callable[[int], object],
    ) -> None:
        self._member, self.config, self.epoch, self._descriptor = member, member.config, part.epoch, descriptor
        self._founders = sorted(part.members) if isinstance(part, StartSwarm) else []
        self._members = part.members if isinstance(part, JoinSwarm) else ()
        self.world = member.mesh({})
        self.inbox = inbox_of(self.config, self.world, met=(*self._founders, *self._members))
        self._worker: ClusterWorker | None = None
        self._leaving, self._has_left = False, False
        self._members_now, self._await_saved = members_now, await_saved
        self._asked_at = self._stepped_at = member.transport.now()
        self._seen = 0  # steps at the last change, for the seconds since then in `beat`
        self._saved_state: State | None = None

    @property
    @override
    def has_left(self) -> bool:
        return self._has_left

    @override
    def steps_done(self) -> int:
        return 0 if self._worker is None else self._worker.steps

    @override
    def leave(self) -> None:
        self._leaving = True
        if self._worker is not None:
            self._worker.leave()

    @override
    def go_on_from(self, step: int, retained: FetchPart) -> None:
        path, facts = retained(0)
        states = [read_state(one)[0] for one in (path, *(retained(part)[0] for part in range(1, facts["parts"])))]
        self._saved_state = {
            **states[0],
            "parameters": {name: own for one in states for name, own in _held(one).items()},
        }

    @override
    def run(self, out: Path | None) -> dict[str, Any] | None:
        seed_draws(self.config.run.seed, self.world.rank)
        try:
            worker = self._worker = self._started()
            worker.saves, worker.leaving, worker.decide_exit = self._offer, self._leaving, self._decide_exit
            worker.states_wanted, worker.watched = self._member.states_wanted, self._member.watched
            if self._saved_state is not None:
                _restore(worker, self._saved_state)
            return worker.run(out)
        except Left:
            self._has_left = self._leaving
            return None

    def _started(self) -> ClusterWorker:
        config, world, corpus = self.config, self.world, self._member.corpus
        if self._founders:
            return found_clusters(config, world, corpus, self._founders, self.inbox, growth_of(config))
        return enter(config, world, corpus, self._members, self._descriptor, self.inbox, self._gives_up)

    def _gives_up(self) -> bool:
        """Whether to stop waiting for a welcome: also if none of the members that it has asked trains any more."""
        if self._leaving or self.world.stop_here(0):
            return True
        now = self.world.transport.now()
        if now - self._asked_at < _LOOK:
            return False
        self._asked_at, members = now, self._members_now()
        return members is not None and not {*members} & {*self._members}

    def _decide_exit(self, step: int) -> bool:
        """Leave without a successor, once the lighthouse has all of this cluster's states; the run then waits for new
        nodes. Returns whether this node leaves.
        """
        if self._leaving:
            self._await_saved(step)
            self._has_left = True
        return self._leaving

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        assert self._worker is not None
        self._worker.agreement.miss(self.first)
        self._worker.agreement.settle()
        return self._worker.conclude(out)

    @override
    def trained(self) -> nn.Module | None:
        server = None if self._worker is None or not self._worker.trains else self._worker.server
        return None if server is None else server.model

    @property
    @override
    def first(self) -> int:
        assert self._worker is not None
        assignment = self._worker.agreement.assignment
        return assignment.clusters[assignment.whole[0]][0]

    @override
    def beat(self) -> SwarmBeat | None:
        worker = self._worker
        if worker is None or worker.agreement.has_departed:
            return None
        assignment, now = worker.agreement.assignment, self.world.transport.now()
        living, coordinates = tuple(assignment.living), assignment.coordinates_of(self.world.rank)
        if self.world.rank not in living:
            return None
        if worker.steps > self._seen:
            self._seen, self._stepped_at = worker.steps, now
        descriptor = ()
        if coordinates is not None:
            descriptor = (
                *coordinates,
                len(assignment.clusters[coordinates[0]]),
                int(coordinates[0] not in assignment.out),
            )
        since = round(now - self._stepped_at, 1)
        return SwarmBeat(
            self.epoch, worker.steps, living, (0,) * len(living), _seconds(worker), 0.0, 0, since, descriptor
        )

    def _offer(self, out: Path, step: int, state: dict[str, Any]) -> None:
        worker = self._worker
        assert worker is not None
        assignment, server = worker.agreement.assignment, worker.server
        coordinates = assignment.coordinates_of(self.world.rank)
        if server is None or coordinates is None or not worker.trains or coordinates[0] != assignment.whole[0]:
            return
        tensors: dict[str, list[Tensor]] = {}
        for name, parameter in server.model.named_parameters():
            moments = [v for v in server.optimizer.state.get(parameter, {}).values() if v.shape == parameter.shape]
            tensors[name] = [parameter, *moments]
        worker.refuse_broken(step, state)
        copy = StateCopy({"step": step, "read": worker.reading.after(step), "parameters": tensors})
        part, name = coordinates[1], state_of(coordinates[1], step)
        facts = {"step": step, "parts": len(assignment.clusters[coordinates[0]])}
        # Published before it is offered: the lighthouse fetches what is offered.
        self._member.publish(name, facts, copy.write)
        self.world.report({"offered": {"stage": part, **facts}})


def _seconds(worker: ClusterWorker) -> float:
    """Compute seconds per microbatch at this node, in the current or last segment; 0 before the first."""
    server = worker.server
    played = [] if server is None else [*server.node.played]
    spent = [span.end - span.start for span in played]
    return sum(spent) / len({span.task.microbatch for span in played}) if played else 0.0


def _held(state: State) -> dict[str, list[Tensor]]:
    """By name, a parameter and its moments. ValueError if it is no state of a run in clusters."""
    tensors = state.get("parameters")
    if not isinstance(tensors, dict) or not all(isinstance(one, list) for one in tensors.values()):
        raise ValueError("the lighthouse's state is not of a run in clusters: it is damaged")
    return tensors


@torch.no_grad()
def _restore(worker: ClusterWorker, saved: State) -> None:
    """Copy this worker's stage out of `saved`. ValueError for a state of another model."""
    step, tensors = integer(saved, "step", 0, worker.config.run.steps), _held(saved)
    worker.begin_after(step, integer(saved, "read", 0, 1 << 53))
    if worker.server is None:
        return
    for name, parameter in worker.server.model.named_parameters():
        state = worker.server.optimizer.state.get(parameter, {})
        moments = [value for value in state.values() if value.shape == parameter.shape]
        for own, loaded in zip_longest([parameter, *moments], tensors.get(name, [])[: 1 + len(moments)]):
            if not isinstance(loaded, Tensor) or loaded.shape != own.shape:
                raise ValueError(f"the lighthouse's state does not fit this model: {name}")
            own.copy_(loaded)
        for value in state.values():
            if not value.ndim:
                value.fill_(step)


_AGAIN = 0.2  # seconds between two aborts of waits: this worker may begin new ones until it ends


class ClusterParticipant(SwarmParticipant):
    """One node as one member. node: its machine's resources; None: as the user set them, or measured."""

    def __init__(self, *of: Any, node: ClusterNode | None = None) -> None:
        self._descriptor, self._closed = node or of[1].here.node, threading.Event()
        super().__init__(*of)
        stack: ExitStack = of[0]
        stack.callback(self._closed.set)

    @override
    def number(self) -> int:
        cluster_cuts(self.config)  # raises ValueError for cuts that the model does not allow
        return run_number(self.config)

    @override
    def made(self, part: StartSwarm | JoinSwarm) -> ElasticClusterNode:
        return ElasticClusterNode(
            self,
            part,
            descriptor=encode_node(self._descriptor or self._measured()) if isinstance(part, JoinSwarm) else NO_FIGURES,
            members_now=self._members_now,
            await_saved=lambda step: self.client.await_saved(step, self.config.run.grace / 2),
        )

    @override
    def leave(self) -> None:
        """Leave after the next average; if it takes longer than `run.grace` seconds, abort all waits and leave."""
        super().leave()
        threading.Thread(target=self._abort_waits, name="isles-grace", daemon=True).start()

    def _abort_waits(self) -> None:
        """After `run.grace` seconds, abort waits until this member ends, also those begun later. In its own thread."""
        wait = self.config.run.grace
        while not self._closed.wait(wait):
            wait = _AGAIN
            for member in [*self._there]:
                self.transport.give_up(member, "this worker leaves, and could not wait for the next average")

    def _members_now(self) -> set[int] | None:
        now = self.client.ask(b"", key=STATUS)
        return {peer.member for peer in now.members if peer.stage >= 0} if isinstance(now, RunStatus) else None

    def _measured(self) -> ClusterNode:
        """Measure memory, speed and link; the link to the lighthouse stands in for those to the other nodes."""
        self.notify("measuring this machine's memory, speed and link")
        client, rate, latency = measure_lighthouse_link(self._session), self.config.world.slowest_link, 0.0
        if client is None:
            self.notify(f"the link could not be measured: using world.slowest_link, {rate / 1e6:g} Mbit/s")
        else:
            rate, latency = 8 * min(client.out, client.back), client.round_trip / 2
        device = choose_device(self.config.model, int(os.environ.get("LOCAL_RANK", 0)))
        return ClusterNode(
            name="here", memory=free_on(device), speed=forward_speed(device), bandwidth=rate, latency=latency
        )

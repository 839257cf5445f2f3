"""Runs in clusters whose nodes come and go, and what each of them held when."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.mesh import Mesh
from isles.data import Corpus, Loader
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.training.clusters.node import ClusterWorker
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.simulated_churn import SimulatedClusters
from tests.pipeline.ravnest.averages import Killed
from tests.training.clusters.test_clusters import SETTINGS

FOUR = [
    *SETTINGS,
    "pipeline.ravnest.clusters=[[2],[1]]",
    "world.workers=4",
    "run.steps=16",
    "run.validate_every=8",
    "replicas.sync_every=4",
    "world.virtual.links=lan",
]
"""Two clusters of two, cut differently; an average takes 0.4 s and comes every 4 steps."""

State = dict[str, list[Tensor]]
"""By parameter's name in the whole model, its numbers and the optimizer's of it."""


def config(*more: str) -> Config:
    return read_config(None, {}, [*FOUR, *more])


def state_of(average: ClusterAverage) -> State:
    """What its node holds now."""
    retained = average._optimizer.state if average._optimizer is not None else {}
    return {
        name: [parameter.detach().clone(), *(v.clone() for v in retained.get(parameter, {}).values() if v.ndim)]
        for share in average._shares
        for name, parameter in zip(share.segment.names, share.parameters, strict=True)
    }


class Watched(SimulatedClusters):
    """What is read, and held before and after each average and each load. dies: a rank, from when until when messages
    count, in seconds, and after how many of them it ends.
    """

    dies: tuple[int, float, float, int] | None = None

    def __init__(self, config: Config, folder: Path, events: list[dict[str, Any]]) -> None:
        folder.mkdir(exist_ok=True)
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps(event) + "\n" for event in sorted(events, key=lambda event: event["at"])))
        self.told_notices: list[str] = []
        super().__init__(config, str(trace), folder / "run", lambda line: None, self.told_notices.append)
        self.read: list[int] = []
        self.before: dict[int, dict[int, State]] = defaultdict(dict)
        """By step and rank."""
        self.after: dict[int, dict[int, State]] = defaultdict(dict)
        self.loaded: dict[int, dict[int, State]] = defaultdict(dict)
        self.ended = False
        """Whether who had to die did."""

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on."""
        average, load, read = ClusterAverage.average, ClusterAverage.load, Loader.read

        def averaged(own: ClusterAverage, step: int, samples: int) -> list[int]:
            rank = own.agreement.world.rank
            if own.agreement.trains:
                self.before[step][rank] = state_of(own)
            whole = average(own, step, samples)
            if own.agreement.trains:
                self.after[step][rank] = state_of(own)
            return whole

        def loaded(own: ClusterAverage, step: int) -> None:
            load(own, step)
            if own.agreement.trains:
                self.loaded[step][own.agreement.world.rank] = state_of(own)

        def reads(own: Loader, positions: Any) -> Tensor:
            self.read += positions.tolist()
            return read(own, positions)

        monkeypatch.setattr(ClusterAverage, "average", averaged)
        monkeypatch.setattr(ClusterAverage, "load", loaded)
        monkeypatch.setattr(Loader, "read", reads)

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        if self.dies is not None and world.rank == self.dies[0]:
            self._end(world, *self.dies[1:])
        try:
            return super().work(world, corpus)
        except Killed:
            self.ended = True
            return None

    def _end(self, world: Mesh, since: float, until: float, left: int) -> None:
        transport, send = world.transport, world.transport.send

        def counted(*arguments: Any) -> Any:
            nonlocal left
            if since <= transport.now() < until:
                if not left:
                    raise Killed("as asked")
                left -= 1
            return send(*arguments)

        transport.send = counted  # type: ignore[method-assign]

    @property
    def finished(self) -> list[ClusterWorker]:
        return [self.workers[rank] for rank in sorted(self.results)]

    def check(self) -> None:
        """Those who came to the end are in the same clusters, and all whole clusters hold the same."""
        assignment = self.finished[0].agreement.assignment
        assert all(worker.agreement.assignment == assignment for worker in self.finished)
        alike(self.after[self.config.run.steps], assignment.clusters)
        for own in (worker.server for worker in self.finished if worker.server is not None and worker.trains):
            counts = {int(state["step"]) for state in own.optimizer.state.values()}
            assert counts == {self.config.run.steps}, counts


def alike(states: dict[int, State], clusters: tuple[tuple[int, ...], ...], *, moments: bool = False) -> None:
    """The weights, and the optimizer's state, are the same bits in all clusters of which somebody is in `states`."""
    whole: list[State] = []
    for own in clusters:
        if own[0] in states:
            whole.append({name: held for rank in own for name, held in states[rank].items()})
    assert len(whole) > 0 and all(own.keys() == whole[0].keys() for own in whole)
    for name, held in whole[0].items():
        for own in whole[1:]:
            for ours, theirs in list(zip(held, own[name], strict=True))[: None if moments else 1]:
                assert torch.equal(ours, theirs), name

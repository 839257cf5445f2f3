"""The lighthouse of a run in clusters: that of a swarm, except that its members serve no stage by number, and that a
state comes in as many parts as the cluster that gave it has nodes.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from isles.comm.elastic.swarm.muster import MusterRules
from isles.fields import integer, table
from isles.training.records.summary import SummaryTable
from isles.training.swarmed.keeping import SwarmKeeper


class ClusterKeeper(SwarmKeeper):
    """A `SwarmKeeper` for nodes of clusters, which agree among themselves about who is in which cluster."""

    def __init__(self, *of: Any) -> None:
        """As `SwarmKeeper`."""
        super().__init__(*of)
        self._parts: dict[int, int] = {}  # by step, of how many parts its state is, as those who offer it have told

    @override
    def muster_rules(self) -> MusterRules:
        pipeline, rules = self.config.pipeline, self.rules
        least = min(map(len, pipeline.ravnest.clusters)) + 1 if pipeline.ravnest.clusters else pipeline.stages
        peers = (rules.founders,)
        return MusterRules(peers=peers, least=least, most=rules.most, last=self.config.run.steps, clustered=True)

    @override
    def parts(self, step: int) -> int:
        there = self._states.manifest(step)["workers"] if step in self._states.steps() else 0
        return self._parts.get(step, there)

    @override
    def hear(self, seat: int, kind: str, value: Any) -> bool:
        if kind != "offered":
            return False
        told = table(value, "offered")
        step = integer(told, "step", 1, self.config.run.steps)
        parts = integer(told, "parts", 1, 1 << 16)
        stage = integer(told, "stage", 0, parts - 1)
        with self._offering:
            if step > self.muster.kept and seat in self.muster.members:
                if self._parts.setdefault(step, parts) != parts:  # of another cluster, which fit with none of before
                    self._parts[step] = parts
                    self._offers.pop(step, None)
                self._offers.setdefault(step, {}).setdefault(stage, []).append(seat)
        return True

    @override
    def _summary(self, holder: int, seconds: float) -> SummaryTable:
        summary = super()._summary(holder, seconds)
        roots = sum(1 for one in self.results.values() if one["val_loss_replica"] is not None)
        return summary | {"replicas": roots or None}

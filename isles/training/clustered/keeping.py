"""The lighthouse of a run in clusters: that of a swarm, except that its members serve no stage by number."""

from __future__ import annotations

from typing_extensions import override

from isles.comm.elastic.swarm.muster import MusterRules
from isles.training.records.summary import SummaryTable
from isles.training.swarmed.keeping import SwarmKeeper


class ClusterKeeper(SwarmKeeper):
    """A `SwarmKeeper` for nodes of clusters, which agree among themselves about who is in which cluster."""

    @override
    def muster_rules(self) -> MusterRules:
        pipeline, rules = self.config.pipeline, self.rules
        least = min(map(len, pipeline.ravnest.clusters)) + 1 if pipeline.ravnest.clusters else pipeline.stages
        peers = (rules.founders,)
        return MusterRules(peers=peers, least=least, most=rules.most, last=self.config.run.steps, clustered=True)

    @override
    def _summary(self, holder: int, seconds: float) -> SummaryTable:
        summary = super()._summary(holder, seconds)
        roots = sum(1 for one in self.results.values() if one["val_loss_replica"] is not None)
        return summary | {"replicas": roots or None}

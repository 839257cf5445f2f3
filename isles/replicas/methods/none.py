"""No communication: every worker trains alone. The floor that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from isles.network.planner.planned import PlannedExchange
from isles.replicas.sync import MethodConfig, ReplicaSync


@dataclass(frozen=True, kw_only=True)
class NoneConfig(MethodConfig):
    """Nothing to set."""


class NoSync(ReplicaSync):
    """See the module. `consolidate()` averages the weights once, at the end."""

    Config = NoneConfig
    level = "parameter"
    spans_islands = True
    agrees = False

    def schedule(self, steps: int) -> list[PlannedExchange]:
        """See ReplicaSync.schedule: nothing."""
        return []

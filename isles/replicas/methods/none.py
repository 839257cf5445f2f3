"""No communication: every worker trains alone. The floor that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from isles.network.planner.planned import PlannedExchange
from isles.replicas.sync import MethodConfig, ReplicaSync


@dataclass(frozen=True, kw_only=True)
class NoneConfig(MethodConfig):
    """Nothing to set."""


class NoSync(ReplicaSync):
    """No exchange in training; `consolidate()` averages the weights once, at the end."""

    Config = NoneConfig
    is_linear = True
    level = "parameter"
    spans_islands = True
    agrees = False

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        """Nothing."""
        return []

"""No communication: every worker trains alone. The floor that every other method has to beat."""

from __future__ import annotations

from typing_extensions import override

from isles.network.exchange_plan import PlannedExchange
from isles.replicas.methods.config import NoneConfig
from isles.replicas.sync import ReplicaSync


class NoSync(ReplicaSync):
    """No exchange in training; `consolidate()` averages the weights once, at the end."""

    Config = NoneConfig
    is_linear = True
    level = "parameter"
    spans_islands = True
    agrees = False

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        return []

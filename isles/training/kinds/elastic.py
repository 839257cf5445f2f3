"""Replicas that come and go, in rounds, over a lighthouse or as a trace says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from isles.training.kinds.fixed import FixedWorld


class ElasticWorld(FixedWorld):
    """See `WorldKind`."""

    @override
    def churned(self) -> Callable[..., Any]:
        from isles.training.elastic.churn.churned import ChurnedRun

        return ChurnedRun

    @override
    def keeper(self) -> type[Any]:
        from isles.training.elastic.lighthouse.keeper import Keeper

        return Keeper


KIND = ElasticWorld()

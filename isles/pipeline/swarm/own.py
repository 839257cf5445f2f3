"""A swarm with an outer method: peers of a stage are its replicas."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from typing_extensions import override

from isles.pipeline.swarm.swarm import Swarm


class OwnSwarm(Swarm):
    """Each peer steps on the mean over the microbatches that it has counted itself; one that has counted none has no
    gradient, and takes no step. The guarantee is then one of the step's microbatches: each is counted once at every
    stage. What a lost peer had learned since the last exchange is lost with it, as a worker's is in DiLoCo. A norm is
    made of the stages' mean squares over the peers that have a gradient.
    """

    @override
    def _gradient(self, counted: int) -> Tensor | None:
        own = len(self.peer.counted)
        return self._mean(self._own(), own) if own else self._own()[:0]

    @override
    def lacks(self, settled: Collection[int]) -> bool:
        return len(settled) > len(self.agreement.members)

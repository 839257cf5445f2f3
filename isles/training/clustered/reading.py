"""Which text the clusters of a run read, where new ones begin and others end: at each step every cluster the next
batch of one order (`isles.data.loader`), so no two read the same, and what is read is in the order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedReading:
    """`clusters` clusters read `batch` sequences each in every step after `since`; `before` of the order's come before
    that.
    """

    clusters: int
    batch: int
    since: int = 0
    before: int = 0

    def after(self, step: int) -> int:
        """Sequences of the order that come before what is read next."""
        return self.before + (step - self.since) * self.clusters * self.batch

    def among(self, clusters: int, step: int) -> SharedReading:
        """So many clusters read after `step`."""
        if clusters == self.clusters:
            return self
        return SharedReading(clusters, self.batch, step, self.after(step))

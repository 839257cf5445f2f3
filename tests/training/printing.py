"""A method that prints; in a module of its own, so that `--method` finds it."""

from __future__ import annotations

import isles


class Prints(isles.NoSync):
    """Nobody exchanges anything, and every worker says how far it is."""

    def after_inner_step(self) -> None:
        """See ReplicaSync."""
        print(f"step {self.steps} of worker {self.group.rank}")

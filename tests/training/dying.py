"""A method whose workers die; in a module of its own, so that `--method` finds it."""

from __future__ import annotations

import os
import signal

import isles

VICTIM, LAST_STEP = 0, 7


class DyingNoLoCo(isles.NoLoCo):
    """NoLoCo; worker 0 is killed after step 7, in the middle of a round of three steps."""

    def after_inner_step(self) -> None:
        """See ReplicaSync."""
        if self.group.rank == VICTIM and self.steps == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        super().after_inner_step()

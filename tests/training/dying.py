"""A method whose workers die; in a module of its own, so that `--method` finds it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import isles

VICTIM, LAST_STEP = 0, 7
AWAITED = "ISLES_TEST_AWAITED"  # the file that is there before the victim dies, where a test names one


class DyingNoLoCo(isles.NoLoCo):
    """NoLoCo; worker 0 is killed after step 7, in the middle of a round of three steps."""

    def after_inner_step(self) -> None:
        """See ReplicaSync."""
        if self.group.rank == VICTIM and self.steps == LAST_STEP:
            if awaited := os.environ.get(AWAITED):
                wait_for(Path(awaited))
            os.kill(os.getpid(), signal.SIGKILL)
        super().after_inner_step()


def wait_for(path: Path, patience: float = 30.0) -> None:
    """Until it is there, so that who dies then dies after what others were to do before; or so many seconds."""
    end = time.monotonic() + patience
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)

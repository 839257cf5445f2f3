"""`isles ...` under torchrun, whose workers do what the fault beside the run directory says: see `striking`."""

from __future__ import annotations

from isles.cli import main
from isles.running import torchrun
from isles.training.config import world
from tests.faults.striking import struck_process

if __name__ == "__main__":
    world._LEAST_SILENCE = 1.0
    torchrun.train_process = struck_process
    main()

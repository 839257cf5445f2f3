"""A model behind a disk against the same one in memory: about 50M parameters, 512 tokens a step, on this machine.

    measured         products, host AdamW and disk, as `isles doctor --memory` does; a block's passes, from two blocks
    simulated        a step of the plan with those numbers
    run              steps on disk, and in memory with blocks made again in the backward pass, in turns

What else the machine does falls on both, but not alike: a disk that others use, or a core that the lanes do not get,
lengthens the steps on disk alone. Run it on a quiet machine with a disk of its own.

    python -m benchmarks.memory_disk [FOLDER]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.lanes import LaneRun, LaneTimeline
from isles.memory.measurement import measure_machine, measured
from isles.memory.profile import profile
from isles.models.decoder import Decoder
from isles.network.machines import Machine
from tests.memory.out_of_core import SHAPE

SEQUENCES, TURNS = 4, 3


def timed_profile() -> Profile:
    """The model's, with the seconds that its blocks take here on one thread, as in the runs."""
    torch.set_num_threads(1)
    batch = torch.zeros(SEQUENCES, SHAPE.context + 1, dtype=torch.int64)
    made = profile(Decoder(SHAPE, device="meta"), batch)
    small = Decoder(replace(SHAPE, layers=2))
    unit = measured(profile(small, batch), small, batch).units[0]
    return replace(made, units=tuple(replace(one, forward=unit.forward, backward=unit.backward) for one in made.units))


def simulated(made: Profile, here: Machine) -> LaneTimeline:
    """The step of the plan that `tests.memory.out_of_core` runs."""
    placements = (Placement("file", "recompute"),) * SHAPE.layers
    return LaneRun(made, placements, here, budget=least_peak(made, placements)).play()


def ran(how: str) -> dict[str, Any]:
    """One run. seconds: of its steps."""
    words = [sys.executable, "-m", "tests.memory.out_of_core", how, str(SEQUENCES)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=True)
    return json.loads(done.stdout)


def main(folder: str = ".") -> None:
    """Print all of it."""
    load = os.getloadavg()[0]
    made = timed_profile()
    here = measure_machine(folder).machine
    timeline = simulated(made, here)
    seconds: dict[str, list[float]] = {"recompute": [], folder: []}
    for turn in range(TURNS):
        for how in seconds if turn % 2 == 0 else reversed(seconds):
            steps = ran(how)["seconds"][1:]  # the first one makes the states
            seconds[how] += steps
            print(f"{how}: {', '.join(f'{one:.2f}' for one in steps)} s", flush=True)
    memory, disk = statistics.median(seconds["recompute"]), statistics.median(seconds[folder])
    print(f"load when it began: {load:.1f} on {os.cpu_count()} cores")
    rates = f"{here.disk_read / 1e6:.0f} MB/s read, {here.disk_write / 1e6:.0f} MB/s written"
    print(f"disk {rates}; host AdamW {here.host_update / 1e6:.0f} M parameters/s")
    lanes = ", ".join(f"{name} {busy:.2f}" for name, busy in timeline.busy.items() if busy)
    print(
        f"simulated step {timeline.step:.2f} s ({lanes}); median on disk {disk:.2f}: {disk / timeline.step:.2f} of it"
    )
    print(f"in memory, recomputing: {memory:.2f} s; on disk {disk / memory:.2f} times that")


if __name__ == "__main__":
    main(*sys.argv[1:])

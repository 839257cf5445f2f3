"""What is said at the start of a run on several machines: what a round takes, and from when silence is a loss."""

from __future__ import annotations

from isles.comm.transport import Line
from isles.replicas.sync import ReplicaSync
from isles.training.config.sections import Config

_ROUNDS, _STEPS = 20, 10_000


def expectation(optimizer: ReplicaSync, config: Config, line: Line) -> str:
    """One line. A round is what the method plans to exchange at a time; seconds are those of its bytes alone, at the
    rate that `line` has shown so far, or where it has shown none at world.slowest_link.
    """
    world, planned = config.world, optimizer.outline(_few(optimizer, config.run.steps))
    nbytes = (max(planned.sent) - planned.inside) / max(planned.rounds, 1)
    rate = world.slowest_link if line.rate is None else line.rate
    source = "world.slowest_link" if line.rate is None else "the slowest line of worker 0 so far"
    every = "step" if planned.every == 1 else f"{planned.every} steps"
    said = [
        f"a round, every {every}: {_in_full(nbytes / 1e6, 3)} MB from a worker, "
        f"about {_in_full(8 * nbytes / rate, 2)} s at {_in_full(rate / 1e6, 3)} Mbit/s ({source})"
    ]
    cut = "" if line.tries_soon else f", or {2 * world.silence:g} s while a line is cut"
    said.append(f"who gives no sign of life for {world.silence:g} s{cut} counts as lost (world.silence)")
    return "; ".join(said if nbytes else said[1:])


def _in_full(number: float, digits: int) -> str:
    """Rounded to so many digits, and no power of ten in it: 1,200."""
    short = f"{number:.{digits}g}"
    return f"{float(short):,.0f}" if "e+" in short else short


def _few(optimizer: ReplicaSync, steps: int) -> int:
    """Inner steps of a run that is like this one and soon looked through: those at the beginning, and some rounds."""
    rhythm = optimizer.rhythm(steps)
    return min(steps, rhythm.start + _ROUNDS * rhythm.every, max(_STEPS, rhythm.start + rhythm.every))

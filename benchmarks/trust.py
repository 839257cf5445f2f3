"""What looking at peers' payloads costs: rounds of a mean over two processes on loopback, with and without the look, in
turns in the same processes.

    python -m benchmarks.trust [--parameters 100e6] [--rounds 7]

Asked for are 3 % of a round; the snapshot and the landing of an outer round come on top of the mean that is timed here.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import isles
from isles.comm import trust
from isles.comm.codecs import codec
from isles.comm.collectives.headers import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.mesh import Mesh


def rounds(world: Mesh, parameters: int, count: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of each round, by whether payloads were looked at."""
    look, nothing = trust.squares, torch.ones(())
    buffer = torch.randn(parameters, generator=torch.Generator().manual_seed(world.rank))
    seconds: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for number in range(2 * count + 2):
        how = "with" if number % 2 else "without"
        trust.squares = look if how == "with" else lambda part: nothing
        world.world.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        call = world.outer.call(round=number)
        world.outer.start(mean(call, buffer, codec("none"), Stamp(number)), deadline=600.0).wait()
        if number >= 2:
            seconds[how].append((time.process_time() - cpu, time.perf_counter() - wall))
        world.world.barrier()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    workers = isles.run_local(rounds, 2, args=(int(asked.parameters), asked.rounds))
    for kind, which in (("CPU", 0), ("wall", 1)):
        each = {
            how: [sum(worker[how][number][which] for worker in workers) / 2 for number in range(asked.rounds)]
            for how in ("with", "without")
        }
        ratios = [a / b for a, b in zip(each["with"], each["without"], strict=True)]
        middle = {how: statistics.median(own) for how, own in each.items()}
        print(
            f"{kind}: {middle['without']:.3f} s a round without, {middle['with']:.3f} s with; ratio "
            f"{statistics.median(ratios):.4f}, of the least {min(each['with']) / min(each['without']):.4f}"
        )


if __name__ == "__main__":
    main()

"""What looking at peers' payloads costs: rounds over two processes on loopback, with and without the look, in turns in
the same processes.

    python -m benchmarks.trust [--parameters 100e6] [--rounds 7]

round is DiLoCo's outer round: snapshot, mean, landing. mean is the exchange within it by itself, most of which is the
kernel's copying. Asked for are 3 % of a round, in CPU seconds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import isles
from benchmarks._models import Weights
from isles.comm import trust
from isles.comm.codecs import codec
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.mesh import Mesh

Seconds = list[tuple[float, float]]


def means(world: Mesh, parameters: int) -> Iterator[None]:
    """Each time one mean."""
    buffer = torch.randn(parameters, generator=torch.Generator().manual_seed(world.rank))
    number = 0
    while True:
        call = world.outer.call(round=number)
        world.outer.start(mean(call, buffer, codec("none"), Stamp(number)), deadline=600.0).wait()
        number += 1
        yield


def outer(world: Mesh, parameters: int) -> Iterator[None]:
    """Each time one outer round; without gradients the inner step does nothing."""
    model = Weights(parameters)
    optimizer = isles.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.0), world.outer, sync_every=1)
    draw = torch.Generator().manual_seed(world.rank)
    while True:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[:512].add_(torch.randn(512, generator=draw))  # shares of zeros would be no round
        optimizer.step()
        yield


KINDS: dict[str, Callable[[Mesh, int], Iterator[None]]] = {"round": outer, "mean": means}


def rounds(world: Mesh, kind: str, parameters: int, count: int) -> dict[str, Seconds]:
    """(CPU, wall) seconds of each round, by whether payloads were looked at."""
    look, nothing = trust.squares, torch.ones(())
    world.outer.ledger.trust.ratio = math.inf  # what is said without a look is no size
    seconds: dict[str, Seconds] = {"with": [], "without": []}
    one = KINDS[kind](world, parameters)
    for number in range(2 * count + 2):
        how = "with" if number % 2 else "without"
        trust.squares = look if how == "with" else lambda part: nothing
        world.world.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        next(one)
        if number >= 2:
            seconds[how].append((time.process_time() - cpu, time.perf_counter() - wall))
        world.world.barrier()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    for kind in KINDS:
        workers = isles.run_local(rounds, 2, args=(kind, int(asked.parameters), asked.rounds))
        for clock, which in (("CPU", 0), ("wall", 1)):
            each = {
                how: [sum(worker[how][number][which] for worker in workers) / 2 for number in range(asked.rounds)]
                for how in ("with", "without")
            }
            ratios = [a / b for a, b in zip(each["with"], each["without"], strict=True)]
            middle = {how: statistics.median(own) for how, own in each.items()}
            print(
                f"{kind:5} {clock:4}  {middle['without']:.3f} s without, {middle['with']:.3f} s with; ratio "
                f"{statistics.median(ratios):.4f}, of the least {min(each['with']) / min(each['without']):.4f}"
            )


if __name__ == "__main__":
    main()

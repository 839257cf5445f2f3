"""`run_virtual`: the virtual backend's counterpart of `run_local`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from isles.comm import mesh
from isles.comm.stopping import SharedStopControl
from isles.comm.transport import Deadlines
from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.transport import VirtualTransport
from isles.modes import torch_threads
from isles.network.links import Links
from isles.network.pauses import Pauses


def run_virtual(
    worker: Callable[..., Any],
    workers: int = 4,
    *,
    links: Links | str = "home-fibre",
    inner: int = 1,
    inner_links: Links | str = "lan",
    args: Sequence[Any] = (),
    threads: int = 1,
    step_seconds: float = 0.1,
    speeds: Sequence[float] | None = None,
    compute_jitter: float = 0.0,
    pauses: Pauses | None = None,
    slots: int = 1,
    seed: int = 0,
    deadlines: Deadlines | None = None,
    on_event: Callable[[Any], None] | None = None,
    stop_control: SharedStopControl | None = None,
    return_errors: bool = False,
) -> list[Any]:
    """Run `worker(world, *args)` for `workers` workers in this process, on a virtual clock; results in rank order.

    threads: torch threads of this process meanwhile; 1 keeps results equal to the bit on any machine.
    links: what a message costs; a `Links`, a preset's name or a .toml file. inner: workers of an island, as in
    `isles.mesh`, which are connected by inner_links among themselves. step_seconds: what one inner step costs
    on a worker of speed factor 1. speeds: factor on that for each worker; 2.0 is half as fast. compute_jitter:
    sigma of a log-normal factor on each step. pauses: when workers are away for a while; `deadlines` of those that
    wait for them should be longer. slots: workers that compute at once; results do not depend on it. Losses,
    weights and bytes equal those of `run_local`. Errors as there. stop_control: through which the run may be asked to
    stop.
    """
    cluster = VirtualCluster(
        workers,
        links=links,
        inner=inner,
        inner_links=inner_links,
        step_seconds=step_seconds,
        speeds=speeds,
        compute_jitter=compute_jitter,
        pauses=pauses,
        slots=slots,
        seed=seed,
    )

    def work(transport: VirtualTransport) -> Any:
        mesh.enter(transport)
        world = mesh.init(deadlines=deadlines)
        if on_event is not None:
            world = replace(world, report=on_event)
        if stop_control is not None:
            world = replace(world, stop_here=partial(stop_control.boundary, transport.rank))
        return worker(world, *args)

    with torch_threads(threads):
        return cluster.run(work, return_errors=return_errors)

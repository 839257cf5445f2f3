"""Tables of the Eager and the Streaming DiLoCo papers (arXiv 2502.12996, 2501.18512), from the model in `utilisation`.

table 5   bandwidth for a utilisation of 50 to 99 %, as printed: on a grid of 50 bandwidths from 0.1 to 1000 Gbit/s,
          over S = 2H + 1 steps from an idle link, transfers under way at the end left out, the H = 30 rows with a
          fragment after every step, and step times 1.19 times those stated. S, the grid, the order of the fragments
          and the factor are stated nowhere: they are what gives all 120 printed numbers.
long run  the same need with a fragment every round(H / P) steps, in the long run, at any bandwidth.
table 1   hours and terabytes of the 1B model; the batch and the bytes a token are fitted to the printed numbers.
table 2   the latency that each overlap tolerates.

`STEP_FACTOR` belongs to table 5 and the long run beside it; everything else takes the stated step times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isles.network.theory.utilisation import (
    Exchanges,
    LayeredJob,
    bandwidth_for,
    data_parallel,
    diloco,
    streaming,
    utilisation,
)

STEP_FACTOR = 1.19
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
JOBS = {
    "1B": LayeredJob(parameters=1e9, layers=24, step_seconds=0.1),
    "10B": LayeredJob(parameters=1e10, layers=48, step_seconds=0.8),
    "100B": LayeredJob(parameters=1e11, layers=108, step_seconds=4.9),
}
GRID = 10.0 ** (-1 + 4 * np.arange(50) / 49)
"""Gbit/s."""

TOKENS_A_STEP = 250e9 * 0.1 / (6.75 * 3600)
"""Table 1: 250 billion tokens in 6.75 hours of steps of 0.1 s."""
BYTES_A_TOKEN = 17_640.0
"""Table 1, data parallel: what gives all nine printed volumes within 0.3 %. A full exchange of 2 bytes a parameter
after every step of `TOKENS_A_STEP` would be a ninth of it; the paper does not say what else was counted."""
TOKENS = (25e9, 100e9, 250e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of table 5: its exchanges for a model, as simulated for the paper and as they should be, and the steps that
    the paper simulated.
    """

    name: str
    printed: Callable[[LayeredJob], Exchanges]
    intended: Callable[[LayeredJob], Exchanges]
    steps: int


def scaled(job: LayeredJob) -> LayeredJob:
    """`job` with the step time that gives table 5."""
    return LayeredJob(parameters=job.parameters, layers=job.layers, step_seconds=STEP_FACTOR * job.step_seconds)


def _same(name: str, make: Callable[[LayeredJob], Exchanges], steps: int) -> Method:
    return Method(name=name, printed=make, intended=make, steps=steps)


def _overlapped(name: str, sync_every: int, overlap: int) -> Method:
    def make(job: LayeredJob, every: int | None = None) -> Exchanges:
        return streaming(job.layers, sync_every, bits=4, overlap=overlap, every=every)

    if sync_every == 30:  # simulated with a fragment after every step, whatever their number
        return Method(name=name, printed=lambda job: make(job, 1), intended=make, steps=2 * sync_every + 1)
    return _same(name, make, 2 * sync_every + 1)


METHODS = (
    _same("Data-Parallel", lambda job: data_parallel(job.layers), 201),
    _same("DiLoCo H100", lambda job: diloco(job.layers, 100), 201),
    _same("Streaming", lambda job: streaming(job.layers, 100), 201),
    _same("Streaming overlapped bf16", lambda job: streaming(job.layers, 100, overlap=1), 201),
    _overlapped("1-inner FP4 H30", 30, 1),
    _overlapped("1-inner FP4 H100", 100, 1),
    _overlapped("1-outer FP4 H30", 30, 30),
    _overlapped("1-outer FP4 H100", 100, 100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A row of a bandwidth table: Gbit/s for each of `TARGETS`; nan: none on the grid is enough."""

    size: str
    method: str
    gbps: tuple[float, ...]


def curve(method: Method, job: LayeredJob) -> np.ndarray:
    """Utilisation at each point of `GRID`, as simulated for the papers (their Figure 3)."""
    return utilisation(scaled(job), method.printed(job), GRID * 1e9, steps=method.steps)


def table5() -> list[Need]:
    """The 24 rows as the papers print them: the first point of the grid that is enough."""
    return [
        Need(size=size, method=method.name, gbps=tuple(_first_enough(curve(method, job))))
        for size, job in JOBS.items()
        for method in METHODS
    ]


def long_run() -> list[Need]:
    """The same rows in the long run, with the schedule that the papers describe; not on the grid."""
    rows = []
    for size, job in JOBS.items():
        for method in METHODS:
            need = bandwidth_for(TARGETS, scaled(job), method.intended(job), precision=1e-4)
            rows.append(Need(size=size, method=method.name, gbps=tuple(need / 1e9)))
    return rows


def as_printed(gbps: float) -> float:
    """A bandwidth as table 5 prints it: to two decimals, and those to one."""
    return float(f"{round(gbps, 2):.1f}")


def _first_enough(shares: np.ndarray) -> list[float]:
    enough = shares[:, None] >= np.array(TARGETS)
    return np.where(enough.any(axis=0), GRID[enough.argmax(axis=0)], np.nan).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """A row of table 1: hours at any bandwidth and at 1 Gbit/s, and terabytes, of a run over `tokens`."""

    method: str
    tokens: float
    hours_unlimited: float
    hours_1gbps: float
    terabytes: float


def table1() -> list[CostRow]:
    """Hours and terabytes of the 1B model at H = 100, 4 bits, over a link of 1 Gbit/s, in the long run."""
    job = JOBS["1B"]
    rows = []
    for name in ("Data-Parallel", "1-inner FP4 H100", "1-outer FP4 H100"):
        method = next(method for method in METHODS if method.name == name)
        exchanges = method.intended(job)
        share = float(utilisation(job, exchanges, 1e9))
        # The paper counts H = 100 steps a round in its volumes, the simulation round(H / P) P.
        fewer = 1.0 if name == "Data-Parallel" else 100 * 16 / exchanges.bits
        for tokens in TOKENS:
            hours = tokens / TOKENS_A_STEP * job.step_seconds / 3600
            volume = tokens * BYTES_A_TOKEN / fewer / 1e12
            rows.append(
                CostRow(method=name, tokens=tokens, hours_unlimited=hours, hours_1gbps=hours / share, terabytes=volume)
            )
    return rows


def table2() -> list[tuple[str, float]]:
    """(overlap, tolerated seconds) of the 500M model, a step of 0.08 s, H = 30: the steps that an exchange overlaps."""
    overlaps = {"none": 0, "1-inner-step": 1, "1-outer-step": 30, "2-outer-steps": 60}
    return [(name, steps * 0.08) for name, steps in overlaps.items()]

"""How much of its time a run computes: the layer-by-layer model of the Streaming and Eager DiLoCo papers
(arXiv 2501.18512, 2502.12996).

A step is a chain of 3L - 1 nodes of equal length: L forward; then from the last layer to the first one node back to the
activations and one to the parameters (the first layer needs no activation gradient). The link is one first-in-first-out
queue: a layer is handed to it when its parameter node ends, and occupies it for bits / bandwidth: two workers, each of
which sends the whole of it once, as in a ring. The forward node of a layer waits for the layer's exchange of
`1 + overlap` steps before; nothing else waits.

    utilisation = time of the nodes / time until the last node ends

Two ways to look: `steps` of a run that begins with an idle link, and transfers still in flight at the end left out (the
papers' tables), or the long run, in which what is sent must also arrive. The long run begins with a full queue, so that
a link that is too slow shows at once and not after it has fallen `overlap` steps behind.

Closed forms, r = bits of the model / (bandwidth * step), v = 1 / (3L - 1), in steps:
data parallel: max(Lv + 2v + r, 1 + r/L + max(0, r/L - v)); DiLoCo: (H - 1 + that) / H; all: utilisation <= `bound`.
Not in the model: latency, jitter, lost packets, time to encode, unequal workers. `isles plan methods` has them.

The schedules say which layers are exchanged after which step, and when the answer must be there:

| schedule | after step s | answer needed |
|---|---|---|
| data parallel | all layers, every step                             | by the next step |
| DiLoCo        | all layers, when s mod H = 0                       | by the next step |
| streaming     | one fragment, when s mod n = 0, n = round(H / P)   | tau steps later than that |

P fragments take turns, so each is exchanged every `period` = n P steps, which is H only where P divides H. Layers are
counted from 0, the one next to the data.

The tables of the two papers, from that model (`isles plan explain eager-...`):

table 5   bandwidth for a utilisation of 50 to 99 %, as printed: on a grid of 50 bandwidths from 0.1 to 1000 Gbit/s,
          over S = 2H + 1 steps from an idle link, transfers in flight at the end left out, the H = 30 rows with a
          fragment after every step, and step times 1.19 times those stated. S, the grid, the order of the fragments
          and the factor are stated nowhere: they are what gives all 120 printed numbers.
long run  the same need with a fragment every round(H / P) steps, in the long run, at any bandwidth.
table 1   hours and terabytes of the 1B model; the batch and the bytes a token are fitted to the printed numbers.
table 2   the latency that each overlap tolerates.

`STEP_FACTOR` belongs to table 5 and the long run beside it; everything else takes the stated step times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from isles.base.errors import demand
from isles.report.panels import Chart, Panel, Table, chart_panel, coloured
from isles.report.sheet import Sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """every: steps from one exchange to the next, the first after step 0. fragments: their layers, in the order of
    their turns. bits: of one parameter on the wire. overlap: steps (tau) that go on before the answer is needed.
    """

    every: int
    fragments: tuple[tuple[int, ...], ...]
    bits: float
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every = {self.every} steps: choose 1 or more")
        if not self.bits > 0:
            raise ValueError(f"bits = {self.bits} a parameter: choose more than 0")
        if self.overlap < 0:
            raise ValueError(f"overlap = {self.overlap} steps: choose 0 or more")

    @property
    def period(self) -> int:
        """Steps in which the whole model is exchanged once."""
        return self.every * len(self.fragments)

    def after(self, step: int) -> tuple[int, ...]:
        """The layers exchanged after `step`, the one that is ready first (the last layer) first."""
        if step % self.every:
            return ()
        return self.fragments[step // self.every % len(self.fragments)]


def data_parallel(layers: int, *, bits: float = 16) -> Exchanges:
    """Gradients of all layers after every step."""
    return Exchanges(every=1, fragments=_whole(layers), bits=bits)


def diloco(layers: int, sync_every: int, *, bits: float = 16, overlap: int = 0) -> Exchanges:
    """All layers every `sync_every` steps."""
    return Exchanges(every=sync_every, fragments=_whole(layers), bits=bits, overlap=overlap)


def streaming(
    layers: int,
    sync_every: int,
    *,
    bits: float = 16,
    overlap: int = 0,
    per_fragment: int = 3,
    every: int | None = None,
) -> Exchanges:
    """Fragments of `per_fragment` layers in turns, the last fragment first: of P fragments each has every P-th layer.

    every: steps from one fragment to the next; None: round(sync_every / fragments), half to even, at least 1.
    """
    if not 1 <= per_fragment <= layers:
        raise ValueError(f"{per_fragment} layers a fragment: choose 1 to {layers}, the number of layers")
    count = -(-layers // per_fragment)
    parts = [range(first, layers, count) for first in range(count)]
    every = max(round(sync_every / count), 1) if every is None else every
    turns = tuple(tuple(reversed(part)) for part in reversed(parts))
    return Exchanges(every=every, fragments=turns, bits=bits, overlap=overlap)


def _whole(layers: int) -> tuple[tuple[int, ...], ...]:
    if layers < 1:
        raise ValueError(f"layers = {layers}: choose 1 or more")
    return (tuple(reversed(range(layers))),)


Floats = np.ndarray

_SETTLE, _MEASURE = 3, 3  # periods; a long run is judged by the second after the first
_LEAST_STEPS = 60
_SECTIONS = 24  # bandwidths tried at once
_WIDEST = (1e-3, 1e18)  # bits per second


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredJob:
    """parameters: spread evenly over the layers. step_seconds: of pure computing."""

    parameters: float
    layers: int
    step_seconds: float

    def __post_init__(self) -> None:
        demand(self, "parameters", lambda x: 0 < x < math.inf, "choose a number above 0, such as 1e9")
        demand(self, "layers", lambda x: x >= 1, "choose 1 or more")
        demand(self, "step_seconds", lambda x: 0 < x < math.inf, "choose a number of seconds above 0")

    @property
    def node_seconds(self) -> float:
        """Of one of the 3L - 1 nodes of a step."""
        return self.step_seconds / (3 * self.layers - 1)


def utilisation(
    job: LayeredJob, exchanges: Exchanges, bandwidth: Floats | Sequence[float] | float, *, steps: int | None = None
) -> Floats:
    """Share of the time spent computing, one for each `bandwidth` (bits per second, any shape).

    steps: the first `steps` of a run; None: the long run. ValueError for a rate that is not positive.
    """
    rates = np.asarray(bandwidth, float)
    if not (rates > 0).all():
        raise ValueError(f"bandwidth must be above 0 bits per second, got {rates.min():g}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps = {steps}: choose 1 or more")
    run = _Clock(job, exchanges, job.parameters / job.layers * exchanges.bits / rates)
    if steps is not None:
        run.advance(steps)
        return steps * job.step_seconds / run.clock
    run.link = run.link + (1 + exchanges.overlap) * job.step_seconds
    settle = max(_SETTLE * exchanges.period, _LEAST_STEPS) + exchanges.overlap
    measured = math.ceil(_LEAST_STEPS / exchanges.period) * exchanges.period * _MEASURE
    run.advance(settle)
    before = run.clock
    run.advance(measured)
    return measured * job.step_seconds / (run.clock - before)


def bandwidth_for(
    targets: Sequence[float], job: LayeredJob, exchanges: Exchanges, *, precision: float = 1e-6
) -> Floats:
    """The least bandwidth (bits per second) for each utilisation in `targets` in the long run, to a relative
    `precision`.

    By sections: each round tries several bandwidths between the bounds, all at once, and keeps the section in which
    the target is reached. Utilisation never falls with bandwidth.
    """
    wanted = np.asarray(targets, float)
    if not ((wanted > 0) & (wanted < 1)).all():
        raise ValueError(f"targets are shares between 0 and 1, got {wanted.tolist()}")
    low, high = (np.full(len(wanted), math.log(end)) for end in _WIDEST)
    inner = np.linspace(0, 1, _SECTIONS + 2)[1:-1]
    while (high - low).max() > precision:
        tried = low[:, None] + (high - low)[:, None] * inner
        found = utilisation(job, exchanges, np.exp(tried))
        enough = np.concatenate([np.zeros((len(wanted), 1), bool), found >= wanted[:, None]], axis=1)
        edges = np.concatenate([low[:, None], tried, high[:, None]], axis=1)
        last_short = _SECTIONS - enough[:, ::-1].argmin(axis=1)
        rows = np.arange(len(wanted))
        low, high = edges[rows, last_short], edges[rows, last_short + 1]
    return np.exp(high)


class _Clock:
    """The clock of the compute stream, the time until which the link is busy, and the answers under way; an entry for
    each bandwidth.
    """

    def __init__(self, job: LayeredJob, exchanges: Exchanges, occupied: Floats) -> None:
        self.job, self.exchanges, self.occupied = job, exchanges, occupied
        self.clock = np.zeros_like(occupied)
        self.link = np.zeros_like(occupied)
        self.step = 0
        self.arrivals: dict[int, list[tuple[int, Floats]]] = {}  # by the step that needs them: (layer, arrival)

    def advance(self, steps: int) -> None:
        """Compute so many steps. Nodes between two layers that wait or send are one stretch."""
        node, layers = self.job.node_seconds, self.job.layers
        clock, link, occupied = self.clock, self.link, self.occupied
        for step in range(self.step, self.step + steps):
            position = 0
            for layer, arrival in self.arrivals.pop(step, ()):
                clock = np.maximum(clock + (layer - position) * node, arrival)
                position = layer
            clock = clock + (layers - position) * node
            position, sent = layers, []
            for layer in self.exchanges.after(step):
                clock = clock + (2 * (position - layer) - (layer == 0)) * node
                position = layer
                link = np.maximum(link, clock) + occupied
                sent.append((layer, link))
            if sent:
                self.arrivals[step + 1 + self.exchanges.overlap] = sent[::-1]
            if position > 0:
                clock = clock + (2 * position - 1) * node
        self.clock, self.link, self.step = clock, link, self.step + steps


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


_FINITE = (
    "As printed: the papers counted about two rounds that began with an idle link, and left out what was still under "
    "way at the end. In the long run a link must carry everything: see isles plan explain eager-long-run.",
    f"Step times are {STEP_FACTOR} times those stated (0.1, 0.8, 4.9 s): only so are all 120 numbers met.",
    "The H30 rows exchange a fragment after every step, whatever the number of fragments, as the papers' must have.",
    "Between two bandwidths of the grid lie 21 %: finer differences mean nothing. No latency, two equal islands.",
)
_LONG = (
    "The same model in the long run: everything that is sent must arrive, and a fragment leaves every round(H / P) "
    f"steps. Step times as in table 5 ({STEP_FACTOR} times those stated): for those stated, multiply by "
    f"{STEP_FACTOR}.",
)


def table5_sheet() -> Sheet:
    """Bandwidth for a utilisation, as printed, and Figure 3."""
    rows = table5()
    return _needs(
        "eager-table5",
        "Bandwidth that a utilisation needs, as printed",
        "Table 5 and Figure 3 of arXiv 2502.12996, table 4 of arXiv 2501.18512",
        [(row, [as_printed(value) for value in row.gbps]) for row in rows],
        [_figure3(size) for size in JOBS],
        _FINITE,
        digits=".1f",
    )


def long_run_sheet() -> Sheet:
    """The same need in the long run."""
    rows = [(row, [float(f"{value:.4g}") for value in row.gbps]) for row in long_run()]
    return _needs(
        "eager-long-run",
        "Bandwidth that a utilisation needs, in the long run",
        "The methods of arXiv 2502.12996 and arXiv 2501.18512 with the schedules that they describe",
        rows,
        [],
        _LONG,
        digits=".3f",
    )


def table1_sheet() -> Sheet:
    """Hours and terabytes."""
    rows = table1()
    return Sheet(
        name="eager-table1",
        title="Hours and terabytes over 1 Gbit/s, 1B model",
        subtitle="Table 1 of arXiv 2502.12996: H = 100, 4 bits a parameter except data parallel (16)",
        what="Time over an unlimited link, over 1 Gbit/s, and what one of the two workers sends.",
        table=Table(
            heads=["method", "tokens", "hours, unlimited", "hours, 1 Gbit/s", "TB"],
            rows=[
                [row.method, f"{row.tokens / 1e9:.0f}e9"]
                + [f"{value:.2f}" for value in (row.hours_unlimited, row.hours_1gbps, row.terabytes)]
                for row in rows
            ],
        ),
        data={"rows": [{"size": "1B", **asdict(row)} for row in rows]},
        notes=[
            "Steps of 0.1 s as stated, in the long run. The tokens of a step "
            f"({TOKENS_A_STEP / 1e6:.3g} million) follow from the printed hours; the bytes of a token "
            f"({BYTES_A_TOKEN / 1e3:.2f} kB) from the printed volumes.",
            "The two do not fit together: 2 bytes a parameter after every step would be a ninth of these volumes. "
            "Ratios between methods hold either way.",
        ],
    )


def table2_sheet() -> Sheet:
    """Tolerated latency."""
    rows = table2()
    return Sheet(
        name="eager-table2",
        title="Latency that an overlap tolerates",
        subtitle="Table 2 of arXiv 2502.12996: 500M model, steps of 0.08 s, H = 30",
        what="Seconds that an exchange may take from the end of a step before anyone waits: overlapped steps x 0.08 s.",
        table=Table(heads=["overlap", "seconds"], rows=[[name, f"{seconds:.2f}"] for name, seconds in rows]),
        data={"rows": [{"overlap": name, "tolerated_seconds": round(seconds, 9)} for name, seconds in rows]},
    )


def _needs(
    name: str,
    title: str,
    subtitle: str,
    rows: list[tuple[Need, list[float]]],
    panels: list[Panel],
    notes: tuple[str, ...],
    *,
    digits: str,
) -> Sheet:
    percents = [f"{100 * target:.0f}" for target in TARGETS]
    return Sheet(
        name=name,
        title=title,
        subtitle=subtitle,
        what="Gbit/s between two islands for a share of the time spent computing.",
        table=Table(
            heads=["size", "method", *(f"{percent} %" for percent in percents)],
            rows=[
                [row.size, row.method, *("-" if math.isnan(v) else f"{v:{digits}}" for v in values)]
                for row, values in rows
            ],
            names=2,
        ),
        data={
            "rows": [
                {
                    "size": row.size,
                    "method": row.method,
                    "bandwidth_gbps": {
                        percent: None if math.isnan(value) else value
                        for percent, value in zip(percents, values, strict=True)
                    },
                }
                for row, values in rows
            ]
        },
        panels=panels,
        notes=notes,
    )


def _figure3(size: str) -> Panel:
    job = JOBS[size]
    grid, curves = GRID.tolist(), {method.name: curve(method, job).tolist() for method in METHODS}
    chart = Chart(
        title=f"Utilisation of the {size} model",
        x_label="Gbit/s between the islands",
        y_format=lambda share: f"{100 * share:.0f} %",
        lines=coloured({name: list(zip(grid, curve, strict=True)) for name, curve in curves.items()}),
        log_x=True,
    )
    return chart_panel(chart, f"{job.layers} layers, steps of {scaled(job).step_seconds:.3g} s.")

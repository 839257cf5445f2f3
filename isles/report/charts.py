"""The panels with lines: loss against steps, bytes and time; bytes against steps; the spread of the replicas."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

from isles.report.panels import Chart, Panel, Polyline, chart_panel, plain
from isles.report.rundir import Run
from isles.report.series import Point, average, latest_of, mean_over, quantile, rising, thin
from isles.report.units import compare, format_bytes, format_number, time_unit

# All worker lines together hold about this many points, so 64 workers make no larger a page than one.
POINTS = 12_000
MEAN_POINTS = 400
# Beyond this ratio a linear axis would press the smaller of two curves onto the floor.
LOG_RATIO = 5


def short(value: float) -> str:
    """A loss or a spread beside an axis."""
    return f"{value:.4g}"


def loss_panel(run: Run) -> Panel | None:
    """One thin line a worker, their mean and the validation losses; None when there are none."""
    series = {worker: _points(log.loss) for worker, log in run.workers.items() if log.loss}
    mean = mean_over(series.values())
    dots = _validation(run)
    if not mean and not dots:
        return None
    top = _cut(mean, series) if mean else None
    shown_mean = average(mean, MEAN_POINTS)
    chart = Chart(
        title="Loss against steps",
        x_label="inner step",
        y_format=short,
        lines=[
            *_worker_lines(series, format_number),
            Polyline(points=shown_mean, css="mean", name="mean of the workers"),
        ],
        dots=dots,
        top=top,
        whole_x=True,
    )
    several = len(series) > 1
    keys = [("worker", "each worker")] * several + [("mean", "mean of the workers" if several else "training loss")]
    keys += [("dot", "validation")] * bool(dots)
    notes = []
    if len(shown_mean) < len(mean):
        notes.append(f"The mean is averaged over {len(mean) / len(shown_mean):.0f} logged steps a point.")
    if top is not None:
        highest = max(y for points in series.values() for _, y in points)
        notes.append(f"Cut off at the top: the highest loss was {format_number(highest)}.")
    return Panel(heading="Loss against steps, nats per token", picture=chart, keys=keys, notes=notes)


def loss_cost_panels(run: Run) -> list[Panel]:
    """The mean loss against the bytes that a worker has sent, and against the clock; those that are known."""
    panels = []
    for against in (by_bytes, by_clock):
        cost = against(run)
        points = loss_against(run, cost)
        if points and points[-1][0] > 0:
            places = dict(cost.points)
            chart = Chart(
                title=f"Loss against {cost.noun}",
                x_label=cost.label,
                x_format=cost.form,
                y_format=short,
                lines=[Polyline(points=average(points, MEAN_POINTS), css="mean", name="mean of the workers")],
                dots=[(places[step], loss) for step, loss in _validation(run) if step in places],
                top=_cut(points, {0: points}),
            )
            keys = [("mean", "mean of the workers"), *[("dot", "validation")] * bool(chart.dots)]
            panels.append(chart_panel(chart, keys=keys))
    return panels


class CostAxis:
    """What an axis other than steps counts: its value by step, mean over the workers."""

    def __init__(self, noun: str, label: str, points: list[Point], form: Callable[[float], str]) -> None:
        self.noun, self.label, self.points, self.form = noun, label, points, form


def by_step(run: Run) -> CostAxis:
    """The inner step itself."""
    steps = sorted({float(step) for log in run.workers.values() for step in log.loss})
    return CostAxis("steps", "inner step", [(step, step) for step in steps], plain)


def by_bytes(run: Run) -> CostAxis:
    """Bytes sent."""
    points = rising(mean_over([_points(log.bytes_sent) for log in run.workers.values()]))
    return CostAxis("bytes", "sent per worker", points, lambda count: format_bytes(count, trim=True))


def by_clock(run: Run, unit: tuple[float, str] | None = None) -> CostAxis:
    """Time since the start until the last worker was there, in `unit` (default: the one that suits it)."""
    points = latest_of([_points(log.clock) for log in run.workers.values()])
    seconds, name = unit or time_unit(points[-1][1] if points else 0.0)
    virtual = run.is_simulated
    label = f"{name} of the virtual clock" if virtual else f"{name} since the workers started"
    return CostAxis("time", label, [(step, value / seconds) for step, value in points], lambda value: f"{value:,.6g}")


def loss_against(run: Run, cost: CostAxis) -> list[Point]:
    """Mean training loss over the workers, by cost instead of by step."""
    places = dict(cost.points)
    loss = mean_over([_points(log.loss) for log in run.workers.values()])
    return [(places[step], value) for step, value in loss if step in places]


def bytes_panel(run: Run) -> Panel | None:
    """The bytes each worker sent so far, beside data parallel's; None when none were counted."""
    series = {worker: _points(log.bytes_sent) for worker, log in run.workers.items() if log.bytes_sent}
    mean = mean_over(series.values())
    if not mean:
        return None
    # The last exchanges may come after the last line, so the summary's number is the whole one.
    final = run.number("bytes_sent_per_worker")
    sent = mean[-1][1] if final is None else final
    reference = max(0.0, run.number("ddp_bytes_per_worker") or 0.0)
    steps = run.number("steps") or run.last_step
    log = reference > 0 and sent > 0 and not 1 / LOG_RATIO <= sent / reference <= LOG_RATIO
    heading = "Bytes sent per worker"
    if sent == 0:
        return Panel(heading=heading, picture=None, notes=["Nothing was sent."])
    several = len(series) > 1
    shape = _stairs if run.number("stages") is None else list  # stages send all the time
    lines = [
        *_worker_lines(series, format_bytes, shape),
        Polyline(
            points=shape(thin(mean, MEAN_POINTS)),
            css="mean",
            name="mean of the workers",
            label=f"this run\n{format_bytes(sent)}",
        ),
    ]
    keys = [("worker", "each worker")] * several + [("mean", "mean of the workers" if several else "this run")]
    notes = ["The scale is logarithmic."] * log
    if reference > 0:
        # One gradient a step makes a straight line; sampled finely because a logarithmic axis bends it.
        first = mean[0][0] / steps if log and steps else 0.0  # no earlier than the run's own first line
        straight = [(steps * share, reference * share) for share in (first + (1 - first) * k / 200 for k in range(201))]
        lines.append(
            Polyline(
                points=straight, css="ddp", name="data parallel", label=f"data parallel\n{format_bytes(reference)}"
            )
        )
        keys.append(("ddp", "data parallel would have sent"))
        notes.insert(0, f"At the end: {compare(sent, reference)} data parallel.")
    chart = Chart(
        title="Bytes sent against steps",
        x_label="inner step",
        y_format=lambda y: format_bytes(y, trim=True),
        lines=lines,
        log_y=log,
        whole_x=True,
        right=118,
    )
    return Panel(heading=heading, picture=chart, keys=keys, notes=notes)


def spread_panel(run: Run) -> Panel | None:
    """How far the replicas are apart, and the learning rate on a scale of its own; None without a record."""
    if not run.spread:
        return None
    heading, highest = "Spread of the replicas", max(y for _, y in run.spread)
    if highest == 0:
        return Panel(heading=heading, picture=None, notes=["The replicas were equal at every logged step."])
    rate = mean_over([_points(log.lr) for log in run.workers.values()])
    peak = max((y for _, y in rate), default=0.0)
    lines = [Polyline(points=thin(run.spread, 2 * MEAN_POINTS), css="mean", name="spread of the replicas")]
    keys = [("mean", "standard deviation between the replicas")]
    notes = ["Estimated from a sample of the weights as they are after a logged step and the exchange that may follow."]
    if peak > 0:
        scaled = [(x, y * highest / peak) for x, y in average(rate, MEAN_POINTS)]
        lines.append(Polyline(points=scaled, css="rate", name="learning rate"))
        keys.append(("rate", f"learning rate, on a scale of its own (peak {peak:.3g})"))
        notes += _correlation(run.spread, dict(rate))
    chart = Chart(title=heading, x_label="inner step", y_format=short, lines=lines, whole_x=True)
    return chart_panel(chart, *notes, keys=keys)


def _correlation(spread: list[Point], rate: dict[float, float]) -> list[str]:
    pairs = [(value, rate[step]) for step, value in spread if step in rate]
    spreads, rates = [value for value, _ in pairs], [value for _, value in pairs]
    if len(pairs) < 3 or len(set(spreads)) == 1 or len(set(rates)) == 1:
        return []
    found = statistics.correlation(spreads, rates)
    return [f"Correlation with the learning rate over {len(pairs)} logged steps: {found:.2f}."]


def _points(by_step: dict[int, float]) -> list[Point]:
    return [(float(step), value) for step, value in sorted(by_step.items())]


def _stairs(points: list[Point]) -> list[Point]:
    """A meter stands still until it jumps: without the corners a sync would look like a slope."""
    corners = [(after[0], before[1]) for before, after in pairwise(points)]
    return [point for pair in zip(points, corners, strict=False) for point in pair] + points[-1:]


def _worker_lines(
    series: dict[int, list[Point]], form: Callable[[float], str], shape: Callable[[list[Point]], list[Point]] = list
) -> list[Polyline]:
    """Thin lines, none for a single worker: its line is the mean."""
    if len(series) < 2:
        return []
    limit = max(100, POINTS // len(series))
    return [
        Polyline(
            points=shape(thin(points, limit)), css="worker", name=f"worker {worker}: {form(points[-1][1])} at the end"
        )
        for worker, points in series.items()
    ]


def _validation(run: Run) -> list[Point]:
    """The validation losses of metrics.jsonl, and the summary's at the last step unless it is there already."""
    steps, loss = run.number("steps"), run.number("val_loss")
    dots = list(run.validation)
    # The last line of metrics.jsonl may count its step from 0, so steps - 1 is the same moment.
    if steps is not None and loss is not None and all(x < steps - 1 for x, _ in dots):
        dots.append((steps, loss))
    return dots


def _cut(mean: list[Point], series: dict[int, list[Point]]) -> float | None:
    """Where to cut the loss axis, so that one exploding worker does not press all curves onto the floor; None: nowhere.

    The start of the mean stays in the picture, and a peak that costs the curves little height is not cut.
    """
    losses = [y for points in series.values() for _, y in points]
    low = min(losses)
    usual = quantile(losses, 0.98)
    top = max(low + 1.5 * (usual - low), mean[0][1])
    return top if usual > low and max(losses) - low > 1.25 * (top - low) else None

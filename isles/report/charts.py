"""The panels with lines: loss against steps, bytes and time; bytes against steps; the spread of the replicas.

The panels of time: seconds computing and blocked a worker, and a close look at some rounds in lanes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

from isles.base.schema import COURSE
from isles.report.panels import (
    Bar,
    Bars,
    Chart,
    Lane,
    Lanes,
    LaneSegment,
    Panel,
    Point,
    Polyline,
    average,
    chart_panel,
    coloured,
    latest_of,
    mean_of_totals,
    mean_over,
    plain,
    quantile,
    thin,
)
from isles.report.rundir import RunFiles, TimelineSpan
from isles.report.units import compare, format_bytes, format_number, format_percent, format_seconds, time_unit

# All worker lines together hold about this many points, so 64 workers make no larger a page than one.
POINTS = 12_000
MEAN_POINTS = 400
# Beyond this ratio a linear axis would press the smaller of two curves onto the floor.
LOG_RATIO = 5


def loss_panel(run: RunFiles) -> Panel | None:
    """One thin line a worker, their mean and the validation losses; None when there are none."""
    series = {worker: _points(log.loss) for worker, log in run.workers.items() if log.loss}
    mean = mean_over(series.values())
    dots = _validation(run)
    if not mean and not dots:
        return None
    top = _cut(mean, series) if mean else None
    shown_mean = average(mean, MEAN_POINTS)
    texts = {f"validation on {key[9:]}": _validation(run, key) for key in run.validation if key != "val_loss"}
    named = coloured({"mean": (), "dot": (), **texts})[2:]  # these two have the first colours
    chart = Chart(
        title="Loss against steps",
        x_label="inner step",
        lines=[
            *_worker_lines(series, format_number),
            Polyline(points=shown_mean, css="mean", name="mean of the workers"),
            *named,
        ],
        dots=dots,
        top=top,
        whole_x=True,
    )
    several = len(series) > 1
    keys = [("worker", "each worker")] * several + [("mean", "mean of the workers" if several else "training loss")]
    keys += [("dot", "validation")] * bool(dots) + [(line.css, line.name) for line in named]
    notes = [f"Lines of {len(named)} of {len(texts)} validation texts."] * (len(named) < len(texts))
    if len(shown_mean) < len(mean):
        notes.append(f"The mean is averaged over {len(mean) / len(shown_mean):.0f} logged steps a point.")
    if top is not None:
        highest = max(y for points in series.values() for _, y in points)
        notes.append(f"Cut off at the top: the highest loss was {format_number(highest)}.")
    return Panel(heading="Loss against steps, nats per token", picture=chart, keys=keys, notes=notes)


def course_panels(run: RunFiles) -> list[Panel]:
    """Learning rate, gradient norm and tokens a second against steps, means over the workers; those that are known."""
    panels, titles = [], ("Learning rate", "Norm of the gradient before clipping", "Tokens a second of a worker")
    for key, title in zip(COURSE, titles, strict=True):
        points = mean_over([_points(log.course[key]) for log in run.workers.values()])
        if points:
            lines = [Polyline(points=average(points, MEAN_POINTS), css="mean", name="mean of the workers")]
            chart = Chart(title=f"{title} against steps", x_label="inner step", lines=lines, whole_x=True)
            panels.append(chart_panel(chart))
    return panels


def loss_cost_panels(run: RunFiles) -> list[Panel]:
    """The mean loss against the bytes that a worker has sent, and against the clock; those that are known."""
    panels = []
    for against in (by_bytes, by_clock):
        cost = against(run)
        points = loss_against(run, cost)
        if points and points[-1][0] > 0:
            cost_at = dict(cost.points)
            chart = Chart(
                title=f"Loss against {cost.noun}",
                x_label=cost.label,
                x_format=cost.form,
                lines=[Polyline(points=average(points, MEAN_POINTS), css="mean", name="mean of the workers")],
                dots=[(cost_at[step], loss) for step, loss in _validation(run) if step in cost_at],
                top=_cut(points, {0: points}),
            )
            keys = [("mean", "mean of the workers"), *[("dot", "validation")] * bool(chart.dots)]
            panels.append(chart_panel(chart, keys=keys))
    return panels


class CostAxis:
    """What an axis other than steps counts: its value by step, mean over the workers."""

    def __init__(self, noun: str, label: str, points: list[Point], form: Callable[[float], str]) -> None:
        self.noun, self.label, self.points, self.form = noun, label, points, form


def by_step(run: RunFiles) -> CostAxis:
    """The inner step itself."""
    steps = sorted({float(step) for log in run.workers.values() for step in log.loss})
    return CostAxis("steps", "inner step", [(step, step) for step in steps], plain)


def by_bytes(run: RunFiles) -> CostAxis:
    """Bytes sent."""
    points = mean_of_totals([_points(log.bytes_sent) for log in run.workers.values() if log.bytes_sent])
    return CostAxis("bytes", "sent per worker", points, lambda count: format_bytes(count, trim=True))


def by_clock(run: RunFiles, unit: tuple[float, str] | None = None) -> CostAxis:
    """Time since the start until the last worker was there, in `unit` (default: the one that suits it)."""
    points = latest_of([_points(log.clock) for log in run.workers.values()])
    seconds, name = unit or time_unit(points[-1][1] if points else 0.0)
    virtual = run.is_simulated
    label = f"{name} of the virtual clock" if virtual else f"{name} since the workers started"
    return CostAxis("time", label, [(step, value / seconds) for step, value in points], lambda value: f"{value:,.6g}")


def loss_against(run: RunFiles, cost: CostAxis) -> list[Point]:
    """Mean training loss over the workers, by cost instead of by step."""
    cost_at = dict(cost.points)
    loss = mean_over([_points(log.loss) for log in run.workers.values()])
    return [(cost_at[step], value) for step, value in loss if step in cost_at]


def bytes_panel(run: RunFiles) -> Panel | None:
    """The bytes each worker sent so far, beside data parallel's; None when none were counted."""
    series = {worker: _points(log.bytes_sent) for worker, log in run.workers.items() if log.bytes_sent}
    mean = mean_of_totals(series.values())
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


def spread_panel(run: RunFiles) -> Panel | None:
    """How far the replicas are apart, and the learning rate on a scale of its own; None without a record."""
    if not run.spread:
        return None
    heading, highest = "Spread of the replicas", max(y for _, y in run.spread)
    if highest == 0:
        return Panel(heading=heading, picture=None, notes=["The replicas were equal at every logged step."])
    rate = mean_over([_points(log.course["lr"]) for log in run.workers.values()])
    peak = max((y for _, y in rate), default=0.0)
    lines = [Polyline(points=thin(run.spread, 2 * MEAN_POINTS), css="mean", name="spread of the replicas")]
    keys = [("mean", "standard deviation between the replicas")]
    notes = ["Estimated from a sample of the weights as they are after a logged step and the exchange that may follow."]
    if peak > 0:
        scaled = [(x, y * highest / peak) for x, y in average(rate, MEAN_POINTS)]
        lines.append(Polyline(points=scaled, css="rate", name="learning rate"))
        keys.append(("rate", f"learning rate, on a scale of its own (peak {peak:.3g})"))
        notes += _correlation(run.spread, dict(rate))
    chart = Chart(title=heading, x_label="inner step", lines=lines, whole_x=True)
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


def _validation(run: RunFiles, key: str = "val_loss") -> list[Point]:
    """The validation losses of metrics.jsonl, and the summary's at the last step unless it is there already."""
    steps, loss = run.number("steps"), run.number(key)
    dots = list(run.validation.get(key, []))
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


EXCHANGES = 12  # that the lanes show: few enough to see each
LANES = 16
TASK_LOOKS = {"forward": "compute", "loss": "blocked", "backward": "transfer"}
TASK_KEYS = (("compute", "forward"), ("blocked", "loss and head"), ("transfer", "backward"))
_TRAINING = ("outer", "inner", "pipeline")  # channels of the method; the rest is start and end
# timeline.jsonl has a worker's first and last spans; there is no gap in its last so many lines, however long the run.
_WITHOUT_GAP = 400


def time_panel(run: RunFiles) -> Panel | None:
    """One bar a worker: seconds computing, then blocked on the network; None when unknown."""
    bars = []
    for worker, log in run.workers.items():
        if "compute_seconds" in log.totals or "blocked_seconds" in log.totals:
            compute, blocked = (log.totals.get(key, 0.0) for key in ("compute_seconds", "blocked_seconds"))
            total = compute + blocked
            text = f"{format_percent(compute / total)} of {format_seconds(total)} computing" if total else "nothing yet"
            hint = f"worker {worker}: {format_seconds(compute)} computing, {format_seconds(blocked)} blocked"
            parts = [("compute", compute), ("blocked", blocked)]
            bars.append(Bar(label=f"worker {worker}", parts=parts, text=text, hint=hint))
    if not any(seconds for bar in bars for _, seconds in bar.parts):
        return None
    title = "Where the time went"
    keys = [("compute", "computing"), ("blocked", "blocked, waiting for the network")]
    return Panel(heading=title, picture=Bars(title=title, bars=bars), keys=keys)


def lanes_panel(run: RunFiles, workers: int = LANES) -> Panel | None:
    """The last exchanges of the record on one clock, a lane for each of the first `workers`; None without a record."""
    window = _window(run)
    if window is None:
        return None
    start, end = window
    lanes = []
    for worker, spans in list(run.spans.items())[:workers]:
        inside = [_stretch(span) for span in spans if span.end > start and span.start < end]
        inside.sort(key=lambda piece: piece.css != "compute")  # below what it includes
        lanes.append(Lane(label=f"worker {worker}", segments=inside))
    virtual = run.is_simulated
    picture = Lanes(
        title="Timeline",
        x_label="seconds of the virtual clock" if virtual else "seconds since the workers started",
        start=start,
        end=end,
        lanes=lanes,
    )
    keys = [
        ("compute", "computing"),
        ("blocked", "blocked"),
        ("transfer", "exchange under way, also behind the computation"),
    ]
    if any(span.kind == "away" for spans in run.spans.values() for span in spans):
        keys.insert(2, ("away", "paused"))
    notes = ["Blank: validation, logging, saving. Nothing is drawn thinner than half a pixel."]
    if any(_exchanges(spans) for spans in run.spans.values()):
        notes.insert(0, f"A close look: the last {EXCHANGES} exchanges or so on record.")
    if len(run.spans) > workers:
        notes.append(f"The first {workers} of {len(run.spans)} workers.")
    return Panel(heading="Timeline of the workers", picture=picture, keys=keys, notes=notes)


def step_panel(run: RunFiles) -> Panel | None:
    """Every task of one step, a lane for each of the first workers; None where replicas do not lie in stages."""
    spans = [span for own in run.tasks.values() for span in own]
    if not spans:
        return None
    stages = max(1, int((run.summary or run.config.get("pipeline") or {}).get("stages") or 1))
    inner = max(1, int((run.config.get("world") or {}).get("inner") or 1))
    steps = _steps(run)
    lanes = [
        Lane(
            label=f"{worker}: stage {worker // inner % stages}",
            segments=[
                LaneSegment(
                    start=span.start - steps[worker][0],
                    end=span.end - steps[worker][0],
                    css=TASK_LOOKS[span.kind],
                    row=0,
                    hint=f"{span.kind} of microbatch {span.microbatch},",
                    mark=str(span.microbatch),
                )
                for span in own
            ],
        )
        for worker, own in list(run.tasks.items())[:LANES]
    ]
    longest = max(end - start for start, end in steps.values())
    picture = Lanes(title="One step", x_label="seconds of the step", start=0.0, end=longest or 1.0, lanes=lanes)
    shares = [
        sum(span.end - span.start for span in own) / (end - start) if end > start else 1.0
        for own, (start, end) in ((own, steps[worker]) for worker, own in run.tasks.items())
    ]
    waited = format_percent(1 - sum(shares) / len(shares))
    notes = [
        "A lane is a worker, with the stage that it holds; numbers are microbatches.",
        f"Inner step {run.task_step}: each worker waited for {waited} of it on average.",
    ]
    if len(set(steps.values())) > 1:
        notes.append("Pipelines that share no microbatch do not wait for each other here: each begins at its own 0.")
    if not run.is_simulated:
        notes.append("The workers' clocks agree to within milliseconds.")
    if len(run.tasks) > LANES:
        notes.append(f"The first {LANES} of {len(run.tasks)} workers.")
    kinds = {TASK_LOOKS[span.kind] for span in spans}
    keys = [key for key in TASK_KEYS if key[0] in kinds]
    return Panel(heading="One step through the stages", picture=picture, keys=keys, notes=notes)


def _steps(run: RunFiles) -> dict[int, tuple[float, float]]:
    """When the step of each worker's pipeline began and ended: that of all that share microbatches with it."""
    joined: list[tuple[set[int], set[int]]] = []  # microbatches, workers
    for worker, own in run.tasks.items():
        numbers, workers = {span.microbatch for span in own}, {worker}
        separate = []
        for other in joined:
            if numbers.isdisjoint(other[0]):
                separate.append(other)
            else:
                numbers, workers = numbers | other[0], workers | other[1]
        joined = [*separate, (numbers, workers)]
    found = {}
    for _, workers in joined:
        spans = [span for worker in workers for span in run.tasks[worker]]
        if spans:
            when = min(span.start for span in spans), max(span.end for span in spans)
            found |= dict.fromkeys(workers, when)
    return found


def _window(run: RunFiles) -> tuple[float, float] | None:
    """From a little before the exchanges to show until the end of the training on record."""
    recent = {worker: spans[-_WITHOUT_GAP:] for worker, spans in run.spans.items()}
    computing = [span for spans in recent.values() for span in spans if span.kind == "compute"]
    if not computing:
        return None
    end = max(span.end for span in computing)
    starts = sorted(next((found for spans in recent.values() if (found := _exchanges(spans))), []))
    shown = [at for at in starts if at < end][-EXCHANGES:]
    whole = min(span.start for span in computing)
    start = max(whole, shown[0] - 0.05 * (end - shown[0])) if shown else whole
    return (start, end) if end > start else None


def _exchanges(spans: list[TimelineSpan]) -> list[float]:
    return [span.start for span in spans if span.kind == "transfer" and span.channel in _TRAINING]


def _stretch(span: TimelineSpan) -> LaneSegment:
    if span.kind == "transfer":
        css = "transfer" if span.channel in _TRAINING else "other"
        return LaneSegment(start=span.start, end=span.end, css=css, row=1, hint=f"{span.channel} exchange,")
    hint = {"compute": "computing,", "away": "paused,"}.get(span.kind, f"blocked on {span.channel},")
    return LaneSegment(start=span.start, end=span.end, css=span.kind, row=0, hint=hint)

"""The three pictures of a run: loss against steps, bytes against steps, and where the time went."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import pairwise

from isles.report.rundir import Run
from isles.report.series import Point, average, mean_over, quantile, thin
from isles.report.svg import WIDTH, Chart, Line
from isles.report.units import compare, format_bytes, format_number, format_percent, format_seconds

# All worker lines together hold about this many points, so 64 workers make no larger a page than one.
POINTS = 12_000
MEAN_POINTS = 400
# Beyond this ratio a linear axis would press the smaller of two curves onto the floor.
LOG_RATIO = 5


def loss_chart(run: Run) -> str:
    """A `<section>` with one thin line a worker, their mean and the validation losses; empty when there are none."""
    series = {worker: _points(log.loss) for worker, log in run.workers.items() if log.loss}
    mean = mean_over(series.values())
    dots = _validation(run)
    if not mean and not dots:
        return ""
    top = _cut(mean, series) if mean else None
    shown_mean = average(mean, MEAN_POINTS)
    chart = Chart(
        title="Loss against steps",
        x_label="inner step",
        y_format=lambda y: f"{y:.4g}",
        lines=[*_worker_lines(series, format_number), Line(points=shown_mean, css="mean", name="mean of the workers")],
        dots=dots,
        top=top,
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
    return figure("Loss, nats per token", chart.svg(), keys, notes)


def bytes_chart(run: Run) -> str:
    """A `<section>` with the bytes each worker sent so far, beside data parallel's; empty when none were counted."""
    series = {worker: _points(log.bytes_sent) for worker, log in run.workers.items() if log.bytes_sent}
    mean = mean_over(series.values())
    if not mean:
        return ""
    # The last exchanges may come after the last line, so the summary's number is the whole one.
    final = run.number("bytes_sent_per_worker")
    sent = mean[-1][1] if final is None else final
    reference = max(0.0, run.number("ddp_bytes_per_worker") or 0.0)
    steps = run.number("steps") or run.last_step
    # A meter that still stands at zero has no place on a logarithmic axis.
    log = reference > 0 and sent > 0 and not 1 / LOG_RATIO <= sent / reference <= LOG_RATIO
    several = len(series) > 1
    label = f"this run\n{format_bytes(sent)}"
    lines = [
        *_worker_lines(series, format_bytes, _stairs),
        Line(points=_stairs(thin(mean, MEAN_POINTS)), css="mean", name="mean of the workers", label=label),
    ]
    keys = [("worker", "each worker")] * several + [("mean", "mean of the workers" if several else "this run")]
    notes = ["The scale is logarithmic: each line of the grid is ten times the one below it."] * log
    if reference > 0:
        # One gradient a step makes a straight line; sampled finely because a logarithmic axis bends it.
        straight = [(steps * k / 200, reference * k / 200) for k in range(1 if log else 0, 201)]
        lines.append(
            Line(points=straight, css="ddp", name="data parallel", label=f"data parallel\n{format_bytes(reference)}")
        )
        keys.append(("ddp", "data parallel would have sent"))
        if sent > 0:
            notes.insert(0, f"At the end: {compare(sent, reference)} data parallel.")
    chart = Chart(
        title="Bytes sent against steps",
        x_label="inner step",
        y_format=lambda y: format_bytes(y, trim=True),
        lines=lines,
        log=log,
        right=118,
    )
    return figure("Bytes sent per worker", chart.svg(), keys, notes)


def time_chart(run: Run) -> str:
    """A `<section>` with one bar a worker: seconds computing, then blocked on the network; empty when unknown."""
    rows = [
        (worker, log.totals.get("compute_seconds", 0.0), log.totals.get("blocked_seconds", 0.0))
        for worker, log in run.workers.items()
        if "compute_seconds" in log.totals or "blocked_seconds" in log.totals
    ]
    longest = max((compute + blocked for _, compute, blocked in rows), default=0.0)
    if longest <= 0:
        return ""
    pitch = 26 if len(rows) <= 16 else 14
    left, right = 84, 190
    scale = (WIDTH - left - right) / longest
    height = pitch * len(rows) + 8
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Where the time went">']
    for i, (worker, compute, blocked) in enumerate(rows):
        y, thick, middle = 4 + i * pitch, pitch * 0.75, left + compute * scale
        total = compute + blocked
        words = f"{format_percent(compute / total)} of {format_seconds(total)} computing" if total else "nothing yet"
        hint = f"worker {worker}: {format_seconds(compute)} computing, {format_seconds(blocked)} blocked"
        parts.append(
            f"<g><title>{escape(hint)}</title>"
            f'<text class="tick end" x="{left - 8}" y="{y + thick / 2 + 4:.1f}">worker {worker}</text>'
            f'<rect class="compute" x="{left}" y="{y}" width="{compute * scale:.1f}" height="{thick}"/>'
            f'<rect class="blocked" x="{middle:.1f}" y="{y}" width="{blocked * scale:.1f}" height="{thick}"/>'
            f'<text class="tick" x="{left + total * scale + 8:.1f}" y="{y + thick / 2 + 4:.1f}">{words}</text></g>'
        )
    parts.append("</svg>")
    keys = [("compute", "computing"), ("blocked", "blocked, waiting for the network")]
    return figure("Where the time went", "".join(parts), keys, [])


def _points(by_step: dict[int, float]) -> list[Point]:
    return [(float(step), value) for step, value in sorted(by_step.items())]


def _stairs(points: list[Point]) -> list[Point]:
    """A meter stands still until it jumps: without the corners a sync would look like a slope."""
    corners = [(after[0], before[1]) for before, after in pairwise(points)]
    return [point for pair in zip(points, corners, strict=False) for point in pair] + points[-1:]


def _worker_lines(
    series: dict[int, list[Point]],
    form: Callable[[float], str],
    shape: Callable[[list[Point]], list[Point]] = list,
) -> list[Line]:
    """Thin lines, none for a single worker: its line is the mean."""
    if len(series) < 2:
        return []
    limit = max(100, POINTS // len(series))
    return [
        Line(points=shape(thin(points, limit)), css="worker", name=f"worker {worker}: {form(points[-1][1])} at the end")
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


def figure(title: str, svg: str, keys: list[tuple[str, str]], notes: list[str]) -> str:
    """A `<section>` with heading, legend (css class, text), picture and caption."""
    legend = "".join(f'<span class="key"><i class="swatch {css}"></i>{escape(text)}</span>' for css, text in keys)
    caption = f"<figcaption>{escape(' '.join(notes))}</figcaption>" if notes else ""
    return f'<section><h2>{escape(title)}</h2><figure><p class="legend">{legend}</p>{svg}{caption}</figure></section>'

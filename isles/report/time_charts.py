"""The panels of time: seconds computing and blocked a worker, and a close look at some rounds in lanes."""

from __future__ import annotations

from isles.report.panels import Bar, Bars, Lane, Lanes, Panel, Stretch
from isles.report.rundir import Run, TimelineSpan
from isles.report.units import format_percent, format_seconds

EXCHANGES = 12  # that the lanes show: few enough to see each
LANES = 16
TASK_LOOKS = {"forward": "compute", "loss": "blocked", "backward": "transfer"}
TASK_KEYS = (("compute", "forward"), ("blocked", "loss and head"), ("transfer", "backward"))
_TRAINING = ("outer", "inner", "pipeline")  # channels of the method; the rest is start and end
# timeline.jsonl has a worker's first and last spans; there is no gap in its last so many lines, however long the run.
_WITHOUT_GAP = 400


def time_panel(run: Run) -> Panel | None:
    """One bar a worker: seconds computing, then blocked on the network; None when unknown."""
    bars = []
    for worker, log in run.workers.items():
        if "compute_seconds" in log.totals or "blocked_seconds" in log.totals:
            compute, blocked = (log.totals.get(key, 0.0) for key in ("compute_seconds", "blocked_seconds"))
            total = compute + blocked
            words = (
                f"{format_percent(compute / total)} of {format_seconds(total)} computing" if total else "nothing yet"
            )
            hint = f"worker {worker}: {format_seconds(compute)} computing, {format_seconds(blocked)} blocked"
            parts = [("compute", compute), ("blocked", blocked)]
            bars.append(Bar(label=f"worker {worker}", parts=parts, text=words, hint=hint))
    if not any(seconds for bar in bars for _, seconds in bar.parts):
        return None
    title = "Where the time went"
    keys = [("compute", "computing"), ("blocked", "blocked, waiting for the network")]
    return Panel(heading=title, picture=Bars(title=title, bars=bars), keys=keys)


def lanes_panel(run: Run, workers: int = LANES) -> Panel | None:
    """The last exchanges of the record on one clock, a lane for each of the first `workers`; None without a record."""
    window = _window(run)
    if window is None:
        return None
    start, end = window
    lanes = []
    for worker, spans in list(run.spans.items())[:workers]:
        inside = [_stretch(span) for span in spans if span.end > start and span.start < end]
        inside.sort(key=lambda piece: piece.css != "compute")  # below what it includes
        lanes.append(Lane(label=f"worker {worker}", stretches=inside))
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


def step_panel(run: Run, workers: int = LANES) -> Panel | None:
    """Every task of one step, a lane for each of the first `workers`; None where replicas do not lie in stages."""
    spans = [span for own in run.tasks.values() for span in own]
    if not spans:
        return None
    stages = max(1, int((run.summary or run.config.get("pipeline") or {}).get("stages") or 1))
    inner = max(1, int((run.config.get("world") or {}).get("inner") or 1))
    steps = _steps(run)
    lanes = [
        Lane(
            label=f"{worker}: stage {worker // inner % stages}",
            stretches=[
                Stretch(
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
        for worker, own in list(run.tasks.items())[:workers]
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
    if len(run.tasks) > workers:
        notes.append(f"The first {workers} of {len(run.tasks)} workers.")
    kinds = {TASK_LOOKS[span.kind] for span in spans}
    keys = [key for key in TASK_KEYS if key[0] in kinds]
    return Panel(heading="One step through the stages", picture=picture, keys=keys, notes=notes)


def _steps(run: Run) -> dict[int, tuple[float, float]]:
    """When the step of each worker's pipeline began and ended: that of all that share microbatches with it."""
    joined: list[tuple[set[int], set[int]]] = []  # microbatches, workers
    for worker, own in run.tasks.items():
        numbers, workers = {span.microbatch for span in own}, {worker}
        apart = []
        for other in joined:
            if numbers.isdisjoint(other[0]):
                apart.append(other)
            else:
                numbers, workers = numbers | other[0], workers | other[1]
        joined = [*apart, (numbers, workers)]
    found = {}
    for _, workers in joined:
        spans = [span for worker in workers for span in run.tasks[worker]]
        if spans:
            when = min(span.start for span in spans), max(span.end for span in spans)
            found |= dict.fromkeys(workers, when)
    return found


def _window(run: Run) -> tuple[float, float] | None:
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
    """When the method's transfers began."""
    return [span.start for span in spans if span.kind == "transfer" and span.channel in _TRAINING]


def _stretch(span: TimelineSpan) -> Stretch:
    if span.kind == "transfer":
        css = "transfer" if span.channel in _TRAINING else "other"
        return Stretch(start=span.start, end=span.end, css=css, row=1, hint=f"{span.channel} exchange,")
    hint = {"compute": "computing,", "away": "paused,"}.get(span.kind, f"blocked on {span.channel},")
    return Stretch(start=span.start, end=span.end, css=span.kind, row=0, hint=hint)

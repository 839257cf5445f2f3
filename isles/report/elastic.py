"""The panels of a run whose workers come and go: members over time, and a lane for each member.

They are made of RUN/members.jsonl and RUN/exchanges.jsonl (`isles.membership.run_log`); a line that is none is left
out. Seconds are counted from the first entry, of the lighthouse's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from isles.base.parsing import parse_json
from isles.membership.run_log import (
    EXCHANGES,
    JOURNAL,
    LATE,
    WHOLE,
    RoundRecord,
    RunHistory,
    StartRecord,
    read_history,
    read_record,
)
from isles.report.panels import Chart, Lane, Lanes, LaneSegment, Panel, Point, Polyline, chart_panel
from isles.report.rundir import RunFiles, finite

MAX_LANES = 32
_LOOKS = {WHOLE: "compute", LATE: "transfer"}
_KEYS = (
    ("compute", "rounds with others"),
    ("transfer", "late: counts in the next round"),
    ("blocked", "rounds alone, or whose exchange failed"),
    ("away", "there, and not in a round: waits for a state or a view"),
    ("other", "the lighthouse is away"),
)
_MARKS = {
    "join": ("series2", "joined"),
    "lost": ("rate", "was lost"),
    "ban": ("series5", "was shut out"),
    "leave": ("series4", "left"),
    "restart": ("series7", "the lighthouse was started again"),
    "begin": ("series3", "the run began again"),
}
MAX_MARKS = 200
T = TypeVar("T")


def elastic_panels(run: RunFiles) -> list[Panel]:
    """None for a run in which nobody comes and goes."""
    start, lines, there = _history(run)
    return [_members(there, start), _member_lanes(there, lines, start)] if there.end > start else []


def marked(run: RunFiles, losses: Panel) -> Panel:
    """The chart of losses against steps, with a mark at each step at which the run began again."""
    *_, there = _history(run)
    if not there.again or not isinstance(losses.picture, Chart):
        return losses
    values = [y for line in losses.picture.lines for _, y in line.points]
    marks = [
        Polyline(points=[(at, min(values)), (at, max(values))], css="rate", name=f"{at}: began again from step {step}")
        for at, step in there.again
    ]
    key = ("rate", "all workers, or a stage, were lost: the run began again from an earlier step")
    picture = replace(losses.picture, lines=[*losses.picture.lines, *marks])
    return replace(losses, picture=picture, keys=[*losses.keys, key])


def _history(run: RunFiles) -> tuple[float, list[RoundRecord | StartRecord], RunHistory]:
    """(when it began, its records, who was there)."""
    entries, lines = list(_usable(run.path / JOURNAL, _entry)), list(_usable(run.path / EXCHANGES, read_record))
    there = read_history(entries, lines, int(finite(run.setting("replicas", "sync_every")) or 1))
    return min((entry["at"] for entry in entries), default=there.end), lines, there


def _members(there: RunHistory, start: float) -> Panel:
    """How many are connected, and how many are in the newest view."""
    changes = sorted(
        change
        for segments in there.present.values()
        for since, until in segments
        for change in ((since, 1), (until, -1))
    )
    connected, count = [(0.0, 0.0)], 0
    for at, change in changes:
        if at < there.end:
            connected += [(at - start, float(count)), (at - start, float(count + change))]
        count += change
    connected.append((there.end - start, connected[-1][1]))
    in_view: list[Point] = [(0.0, 0.0)]
    for at, _, _, members in there.views:
        in_view += [(at - start, in_view[-1][1]), (at - start, float(len(members)))]
    in_view.append((there.end - start, in_view[-1][1]))
    top, begun = max(y for _, y in connected), min((at for at, *_ in there.views), default=start)
    marks = [mark for mark in there.marks if mark[1] != "join" or mark[0] > begun]
    drawn = [
        Polyline(points=[(at - start, 0.0), (at - start, top)], css=css, name=f"{there.name(member)} {what}".strip())
        for (css, what), at, member in ((_MARKS[event], at, member) for at, event, member in marks[:MAX_MARKS])
    ]
    picture = Chart(
        title="Members over time",
        x_label="seconds since the first one joined",
        lines=[
            Polyline(points=in_view, css="series1", name="in the newest view"),
            Polyline(points=connected, css="series0", name="connected"),
            *drawn,
        ],
        whole_y=True,
    )
    keys = [("series0", "connected"), ("series1", "in the newest view, which begins some rounds later")]
    keys += [key for event, key in _MARKS.items() if any(event == one for _, one, _ in marks)]
    notes = [f"The first {MAX_MARKS} of {len(marks)} marks."] if len(marks) > MAX_MARKS else []
    return chart_panel(picture, *notes, keys=keys)


def _member_lanes(there: RunHistory, lines: list[RoundRecord | StartRecord], start: float) -> Panel:
    """A lane for each of the first members, with its rounds, and one for the lighthouse where it was away."""
    by_member: dict[int, list[RoundRecord]] = {}
    for line in lines:
        if isinstance(line, RoundRecord):
            by_member.setdefault(line.member, []).append(line)
    begun = {(line.member, line.first): line for line in lines if isinstance(line, StartRecord)}
    lanes = []
    for member, segments in sorted(there.present.items())[:MAX_LANES]:
        pieces = []
        own = sorted(by_member.get(member, []), key=lambda line: line.at)
        done = [(line.at - line.seconds, line.at) for line in own]
        for since, until in (gap for segment in segments for gap in _without(segment, done)):
            pieces.append(LaneSegment(start=since - start, end=until - start, css="away", row=0, hint="waits,"))
        for line in own:
            first = begun.get((member, line.round))
            donor = f", with the state of {there.name(first.donor)}" if first is not None and first.donor >= 0 else ""
            hint = f"round {line.round}{donor}: {line.outcome},"
            css = _LOOKS.get(line.outcome, "blocked")
            at = line.at - start
            pieces.append(LaneSegment(start=max(at - line.seconds, 0.0), end=at, css=css, row=0, hint=hint))
        lanes.append(Lane(label=there.name(member), segments=pieces))
    if there.outages:
        away = [
            LaneSegment(start=since - start, end=until - start, css="other", row=0, hint="the lighthouse is away,")
            for since, until in there.outages
        ]
        lanes.append(Lane(label="lighthouse", segments=away))
    title = "Lanes of members"
    end = there.end - start
    picture = Lanes(title=title, x_label="seconds since the first one joined", start=0.0, end=end, lanes=lanes)
    notes = ["A lane ends where its worker died, left, or was cut off."]
    if len(there.present) > MAX_LANES:
        notes.append(f"The first {MAX_LANES} of {len(there.present)} members.")
    drawn = {piece.css for lane in lanes for piece in lane.segments}
    return Panel(heading=title, picture=picture, keys=[key for key in _KEYS if key[0] in drawn], notes=notes)


def _without(segment: tuple[float, float], done: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What of a span of time is in none of `done`, which are in order."""
    since, until = segment
    for begins, ends in done:
        if begins > since and ends <= until:
            yield since, begins
        since = max(since, ends)
    if since < until:
        yield since, until


def _entry(value: Any) -> dict[str, Any]:
    """A line of the journal, as far as it is read here. ValueError where it is none."""
    at, event = value["at"], value["event"]
    if finite(at) is None or not isinstance(event, str):
        raise ValueError("no entry")
    read_history([value])
    return value


def _usable(path: Path, read: Callable[[Any], T]) -> Iterator[T]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield read(parse_json(line))
            except (ValueError, TypeError, KeyError):
                continue

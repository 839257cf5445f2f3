"""The page of a run whose workers come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isles.report import read_run, run_report, write_picture
from isles.report.elastic import elastic_panels
from isles.report.page import format_counts, format_link_bytes, format_rejections
from isles.report.panels import Chart, Lanes


def line(member: int, round: int, at: float, outcome: str = "whole", seconds: float = 10.0) -> dict[str, Any]:
    told = {"member": member, "round": round, "view": 0, "spare": 0, "steps": 5, "seconds": seconds}
    return {**told, "members": [member], "outcome": outcome, "at": at}


def view(number: int, *members: int) -> dict[str, Any]:
    return {"number": number, "since": 3 * number + 1, "members": list(members)}


ENTRIES = [
    {"event": "join", "member": 0, "at": 1000.0},
    {"event": "join", "member": 1, "at": 1000.0},
    {"event": "view", "view": view(0, 0, 1), "at": 1000.0},
    {"event": "lost", "member": 1, "at": 1030.0},
    {"event": "restart", "at": 1040.0},
    {"event": "join", "member": 2, "at": 1050.0},
    {"event": "view", "view": view(1, 0, 2), "at": 1060.0},
]
LINES = [
    line(0, 1, 1010.0),
    line(1, 1, 1010.0),
    line(0, 2, 1025.0, "PeerLost"),
    line(0, 3, 1035.0, "late"),
    {"member": 2, "first": 4, "donor": 0, "copied": 3, "has": 3, "size": 500, "at": 1061.0},
    line(2, 4, 1075.0),
]


def written(folder: Path, entries: list[Any], lines: list[Any], summary: dict[str, Any] | None = None) -> Path:
    for name, rows in (("members", entries), ("exchanges", lines)):
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "summary.json").write_text(json.dumps(summary or {"method": "noloco"}))
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_members_and_seats(tmp_path: Path) -> None:
    members, by_member = elastic_panels(read_run(written(tmp_path, ENTRIES, LINES)))
    assert isinstance(members.picture, Chart) and isinstance(by_member.picture, Lanes)
    in_view, connected, *marks = (one.points for one in members.picture.lines)
    assert marks == [[(30.0, 0.0), (30.0, 2.0)], [(40.0, 0.0), (40.0, 2.0)], [(50.0, 0.0), (50.0, 2.0)]]
    assert connected[-1] == (75.0, 2.0) and (30.0, 1.0) in connected and (50.0, 2.0) in connected
    assert in_view[-1] == (75.0, 2.0)
    lanes = {lane.label: [(s.start, s.end, s.css) for s in lane.segments] for lane in by_member.picture.lanes}
    assert list(lanes) == ["member 0", "member 1", "member 2", "lighthouse"]
    assert lanes["member 1"] == [(10.0, 30.0, "away"), (0.0, 10.0, "compute")]
    assert lanes["member 0"][-2:] == [(15.0, 25.0, "blocked"), (25.0, 35.0, "transfer")]
    assert lanes["member 2"] == [(50.0, 65.0, "away"), (65.0, 75.0, "compute")]
    assert lanes["lighthouse"] == [(30.0, 40.0, "other")]
    hints = [piece.hint for lane in by_member.picture.lanes for piece in lane.segments]
    assert "round 4, with the state of member 0: whole," in hints


def test_the_page_says_what_happened(tmp_path: Path) -> None:
    links = {"direct": 2_000_000, "relayed": 1000, "relayed_here": 1100, "pairs": [{"by": 0}]}
    refused = [{"by": -1, "member": 3, "reason": "<b>no numbers</b>", "times": 4}]
    summary = {"method": "noloco", "goodput": 0.953, "outcomes": {"whole": 7, "alone": 2}, "outages": 1}
    page = run_report(read_run(written(tmp_path, ENTRIES, LINES, {**summary, "links": links, "refused": refused}))).page
    for words in ("95.3 %", "whole 7, alone 2", "direct 2.00 MB, relayed 1.00 kB", "member 3, 4 times", "member 2"):
        assert words in page
    assert "<b>no numbers" not in page
    assert write_picture(tmp_path).stat().st_size > 10_000


@pytest.mark.parametrize(
    "entries",
    [
        ["nonsense", "{}", "[]", '{"at": "x", "event": "join"}', '{"at": 1, "event": "view"}'],
        [{"event": "view", "view": {"number": 0, "since": [], "members": 3}, "at": 1.0}],
        [{"event": "join", "member": [1], "at": 1.0}, {"event": "decision", "decision": {}, "at": 2.0}],
        [{"event": "join", "member": 1, "at": float("nan")}],
    ],
)
def test_damaged_records_are_left_out(tmp_path: Path, entries: list[Any]) -> None:
    assert elastic_panels(read_run(written(tmp_path, entries, ["", '{"member": 1}']))) == []


def test_whatever_a_summary_holds_is_shown() -> None:
    assert format_counts("three") == '"three"' and format_counts({}) == "nothing"
    assert format_link_bytes({"direct": None}) == '{"direct": null}'
    assert format_rejections([1]) == "[1]" and format_rejections([]) == "nothing"
    assert format_rejections([{"times": "x"}]).startswith("member None, x times")

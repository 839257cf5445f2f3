"""The record of spans: bounded, and in agreement with the totals of the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from isles.comm.traffic import MAX_SPANS, ClockSpan, Traffic
from isles.running.run import launch
from isles.training.records import timeline
from isles.training.records.timeline import Timeline
from tests.training.runs import Told, lines_of, run, tiny, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def test_traffic_keeps_the_newest_spans_until_they_are_taken() -> None:
    traffic = Traffic()
    for number in range(MAX_SPANS + 5):
        traffic.waited("outer", number, number + 0.5)
    traffic.transfer("inner", 0.0, 9.0)
    taken = traffic.take_spans()
    assert len(taken) == MAX_SPANS and taken[-1] == ClockSpan("transfer", "inner", 0.0, 9.0)
    assert traffic.take_spans() == []
    assert traffic["outer"].blocked_seconds == (MAX_SPANS + 5) / 2  # totals forget nothing


def test_a_wait_begins_when_the_device_has_nothing_left_to_do() -> None:
    """Marked waits of 4 s from 10 s: at a mark that the device comes to at 9 s, 12 s, 20 s."""
    traffic = Traffic()
    for mark in (9.0, 12.0, 20.0):
        traffic.waited("outer", 10.0, 14.0, mark)
    assert traffic["outer"].blocked_seconds == 12.0 and traffic.take_spans() == []
    traffic.settle(lambda mark: mark)
    traffic.settle(lambda mark: mark)
    assert traffic["outer"].blocked_seconds == 4.0 + 2.0 + 0.0
    assert [(span.start, span.end) for span in traffic.take_spans()] == [(10.0, 14.0), (12.0, 14.0), (14.0, 14.0)]


def test_steps_in_a_row_are_one_stretch() -> None:
    """A pause of more than a tenth of a step ends it; what is told is in the order of the ends, rounded to 1 us."""
    record = Timeline(3)
    for start in (0.0, 1.0, 2.05, 5.0):
        record.step(start, start + 1.0)
    assert record.take(4, [ClockSpan("blocked", "outer", 2.5, 2.75)], 10.0) == []
    told = [(r["kind"], r["start"], r["end"]) for r in record.rest()]
    assert told == [("blocked", 12.5, 12.75), ("compute", 10.0, 13.05), ("compute", 15.0, 16.0)]
    assert record.rest() == []


def test_the_first_and_the_last_spans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 5)
    record = Timeline(0)
    told = []
    for step in range(1, 21):
        record.step(2.0 * step, 2.0 * step + 1)
        told += record.take(step, [], 0.0)
    assert [r["step"] for r in told] == [1, 2, 3, 4, 5]
    assert [r["step"] for r in record.rest()][-1] == 20


def test_a_resumed_worker_adds_no_second_beginning() -> None:
    record = Timeline(0, resumed=True)
    record.step(0.0, 1.0)
    assert record.take(1, [], 0.0) == [] and len(record.rest()) == 1


@pytest.mark.parametrize(("name", "rounds"), [("none", 0), ("ddp", 6), ("diloco", 2), ("noloco", 2)])
def test_spans_agree_with_the_totals(text: Path, tmp_path: Path, name: str, rounds: int) -> None:
    """On the virtual clock to the rounding: computing, waiting, and one transfer a message of the method."""
    summary = run(tiny(text, method=name, workers=2), tmp_path / "run")
    spans = lines_of(tmp_path / "run" / "timeline.jsonl")
    assert all(set(s) == {"step", "worker", "kind", "channel", "start", "end"} for s in spans)
    assert all(0 <= s["start"] <= s["end"] <= summary["virtual_seconds"] + 1e-5 for s in spans)

    def seconds(kind: str, *channels: str) -> float:
        return math.fsum(s["end"] - s["start"] for s in spans if s["kind"] == kind and s["channel"] in channels) / 2

    assert seconds("blocked", "outer", "inner") == pytest.approx(summary["blocked_seconds"], abs=1e-4)
    busy = seconds("compute", "")
    within = summary["compute_seconds"] + summary["blocked_seconds"]
    assert summary["compute_seconds"] - 1e-4 <= busy <= within + 1e-4
    transfers = [s for s in spans if s["kind"] == "transfer" and s["channel"] == "outer" and s["worker"] == 0]
    per_round = 2 if name == "noloco" else 1  # the outer gradient and, after the first round, the anchors sent ahead
    assert len(transfers) == rounds * per_round


def test_what_lies_beyond_the_checkpoint_is_cut(text: Path, tmp_path: Path) -> None:
    """Resumed, the record is that of the run that never stopped: nothing twice, on the same clock."""
    out, told = tmp_path / "run", Told()
    config = tiny(text, "run.checkpoint_every=4", "run.log_every=1", method="ddp", steps=8)
    run(config, out)
    whole = lines_of(out / "timeline.jsonl")
    (out / "summary.json").unlink()
    launch(config, out, told.lines.append, told.notices.append, resume=4)
    resumed = [span for span in lines_of(out / "timeline.jsonl") if span["channel"] != "control"]  # it begins again
    assert sorted(map(str, resumed)) == sorted(str(span) for span in whole if span["channel"] != "control")

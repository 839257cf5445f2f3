"""Recomputes the totals of a run whose workers came and went from its files, beside the code that writes them."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from isles.report.charts import bytes_panel
from isles.report.page import FIELDS, run_report
from isles.report.panels import Chart
from isles.report.rundir import read_run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_the_model(rounds: list[dict[str, Any]], starts: list[dict[str, Any]], model: set[int]) -> int:
    """Inner steps in the last weights of the members `model`: sets of the places of `rounds`, moved by hand."""
    has: dict[int, set[int]] = {}
    after: dict[tuple[int, int], set[int]] = {}
    for round in sorted({one["round"] for one in rounds}):
        own = [(place, one) for place, one in enumerate(rounds) if one["round"] == round]
        for member in {one["member"] for _, one in own}:
            begun = [one for one in starts if (one["member"], one["first"]) == (member, round)]
            if begun:
                has[member] = set(after.get((begun[0]["donor"], begun[0]["has"]), set()))
        for place, one in own:
            has.setdefault(one["member"], set()).add(place)
        before = {member: set(places) for member, places in has.items()}
        for _, one in own:
            for other in one["members"] if one["outcome"] in ("whole", "late") else ():
                has[one["member"]] |= before.get(other, set())
        after |= {(member, round): set(places) for member, places in has.items()}
    return sum(rounds[place]["steps"] for place in set().union(*(has.get(member, set()) for member in model)))


def agree(out: Path, *, tokens_a_step: int, model: set[int], simulated: bool = False) -> dict[str, Any]:
    """Assert that metrics.jsonl, exchanges.jsonl, members.jsonl, summary.json and the page of the run in `out` say the
    same; returns the summary. model: members whose weights the model is made of.
    """
    summary = json.loads((out / "summary.json").read_text())
    metrics = [line for line in lines(out / "metrics.jsonl") if "worker" in line]
    exchanged = lines(out / "exchanges.jsonl")
    rounds, starts = ([one for one in exchanged if ("outcome" in one) == which] for which in (True, False))
    journal = lines(out / "members.jsonl")
    journal = journal[: next((at for at, one in enumerate(journal) if one["event"] == "end"), len(journal))]

    last: dict[int, dict[str, Any]] = {}
    for line in metrics:
        before = last.get(line["worker"], dict.fromkeys(line, 0))
        assert all(line[key] >= before[key] for key in ("tokens", "bytes_sent", "bytes_received", "compute_seconds"))
        last[line["worker"]] = line
    assert summary["workers"] == len(last)
    for way in ("bytes_sent", "bytes_received"):
        assert summary[f"{way}_per_worker"] * len(last) == pytest.approx(sum(one[way] for one in last.values()))
        assert sum(one[way] for one in summary["channels"].values()) == pytest.approx(summary[f"{way}_per_worker"])

    steps = Counter[int]()
    for one in rounds:
        steps[one["member"]] += one["steps"]
    assert summary["inner_steps"] == steps.total() and summary["tokens"] == steps.total() * tokens_a_step
    assert all(one["tokens"] <= steps[member] * tokens_a_step for member, one in last.items())
    assert all(last[member]["tokens"] == steps[member] * tokens_a_step for member in model)
    assert summary["rounds"] == len(rounds) and summary["outcomes"] == Counter(one["outcome"] for one in rounds)
    counted = in_the_model(rounds, starts, model)
    assert summary["inner_steps_counted"] == counted

    events, left = Counter[str](), set[int]()
    for one in journal:
        events["gone" if one["event"] == "lost" and one["member"] in left else one["event"]] += 1
        left |= {one["member"]} if one["event"] == "leave" else set()
    names = {"joins": "join", "losses": "lost", "leaves": "leave", "views": "view", "outages": "restart"}
    assert {key: summary[key] for key in names} == {key: events[event] for key, event in names.items()}
    if not simulated:
        assert 0 <= summary["wall_seconds"] - (journal[-1]["at"] - journal[0]["at"]) < 60
        computed = sum(one["seconds"] for one in rounds)
        assert summary["work_lost"] == pytest.approx(1 - counted / steps.total()) and computed > 0

    run = read_run(out)
    page, forms = run_report(run).page, {key: form for key, _, form in FIELDS}
    shown = dict(re.findall(r'<tr data-key="(.*?)">.*?<td>(.*?)(?:<small>|</td>)', page))
    assert all(unescape(shown[key]) == forms[key](value) for key, value in summary.items() if value is not None)
    assert "disagree" not in page and "_" not in "".join(re.findall(r'<th scope="row">(.*?)</th>', page))
    panel = bytes_panel(run)
    if panel is not None and isinstance(panel.picture, Chart):
        mean = [y for _, y in next(line.points for line in panel.picture.lines if line.css == "mean")]
        assert mean == sorted(mean) and mean[-1] == pytest.approx(summary["bytes_sent_per_worker"])
    return summary

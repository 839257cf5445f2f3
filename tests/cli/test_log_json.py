"""`--log json`: an object a line on stdout, in place of progress, notes, tables and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command, eventually, in_process
from tests.membership.sessions import free_port
from tests.training.runs import TINY, metrics, write_folder, write_text

Events = list[dict[str, Any]]
Answer = Callable[..., tuple[int, Events]]
TRAIN = ["train", *(word for one in ("data.path=text.txt", "replicas.sync_every=3", *TINY) for word in ("--set", one))]


def read(out: str, error: str) -> Events:
    """The events, which are all that was printed; each has a time, in order."""
    events = [json.loads(line) for line in out.splitlines()]
    times = [datetime.fromisoformat(event["time"]) for event in events]
    assert error == "" and times == sorted(times) and all(at.tzinfo is not None for at in times), (out, error)
    return events


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    write_text(tmp_path / "text.txt")
    command = in_process(tmp_path, monkeypatch, capfd)

    def ask(*words: str) -> tuple[int, Events]:
        code, out, error = command(*words, "--log", "json")
        return code, read(out, error)

    return ask


def test_a_run_and_its_resume(answer: Answer) -> None:
    words = ["--workers", "2", "--set", "run.checkpoint_every=6", "--set", "replicas.gamma=1.9"]
    code, events = answer(*TRAIN, *words, "--steps", "6", "--out", "run")
    assert code == 0
    assert events[0]["event"] == "notice" and events[0]["text"].startswith("device: 2 workers on cpu")
    assert any("gamma = 1.9" in event["text"] for event in events if event["event"] == "notice")
    steps = [event for event in events if event["event"] == "step"]
    assert [(event["step"], event["steps"], event["workers"]) for event in steps] == [(n, 6, 2) for n in (2, 4, 6)]
    for event in steps:
        lines = [line for line in metrics(Path("run")) if line["step"] == event["step"]]
        assert event["loss"] == pytest.approx(sum(line["loss"] for line in lines) / 2, abs=1e-12)
        assert event["tokens"] == sum(line["tokens"] for line in lines)
    assert steps[0]["tokens_per_second"] is None and all(event["tokens_per_second"] > 0 for event in steps[1:])
    end = events[-1]
    summary = json.loads(Path("run/summary.json").read_text())
    assert (end["event"], end["run"], end["report"]) == ("end", "run", "run/report.html")
    assert {key: end[key] for key in summary} == summary
    code, events = answer("resume", "run", "--steps", "8")
    assert code == 0 and any(event.get("text") == "resuming run after step 6" for event in events)
    assert [event["step"] for event in events if event["event"] == "step"] == [8]
    code, events = answer("resume", "run")
    assert code == 2 and [(event["event"], event["level"]) for event in events] == [("notice", "error")]
    assert events[0]["text"].startswith("run: this run is complete")
    code, events = answer("train", "--dry-run")
    assert code == 2 and "--json prints the plan" in events[0]["text"]


@pytest.mark.long
def test_a_lighthouse_and_a_worker_that_joins(tmp_path: Path) -> None:
    folder, port = write_folder(tmp_path), str(free_port())
    words = ["lighthouse", "tiny.toml", "--host", "127.0.0.1", "--port", port, "--workers", "1", "--founders", "2"]
    commands = [Command(*words, "--set", "run.steps=12", "--out", "run", "--log", "json", folder=folder)]
    token = "run/credentials/token"
    try:
        assert eventually((folder / token).exists)
        joins = ["join", f"127.0.0.1:{port}", "--token", f"@{token}", "--data", "text.txt", "--log", "json"]
        commands.append(Command(*joins, folder=folder))
        for command, kinds in zip(commands, ({"notice", "step", "end"}, {"notice", "end"}), strict=True):
            code, out, error = command.end()
            events = read(out, error)
            assert code == 0 and events[-1]["event"] == "end" and {event["event"] for event in events} == kinds
    finally:
        for process in [process for command in commands for process in command.left()]:
            process.kill()

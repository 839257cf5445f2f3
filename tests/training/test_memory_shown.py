"""What is said of a plan of memory before a run: by --dry-run, with the clock of its machine."""

from __future__ import annotations

import json

import pytest

from isles.cli import plan_printer as shown
from isles.plan.run_plan import plan_run
from isles.training.memory.plans import prepared
from tests.training.test_memory import _config

WORDS = ["memory.method=auto", "memory.machine=RTX 3060", "memory.device_budget=2MB"]


def test_a_dry_run_shows_the_plan_and_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(*WORDS)
    plan = prepared(config)[2]
    found = plan_run(config)
    assert found.placed == plan
    assert found.step_seconds == plan.step  # the clock's, not that of [world]
    assert json.loads(json.dumps(found.as_json()))["placed"]["peak"] == plan.peak
    shown.show(config, probe=False, as_json=False)
    told = capsys.readouterr().out
    assert f"blocks      {plan.short} (auto, exact updates)" in told
    assert "on RTX 3060, simulated" in told


def test_a_dry_run_without_a_plan_says_nothing_of_one() -> None:
    assert plan_run(_config()).as_json()["placed"] is None

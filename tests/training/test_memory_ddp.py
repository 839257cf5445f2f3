"""Data parallel under a plan of memory: when gradients are delivered, and what is measured."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import isles
from isles.memory.costs import Placement
from isles.memory.engines.inline import Inline
from isles.replicas.replica import Plain
from isles.training.config.reading import read_config
from isles.training.running.run import launch
from tests.memory.loops import UNITS
from tests.training.test_memory import PLANS, _worker

PLANS.setdefault("kept", (Placement("host", "keep"),) * UNITS)


def _ddp(plan: str | None) -> list[tuple[Any, ...]]:
    return isles.run_virtual(lambda world: _worker(world, "ddp", plan, 2, 2), workers=2)


class _LateGradients(Inline):
    """What goes down arrives at the next wait: as late as it may. A lane that does its work at once, as that of the
    virtual backend, has delivered all before `no_sync` ends, and no mutant of `no_sync` can show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], None]] = []

    def submit(self, lane: Any, urgency: Any, seconds: float, work: Any, done: Any) -> None:
        now = partial(super().submit, lane, urgency, seconds, work, done)
        self.late.append(now) if lane == "down" else now()

    def wait_for(self, event: Any, what: str) -> None:
        late, self.late = self.late, []
        for run in late:
            run()
        assert event.happened, what


def test_gradients_delivered_after_no_sync_travel_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The house's DDP sends a bucket again that a later backward pass has changed, so such a mutant keeps the bits; but
    it is told, and it shows in the bytes, which a plan must not change.
    """
    wanted = _ddp(None)
    monkeypatch.setattr("tests.training.test_memory.Inline", _LateGradients)
    assert [one[3] for one in _ddp("kept")] == [one[3] for one in wanted]

    @contextmanager
    def late(self: Plain) -> Iterator[None]:
        yield  # without self.gradients()

    monkeypatch.setattr(Plain, "no_sync", late)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = _ddp("kept")
    assert any("travel twice" in str(one.message) for one in told)
    for plain, mutant in zip(wanted, got, strict=True):
        assert all(map(torch.equal, mutant[1], plain[1]))
        assert mutant[3] > plain[3]  # what test_every_method_keeps_its_bits asserts to be equal


def test_what_ddp_holds_on_the_host_is_not_the_device_s(tmp_path: Path) -> None:
    words = [
        "model.d_model=64",
        "model.layers=4",
        "model.context=32",
        "data.batch_size=2",
        "world.backend=virtual",
        "world.workers=2",
        "run.steps=3",
        "memory.machine=RTX 3060",
        "replicas.bucket_megabytes=0.1",
    ]
    config = read_config(None, {"replicas.method": "ddp", "memory.method": "auto"}, words)
    launch(config, tmp_path, lambda line: None, lambda notice: None)
    told = json.loads((tmp_path / "summary.json").read_text())["memory"]
    assert 0.9 * told["planned_peak_bytes"] <= told["measured_peak_bytes"] <= told["planned_peak_bytes"]

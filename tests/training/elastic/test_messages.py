"""Real training through random joins, deaths, leaves, pauses and outages on the virtual clock: what became of every
message, and that the same comes of it twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from isles.training.simulated_churn import SimulatedElasticRun
from tests.training.elastic.accounting import AccountedWire, accounted
from tests.training.elastic.test_simulated import churned, small
from tests.training.elastic.traces import random_trace

REASONS = {"PeerLost", "DeadlinePassed", "Elsewhere", "RoundClosed"}


def run_through(
    folder: Path, method: str, *, most: int, events: int, seed: int, name: str = "run"
) -> SimulatedElasticRun:
    """Of messages whose round was over where they came, one end at least must know what ended its part in it."""
    founders, spacing = most // 2, 60.0 / most
    trace = random_trace(founders=founders, most=most, events=events, spacing=spacing, seed=seed)
    steps = 2 * (int(trace[-1].at / 20.0) + 12)
    with accounted():
        run = churned(small(folder, founders, steps, method=method), trace, folder, name)
    wire = wire_of(run)
    assert {wire.why(one.source, one.target, one.tag) for one in wire.late} <= REASONS
    return run


def wire_of(run: SimulatedElasticRun) -> AccountedWire:
    wire = run.simulation.wire
    assert isinstance(wire, AccountedWire)
    return wire


def check(run: SimulatedElasticRun) -> None:
    """It ended with all who are there; every message was received, or a loss or a deadline ended its exchange."""
    assert run.simulation.membership is not None
    assert set(run.simulation.membership.view.members) <= set(run.results)
    wire = wire_of(run)
    assert wire.under_way() == 0
    assert set(wire.missed) <= REASONS
    assert {wire.why(one.source, one.target, one.tag) for one in wire.unclaimed()} <= REASONS
    assert wire.received > 0.5 * wire.sent
    assert run.simulation.counts["deaths"] and run.simulation.counts["outages"] and run.simulation.counts["pauses"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["diloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_every_message_has_a_fate(tmp_path: Path, method: str) -> None:
    check(run_through(tmp_path, method, most=8, events=50, seed=1))


@pytest.mark.long
@pytest.mark.parametrize("method", ["noloco", "diloco"])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("events", [200, 1000])
def test_hundreds_of_events_are_the_same_twice(tmp_path: Path, method: str, seed: int, events: int) -> None:
    """No two members ever differ; the first seed is done again."""
    one = run_through(tmp_path, method, most=64, events=events, seed=seed, name="one")
    check(one)
    wire = wire_of(one)
    print(f"{method}, seed {seed}: {dict(one.simulation.counts)}, {one.summary['outcomes']}")
    print(f"bytes: {wire.sent} sent, {wire.received} received, {dict(wire.missed)} missed")
    if seed > 1:
        return
    two = run_through(tmp_path, method, most=64, events=events, seed=seed, name="two")
    assert one.records == two.records and one.simulation.journal == two.simulation.journal
    first, second = (load_file(run.out / "model.safetensors") for run in (one, two))
    assert all((first[name] == second[name]).all() for name in first)

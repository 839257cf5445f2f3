"""Runs whose workers come and go on the virtual clock: real training through traces of every kind."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from isles.data import Loader, load_corpus
from isles.data.order import rows
from isles.membership.data_ledger import batches
from isles.membership.messages import from_plain
from isles.membership.run_log import RoundRecord, StartRecord
from isles.network.churn import ChurnEvent, rate_of, write_trace
from isles.plan.worker_classes import churn_costs
from isles.training.config.reading import over, resolve
from isles.training.config.sections import Config
from isles.training.elastic.metrics import recorded
from isles.training.elastic.support import going_on
from isles.training.records.saved_run import load_saved
from isles.training.simulated_churn import SimulatedElasticRun, trace_of

SMALL: dict[str, Any] = {"layers": 1, "d_model": 16, "heads": 2, "context": 16}


def small(
    folder: Path,
    workers: int,
    steps: int,
    *,
    every: int = 2,
    method: str = "noloco",
    model: dict[str, Any] = SMALL,
    **world: Any,
) -> Config:
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog; nobody else does. " * 300)
    tables = {
        "model": model,
        "data": {"path": str(text), "batch_size": 2, "validation_sequences": 8},
        "replicas": {"method": method, "sync_every": every},
        "run": {"steps": steps, "log_every": every},
        "world": over({"backend": "virtual", "workers": workers, "virtual": {"step_seconds": 10.0}}, world),
    }
    return going_on(resolve(tables))


def churned(config: Config, trace: list[ChurnEvent], folder: Path, name: str = "run") -> SimulatedElasticRun:
    file = folder / f"{name}.jsonl"
    write_trace(trace, str(file))
    run = SimulatedElasticRun(config, str(file), folder / name, lambda line: None, lambda notice: None)
    run.run()
    return run


def read_by(out: Path, lines: list[Any]) -> list[int]:
    """The place in the data's order of the first row of each batch that was read in turn."""
    entries, _ = recorded(out)
    views = {v.number: v for v in (from_plain(entry["view"]) for entry in entries if entry["event"] == "view")}
    found = []
    for line in lines:
        if isinstance(line, RoundRecord) and line.view >= 0:
            place = views[line.view].index(line.member)
            assert place is not None
            found += [int(rows(*one, batch_size=1)[0]) for one in batches(views, views[line.view], line.round, place)]
    return found


EVERYTHING = [
    ChurnEvent(30.0, "join", 2),
    ChurnEvent(65.0, "kill", 1),
    ChurnEvent(71.0, "pause", 2),
    ChurnEvent(90.0, "lighthouse", 25.0),
    ChurnEvent(133.0, "resume", 2),
    ChurnEvent(150.0, "leave", 0),
    ChurnEvent(200.0, "join", 1),
    ChurnEvent(220.0, "pause", 3),
    ChurnEvent(221.0, "resume", 3),
]


def test_joins_deaths_pauses_leaves_and_outages(tmp_path: Path) -> None:
    """It ends; who is left has done the last round, and what was read is read once. That it is the same twice: see
    test_late.py, test_messages.py and test_replay.py.
    """
    config = small(tmp_path, 4, 40)
    one = churned(config, EVERYTHING, tmp_path, "one")
    assert one.simulation.counts == {"deaths": 1, "pauses": 2, "outages": 1, "leaves": 1}
    assert set(one.results) == {2, 3, 4, 5, 6} == set(one.simulation.membership.view.members)

    _, lines = recorded(one.out)
    starts = {line.member: line for line in lines if isinstance(line, StartRecord)}
    assert all(starts[member].donor >= 0 and starts[member].size > 0 for member in (4, 5, 6))
    rounds = [line for line in lines if isinstance(line, RoundRecord)]
    assert max(line.round for line in rounds if line.member == 0) < 20  # it left
    assert max(line.round for line in rounds if line.member == 1) <= 3  # it died
    for member in (4, 5, 6):  # a joiner keeps step with the others: it meets them in its first rounds
        own = sorted((line for line in rounds if line.member == member), key=lambda line: line.round)
        assert [line.round for line in own] == list(range(own[0].round, 21))
        assert "whole" in {line.outcome for line in own[:4]}

    positions = read_by(one.out, lines)
    twice = len(positions) - len(set(positions))
    assert twice <= config.replicas.sync_every * 3  # a cell a loss: one death and one long pause, seen by few
    assert one.summary["inner_steps_counted"] <= len(set(positions))
    assert 0.5 < one.summary["goodput"] < 1.0

    model, text = load_saved(one.out, device="cpu").model, load_corpus(config.data)
    windows = [*Loader(text, config.data, context=16).validation_batches()]
    with torch.no_grad():  # of the one model that is written, not of a member's own
        loss = float(torch.cat([model(row[None]).loss[None] for batch in windows for row in batch]).mean())
    assert one.summary["val_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_joiner_takes_the_state_of_both_inner_optimizers(tmp_path: Path) -> None:
    """Muon keeps one tensor for each matrix of the blocks where AdamW keeps two and a step count."""
    sizes = dict[str, int]()
    for kind in ("adamw", "muon"):
        config = small(tmp_path, 2, 12, method="diloco", model=SMALL | {"ffn": 24})
        config = replace(config, inner=replace(config.inner, optimizer=kind))
        run = churned(config, [ChurnEvent(30.0, "join", 1)], tmp_path, kind)
        assert set(run.results) == {0, 1, 2}
        sizes[kind] = next(line.size for line in recorded(run.out)[1] if isinstance(line, StartRecord) and line.size)
    entries = 3 * 16 * 16 + 16 * 16 + 3 * 16 * 24
    entries = 3 * 16 * 16 + 16 * 16 + 3 * 16 * 24
    assert 0 < sizes["adamw"] - sizes["muon"] - 4 * (entries + 5) < 3000, sizes  # beside the tensors: their names


def test_without_churn_it_is_the_fixed_world(tmp_path: Path) -> None:
    """Weights to the bit."""
    from isles.running.run import launch

    config = small(tmp_path, 3, 12)
    run = churned(config, [], tmp_path)
    summary = launch(config, tmp_path / "fixed", lambda line: None, lambda notice: None)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "fixed"))
    assert all(np.array_equal(one[name], two[name]) for name in two) and one.keys() == two.keys()
    assert run.summary["val_loss_replicas"] == summary["val_loss_replicas"]
    assert run.summary["goodput"] > 0.99 and run.summary["inner_steps_counted"] == 3 * 12


def test_a_run_ends_whose_last_workers_came_too_late(tmp_path: Path) -> None:
    """All founders die; those who come find no round to begin, and hand in the state that they have."""
    trace = [ChurnEvent(75.0, "join", 1), *(ChurnEvent(95.0 + member, "kill", member) for member in range(2))]
    run = churned(small(tmp_path, 2, 10), trace, tmp_path)
    assert set(run.results) == {2}


def test_who_is_to_leave_while_it_waits_for_its_first_round_does_none(tmp_path: Path) -> None:
    trace = [ChurnEvent(45.0, "join", 1), ChurnEvent(46.0, "leave", 3)]
    run = churned(small(tmp_path, 3, 20), trace, tmp_path)
    _, lines = recorded(run.out)
    assert {line.member for line in lines if isinstance(line, RoundRecord)} == {0, 1, 2} == set(run.results)
    assert run.simulation.membership is not None and run.simulation.membership.view.members == (0, 1, 2)


@pytest.mark.long
def test_who_comes_amid_a_long_first_round_waits_for_its_end(tmp_path: Path) -> None:
    """A round takes 300 s. After the first step its donor's pace is known."""
    said: list[str] = []
    write_trace([ChurnEvent(100.0, "join", 1)], str(tmp_path / "trace.jsonl"))
    config = small(tmp_path, 2, 40, every=4, virtual={"step_seconds": 75.0})
    run = SimulatedElasticRun(config, str(tmp_path / "trace.jsonl"), tmp_path / "run", lambda line: None, said.append)
    run.run()
    assert not any("could not fetch" in line for line in said)
    assert set(run.results) == {0, 1, 2}


@pytest.mark.parametrize(("lease", "views"), [(3.0, 1), (20.0, 0)])
def test_one_that_stands_still_is_gone_after_the_lease(tmp_path: Path, lease: float, views: int) -> None:
    """Ten seconds of it: a new view without it, and none where the lease is longer."""
    config = small(tmp_path, 3, 12, virtual={"step_seconds": 2.0}, elastic={"lease": lease})
    pause = [ChurnEvent(7.0, "pause", 1), ChurnEvent(17.0, "resume", 1)]
    journal = churned(config, pause, tmp_path).simulation.journal
    without = [entry for entry in journal if entry["event"] == "view" and 1 not in entry["view"]["members"]]
    assert len(without) == views


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_whoever_waits_for_one_that_stands_still_is_told(tmp_path: Path, method: str) -> None:
    """Within two seconds, where it would wait for up to ten: the round of 4 s then goes on without it, or ends."""
    config = small(tmp_path, 4, 24, method=method, virtual={"step_seconds": 2.0}, elastic={"lease": 60.0})
    run = churned(config, [ChurnEvent(13.0, "pause", 1), ChurnEvent(21.0, "resume", 1)], tmp_path)
    rounds = [line for line in recorded(run.out)[1] if isinstance(line, RoundRecord) and line.member != 1]
    without = [line for line in rounds if line.outcome == "PeerSilent" or (line.round == 4 and len(line.members) == 3)]
    assert without
    for line in without:
        began = max(other.at for other in rounds if (other.member, other.round) == (line.member, line.round - 1))
        assert line.at - began < 4.0 + 2.0


@pytest.mark.parametrize("still", [6.0, pytest.param(15.0, marks=pytest.mark.long)])
def test_who_comes_back_after_the_others_went_on_does_not_wait_in_its_round(tmp_path: Path, still: float) -> None:
    """Round 7 of two steps of 1 s begins at 12.7 s. Its rest of 1.7 s follows the pause, and then nobody is waited for:
    that round is over for it. It begins anew three rounds later, with a state that it gets within one.
    """
    config = small(tmp_path, 4, 60, method="diloco", virtual={"step_seconds": 1.0})
    run = churned(config, [ChurnEvent(13.0, "pause", 1), ChurnEvent(13.0 + still, "resume", 1)], tmp_path)
    own = [line for line in recorded(run.out)[1] if line.member == 1 and line.at > 13.0]
    assert isinstance(own[0], RoundRecord) and (own[0].round, own[0].outcome) == (7, "alone")
    assert own[0].at == pytest.approx(13.0 + still + 1.7, abs=0.1)
    assert isinstance(own[1], StartRecord) and own[1].at - own[0].at < (1 + 3) * 2.1


def test_whoever_waits_for_one_that_has_no_part_any_more_is_told(tmp_path: Path) -> None:
    """Worker 2 stands still for longer than the lease in round 3, in which the others wait for it: until it is back,
    has done its steps and says that it has no part in that round.
    """
    config = small(tmp_path, 3, 12, method="diloco", virtual={"step_seconds": 10.0})
    run = churned(config, [ChurnEvent(41.0, "pause", 2), ChurnEvent(44.5, "resume", 2)], tmp_path)
    rounds = [line for line in recorded(run.out)[1] if isinstance(line, RoundRecord) and line.round == 3]
    (late,) = [line for line in rounds if line.member == 2]
    assert late.outcome == "alone" and late.at == pytest.approx(60.4 + 3.5, abs=0.3)
    others = [line for line in rounds if line.member != 2]
    assert [line.members for line in others] == [(0, 1)] * 2 and all(line.at - late.at < 0.3 for line in others)


def test_one_that_says_nothing_for_long_is_gone_whatever_the_lease(tmp_path: Path) -> None:
    """25 s of a lease of 60: within 10 s it counts as gone, and as back once it goes on."""
    config = small(tmp_path, 4, 24, virtual={"step_seconds": 2.0}, elastic={"lease": 60.0})
    run = churned(config, [ChurnEvent(13.0, "pause", 1), ChurnEvent(38.0, "resume", 1)], tmp_path)
    told = {entry["event"]: entry["at"] for entry in run.simulation.journal if entry.get("member") == 1}
    assert 22.0 <= told["lost"] <= 24.0 and 38.0 <= told["back"] <= 38.1


def test_nothing_is_saved_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    config = small(tmp_path, 2, 4)
    saving = replace(config, run=replace(config.run, checkpoint_every=2))
    SimulatedElasticRun(saving, "constant", tmp_path / "run", lambda line: None, said.append).run()
    assert any("run.checkpoint_every = 2: such a run of --churn cannot be resumed" in line for line in said)


def test_pools_compute_what_they_plan(tmp_path: Path) -> None:
    config = small(tmp_path, 4, 40)
    done = {}
    for name in ("halving", "doubling"):
        run = SimulatedElasticRun(config, name, tmp_path / name, lambda line: None, lambda notice: None)
        done[name] = run.run()
    assert trace_of(config, "doubling")[0] == 2 and trace_of(config, "halving")[0] == 4
    for name in ("inner_steps", "inner_steps_counted"):
        assert done["halving"][name] == pytest.approx(done["doubling"][name], rel=0.25)  # views come three rounds late


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, 2, 4, virtual={"pause_every": 60.0})
    with pytest.raises(ValueError, match=r"pause_every = 60.0 does not go with --churn: pauses are in the trace"):
        trace_of(config, "10%/h")
    with pytest.raises(ValueError, match=r"max_members = 3 does not go with --churn: the trace has the joiners"):
        trace_of(small(tmp_path, 2, 4, elastic={"max_members": 3}), "10%/h")
    with pytest.raises(ValueError, match=r"--nodes"):
        going_on(resolve({"replicas": {"method": "ddp"}, "world": {"backend": "virtual"}}))


def test_the_records_lines_are_checked() -> None:
    from isles.membership.run_log import read_record

    line = RoundRecord(
        member=1, round=2, view=-1, spare=0, steps=2, seconds=1.0, members=(1, 2), outcome="whole", at=3.5
    )
    assert read_record(json.loads(json.dumps(asdict(line)))) == line
    for bad in (
        {"member": "1"},
        {"members": [True]},
        {"outcome": "a b"},
        {"at": -1.0},
        {"steps": 1 << 60},
    ):
        with pytest.raises(ValueError):
            read_record({**asdict(line), **bad})


@pytest.mark.long(cases=0)
@pytest.mark.parametrize("method", ["noloco", "diloco"])
@pytest.mark.parametrize("churn", ["100%/h", "10%/h"])
def test_churn_costs_what_is_planned(tmp_path: Path, method: str, churn: str) -> None:
    """128 workers of which so many die in an hour: shares of rounds alone and of work lost within a quarter, where
    there are enough deaths for that.
    """
    every, hour = 5, 60
    times = {"step_seconds": 60.0, "links": "home-fibre"}
    config = small(tmp_path, 128, hour, every=every, method=method, virtual=times)
    began = time.process_time()
    summary = SimulatedElasticRun(config, churn, tmp_path / "run", lambda line: None, lambda notice: None).run()
    took = time.process_time() - began
    rate = rate_of(churn)
    assert rate is not None
    planned = churn_costs(
        rate,
        workers=128,
        parameters=summary["parameters"],
        computing=60.0 * every,
        waits=0.0,
        bytes_a_round=0.0,
        rounds=hour // every,
        pairs=method == "noloco",
    )
    found = {
        name: summary[name] for name in ("rounds_alone", "work_lost", "goodput", "state_transfers", "losses", "joins")
    }
    print(method, churn, f"{took:.0f} CPU seconds", found, planned)
    if churn == "10%/h":
        return  # 13 deaths
    assert summary["losses"] > 100
    assert summary["rounds_alone"] == pytest.approx(planned.alone, rel=0.25, abs=0.01)  # where one mean lands, 0
    assert summary["work_lost"] == pytest.approx(planned.lost, rel=0.25)

"""Workers join, leave and are lost in a real run: a lighthouse and workers in threads, over the engine on loopback."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isles.membership.rounds import Decision
from isles.training.config.reading import gather
from isles.training.config.sections import Config
from isles.training.elastic.leader import Participant
from isles.training.elastic.support import elastic
from isles.training.elastic.worker import Decisions, ElasticWorker
from tests.training.elastic.runs import Run
from tests.training.runs import TINY, metrics, run, write_text

EVERY = 5


def small(folder: Path, steps: int, founders: int, *more: str) -> Config:
    settings = [one for one in TINY if not one.startswith("world.backend")]
    settings += [f"data.path={write_text(folder / 'text.txt')}", f"run.steps={steps}", f"world.workers={founders}"]
    settings += ["replicas.method=noloco", f"replicas.sync_every={EVERY}", "run.validate_every=0", *more]
    return elastic(gather(None, {}, settings))


def fixed(config: Config) -> Config:
    return replace(config, world=replace(config.world, backend="virtual"), run=replace(config.run, log_every=EVERY))


def lines_of(records: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[Any, ...]]:
    """By step and worker: loss, rate, tokens."""
    return {(one["step"], one["worker"]): (one["loss"], one["lr"], one["tokens"]) for one in records if "loss" in one}


def test_a_model_of_one_s_own_is_joined_where_it_is_named_here_too(tmp_path: Path) -> None:
    """The lighthouse's word for it is not taken: `isles join ... --set model.factory=...`."""
    tiny = [one for one in TINY if not one.startswith(("world.backend", "model."))]
    text, factory = write_text(tmp_path / "text.txt"), "tests.training.own_models:build"
    more = [f"data.path={text}", f"model.factory={factory}", "model.context=16", "run.steps=5", "world.workers=1"]
    made = elastic(gather(None, {}, [*tiny, *more, "replicas.method=noloco", f"replicas.sync_every={EVERY}"]))
    run = Run(made, tmp_path / "run")
    run.own = {"data": {"path": str(text)}, "model": {"factory": factory}}
    run.join()
    assert run.end()["val_loss"] > 0


INT8 = ("replicas.method=diloco", "replicas.codec=int8", "replicas.error_feedback=local")
LOCAL = ("replicas.method=localsgd",)
LOW_RANK = ("replicas.method=dilocox", "replicas.delay=none")
ROBUST = ("replicas.method=diloco", "replicas.robust=clip")
SPARSE = ("replicas.method=sparseloco",)


@pytest.mark.parametrize(
    ("workers", "listen", "settings"),
    [
        (1, 0, ()),
        (3, 0, ()),
        (2, 2, INT8),
        *(
            pytest.param(workers, 0, settings, marks=pytest.mark.long)
            for workers in (1, 2, 3, 4)
            for settings in (("replicas.method=diloco",), INT8, LOCAL, LOW_RANK, SPARSE, ROBUST)
        ),
    ],
)
def test_without_churn_it_is_the_fixed_world(
    tmp_path: Path, workers: int, listen: int, settings: tuple[str, ...]
) -> None:
    """The same lines, bytes of exchanges and bits of the one model as on the virtual clock, relayed and directly."""
    config = small(tmp_path, 30, workers, *settings)
    whole = run(fixed(config), tmp_path / "fixed")
    world = Run(config, tmp_path / "elastic")
    for number in range(workers):
        world.join(listens=number < listen)
    summary = world.end()
    assert sum(": direct" in line for line in world.notices) == (workers * (workers - 1) if listen else 0)
    assert sum("others reach this worker directly" in line for line in world.notices) == listen
    ours, theirs = lines_of(metrics(tmp_path / "elastic")), lines_of(metrics(tmp_path / "fixed"))
    assert ours == theirs
    sent, should = (one["channels"].get("outer", {"bytes_sent": 0})["bytes_sent"] for one in (summary, whole))
    assert sent == should
    mine, other = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("elastic", "fixed"))
    assert mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)
    assert summary["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-12)
    assert summary["replica_std"] == pytest.approx(whole["replica_std"], rel=1e-4)
    assert summary["ddp_bytes_per_worker"] == whole["ddp_bytes_per_worker"]
    assert summary["refused"] == []


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (out / "members.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == kind]


@pytest.fixture
def leisurely(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 50 ms, or so many seconds, which leave the machine to the others."""
    one_round, seconds = Participant._round, getattr(request, "param", 0.05)

    def slowly(worker: Participant, *place: int) -> Decisions[int]:
        time.sleep(seconds)
        return one_round(worker, *place)

    monkeypatch.setattr(Participant, "_round", slowly)


@pytest.mark.usefixtures("leisurely")
def test_workers_come_and_go(tmp_path: Path) -> None:
    """One vanishes, one comes in its place, one leaves; then all do."""
    config = small(tmp_path, 6000, 3)
    world = Run(config, tmp_path / "run")
    first, second, third = (world.join() for _ in range(3))
    world.until(lambda: min(world.step(number) for number in (first, second, third)) >= 4 * EVERY)
    world.vanish(third)
    gone = world.workers[third].client.member
    world.until(lambda: any(gone not in view["view"]["members"] for view in events(world.out, "view")))
    fourth = world.join()
    world.until(lambda: world.step(fourth) > 0)
    # It begins where the others are, with their weights, and not at the start of the run.
    assert world.step(fourth) > 4 * EVERY
    world.workers[second].leaving.set()
    world.until(lambda: second in world.end_reasons)
    assert world.end_reasons[second] == "left"
    assert len({worker.client.member for worker in world.workers.values()}) == 4  # members are never used twice
    for number in (first, fourth):
        world.workers[number].leaving.set()
    world.until(lambda: {first, fourth} <= world.end_reasons.keys())
    assert world.end_reasons[first] == world.end_reasons[fourth] == "left"
    world.stop()
    world.rest()
    views = [view["view"] for view in events(world.out, "view")]
    assert [view["number"] for view in views] == sorted({view["number"] for view in views})


@pytest.mark.long
@pytest.mark.usefixtures("leisurely")
def test_the_lighthouse_is_put_out_and_lit_again(tmp_path: Path) -> None:
    """Training goes on meanwhile; then all are back in one view, a newcomer too. Once all have gone, a new worker
    begins with the state on the lighthouse's disk.
    """
    world = Run(small(tmp_path, 60_000, 2, "run.checkpoint_every=50"), tmp_path / "run")
    first, second = world.join(), world.join()
    world.until(lambda: list((world.out / "states").glob("step-*/manifest.json")))
    world.stop()
    assert world.summary is None  # stopped, not over
    before = world.step(first)
    world.until(lambda: world.step(first) >= before + 2 * EVERY)  # training does not wait for it
    world.keep()
    third = world.join()
    world.until(lambda: world.step(third) > 0)
    members = {world.workers[number].client.member for number in (first, second, third)}
    world.until(lambda: any(set(view["view"]["members"]) == members for view in events(world.out, "view")))
    for number in (first, second, third):
        world.vanish(number)
    fourth = world.join()
    world.until(lambda: world.step(fourth) > 0)
    assert world.step(fourth) >= 50
    world.workers[fourth].leaving.set()
    world.until(lambda: fourth in world.end_reasons)
    world.stop()
    world.rest()


@pytest.mark.long
@pytest.mark.usefixtures("leisurely")
@pytest.mark.parametrize("listens", [True, False])
def test_exchanges_while_the_lighthouse_is_away(tmp_path: Path, listens: bool) -> None:
    """Directly linked workers go on with each other, all others alone at once."""
    world = Run(small(tmp_path, 60_000, 2), tmp_path / "run")
    pair = [world.join(listens=listens) for _ in range(2)]
    world.until(lambda: min(map(world.step, pair)) >= 10 * EVERY)
    world.stop()

    def messages() -> int:
        return world.workers[pair[0]].transport.traffic["outer"].messages_sent

    before, step = messages(), world.step(pair[0])
    world.until(lambda: world.step(pair[0]) >= step + 20 * EVERY)
    sent = messages() - before
    assert (sent >= 18) if listens else (sent <= 2)
    for number in pair:
        world.workers[number].leaving.set()
    world.rest()
    assert all(world.end_reasons[number] == "left" for number in pair), world.end_reasons


@pytest.mark.long
@pytest.mark.parametrize("leisurely", [0.3], indirect=True)
@pytest.mark.usefixtures("leisurely")
def test_what_a_joiner_begins_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its third round on its distance from the mean of the others is at most twice the largest of theirs."""
    anchors: dict[int, dict[int, Tensor]] = {}

    def noted(worker: ElasticWorker, said: Decision) -> None:
        anchors.setdefault(said.round, {})[worker.member] = worker.optimizer.fragments[0].anchor.clone()
        keep(worker, said)

    keep = ElasticWorker.keep
    monkeypatch.setattr(ElasticWorker, "keep", noted)
    world = Run(small(tmp_path, 6000, 3, "inner.lr=0.002"), tmp_path / "run")
    founders = [world.join() for _ in range(3)]
    world.until(lambda: min(map(world.step, founders)) >= 10 * EVERY)
    joiner = world.join()
    world.until(lambda: world.step(joiner) > 0)
    begun = world.step(joiner) // EVERY
    world.until(lambda: world.step(joiner) >= (begun + 12) * EVERY)
    member = world.workers[joiner].client.member
    for number in range(4):
        world.workers[number].leaving.set()
    world.until(lambda: len(world.end_reasons) == 4)
    world.stop()
    world.rest()
    looked = 0
    for round in range(begun + 2, begun + 12):
        there = anchors[round]
        if member in there and len(there) == 4:
            others = [anchor for other, anchor in there.items() if other != member]
            mean = torch.stack(others).mean(0)
            assert (there[member] - mean).norm() <= 2 * max(float((anchor - mean).norm()) for anchor in others)
            looked += 1
    assert looked > 0

"""Swarms over a lighthouse: the virtual clock's bits, peers that come, are lost and leave, and what is refused."""

from __future__ import annotations

import time
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader
from isles.comm.credentials import parse_token
from isles.membership.messages import RequestWork
from isles.membership.run_log import read_history
from isles.membership.state_transfer import StateUnavailable
from isles.pipeline.peers.inbox import FORWARD, HOME
from isles.training.elastic.connect import LocalSettings
from isles.training.lighthouse import schedule
from isles.training.swarm.connect import take_part
from isles.training.swarm.trainer import ElasticSwarmTrainer
from tests.training.elastic.runs import Run, in_run
from tests.training.elastic.test_runs import events, small
from tests.training.swarm.members import SwarmRun, elastic_config
from tests.training.swarm.test_swarm import ONE, config, furthest, train


def settings(peers: str, steps: int, *more: str) -> list[str]:
    own = [one for one in ONE if not one.startswith(("world.backend", "run."))]
    workers = sum(int(count) for count in peers[1:-1].split(","))
    own += [f"run.steps={steps}", "run.log_every=2", "run.validate_every=0", "inner.max_norm=0", *more]
    return [
        *own,
        "pipeline.routing=swarm",
        f"pipeline.swarm.peers={peers}",
        "pipeline.microbatches=6",
        f"world.workers={workers}",
    ]


@cache
def undisturbed(folder: Path, peers: str, steps: int, *more: str) -> dict[str, Tensor]:
    """The weights of the same run on the virtual clock."""
    return train(config(*settings(peers, steps, *more)), folder / f"virtual-{steps}")[1]


def weights(run: SwarmRun) -> dict[str, Tensor]:
    return load_file(str(run.out / "model.safetensors"))


def states(run: SwarmRun) -> dict[int, set[bytes]]:
    """By stage, what its peers had in the end: one thing, to the bit."""
    trainers = [peer._trainer for number, peer in run.peers.items() if run.end_reasons.get(number) == "finished"]
    found: dict[int, set[bytes]] = {}
    for trainer in trainers:
        assert isinstance(trainer, ElasticSwarmTrainer)
        swarm = trainer.model_step.swarm
        found.setdefault(swarm.stages[swarm.me], set()).add(trainer._state().to_bytes())
    return found


@pytest.mark.parametrize(
    ("peers", "listens"),
    [("[1,1,1]", 2), *(pytest.param(peers, 0, marks=pytest.mark.long) for peers in ("[1,1,1]", "[2,3,2]", "[1,2]"))],
)
def test_over_a_lighthouse_it_is_the_virtual_swarm(tmp_path: Path, peers: str, listens: int) -> None:
    """Where one peer serves a stage to the bit; else up to the order of sums. Directly and relayed."""
    run = SwarmRun(elastic_config(*settings(peers, 6)), tmp_path / "run")
    workers = run.config.world.workers
    for number in range(workers):
        run.join(listens=number < listens)
    summary = run.end()
    distance = furthest(weights(run), undisturbed(tmp_path, peers, 6))
    assert distance == 0 if peers == "[1,1,1]" else distance < 1e-12
    assert (summary["joins"], summary["deaths"], summary["leaves"], summary["begun"]) == (workers, 0, 0, 1)
    assert (summary["workers"], summary["tokens"]) == (workers, 6 * 12 * 16)
    assert (summary["links"]["direct"] > 0) == (listens > 0)
    assert [line["step"] for line in run.lines if line["worker"] == 0] == [2, 4, 6]


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        ["pipeline.swarm.delay_updates=1"],
        ["replicas.method=diloco", "replicas.sync_every=2"],
        ["replicas.method=noloco", "replicas.sync_every=2"],
    ],
)
def test_what_a_swarm_does_otherwise_it_does_over_a_lighthouse(tmp_path: Path, more: list[str]) -> None:
    """To the bit where one peer serves a stage, as in steps that sum gradients."""
    run = SwarmRun(elastic_config(*settings("[1,1,1]", 6, *more)), tmp_path / "run")
    for _ in range(3):
        run.join()
    summary = run.end()
    assert furthest(weights(run), undisturbed(tmp_path, "[1,1,1]", 6, *more)) == 0
    assert furthest(weights(run), undisturbed(tmp_path / "plain", "[1,1,1]", 6)) > 1e-9
    assert (summary["deaths"], summary["begun"]) == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4, 5])
def test_who_comes_and_who_is_lost_change_nothing(tmp_path: Path, lost: int) -> None:
    """A seventh peer comes in the middle, and then one of those that were there is gone without a word."""
    steps = 30
    run = SwarmRun(elastic_config(*settings("[2,2,2]", steps)), tmp_path / "run")
    for number in range(6):
        run.join(number // 2)
    run.until(lambda: run.step(0) > 5)
    comer = run.join()
    run.until(lambda: run.step(comer) > 10)
    run.vanish(lost)
    summary = run.end(120)
    assert furthest(weights(run), undisturbed(tmp_path, "[2,2,2]", steps)) < 1e-9
    assert all(len(found) == 1 for found in states(run).values()) and len(states(run)) == 3
    assert summary["begun"] == 1 and run.end_reasons[comer] == "finished"
    assert (summary["joins"], summary["deaths"]) == (7, 1)


@pytest.mark.long
def test_a_stage_that_has_lost_all_of_its_peers_is_rebuilt_where_that_is_asked_for(tmp_path: Path) -> None:
    """By a peer of another stage, in the same swarm."""
    more = ("pipeline.swarm.stage_lost=rebuild", "pipeline.swarm.stage_patience=2")
    run = SwarmRun(elastic_config(*settings("[2,2,2]", 30, *more)), tmp_path / "run")
    for number in range(6):
        run.join(number // 2)
    run.until(lambda: run.step(0) > 5)
    run.vanish(2)
    run.vanish(3)
    summary = run.end(60)
    assert (summary["deaths"], summary["begun"], summary["workers"]) == (2, 1, 4)
    assert sum(peer._trainer.model_step.rebuilt for number, peer in run.peers.items() if number not in (2, 3)) == 1  # type: ignore[union-attr]
    assert all(len(found) == 1 for found in states(run).values()) and len(states(run)) == 3


@pytest.mark.long
def test_a_stage_that_has_lost_all_of_its_peers_is_begun_again(tmp_path: Path) -> None:
    """From the newest step of which all stages are kept; the others come again by themselves."""
    steps = 30
    run = SwarmRun(elastic_config(*settings("[1,2,1]", steps, "run.checkpoint_every=5")), tmp_path / "run")
    for number in range(4):
        run.join([0, 1, 1, 2][number])
    run.until(lambda: run.keeper.coordinator.saved >= 10)
    run.vanish(3)
    run.until(lambda: run.keeper.coordinator.alive() == [])
    run.join()
    summary = run.end(120)
    assert furthest(weights(run), undisturbed(tmp_path, "[1,2,1]", steps)) < 1e-9
    assert summary["begun"] == 2 and summary["joins"] == 8


@pytest.mark.long
def test_all_and_the_lighthouse_are_lost(tmp_path: Path) -> None:
    """Lit again, it goes on from what it keeps: at most the interval is lost, whenever that is."""
    steps, every = 30, 5
    run = SwarmRun(elastic_config(*settings("[1,1,1]", steps, f"run.checkpoint_every={every}")), tmp_path / "run")
    for stage in range(3):
        run.join(stage, again=False)
    run.until(lambda: run.keeper.coordinator.saved >= 10)
    newest = run.step(0)
    for number in range(3):
        run.vanish(number)
    run.stop()
    kept = run.keeper.coordinator.saved
    assert newest - kept <= every
    run.keep()
    for stage in range(3):
        run.join(stage)
    summary = run.end(120)
    assert furthest(weights(run), undisturbed(tmp_path, "[1,1,1]", steps)) == 0
    assert (summary["begun"], summary["outages"]) == (2, 1)


@pytest.mark.long
def test_no_step_is_further_than_the_interval_from_what_is_kept(tmp_path: Path) -> None:
    """With a lighthouse that takes its time for every state: peers wait for it."""
    every = 4
    run = SwarmRun(elastic_config(*settings("[1,2]", 30, f"run.checkpoint_every={every}")), tmp_path / "run")
    fetch = run.keeper._fetch_state

    def slowly(*of: Any) -> int:
        time.sleep(0.3)
        return fetch(*of)

    run.keeper._fetch_state = slowly  # type: ignore[method-assign]
    for stage in (0, 1, 1):
        run.join(stage)
    seen = set[int]()
    while 0 not in run.end_reasons:
        newest = max(run.step(number) for number in range(3))
        seen.add(newest - run.keeper.coordinator.saved)
        time.sleep(0.001)
    summary = run.end()
    assert max(seen) == every and summary["begun"] == 1
    assert len([*(run.out / "states").iterdir()]) == 2  # of fourteen
    assert furthest(weights(run), undisturbed(tmp_path, "[1,2]", 30)) < 1e-12


@pytest.mark.long
def test_a_lighthouse_that_keeps_nothing_is_not_waited_for_long(tmp_path: Path) -> None:
    """Half of world.pipeline_deadline, once in an interval, and that is said."""
    more = ("run.checkpoint_every=5", "world.pipeline_deadline=4")
    run = SwarmRun(elastic_config(*settings("[1,1]", 12, *more)), tmp_path / "run")

    def nothing(*of: object) -> int:
        raise StateUnavailable("it broke off")

    run.keeper._fetch_state = nothing  # type: ignore[method-assign]
    began = time.monotonic()
    for stage in (0, 1):
        run.join(stage)
    summary = run.end()
    told = [notice for notice in run.notices if "training continues without" in notice]
    assert "of step 1 or later" in told[0] and len(told) >= 2
    assert time.monotonic() - began > 2 * 2.0 and summary["begun"] == 1
    assert furthest(weights(run), undisturbed(tmp_path, "[1,1]", 12)) == 0


@pytest.mark.long
def test_a_directly_linked_swarm_goes_on_without_its_lighthouse(tmp_path: Path) -> None:
    steps = 80
    run = SwarmRun(elastic_config(*settings("[1,2]", steps)), tmp_path / "run")
    for stage in (0, 1, 1):
        run.join(stage, listens=True)
    run.until(lambda: run.step(0) > 3 and sum(": direct" in line for line in run.notices) == 6)
    run.stop()
    before = run.step(0)
    run.until(lambda: run.step(0) > before + 20)
    run.keep()
    comer = run.join()
    run.until(lambda: run.step(comer) > 0)
    summary = run.end(120)
    assert furthest(weights(run), undisturbed(tmp_path, "[1,2]", steps)) < 1e-9
    assert (summary["begun"], summary["outages"], summary["joins"], summary["deaths"]) == (1, 1, 4, 0)


LIES = {
    "kind": "a message of kind 99",
    "length": "with 3 bytes",
    "number": "below 0",
    "another run": "a message of another run, or of another configuration",
    "activations": "not finite",
    "gradients": "not finite",
}


def spoil(trainer: ElasticSwarmTrainer, lie: str, others: set[int]) -> None:
    """Have this peer send it."""
    peer = trainer.model_step.swarm.peer
    work, queue = peer.work, peer.inbox.queue
    honest_forward, honest_backward = work.forward, work.backward

    def forward(*args: Any) -> Any:
        done = honest_forward(*args)
        done.sent = torch.full_like(cast(Tensor, done.sent), 0xFF)  # NaN in every entry
        return done

    def backward(*args: Any) -> Any:
        saved_pass = honest_backward(*args)
        object.__setattr__(saved_pass, "back", torch.full_like(cast(Tensor, saved_pass.back), 0xFF))
        return saved_pass

    if lie == "activations":
        work.forward = forward  # type: ignore[method-assign]
    elif lie == "gradients":
        work.backward = backward  # type: ignore[method-assign]
    elif lie == "another run":
        false = copy(queue)  # it listens no more than the honest one
        false.run += 1
        queue.send = false.send  # type: ignore[method-assign]
    else:
        notes = {
            "kind": MessageHeader(99, 0),
            "length": MessageHeader(FORWARD, 0),
            "number": MessageHeader(HOME, 0, 0, -5),
        }
        body = torch.zeros(3, dtype=torch.uint8) if lie == "length" else None
        for member in others:
            queue.send(member, notes[lie], body)


@pytest.mark.long
@pytest.mark.parametrize("lie", LIES)
def test_who_sends_what_cannot_be_is_named_and_left_out(tmp_path: Path, lie: str) -> None:
    """A peer that is broken, or not honest: the others count it, go on, and come to the same weights."""
    run = SwarmRun(elastic_config(*settings("[1,2,1]", 30)), tmp_path / "run")
    for stage in (0, 1, 1, 2):
        run.join(stage, again=False)
    run.until(lambda: run.step(0) > 2)
    liar = run.peers[1]
    trainer = liar._trainer
    assert trainer is not None
    spoil(trainer, lie, set(range(4)) - {liar.client.member})
    summary = run.end(120)
    assert furthest(weights(run), undisturbed(tmp_path, "[1,2,1]", 30)) < 1e-9
    named = [row for row in summary["refused"] if row["member"] == liar.client.member]
    assert named and all(LIES[lie] in row["reason"] for row in named), summary["refused"]
    assert all(row["member"] == liar.client.member for row in summary["refused"])
    assert run.end_reasons[1] in ("again", "finished") and summary["begun"] == 1  # it may hear of the end first


@pytest.mark.long
def test_each_command_joins_its_own_kind_of_run(tmp_path: Path) -> None:
    run = SwarmRun(elastic_config(*settings("[1,1]", 10)), tmp_path / "run")
    with (
        pytest.raises(ValueError, match="isles swarm peer"),
        in_run(run, LocalSettings()),
    ):
        pass
    run.stop()
    plain = Run(small(tmp_path, 60, 2), tmp_path / "plain")
    here = LocalSettings(own={"data": {"path": str(tmp_path / "text.txt")}})
    with pytest.raises(ValueError, match="join it with isles join"):
        take_part(plain.address, parse_token(plain.token), here, -1, notify=plain.notices.append)
    plain.stop()


def one_line(ending: Any, *words: str) -> None:
    assert isinstance(ending, ValueError) and "\n" not in str(ending)
    assert all(word in str(ending) for word in words), ending


@pytest.mark.long
def test_who_wishes_a_stage_gets_it_and_who_is_asked_to_leaves(tmp_path: Path) -> None:
    """After a step, another one of its stage being there; work in flight is finished."""
    steps = 30
    run = SwarmRun(elastic_config(*settings("[1,1]", steps)), tmp_path / "run")
    for stage in (0, 1):
        run.join(stage)
    run.until(lambda: run.step(0) > 2)
    comer = run.join(0)
    run.until(lambda: run.step(comer) > 0)
    run.until(lambda: run.keeper.coordinator.members.get(run.peers[comer].client.member) == 0)
    run.ask_to_leave(0)
    run.until(lambda: 0 in run.end_reasons)
    summary = run.end(120)
    assert run.end_reasons == {0: "left", 1: "finished", comer: "finished"}
    assert furthest(weights(run), undisturbed(tmp_path, "[1,1]", steps)) < 1e-9
    assert (summary["begun"], summary["leaves"], summary["deaths"]) == (1, 1, 0)


@pytest.mark.long
def test_the_last_of_a_stage_hands_its_state_over(tmp_path: Path) -> None:
    """Nobody can take its place: all give their states, it goes, and the run goes on from there with another one."""
    steps = 30
    run = SwarmRun(elastic_config(*settings("[1,1]", steps)), tmp_path / "run")
    for stage in (0, 1):
        run.join(stage)
    run.until(lambda: run.step(0) > 2)
    run.ask_to_leave(1)
    run.until(lambda: 1 in run.end_reasons)
    assert run.end_reasons[1] == "left" and run.keeper.coordinator.saved == run.step(1) > 0
    run.join()
    summary = run.end(120)
    assert furthest(weights(run), undisturbed(tmp_path, "[1,1]", steps)) == 0
    assert summary["begun"] == 2


def test_a_swarm_that_begins_again_says_from_where(tmp_path: Path) -> None:
    """Of the lighthouse alone: its peers are words to it. Stage 1 loses its peer at step 20, then at 25; at first
    nothing is saved, then the states of step 15.
    """
    run = SwarmRun(elastic_config(*settings("[1,1]", 30)), tmp_path / "run")
    coordinator = run.keeper.coordinator
    for epoch in (1, 2, 3):
        members = [len(coordinator.peers), len(coordinator.peers) + 1]
        calls = [partial(coordinator.disconnected, member=member) for member in reversed(coordinator.members)]
        calls += [partial(coordinator.join, description="") for _ in members]
        calls += [
            partial(coordinator.hear, member=member, message=RequestWork(stage, 7))
            for stage, member in enumerate(members)
        ]
        for call in calls:
            run.keeper.lighthouse.act(call)
        run.until(lambda epoch=epoch: coordinator.epoch == epoch)
        run.until(lambda epoch=epoch: len([line for line in run.notices if "begins again" in line]) == epoch - 1)
        coordinator.step, coordinator.saved = 15 + 5 * epoch, 15 * (epoch - 1)
    assert [line for line in run.notices if "begins again" in line] == [
        "stage 1 lost its last peer at step 20: begins again from step 0, 20 steps lost, as no states were saved yet "
        "(run.checkpoint_every)",
        "stage 1 lost its last peer at step 25: begins again from step 15, 10 steps lost",
    ]
    run.stop()
    assert read_history(events(run.out, "begin")).again == [(20, 0), (25, 15)], "the journal has it"


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("delayed", [0, 1])
def test_states_are_saved_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delayed: int) -> None:
    """run.checkpoint_every is left out: the lighthouse asks for states, here every 0.2 s; a stage loses its peer."""
    monkeypatch.setattr(schedule, "LEAST", 0.2)
    monkeypatch.setattr(schedule, "MOST", 0.2)
    monkeypatch.setattr(schedule, "_NOTICE", 0.5)
    steps, more = 80, ["pipeline.swarm.delay_updates=1"] * delayed
    run = SwarmRun(elastic_config(*settings("[1,2,1]", steps, *more)), tmp_path / "run")
    for stage in (0, 1, 1, 2):
        run.join(stage)
    run.until(lambda: run.keeper.coordinator.saved > 0)
    run.vanish(3)
    run.until(lambda: run.keeper.coordinator.alive() == [])
    run.join()
    summary = run.end(120)
    saved = next(entry["step"] for entry in events(run.out, "begin") if entry["epoch"] == 2)
    (notice,) = [line for line in run.notices if "begins again" in line]
    assert notice.endswith(f": begins again from step {saved}, {summary['steps_lost']} steps lost") and saved > 0
    assert furthest(weights(run), undisturbed(tmp_path, "[1,2,1]", steps, *more)) < 1e-8


def test_what_cannot_be_is_a_line(tmp_path: Path) -> None:
    run = SwarmRun(elastic_config(*settings("[1,1]", 10)), tmp_path / "run")
    one_line(run.end_reason(run.join(2)), "--stage 2: the run has 2 stages, 0 to 1")
    run.stop()

"""Outer methods between the peers of a stage: one process that holds all of them, and losses at any message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.data import load_corpus
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.simulated_churn import SimulatedSwarm
from isles.training.swarm.trainer import SwarmTrainer
from tests.covers import share
from tests.gloo import run_gloo
from tests.pipeline.swarm import killing
from tests.training.swarm import oracle
from tests.training.swarm.test_moves import MOVES
from tests.training.swarm.test_swarm import ONE, SWARM, furthest, train

torch.set_num_threads(1)
METHODS = {"diloco": ["replicas.method=diloco"], "noloco": ["replicas.method=noloco"]}


def config(method: str, *more: str) -> Config:
    own = [one for one in SWARM if not one.startswith(("replicas.", "run.validate_every"))]
    return read_config(None, {}, [*own, *METHODS[method], "replicas.sync_every=3", "run.validate_every=0", *more])


def run(read: Config, deaths: dict[int, int] | None = None, **virtual: Any) -> list[dict[str, Any] | None]:
    args = (read, load_corpus(read.data))
    done = killing.run(oracle.run_peer, read.world.workers, args, deaths or {}, **virtual)
    return [None if each is None else {**each[0], "messages": each[1]} for each in done]


@pytest.mark.parametrize("method", share(METHODS, turn=0, of=2))
def test_peers_are_replicas_of_their_stage(method: str) -> None:
    """Those of one process that is told who counted what; one of them is slow, and counts nothing in some steps."""
    read = config(method, "world.workers=7")
    done = run(read, speeds=[1, 1, 9, 1, 1, 1, 1])
    assert all(each is not None for each in done)
    assert any(not step for each in done for step in each["counted"])
    assert oracle.furthest(read, done) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_processes_are_replicas_of_their_stage(method: str) -> None:
    read = config(method, "world.workers=7", "world.backend=distributed")
    assert oracle.furthest(read, run_gloo(oracle.run_peer, 7, args=(read, load_corpus(read.data)))) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_one_peer_a_stage_is_a_static_pipeline(method: str, tmp_path: Path) -> None:
    """To the bit."""
    shape = ["pipeline.microbatches=6", "world.workers=3", "replicas.sync_every=3", "inner.max_norm=0"]
    own = [one for one in ONE if not one.startswith("replicas.")] + METHODS[method] + shape
    _, static = train(read_config(None, {}, [*own, "pipeline.stages=3", "pipeline.loss_at=last"]), tmp_path / "static")
    _, swarm = train(config(method, "pipeline.swarm.peers=[1,1,1]", *shape), tmp_path / "swarm")
    assert furthest(static, swarm) == 0


@pytest.mark.parametrize("method", ["diloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_an_exchange_counts_on_its_own_channel(method: str, tmp_path: Path) -> None:
    """The bytes of replicas that are cut into fixed stages; what a swarm sends besides is on the pipeline's."""
    shape = ["pipeline.microbatches=6", "world.workers=4", "model.layers=2", "replicas.sync_every=2", "run.steps=2"]
    own = [one for one in ONE if not one.startswith(("replicas.", "model.layers"))] + METHODS[method] + shape
    more = ["replicas.prefetch_phi=false"] if method == "noloco" else []
    read = read_config(None, {}, [*own, *more, "pipeline.stages=2", "pipeline.loss_at=last"])
    static, _ = train(read, tmp_path / "static")
    swarm, _ = train(config(method, "pipeline.swarm.peers=[2,2]", *shape), tmp_path / "swarm")
    ours, theirs = swarm["channels"], static["channels"]
    assert ours["outer"]["bytes_sent"] == theirs["outer"]["bytes_sent"] == ours["outer"]["bytes_received"] > 0
    sent = [sum(each[way] for each in ours.values()) for way in ("bytes_sent", "bytes_received")]
    assert sent == [swarm[f"{way}_per_worker"] for way in ("bytes_sent", "bytes_received")]
    assert all(value >= 0 for each in ours.values() for value in each.values())


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_gone_on_from_to_the_bit(method: str, tmp_path: Path) -> None:
    """In the middle of a round, with speeds known and jitter drawn."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    read = config(method, "run.checkpoint_every=4", "world.virtual.links=home-fibre", "world.virtual.step_jitter=0.5")
    _, first = train(read, whole)
    shutil.copytree(whole, cut)
    for name in ("summary.json", "model.safetensors"):
        (cut / name).unlink()
    _, again = train(read_config(str(cut / "config.toml"), {}, []), cut, resume=4)
    assert furthest(first, again) == 0


def at(trainer: SwarmTrainer) -> int:
    return trainer.model_step.swarm.stages[trainer.world.rank]


EVENTS = [{"at": 0.15, "kill": 3}, {"at": 0.25, "join": 1}, {"at": 0.5, "leave": 6}, {"at": 0.6, "join": 2}]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_who_comes_takes_part_in_the_next_exchange(method: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    read = config(method, "run.steps=12")
    swarm = SimulatedSwarm(read, str(trace), tmp_path / "run", lambda line: None, lambda notice: None)
    summary = swarm.run()
    assert summary["joins"] == 3 and summary["deaths"] == summary["leaves"] == 1
    ends = {rank: swarm.workers[rank] for rank in swarm.results}
    assert {7, 8, 9} <= ends.keys() and summary["val_loss"] < 5.5
    for stage in range(3):
        anchors = [trainer.optimizer.fragments[0].anchor for trainer in ends.values() if at(trainer) == stage]
        spread = max(float((anchor - anchors[0]).abs().max()) for anchor in anchors)
        assert spread == 0 if method == "diloco" else spread < 0.1


@pytest.mark.long
def test_who_moves_has_the_state_of_its_stage() -> None:
    """In the middle of rounds too: weights, moments, anchor and outer momentum, and all land the same."""
    done = run(
        config("diloco", *MOVES, "pipeline.swarm.peers=[4,1,1]", "world.workers=6"), links="lan", step_seconds=1.0
    )
    assert sum(each["moves"] for each in done) >= 2
    for each in done:
        alike = next(other for other in done if other["stage"] == each["stage"])
        assert torch.equal(each["anchor"], alike["anchor"]) and torch.equal(each["momentum"], alike["momentum"])


def killed(method: str, victim: int, messages: list[int], *more: str) -> None:
    """A peer of a small swarm dies at each of these messages."""
    small = ("pipeline.swarm.peers=[2,3]", "pipeline.stages=2", "world.workers=5", "model.layers=2", "run.steps=2")
    read = config(method, *small, "replicas.sync_every=1", "pipeline.microbatches=3", *more)
    for message in messages:
        done = run(read, {victim: message})
        assert done[victim] is None, message
        left = [each for each in done if each is not None]
        assert len(left) == 4 and len({each["members"] for each in left}) == 1, message
        for step in range(read.run.steps):
            if victim in left[0]["present"][step]:
                continue
            for stage in range(read.pipeline.stages):
                counted = [one for each in left if each["stage"] == stage for one in each["counted"][step]]
                assert sorted(counted) == list(range(read.pipeline.microbatches)), message
        for each in left if method == "diloco" else []:
            alike = next(other for other in left if other["stage"] == each["stage"])
            assert torch.equal(each["anchor"], alike["anchor"]), message


def test_a_peer_lost_in_an_exchange_leaves_the_others_alike() -> None:
    killed("diloco", 3, [95, 120])  # of 76 to 131, which it sends or posts there


def test_what_a_peer_had_counted_that_is_lost_in_the_vote_is_run_again() -> None:
    killed("diloco", 0, [61])  # ledger were right with it


@pytest.mark.long
def test_peers_exchange_among_the_same_ones_whoever_knows_of_a_loss_first() -> None:
    killed("diloco", 3, [61, 64])


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("more", [[], ["replicas.codec=int8", "replicas.error_feedback=local"]])
def test_diloco_whenever_a_peer_is_lost(victim: int, more: list[str]) -> None:
    killed("diloco", victim, list(range(18 + victim, 360, 9)), *more)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 3])
def test_noloco_goes_on_whenever_a_peer_is_lost(victim: int) -> None:
    killed("noloco", victim, list(range(18 + victim, 360, 9)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["replicas.method=localsgd"], 'choose "none", or diloco or noloco'),
        (["replicas.prefetch_phi=true"], "replicas.prefetch_phi = true"),
        (["replicas.on_peer_failure=raise"], 'replicas.on_peer_failure = "raise"'),
        (["replicas.method=diloco", "replicas.on_late=quorum"], 'replicas.on_late = "quorum"'),
        (["pipeline.swarm.stage_lost=rebuild"], 'pipeline.swarm.stage_lost = "rebuild"'),
    ],
)
def test_what_does_not_go_with_a_swarm_is_refused_in_a_line(more: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        config("noloco", *more)
    assert words in str(error.value) and "\n" not in str(error.value)

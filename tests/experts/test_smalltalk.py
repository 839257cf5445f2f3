"""SMALLTALK LM from end to end on small languages: routers, partition, experts, use."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.comm.errors import Diverged
from isles.experts.assignment import Assignment, assign
from isles.experts.border import KEPT
from isles.experts.em import RouterTask, train_router
from isles.experts.jobs import Progress, weights_sha256
from isles.experts.planning import planned
from isles.experts.registry import Forest
from isles.experts.routing import Routers, from_wire, route, to_wire
from isles.experts.served import Served
from isles.experts.smalltalk import router_config
from isles.experts.speaking import speaker
from isles.experts.system import System
from isles.experts.systems import opened
from isles.experts.workers import run_workers
from isles.report import write_report
from isles.training.checkpoint import Checkpoints
from tests.experts.small import asked, made, write_domains
from tests.training.runs import lines_of

Built = tuple[System[Any], dict[str, Any]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_domains(tmp_path_factory.mktemp("domains"))


@pytest.fixture(scope="module")
def built(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    system = made("smalltalk", config, tmp_path_factory.mktemp("smalltalk"))
    return system, system.evaluate(Progress())


def test_shares_are_balanced_and_make_up_the_pool(built: Built) -> None:
    system, results = built
    pool = system.pool()  # type: ignore[attr-defined]
    assignment = Assignment.load(system.out / "assignment.npy")
    assert len(assignment.expert_of) == len(pool.rows)
    assert max(assignment.loads) - min(assignment.loads) <= 1
    for expert in range(2):
        stored = np.load(system.out / "segments" / str(expert) / "train-tokens.npy").reshape(-1, 17)
        assert np.array_equal(stored, pool.rows[assignment.expert_of == expert])
    assert sum(results["routing"]["loads_test"]) == 36
    assert 0 < results["routing"]["entropy_test"] < math.log(2)


def test_routers_exchange_scores_alone_and_experts_nothing(built: Built) -> None:
    system, results = built
    rounds, sequences = 2, 2 * 16
    for router in json.loads((system.out / "routers.json").read_text()):
        assert router["score_bytes_sent"] == router["score_bytes_received"] == rounds * 2 * sequences
        assert router["control_bytes_sent"] == rounds * 8
    for expert in range(2):
        summary = json.loads((system.out / f"runs/expert-{expert}/summary.json").read_text())
        assert summary["bytes_sent_per_worker"] == summary["bytes_received_per_worker"] == 0
    assert results["bytes"]["between_experts"] == 0
    lines = lines_of(system.out / "routers" / "rounds.jsonl")
    assert sorted((line["round"], line["worker"]) for line in lines) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(line["load"] == 16 for line in lines)


def test_shares_at_random_make_experts_alike(built: Built, config: Path, tmp_path: Path) -> None:
    """Of a shuffled assignment it hardly matters who answers; of the routers' it does."""
    words = ["smalltalk.dense=[]", "smalltalk.steps=40", "smalltalk.router_lr=0.01", "smalltalk.rounds=6"]
    real = made("smalltalk", config, tmp_path / "real", *words)
    for name in ("pool", "routers"):
        shutil.copytree(real.out / name, tmp_path / "shuffled" / name)
    shutil.copy(real.out / "routers.json", tmp_path / "shuffled")
    assignment = Assignment.load(real.out / "assignment.npy")
    order = np.random.default_rng(0).permutation(len(assignment.expert_of))
    Assignment(assignment.expert_of[order], 2).save(tmp_path / "shuffled" / "assignment.npy")
    shuffled = made("smalltalk", config, tmp_path / "shuffled", *words)
    told, by_routers = (system.evaluate(Progress())["trained"]["all"] for system in (shuffled, real))
    assert told["random"] < 1.1 * told["oracle"]
    assert by_routers["random"] > 2 * by_routers["oracle"]
    assert by_routers["mixture"] < 0.6 * by_routers["random"]


def test_a_route_depends_on_the_prefix_alone(built: Built) -> None:
    system, _ = built
    routers = Routers(Served.load(Forest.load(system.out / "forests" / "smalltalk.json").routers))
    tokens = torch.cat([text.sequences("test", 8) for text in system.texts.values()])
    changed = tokens.clone()
    changed[:, 8:] = 65
    assert torch.equal(route(routers, tokens, 8), route(routers, changed, 8))
    assert torch.equal(routers.scores(tokens, 8), routers.scores(tokens[:, :8], 99))
    changed[:, 1] = 65
    assert not torch.equal(routers.scores(tokens, 8), routers.scores(changed, 8))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        route(routers, tokens[:, :1], 8)


def test_routers_that_are_the_experts_choose_the_best_one_of_each_sequence(built: Built) -> None:
    """Self-routing over the whole sequence is the oracle, and assigning to it never raises the hard-EM objective."""
    system, _ = built
    experts = Served.load(Forest.load(system.out / "forests" / "smalltalk.json").experts)
    tokens = system.texts["easy"].sequences("test", 12)[:, :-1]
    chosen = route(Routers(experts), tokens, tokens.shape[1])
    own = experts.scores(tokens).sum(-1)
    assert torch.equal(chosen, own.argmax(0))
    kept = own.gather(0, chosen[None])[0]
    assert all((kept >= own[torch.arange(12) % 2, torch.arange(12)]).tolist())


def test_one_expert_is_the_dense_run_to_the_bit(config: Path, tmp_path: Path) -> None:
    system = made(
        "smalltalk", config, tmp_path, "smalltalk.experts=1", "smalltalk.rounds=1", "smalltalk.dense=['steps']"
    )
    assert weights_sha256(tmp_path / "runs/expert-0") == weights_sha256(tmp_path / "runs/dense-steps")
    told = system.evaluate(Progress())["trained"]["all"]
    assert told["mixture"] == told["steps"] == told["oracle"] == told["random"]


def test_rounds_go_on_from_a_checkpoint_to_the_same_routers(built: Built, tmp_path: Path) -> None:
    system, _ = built
    pool = system.pool()  # type: ignore[attr-defined]
    task = RouterTask(
        own=system.own, config=router_config(system.own, system.base, pool.folder), label=pool.label, out=tmp_path
    )
    checkpoints = Checkpoints(tmp_path)
    # The built system's checkpoint of the first round, from which the second is done again.
    for rank in range(2):
        checkpoints.write_shard(1, rank, Checkpoints(system.out / "routers").read_shard(1, rank))
    events: list[Any] = []
    run_workers(train_router, 2, task.config, (task, 1), events.append, tmp_path)
    for rank in range(2):
        assert weights_sha256(tmp_path / f"router-{rank}") == weights_sha256(system.out / f"routers/router-{rank}")
    assert [event["round"] for event in events if "round" in event] == [2, 2]


def test_routers_that_disagree_on_the_shares_stop(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, calls = built[0], []
    pool = system.pool()  # type: ignore[attr-defined]
    task = RouterTask(
        own=system.own, config=router_config(system.own, system.base, pool.folder), label=pool.label, out=tmp_path
    )

    def wrong(scores: np.ndarray, rule: str) -> np.ndarray:
        calls.append(rule)
        return assign(scores) if len(calls) == 1 else 1 - assign(scores)

    monkeypatch.setattr("isles.experts.em.assign", wrong)
    with pytest.raises(Diverged, match="diverged at step 1: its assignment is another one"):
        run_workers(train_router, 2, task.config, (task, None), lambda event: None, tmp_path)


def test_real_processes_train_the_same_routers(config: Path, built: Built, tmp_path: Path) -> None:
    system = opened(asked("smalltalk", config, "world.backend=distributed"), tmp_path)
    system.prepare(Progress())
    for rank in range(2):
        assert weights_sha256(tmp_path / f"routers/router-{rank}") == weights_sha256(
            built[0].out / f"routers/router-{rank}"
        )
    assert (tmp_path / "assignment.npy").read_bytes() == (built[0].out / "assignment.npy").read_bytes()


def test_a_lost_expert_leaves_the_others_of_use(built: Built, tmp_path: Path) -> None:
    forest = Forest.load(built[0].out / "forests" / "smalltalk.json").remove("expert-1")
    forest.save(tmp_path / "rest.json")
    rest = Forest.load(tmp_path / "rest.json")
    assert [member.name for member in (*rest.experts, *rest.routers)] == ["expert-0", "router-0"]
    voice = speaker(tmp_path / "rest.json", "some words")
    assert "by expert-0" in voice.note and "1.000" in voice.note


def test_another_machine_needs_the_segment_alone(built: Built, config: Path, tmp_path: Path) -> None:
    """Neither pool nor routers are there, nor the other segments; the expert that is trained there is the same."""
    shutil.copytree(built[0].out / "segments" / "1", tmp_path / "segments" / "1")
    system = opened(asked("smalltalk", config), tmp_path)
    assert not system.train(Progress(), ["runs/expert-1"])
    assert weights_sha256(tmp_path / "runs/expert-1") == weights_sha256(built[0].out / "runs/expert-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [KEPT, "runs", "segments"]


def test_scores_on_the_wire_are_16_bits_and_near_enough() -> None:
    mean = -torch.tensor([0.0, 0.25, 5.5, 15.9, 40.0], dtype=torch.float64)
    wire = to_wire(mean)
    assert wire.dtype == torch.uint8 and wire.numel() == 10
    assert from_wire(wire)[:4] == pytest.approx(mean[:4].numpy(), abs=1 / 8192)
    assert from_wire(wire)[4] == pytest.approx(-16, abs=1e-3)  # held at the end of the scale


@pytest.mark.parametrize("words", [[], ["inner.accumulation=3"], ["world.workers=2", "replicas.method=ddp"]], ids=str)
def test_the_plan_and_the_results_count_the_same_flops(words: list[str], config: Path, tmp_path: Path) -> None:
    request = asked("smalltalk", config, *words)
    found = opened(request, tmp_path)._flops(10)  # type: ignore[attr-defined]
    told = planned(request)["flops"]
    assert found["experts"] == told["experts"] > 0
    assert found["scoring_rounds"] == told["scoring in the rounds"]
    assert found["scoring_pool"] == pytest.approx(told["scoring a million sequences of the pool"] / 100_000)


def test_clusters_cost_no_router_and_no_scores(config: Path, tmp_path: Path) -> None:
    request = asked("smalltalk", config, "smalltalk.gate=clusters")
    system = opened(request, tmp_path)
    assert set(system._flops(10)) == {"experts", "inference"}  # type: ignore[attr-defined]
    assert not [key for key in system._bytes(system.pool()) if "score" in key and key != "scoring_per_token"]  # type: ignore[attr-defined]
    assert set(planned(request)["flops"]) == {"experts", "a sequence at inference"}
    assert not [key for key in planned(request)["bytes"] if "scores" in key]


def test_a_router_that_diverged_is_no_sure_one(config: Path, tmp_path: Path) -> None:
    """What is no number stays so on the wire; read as 0 it would be the best score of all."""
    lost = from_wire(to_wire(torch.tensor([float("nan"), -float("inf")], dtype=torch.float64)))
    assert np.isnan(lost[0]) and lost[1] < -15
    with pytest.raises(ValueError, match=r"no number: lower its learning rate \(smalltalk\.router_lr\)"):
        made("smalltalk", config, tmp_path, "smalltalk.router_lr=1e30", "smalltalk.router_warmup=0")


def test_the_page_shows_routing(built: Built) -> None:
    page = write_report(built[0].out).read_text()
    for words in ("Perplexity by domain", "dense, E x batch", "apart (held out)", "Loads", "score bytes sent"):
        assert words in page


def test_what_cannot_be_is_refused(config: Path, tmp_path: Path) -> None:
    for words, match in (
        (["smalltalk.prefix=17", "smalltalk.prefixes=[8]"], r"prefix = 17 is longer than model\.context = 16"),
        (["smalltalk.prefixes=[1]"], r"each must lie between 2 and prefix = 8"),
        (["smalltalk.router_batch=17"], r"router_batch = 17 is more than round_sequences"),
        (["smalltalk.assignment=best"], r"smalltalk.assignment = 'best'"),
    ):
        with pytest.raises(ValueError, match=match):
            made("smalltalk", config, tmp_path / "new", *words)
        assert not (tmp_path / "new").exists()

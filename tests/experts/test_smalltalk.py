"""SMALLTALK LM from end to end on small languages: routers, partition, experts, use."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.comm.errors import Diverged
from isles.comm.mesh import Mesh
from isles.experts.ensemble import Joining, Speaker
from isles.experts.forest import Forest, Served
from isles.experts.jobs import JobProgress, weights_sha256
from isles.experts.planning import opened, planned
from isles.experts.routing import Assignment, Routers, assign, from_wire, route, to_wire
from isles.experts.smalltalk import RouterTask, TextRouter, router_config, train_router
from isles.experts.smalltalk_run import run_workers
from isles.experts.system import System
from isles.report import write_report
from isles.training.records.checkpoint import Checkpoints
from tests.experts.small import asked, made, write_domains
from tests.training.runs import lines_of

Built = tuple[System[Any], dict[str, Any]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_domains(tmp_path_factory.mktemp("domains"))


@pytest.fixture(scope="module")
def built(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    system = made("smalltalk", config, tmp_path_factory.mktemp("smalltalk"))
    return system, system.evaluate(JobProgress())


def test_shares_are_balanced_and_make_up_the_pool(built: Built) -> None:
    system, results = built
    pool = system.seeds["seed-0"].pool(system.trained)  # type: ignore[attr-defined]
    assignment = Assignment.load(system.out / "seed-0/assignment.npy")
    assert len(assignment.expert_of) == len(pool.rows)
    assert max(assignment.loads) - min(assignment.loads) <= 1
    for expert in range(2):
        stored = np.load(system.out / "seed-0/segments" / str(expert) / "train-tokens.npy").reshape(-1, 17)
        assert np.array_equal(stored, pool.rows[assignment.expert_of == expert])
    routing = results["by_seed"][0]["routing"]
    assert sum(routing["loads_test"]) == 36
    assert 0 < routing["entropy_test"] < math.log(2)


def test_routers_exchange_scores_alone_and_experts_nothing(built: Built) -> None:
    system, results = built
    rounds, sequences = 2, 2 * 16
    for router in json.loads((system.out / "seed-0/routers.json").read_text()):
        assert router["score_bytes_sent"] == router["score_bytes_received"] == rounds * 2 * sequences
        assert router["control_bytes_sent"] == rounds * 8
    for expert in range(2):
        summary = json.loads((system.out / f"seed-0/expert-{expert}/summary.json").read_text())
        assert summary["bytes_sent_per_worker"] == summary["bytes_received_per_worker"] == 0
    assert results["bytes"]["between_experts"] == 0
    lines = lines_of(system.out / "seed-0/routers/rounds.jsonl")
    assert sorted((line["round"], line["worker"]) for line in lines) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(line["load"] == 16 for line in lines)


def test_shares_at_random_make_experts_alike(built: Built, config: Path, tmp_path: Path) -> None:
    """Of a shuffled assignment it hardly matters who answers; of the routers' it does."""
    words = ["smalltalk.dense=[]", "smalltalk.steps=40", "smalltalk.router_lr=0.01", "smalltalk.rounds=6"]
    real = made("smalltalk", config, tmp_path / "real", *words)
    by_routers, by_chance = real.out / "seed-0", tmp_path / "shuffled" / "seed-0"
    for name in ("pool", "routers"):
        shutil.copytree(by_routers / name, by_chance / name)
    for name in ("routers.json", "held.npy", "held.json"):
        shutil.copy(by_routers / name, by_chance)
    assignment = Assignment.load(by_routers / "assignment.npy")
    order = np.random.default_rng(0).permutation(len(assignment.expert_of))
    Assignment(assignment.expert_of[order], 2).save(by_chance / "assignment.npy")
    shuffled = made("smalltalk", config, tmp_path / "shuffled", *words)
    mixed, told = (system.evaluate(JobProgress())["mean"]["trained"]["all"] for system in (shuffled, real))
    assert mixed["random"] < 1.1 * mixed["oracle"]
    assert told["random"] > 2 * told["oracle"]
    assert told["mixture"] < 0.6 * told["random"]


def test_a_route_depends_on_the_prefix_alone(built: Built) -> None:
    system, _ = built
    routers = Routers(Served.load(Forest.load(system.out / "seed-0/forests/smalltalk.json").routers))
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
    experts = Served.load(Forest.load(system.out / "seed-0/forests/smalltalk.json").experts)
    tokens = system.texts["easy"].sequences("test", 12)[:, :-1]
    chosen = route(Routers(experts), tokens, tokens.shape[1])
    own = experts.scores(tokens).sum(-1)
    assert torch.equal(chosen, own.argmax(0))
    kept = own.gather(0, chosen[None])[0]
    assert all((kept >= own[torch.arange(12) % 2, torch.arange(12)]).tolist())


def test_hard_em_never_raises_its_objective(built: Built, tmp_path: Path) -> None:
    """On sequences that stay the same, without capacities: the E-step takes each one's best router, so it cannot lose;
    the M-step trains each router on its own share alone, which then fits it better.
    """
    system = built[0]
    pool = system.seeds["seed-0"].pool(system.trained)  # type: ignore[attr-defined]
    own = replace(system.own, router_lr=0.005, router_warmup=0)
    task = RouterTask(own=own, config=router_config(own, system.base, pool.folder), label=pool.label, out=tmp_path)

    def total(scores: np.ndarray, chosen: np.ndarray) -> float:
        return float(scores[np.arange(len(chosen)), chosen].sum())

    def rounds(world: Mesh, task: RouterTask) -> list[float]:
        router = TextRouter(task, world.outer)
        scores = router._exchange()
        history = [total(scores, router.expert_of)]
        for _ in range(3):
            router.expert_of = assign(scores, "unbalanced")
            history.append(total(scores, router.expert_of))
            router._train(router.sequences[router.expert_of == router.group.rank])
            scores = router._exchange()
            history.append(total(scores, router.expert_of))
        return history

    first, second = run_workers(rounds, 2, task.config, (task,), lambda event: None, tmp_path)
    assert first == second == sorted(first)
    steps = np.diff(first)
    assert steps[1::2].min() > 0.01  # nats a token, of all sequences, by each M-step


def test_one_expert_is_the_dense_run_to_the_bit(config: Path, tmp_path: Path) -> None:
    system = made(
        "smalltalk", config, tmp_path, "smalltalk.experts=1", "smalltalk.rounds=1", "smalltalk.dense=['steps']"
    )
    assert weights_sha256(tmp_path / "seed-0/expert-0") == weights_sha256(tmp_path / "seed-0/dense-steps")
    told = system.evaluate(JobProgress())["mean"]["trained"]["all"]
    assert told["mixture"] == told["steps"] == told["oracle"] == told["random"]


def test_rounds_go_on_from_a_checkpoint_to_the_same_routers(built: Built, tmp_path: Path) -> None:
    system, _ = built
    pool = system.seeds["seed-0"].pool(system.trained)  # type: ignore[attr-defined]
    task = RouterTask(
        own=system.own,
        config=router_config(system.own, system.seeds["seed-0"].base, pool.folder),
        label=pool.label,
        out=tmp_path,
    )
    checkpoints = Checkpoints(tmp_path)
    # The built system's checkpoint of the first round, from which the second is done again.
    for rank in range(2):
        checkpoints.write_shard(1, rank, Checkpoints(system.out / "seed-0/routers").read_shard(1, rank))
    events: list[Any] = []
    run_workers(train_router, 2, task.config, (task, 1), events.append, tmp_path)
    for rank in range(2):
        assert weights_sha256(tmp_path / f"router-{rank}") == weights_sha256(
            system.out / f"seed-0/routers/router-{rank}"
        )
    assert [event["round"] for event in events if "round" in event] == [2, 2]


def test_routers_that_disagree_on_the_shares_stop(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, calls = built[0], []
    pool = system.seeds["seed-0"].pool(system.trained)  # type: ignore[attr-defined]
    task = RouterTask(
        own=system.own,
        config=router_config(system.own, system.seeds["seed-0"].base, pool.folder),
        label=pool.label,
        out=tmp_path,
    )

    def wrong(scores: np.ndarray, rule: str) -> np.ndarray:
        calls.append(rule)
        return assign(scores) if len(calls) == 1 else 1 - assign(scores)

    monkeypatch.setattr("isles.experts.smalltalk.assign", wrong)
    with pytest.raises(Diverged, match="diverged at step 1: its assignment is another one"):
        run_workers(train_router, 2, task.config, (task, None), lambda event: None, tmp_path)


def test_the_assignment_is_all_that_has_to_travel(built: Built, config: Path, tmp_path: Path) -> None:
    """The other machine has the domains' text; no router and no segment comes along."""
    folder = tmp_path / "seed-0"
    folder.mkdir()
    for name in ("assignment", "held"):
        for suffix in (".npy", ".json"):
            shutil.copy(built[0].out / "seed-0" / f"{name}{suffix}", folder)
    system = opened(asked("smalltalk", config), tmp_path)
    assert not system.train(JobProgress(), ["seed-0/expert-0"])
    one, other = (out / "seed-0/expert-0" for out in (tmp_path, built[0].out))
    assert weights_sha256(one) == weights_sha256(other)
    losses = [json.loads((run / "summary.json").read_text())["val_loss"] for run in (one, other)]
    assert losses[0] == losses[1] and not (folder / "routers").exists()


@pytest.mark.long
def test_seeds_at_once_are_those_of_their_own_runs(built: Built, config: Path, tmp_path: Path) -> None:
    words = ["smalltalk.seeds=[0,5]", "smalltalk.dense=['batch']"]
    system = made("smalltalk", config, tmp_path, *words, at_once=2)
    for name in ("expert-0", "expert-1", "dense-batch", "routers/router-0"):
        assert weights_sha256(system.out / "seed-0" / name) == weights_sha256(built[0].out / "seed-0" / name)
        assert weights_sha256(system.out / "seed-5" / name) != weights_sha256(built[0].out / "seed-0" / name)
    results = system.evaluate(JobProgress())
    assert json.dumps(results["by_seed"][0]) == json.dumps(built[1]["by_seed"][0])
    told = [record["trained"]["all"]["mixture"] for record in results["by_seed"]]
    assert results["mean"]["trained"]["all"]["mixture"] == sum(told) / 2 and told[0] != told[1]
    assert "Perplexity by seed" in write_report(system.out).read_text()


def test_a_lost_expert_leaves_the_others_of_use(built: Built, tmp_path: Path) -> None:
    forest = Forest.load(built[0].out / "seed-0/forests/smalltalk.json")
    replace(forest, experts=forest.experts[:1], routers=forest.routers[:1]).save(tmp_path / "rest.json")
    rest = Forest.load(tmp_path / "rest.json")
    assert [member.name for member in (*rest.experts, *rest.routers)] == ["expert-0", "router-0"]
    voice = Speaker(tmp_path / "rest.json", Joining()).voice("some words")
    assert "by expert-0" in voice.note and "1.000" in voice.note


def test_another_machine_needs_the_segment_alone(built: Built, config: Path, tmp_path: Path) -> None:
    """Neither pool nor routers are there, nor the other segments; the expert that is trained there is the same."""
    shutil.copytree(built[0].out / "seed-0/segments/1", tmp_path / "seed-0/segments/1")
    system = opened(asked("smalltalk", config), tmp_path)
    assert not system.train(JobProgress(), ["seed-0/expert-1"])
    assert weights_sha256(tmp_path / "seed-0/expert-1") == weights_sha256(built[0].out / "seed-0/expert-1")
    assert sorted(path.name for path in (tmp_path / "seed-0").iterdir()) == ["expert-1", "segments"]


def test_scores_on_the_wire_are_16_bits_and_near_enough() -> None:
    mean = -torch.tensor([0.0, 0.25, 5.5, 15.9, 40.0], dtype=torch.float64)
    wire = to_wire(mean)
    assert wire.dtype == torch.uint8 and wire.numel() == 10
    assert from_wire(wire)[:4] == pytest.approx(mean[:4].numpy(), abs=1 / 8192)
    assert from_wire(wire)[4] == pytest.approx(-16, abs=1e-3)  # held at the end of the scale


@pytest.mark.parametrize("words", [[], ["inner.accumulation=3"], ["world.workers=2", "replicas.method=ddp"]], ids=str)
def test_the_plan_and_the_results_count_the_same_flops(words: list[str], config: Path, tmp_path: Path) -> None:
    request = asked("smalltalk", config, *words)
    system: Any = opened(request, tmp_path)
    found = system._flops(system.seeds["seed-0"], 10)
    told = planned(request)["flops"]
    assert found["experts"] == told["experts"] > 0
    assert found["scoring_rounds"] == told["scoring in the rounds"]
    assert found["scoring_pool"] == pytest.approx(told["scoring a million sequences of the pool"] / 100_000)


def test_clusters_cost_no_router_and_no_scores(config: Path, tmp_path: Path) -> None:
    request = asked("smalltalk", config, "smalltalk.gate=clusters")
    system = opened(request, tmp_path)
    seed = system.seeds["seed-0"]  # type: ignore[attr-defined]
    assert set(system._flops(seed, 10)) == {"experts", "inference"}  # type: ignore[attr-defined]
    assert not [key for key in system._bytes(seed, 1000, 1) if "score" in key and key != "scoring_per_token"]  # type: ignore[attr-defined]
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

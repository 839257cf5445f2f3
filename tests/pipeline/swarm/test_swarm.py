"""A swarm's step against one process: without losses, with peers killed at every message, and with late answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import isles
from isles.comm.errors import DeadlinePassed
from isles.pipeline.swarm import swarm as steps
from isles.pipeline.swarm.ledger import RepairPlan
from isles.pipeline.swarm.swarm import StageLost
from tests.covers import cover
from tests.gloo import run_gloo
from tests.pipeline.swarm import killing, peers
from tests.pipeline.swarm.peers import Setting, furthest, whole

LINKS = isles.Links(bandwidth=1e7, latency=0.02, jitter=0.8)
WORKERS = 9
CLOSE = 1e-12
VICTIMS = (1, 4, 7)  # of stages 0, 1 and 2


def virtual(setting: Setting, seed: int = 0) -> list[Any]:
    return isles.run_virtual(peers.train, sum(setting.peers), links=LINKS, args=(setting,), step_seconds=0.3, seed=seed)


@pytest.mark.parametrize(
    ("served", "consistency"), cover([(2, 1), (1, 3, 2), (3, 3, 3)], ("exact", "strict", "relaxed"), each=1)
)
def test_without_losses_it_is_one_process_that_accumulates(served: tuple[int, ...], consistency: Any) -> None:
    setting = Setting(peers=served, consistency=consistency, seed=sum(served), steps=2)
    assert furthest(setting, virtual(setting, setting.seed)) < CLOSE


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("served", itertools.product((1, 2, 3), repeat=3))
def test_any_seed_and_any_peers(served: tuple[int, ...], seed: int) -> None:
    setting = Setting(peers=served, seed=seed)
    assert furthest(setting, virtual(setting, seed)) < CLOSE


def test_one_peer_a_stage_is_one_process_to_the_bit() -> None:
    check_bits(virtual)


@pytest.mark.long
def test_the_same_with_processes() -> None:
    check_bits(lambda setting: run_gloo(peers.train, 3, args=(setting,)))


def check_bits(run: Callable[[Setting], list[Any]]) -> None:
    setting = Setting(peers=(1, 1, 1), steps=2)
    for peer in run(setting):
        for (gradients, *_), (expected, _) in zip(peer, whole(setting), strict=True):
            assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


def test_the_norm_is_the_whole_gradients() -> None:
    setting = Setting(peers=(2, 1, 2))
    gradients, _ = whole(setting)[0]
    expected = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
    assert all(peer[0][2] == pytest.approx(expected, rel=1e-12) for peer in virtual(setting))


@pytest.mark.parametrize(
    "consistency", ["exact", *(pytest.param(other, marks=pytest.mark.long) for other in ("strict", "relaxed"))]
)
def test_processes_give_the_same(consistency: Any) -> None:
    setting = Setting(peers=(1, 2, 1), consistency=consistency, steps=2)
    assert furthest(setting, run_gloo(peers.train, 4, args=(setting,))) < CLOSE


@cache
def messages() -> list[int]:
    """That each peer sends or posts in an undisturbed step."""
    return [count for _, count in killing.run(peers.train, WORKERS, (Setting(charged=True),), {})]


def survivors(setting: Setting, deaths: dict[int, int], **more: Any) -> list[Any]:
    done = killing.run(peers.train, sum(setting.peers), (setting,), deaths, **more)
    assert all(done[rank] is None for rank in deaths)
    return [each[0] for each in done if each is not None]


def check_killed(at: list[tuple[int, int]], consistency: Any = "exact") -> None:
    setting = Setting(consistency=consistency, charged=True)
    for victim, message in at:
        left = survivors(setting, {victim: message})
        assert len(left) == WORKERS - 1 and furthest(setting, left) < CLOSE, (victim, message)


@pytest.mark.parametrize("victim", [4, *(pytest.param(rank, marks=pytest.mark.long) for rank in (1, 7))])
def test_a_peer_killed_at_any_message_changes_nothing(victim: int) -> None:
    chosen = random.Random(victim).sample(range(messages()[victim]), 1)
    check_killed([(victim, message) for message in chosen])


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("consistency", ["exact", "strict"])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("every", [4, 1])
def test_a_peer_killed_at_every_message_changes_nothing(victim: int, consistency: Any, every: int) -> None:
    check_killed([(victim, message) for message in range(0, messages()[victim], every)], consistency)


def check_pairs(number: int) -> None:
    setting, drawn = Setting(charged=True), random.Random(7)
    for _ in range(number):
        stage = drawn.choice((0, 1))
        pair = [3 * stage + drawn.randrange(3), 3 * stage + 3 + drawn.randrange(3)]
        deaths = {rank: drawn.randrange(messages()[rank]) for rank in pair}
        done = killing.run(peers.train, WORKERS, (setting,), deaths)
        assert done[min(deaths, key=lambda rank: deaths[rank] / messages()[rank])] is None
        assert furthest(setting, [each[0] for each in done if each is not None]) < CLOSE, deaths


def test_two_peers_of_neighbouring_stages_may_be_killed() -> None:
    check_pairs(2)


@pytest.mark.long
def test_two_peers_of_neighbouring_stages_may_be_killed_at_any_two_messages() -> None:
    check_pairs(50)


HELD = Setting(peers=(2, 2, 2), charged=True, deadlines=(0.8, 0.8))


def held_back(setting: Setting = HELD) -> list[Any]:
    """Two peers are so slow that others are asked in their place, and answer in the end."""
    return isles.run_virtual(peers.train, 6, links=LINKS, args=(setting,), step_seconds=0.3, speeds=(1, 1, 1, 9, 1, 1))


def test_a_late_answer_is_counted_once() -> None:
    done = held_back()
    assert furthest(HELD, done) < CLOSE
    counts = [peer[-1][-1] for peer in done]
    assert sum(each.sent_again for each in counts) > 0 and sum(each.taken_back for each in counts) > 0


def test_a_mutant_that_counts_doubles_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps.plan_repairs
    monkeypatch.setattr(steps, "plan_repairs", lambda *args: RepairPlan(right(*args).runs, ()))
    assert furthest(HELD, held_back()) > 1e-3


def test_a_mutant_without_books_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "plan_repairs", lambda *args: RepairPlan((), ()))
    setting = Setting(charged=True)
    assert furthest(setting, survivors(setting, {7: messages()[7] * 2 // 3})) > 1e-3


@pytest.mark.parametrize("victim", [4, *(pytest.param(other, marks=pytest.mark.long) for other in (1, 7))])
def test_relaxed_counts_at_least_the_target(victim: int) -> None:
    setting = Setting(consistency="relaxed", charged=True, steps=3)
    left = survivors(setting, {victim: messages()[victim] // 2})
    assert len(left) == WORKERS - 1
    assert all(peer[-1][1] < 5 for peer in left)


def test_a_stage_without_peers_ends_the_run_by_name() -> None:
    setting = Setting(peers=(2, 1, 2), charged=True)
    with pytest.raises(StageLost, match="stage 1 has no peer left"):
        survivors(setting, {2: 30})


def test_a_silent_peer_is_named_where_nobody_is_asked_again() -> None:
    setting = Setting(peers=(1, 1, 1), consistency="strict", charged=True, patience=5.0)
    with pytest.raises(DeadlinePassed):
        isles.run_virtual(peers.train, 3, links=LINKS, args=(setting,), step_seconds=0.3, speeds=(1, 1000, 1))

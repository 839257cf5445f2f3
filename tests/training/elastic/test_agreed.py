"""Workers that land one mean together come, go and are lost: whoever lands a round has the others' anchors."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from isles.membership.lighthouse import Lighthouse
from isles.membership.round_commit import RoundDecision
from isles.membership.rounds import Decision
from isles.training.elastic.leader import Participant
from isles.training.elastic.worker import Decisions, ElasticWorker
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import events, small

INT8 = ("replicas.method=diloco", "replicas.codec=int8", "replicas.error_feedback=local")
ADAM = ("replicas.method=fedadam",)  # whose landing uses up the mean
Digests = Mapping[int, Mapping[int, int]]


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> Digests:
    """By round and member, of what was landed; rounds take 50 ms."""
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)
    one_round, keep = Participant._round, ElasticWorker.keep

    def noted(worker: ElasticWorker, said: Decision) -> None:
        found[said.round][worker.member] = worker.optimizer.fragments[0].digest
        keep(worker, said)

    def slowly(worker: Participant, *place: int) -> Decisions[int]:
        time.sleep(0.05)
        return one_round(worker, *place)

    monkeypatch.setattr(ElasticWorker, "keep", noted)
    monkeypatch.setattr(Participant, "_round", slowly)
    return found


def landed(digests: Digests, member: int) -> list[int]:
    return sorted(round for round, members in list(digests.items()) if member in members)


def end(world: Run) -> None:
    """All leave."""
    for number, worker in world.workers.items():
        if number not in world.end_reasons:
            worker.leaving.set()
    world.until(lambda: len(world.end_reasons) == len(world.workers))
    world.stop()
    world.rest()


def member_of(world: Run, number: int) -> int:
    world.until(lambda: number in world.workers)
    return world.workers[number].client.member


def all_alike(digests: Digests) -> bool:
    return all(len(set(members.values())) == 1 for members in digests.values())


@pytest.mark.parametrize("settings", [INT8, pytest.param(ADAM, marks=pytest.mark.long)])
def test_who_lands_a_round_has_what_the_others_have(
    tmp_path: Path, digests: Digests, settings: tuple[str, ...]
) -> None:
    """One of three vanishes: the others repeat the round without it. A joiner lands with them from its first one on."""
    world = Run(small(tmp_path, 6000, 3, *settings), tmp_path / "run")
    first, _, third = (world.join() for _ in range(3))
    world.until(lambda: len(digests) >= 4)
    world.vanish(third)
    lost = member_of(world, third)
    last = max(landed(digests, lost))
    world.until(lambda: max(landed(digests, member_of(world, first))) >= last + 3)
    fourth = world.join()
    joined = member_of(world, fourth)
    world.until(lambda: len(landed(digests, joined)) >= 4)
    begun = landed(digests, joined)[0]
    end(world)
    assert begun > last + 3 and all_alike(digests)
    assert not any("could not fetch" in notice for notice in world.notices)
    shared = [round for round in landed(digests, joined) if len(digests[round]) == 3]
    assert len(shared) >= 3  # with both founders
    every_round = sorted(digests)
    assert every_round == list(range(1, len(every_round) + 1))  # none was left out
    decisions = [decision["decision"] for decision in events(world.out, "decision")]
    assert any(decision["outcome"] == "land" and lost not in decision["members"] for decision in decisions)


@pytest.mark.long
def test_nothing_lands_without_the_lighthouse_and_training_goes_on(tmp_path: Path, digests: Digests) -> None:
    world = Run(small(tmp_path, 60_000, 3, *INT8), tmp_path / "run")
    numbers = [world.join() for _ in range(3)]
    world.until(lambda: len(digests) >= 5)
    world.stop()
    time.sleep(1.0)  # what was decided is landed
    before, spare = max(digests), [world.workers[number]._unassigned_read for number in numbers]
    time.sleep(8.0)
    assert max(digests) == before
    assert all(world.workers[number]._unassigned_read > was for number, was in zip(numbers, spare, strict=True))
    world.keep()
    lit = time.monotonic()
    world.until(lambda: max(digests) > before + 3)
    took = time.monotonic() - lit
    fourth = world.join()
    world.until(lambda: len(landed(digests, member_of(world, fourth))) >= 3)
    end(world)
    assert all_alike(digests) and took < 30.0  # 10 s are promised, on a machine with nothing else to do
    assert all(len(digests[round]) >= 3 for round in range(before + 2, max(digests) - 8))


@pytest.mark.long
def test_the_journalled_word_holds(tmp_path: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lighthouse ends after it wrote that a round lands, and before it told anybody."""
    world = Run(small(tmp_path, 60_000, 3, *INT8), tmp_path / "run")
    for _ in range(3):
        world.join()
    world.until(lambda: len(digests) >= 4)
    silent: list[int] = []
    carry_out = Lighthouse._carry_out

    def struck(lighthouse, orders, query=None):
        decisions = [order.message for order in orders if isinstance(getattr(order, "message", None), RoundDecision)]
        if silent or any(decision.outcome == "land" for decision in decisions):
            silent.extend(decision.round for decision in decisions)
            for order in orders:
                if hasattr(order, "entry"):
                    lighthouse._journal.append(order.entry)
            lighthouse._journal.commit()
            return
        carry_out(lighthouse, orders, query)

    monkeypatch.setattr(Lighthouse, "_carry_out", struck)
    world.until(lambda: bool(silent))
    monkeypatch.setattr(Lighthouse, "_carry_out", carry_out)
    round = silent[0]
    world.stop()
    assert round not in digests
    world.keep()
    world.until(lambda: round + 3 in digests)
    end(world)
    assert all_alike(digests) and len(digests[round]) == 3
    decision = next(
        decision["decision"] for decision in events(world.out, "decision") if decision["decision"]["round"] == round
    )
    assert decision["outcome"] == "land" and decision["attempt"] == 0

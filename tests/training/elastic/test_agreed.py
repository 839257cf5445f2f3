"""Workers that land one mean together come, go and are lost: whoever lands a round has the others' anchors."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from isles.membership.lighthouse import Lighthouse
from isles.membership.round_commit import Word
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
    """By round and seat, of what was landed; rounds take 50 ms."""
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)
    one_round, keep = Participant._round, ElasticWorker.keep

    def noted(worker: ElasticWorker, said: Decision) -> None:
        found[said.round][worker.seat] = worker.optimizer.fragments[0].digest
        keep(worker, said)

    def slowly(worker: Participant, *place: int) -> Decisions[int]:
        time.sleep(0.05)
        return one_round(worker, *place)

    monkeypatch.setattr(ElasticWorker, "keep", noted)
    monkeypatch.setattr(Participant, "_round", slowly)
    return found


def landed(digests: Digests, seat: int) -> list[int]:
    return sorted(round for round, seats in list(digests.items()) if seat in seats)


def end(world: Run) -> None:
    """All leave."""
    for number, worker in world.workers.items():
        if number not in world.endings:
            worker.leaving.set()
    world.until(lambda: len(world.endings) == len(world.workers))
    world.stop()
    world.rest()


def rank_to_load(world: Run, number: int) -> int:
    world.until(lambda: number in world.workers)
    return world.workers[number].company.seat


def all_alike(digests: Digests) -> bool:
    return all(len(set(seats.values())) == 1 for seats in digests.values())


@pytest.mark.parametrize("settings", [INT8, pytest.param(ADAM, marks=pytest.mark.long)])
def test_who_lands_a_round_has_what_the_others_have(
    tmp_path: Path, digests: Digests, settings: tuple[str, ...]
) -> None:
    """One of three vanishes: the others repeat the round without it. A joiner lands with them from its first one on."""
    world = Run(small(tmp_path, 6000, 3, *settings), tmp_path / "run")
    first, _, third = (world.join() for _ in range(3))
    world.until(lambda: len(digests) >= 4)
    world.vanish(third)
    lost = rank_to_load(world, third)
    last = max(landed(digests, lost))
    world.until(lambda: max(landed(digests, rank_to_load(world, first))) >= last + 3)
    fourth = world.join()
    joined = rank_to_load(world, fourth)
    world.until(lambda: len(landed(digests, joined)) >= 4)
    begun = landed(digests, joined)[0]
    end(world)
    assert begun > last + 3 and all_alike(digests)
    assert not any("did not come" in notice for notice in world.notices)
    shared = [round for round in landed(digests, joined) if len(digests[round]) == 3]
    assert len(shared) >= 3  # with both founders
    every_round = sorted(digests)
    assert every_round == list(range(1, len(every_round) + 1))  # none was left out
    words = [word["word"] for word in events(world.out, "word")]
    assert any(word["verdict"] == "land" and lost not in word["seats"] for word in words)


@pytest.mark.long
def test_nothing_lands_without_the_lighthouse_and_training_goes_on(tmp_path: Path, digests: Digests) -> None:
    world = Run(small(tmp_path, 60_000, 3, *INT8), tmp_path / "run")
    numbers = [world.join() for _ in range(3)]
    world.until(lambda: len(digests) >= 5)
    world.stop()
    time.sleep(1.0)  # what was decided is landed
    before, spare = max(digests), [world.workers[number]._spare for number in numbers]
    time.sleep(8.0)
    assert max(digests) == before
    assert all(world.workers[number]._spare > was for number, was in zip(numbers, spare, strict=True))
    world.keep()
    lit = time.monotonic()
    world.until(lambda: max(digests) > before + 3)
    took = time.monotonic() - lit
    fourth = world.join()
    world.until(lambda: len(landed(digests, rank_to_load(world, fourth))) >= 3)
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
        words = [order.message for order in orders if isinstance(getattr(order, "message", None), Word)]
        if silent or any(word.verdict == "land" for word in words):
            silent.extend(word.round for word in words)
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
    word = next(word["word"] for word in events(world.out, "word") if word["word"]["round"] == round)
    assert word["verdict"] == "land" and word["attempt"] == 0

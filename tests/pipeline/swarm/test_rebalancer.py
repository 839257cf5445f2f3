"""Moves between stages: to the balance from any start, one a period, none where it is balanced, no stage left empty."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isles.pipeline.swarm.placement import (
    BalancePolicy,
    PeerLoad,
    Rebalancer,
    StageMove,
    queue_move,
    stage_for_joiner,
    throughput_move,
)

POLICIES: tuple[BalancePolicy, ...] = ("queue", "throughput")


def table(stages: Sequence[int], costs: Sequence[float], speeds: Sequence[float] | None = None) -> dict[int, PeerLoad]:
    """Of peers that serve `stages`, when 24 microbatches of work come to each stage: its peers share them."""
    speeds = speeds or [1.0] * len(stages)
    total = Counter[int]()
    for stage, speed in zip(stages, speeds, strict=True):
        total[stage] += speed / costs[stage]
    return {peer: PeerLoad(stage, 24 / total[stage], speeds[peer] / costs[stage]) for peer, stage in enumerate(stages)}


def moved(stages: Sequence[int], move: StageMove) -> list[int]:
    return [move.to if peer == move.peer else stage for peer, stage in enumerate(stages)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", [s for s in itertools.product((0, 1), repeat=6) if 0 < sum(s) < 6], ids=str)
def test_a_stage_of_twice_the_work_gets_twice_the_peers(start: tuple[int, ...], policy: BalancePolicy) -> None:
    costs, stages = (2.0, 1.0), list(start)
    run = Rebalancer(policy, costs, period=60)
    for period in range(1, 10):
        move = run.move(60.0 * period, table(stages, costs))
        if move is None:
            break
        assert stages[move.peer] != move.to
        stages = moved(stages, move)
    assert stages.count(0) == 4
    # as good as any: the throughput of the slower stage
    assert min(4 / 2.0, 2 / 1.0) == max(min(heavy / 2.0, (6 - heavy) / 1.0) for heavy in range(1, 6))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 50), st.floats(0.1, 10)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_no_stage_is_left_empty_and_the_move_is_a_move(peers: list[tuple[int, float, float]], bar: float) -> None:
    loads = {number: PeerLoad(*peer) for number, peer in enumerate(peers)}
    for move in (queue_move(loads, bar), throughput_move(loads, (1.0, 2.0, 0.5, 3.0), bar)):
        if move is None:
            continue
        left = Counter(load.stage for peer, load in loads.items() if peer != move.peer)
        assert left.keys() == {load.stage for load in loads.values()}
        assert move.to in left and loads[move.peer].stage != move.to


@example([(0, 1.0), (2, 1.0), (2, 1.0), (2, 1.0), (1, 1.0), (2, 1.0), (0, 1.0)], (3.0, 3.0, 2.0))  # rates tie
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.2, 5)), min_size=3, max_size=10).filter(
        lambda peers: len({stage for stage, _ in peers}) == 3
    ),
    st.tuples(*[st.floats(0.5, 4)] * 3),
)
def test_best_response_comes_to_an_end_and_never_slows_the_slowest(
    peers: list[tuple[int, float]], costs: tuple[float, float, float]
) -> None:
    stages, speeds = [stage for stage, _ in peers], [speed for _, speed in peers]
    for _ in range(200):
        loads = table(stages, costs, speeds)
        slowest = throughput(loads)
        move = throughput_move(loads, costs)
        if move is None:
            return
        stages = moved(stages, move)
        assert throughput(table(stages, costs, speeds)) >= slowest
    pytest.fail("it goes on moving")


def throughput(loads: dict[int, PeerLoad]) -> float:
    total = Counter[int]()
    for load in loads.values():
        total[load.stage] += load.rate
    return min(total.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_balanced_stages_stay_as_they_are(policy: BalancePolicy) -> None:
    run = Rebalancer(policy, (2.0, 1.0), period=60, hysteresis=0.0)
    loads = table([0, 0, 0, 0, 1, 1], (2.0, 1.0))
    assert [run.move(60.0 * period, loads) for period in range(1, 100)] == [None] * 99


def test_less_than_the_hysteresis_moves_nobody() -> None:
    loads = {0: PeerLoad(0, 12, 1.0), 1: PeerLoad(1, 10, 1.0), 2: PeerLoad(1, 10, 1.0)}
    assert queue_move(loads, 0.25) is None
    assert queue_move(loads, 0.19) == StageMove(1, 0)
    rates = {0: PeerLoad(0, 0, 1.0), 1: PeerLoad(1, 0, 0.2), 2: PeerLoad(1, 0, 2.0)}
    assert throughput_move(rates, (1.0, 1.0), 0.25) is None
    assert throughput_move(rates, (1.0, 1.0), 0.15) == StageMove(1, 0)


def test_only_one_peer_moves_a_period() -> None:
    run = Rebalancer("queue", (1.0, 1.0), period=300, hysteresis=0.0)
    loads = {0: PeerLoad(0, 9, 1.0), 1: PeerLoad(1, 1, 1.0), 2: PeerLoad(1, 2, 1.0)}
    asked = [run.move(now, loads) is not None for now in range(0, 1500, 10)]
    assert [10 * number for number, did in enumerate(asked) if did] == [300, 600, 900, 1200]
    assert run.move(5000, loads) and not run.move(5090, loads) and run.move(5100, loads)


def test_the_shortest_queue_of_the_shortest_queues_goes() -> None:
    loads = {0: PeerLoad(0, 9, 1.0), 1: PeerLoad(1, 2, 1.0), 2: PeerLoad(1, 1, 1.0), 3: PeerLoad(2, 3, 1.0)}
    assert queue_move(loads) == StageMove(2, 0)


def test_who_joins_goes_where_it_is_wanted_most() -> None:
    loads = {0: PeerLoad(0, 1, 1.0), 1: PeerLoad(2, 5, 1.0)}
    assert stage_for_joiner(loads, 3) == 1
    assert stage_for_joiner(loads | {2: PeerLoad(1, 3, 1.0)}, 3) == 2
    assert stage_for_joiner({0: PeerLoad(0, 1, 2.0), 1: PeerLoad(1, 1, 1.0)}, 2) == 1
    assert stage_for_joiner({}, 3) == 0


@pytest.mark.parametrize(
    ("key", "value"), [("policy", "queues"), ("period", 0.0), ("period", float("nan")), ("hysteresis", -0.1)]
)
def test_settings_that_are_none_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        Rebalancer(**{"policy": "queue", "costs": (1.0,), key: value})  # type: ignore[arg-type]

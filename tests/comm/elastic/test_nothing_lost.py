"""The account of the data through joins, deaths, pauses, cut lines, leaves and outages of the lighthouse."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from isles.comm.elastic.cells import fresh_before, lot_batches
from isles.data.lots import _SPARE, rows
from tests.comm.elastic.world import World


def churned(*, agrees: bool, founders: int, most: int, events: int, seed: int) -> World:
    world = World(founders=founders, agrees=agrees, seed=seed)
    draw = random.Random(seed)
    world.run(12.0)
    for _ in range(events):
        world.run(world.now + draw.uniform(0.3, 1.6))
        awake = [node for node in world.living() if node.member is not None and not node.frozen and not node.cut]
        settled = [node for node in awake if node.training and not node.leaving]
        kind = draw.choices(["join", "kill", "leave", "pause", "cut", "outage"], [8, 5, 2, 2, 2, 1])[0]
        if kind == "join" and len(world.living()) >= most:
            kind = "kill"
        if kind == "join":
            world.join()
        elif kind == "outage":
            if world.lighthouse is not None:
                world.crash(draw.uniform(0.5, 8.0))
        elif len(settled) > 2:  # the last ones with the state stay
            victim = draw.choice(awake if len(settled) > 3 else [node for node in awake if node not in settled] or settled)
            if kind == "kill":
                world.kill(victim)
            elif kind == "leave" and victim.training:
                world.leave(victim)
            elif kind == "pause":
                world.pause(victim, draw.uniform(0.5, 9.0))
            elif kind == "cut":
                world.cut(victim, draw.uniform(0.5, 9.0))
    world.run(world.now + 30.0)
    world.final = max(node.member.round for node in world.living() if node.member is not None) + 6
    world.run(world.now + 60.0)
    return world


def owed_positions(world: World) -> list[int]:
    """The rows of every debt at the end."""
    lighthouse = world.lighthouse
    assert lighthouse is not None
    views = lighthouse.account.views
    return [
        int(rows(*batch, batch_size=1)[0]) for lot in lighthouse.owed() for batch in lot_batches(views[lot.view], lot)
    ]


def check(world: World) -> None:
    lighthouse = world.lighthouse
    assert lighthouse is not None and lighthouse.view is not None
    living = world.living()
    assert all(not node.training and node.exchange is None for node in living), "a worker is stuck"
    assert {node.seat for node in living} == set(lighthouse.view.seats)
    covering = [view for view in lighthouse.account.views.values() if view.since <= world.final]
    view = max(covering, key=lambda view: view.number)
    end = view.start + fresh_before(view, world.final + 1)
    held = Counter(position for position, _ in world.held() if position < _SPARE)
    owed = Counter(owed_positions(world))
    print(
        world.counts,
        "owed",
        sum(owed.values()),
        "end",
        end,
        "rounds",
        world.final,
        "doubles",
        sum(c > 1 for c in held.values()),
        "never",
        sum(p not in held and p not in owed for p in range(end)),
        "both",
        sum(p in held for p in owed),
    )
    assert max(held) < end
    assert max(owed.values(), default=1) == 1
    assert not [position for position in owed if position in held]
    assert not [position for position in range(end) if position not in held and position not in owed]
    assert sum(count - 1 for count in held.values()) <= world.counts["deaths"] * world.rules.sync_every


@pytest.mark.parametrize("agrees", [False, True], ids=["pairs", "all-reduce"])
def test_hundred_events_lose_nothing(agrees: bool) -> None:
    check(churned(agrees=agrees, founders=3, most=8, events=100, seed=1))

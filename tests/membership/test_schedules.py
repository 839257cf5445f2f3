"""Short schedules of kills, freezes, delays, cuts, rejoins, leaves and outages of the lighthouse, against six
invariants. In a third of them one of the members is hostile.

1. One model a round: all that land a round of one mean land the same, after the same rounds.
2. No honest member is shut out: banned, or refused.
3. Every sample's account: each cell of the data is held by somebody living, or owed; a loss has at most a slice read
   twice. (Beside a hostile member: but for its own cells, and those that it says it has from a lost one.)
4. No wait above its bound: whoever lives, is reachable and has a lighthouse does a round within `STANDS` seconds.
5. States load: whoever is to load one has it, and trains again, within `AWAY` seconds.
6. The end comes: all have done the last round, the sixth from then, within `ENDS` seconds.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from isles.data.order import _SPARE, rows
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.data_ledger import DataLedger, batches, fresh_before, range_batches
from isles.membership.messages import MARGIN, Beat, BeatReply, View, from_plain
from isles.membership.round_commit import RoundDecision
from tests.membership.hostile import HostileWorld
from tests.membership.world import FIRST, GRACE, LEASE, PATIENCE, RETRY, Exchange, Node

ROUND, ABSENT = 1.3, 7.0  # the longest round without a wait, and the longest absence, seconds
AGAIN = ROUND + FIRST + PATIENCE  # a round that one member holds up until the next attempt is without it
STANDS = GRACE + LEASE + AGAIN + 2 * PATIENCE  # up to three attempts, after a restart and a loss
AWAY = (
    GRACE + 3 * (RETRY + 2.5) + 15.0 + MARGIN * AGAIN
)  # three donors, a proposal unanswered, and rounds until its view
ENDS = GRACE + ABSENT + 6 * AGAIN


class Schedule(HostileWorld):
    """One schedule. longest: seconds, by what was waited for. what: the events so far."""

    def __init__(self, seed: int, *, has_liar: bool, **form: Any) -> None:
        self.draw = Random(seed)
        super().__init__(founders=self.draw.randint(3, 4) + has_liar, seed=seed, **form)
        if not has_liar:
            self.nodes[-1].address, self.works, self.silent = "", True, False
        self.has_liar = has_liar
        self.longest: Counter[str] = Counter()
        self.what: list[str] = []
        self.slow: dict[int, float] = {}  # by node: until when its messages are late
        self._killed: set[int] = set()
        self._rounds: dict[int, tuple[object, ...]] = {}
        self._stands: dict[int, tuple[object, float]] = {}
        self._idle: Counter[int] = Counter()
        self.after(0.5, self._tick)
        if has_liar:
            self.after(5.0, self.lie)

    def honest(self) -> list[Node]:
        return [node for node in self.living() if not node.address]

    def to_node(self, node: Node, what: object) -> None:
        if self.slow.get(node.name, 0.0) > self.now:
            self.after(self.draw.uniform(0.1, 0.7), lambda: super(Schedule, self).to_node(node, what))  # type: ignore[arg-type]
        else:
            super().to_node(node, what)  # type: ignore[arg-type]

    def crash(self, seconds: float) -> None:
        """3: a lighthouse that is started again knows from its journal what the former one knew."""
        was, now = self.lighthouse, RoundsCoordinator(self.rules, self.journal)
        assert was is not None
        for each in (lambda run: run.view, lambda run: run.backlog(), lambda run: run.newest_round, known):
            assert each(was) == each(now), "3: the journal lacks something"
        super().crash(seconds)

    def kill(self, node: Node) -> None:
        self._killed.add(node.name)
        super().kill(node)

    def _land(self, node: Node, decision: RoundDecision, union: int) -> None:
        super()._land(node, decision, union)
        if not node.address:
            landed = (union, *node.landed)
            assert self._rounds.setdefault(decision.round, landed) == landed, f"1: two models in round {decision.round}"

    def _tick(self) -> None:
        self.command(lambda m: m.tick(self.now))
        for node in self.nodes:
            if node.address:
                continue
            assert node.alive or node.leaving or node.name in self._killed, f"2: node {node.name} is shut out"
            state = node.state
            if not node.alive or (state is not None and is_over(self, node)):
                continue
            reached = self.lighthouse is not None and not (node.frozen or node.cut or node.broken)
            is_busy = node.training or node.exchange is not None  # with a quorum, the last round lands after its steps
            mark = (
                state and (state.round, state.call, state.ready),
                len(node.landed),
                node.training,
            )
            was, since = self._stands.get(node.name, (None, self.now))
            if mark != was or not reached:
                self._stands[node.name] = mark, self.now
            elif is_busy:
                self.longest["stands"] = max(self.longest["stands"], self.now - since)
                number = 6 if state is not None and state.round >= self.final else 4
                assert self.now - since <= STANDS, f"{number}: node {node.name} stands still"
            if is_busy:
                self._idle[node.name] = 0
            elif reached:
                self._idle[node.name] += 1
                self.longest["away"] = max(self.longest["away"], self._idle[node.name] / 2)
                assert self._idle[node.name] / 2 <= AWAY, f"5: node {node.name} has no state"
        self.after(0.5, self._tick)

    def event(self) -> None:
        draw, awake = self.draw, [node for node in self.honest() if node.state and not node.frozen and not node.cut]
        counted = self.lighthouse.members() if self.lighthouse else ()
        settled = [node for node in awake if node.training and not node.leaving and node.member in counted]
        kinds = ["join", "kill", "rejoin", "leave", "pause", "cut", "delay", "outage"]
        kind = draw.choices(kinds, [3, 3, 3, 2, 4, 4, 3, 2])[0]
        self.what.append(kind)
        if kind == "join" and len(self.honest()) < 7:
            self.join()
        elif kind == "outage" and self.lighthouse is not None:
            self.crash(draw.uniform(0.5, 6.0))
        elif kind == "delay" and awake:
            self.slow[draw.choice(awake).name] = self.now + draw.uniform(1.0, 10.0)
        elif len(settled) > 2:  # the last ones with the state stay
            victim = draw.choice(awake if len(settled) > 3 else [n for n in awake if n not in settled] or settled)
            if kind in ("kill", "rejoin"):
                self.kill(victim)
                if kind == "rejoin":
                    self.after(draw.uniform(0.2, 4.0), self.join)
            elif kind == "leave" and victim.training:
                self.leave(victim)
            elif kind == "pause":
                self.pause(victim, draw.uniform(0.5, ABSENT))
            elif kind == "cut":
                self.cut(victim, draw.uniform(0.5, ABSENT))

    def until(self, seconds: float, what: object) -> None:
        end = self.now + seconds
        while self.now < end and not what():  # type: ignore[operator]
            self.run(self.now + 0.5)


def known(run: RoundsCoordinator) -> list[tuple[object, ...]]:
    workers = run.workers.values()
    return [(one.member, one.state, one.call, one.entered, one.round, one.connected) for one in workers]


def is_over(world: Schedule, node: Node) -> bool:
    return world.final < 1 << 30 and not node.training and node.exchange is None


FORMS: dict[str, dict[str, Any]] = {
    "pairs": {"agrees": False},
    "one mean": {"agrees": True},
    "quorum": {"agrees": True, "quorum": 0.6},
}


def scheduled(seed: int, form: str) -> Schedule:
    """Runs a schedule, and asserts the invariants."""
    world = Schedule(seed, has_liar=seed % 3 == 0, **FORMS[form])
    draw = world.draw
    world.run(draw.uniform(5.0, 9.0))
    for _ in range(draw.randint(8, 15)):
        world.run(world.now + draw.uniform(0.2, 1.6))
        world.event()
    world.until(AWAY + 10.0, lambda: world.lighthouse and all(node.training for node in world.honest()))
    assert all(node.training for node in world.honest()), "5: somebody has no state"
    world.end_after(6)
    if draw.random() < 0.5:
        world.run(world.now + draw.uniform(0.0, 8.0))
        world.event()
    begun = world.now
    world.until(
        ENDS, lambda: world.lighthouse and all(n.state and is_over(world, n) and not n.frozen for n in world.honest())
    )
    world.longest["ends"] = world.now - begun
    assert all(n.state is None or is_over(world, n) for n in world.honest()), "6: the end does not come"
    world.run(world.now + 5.0)
    account(world)
    return world


def account(world: Schedule) -> None:
    lighthouse = world.lighthouse
    assert lighthouse is not None and lighthouse.view is not None
    views = lighthouse.ledger.views
    owed = Counter(
        int(rows(*batch, batch_size=1)[0])
        for one in lighthouse.backlog()
        for batch in range_batches(views[one.view], one)
    )
    union = 0
    for node in world.honest():
        union |= node.work
    held = Counter(p for bit, (p, _) in enumerate(world.reads) if union >> bit & 1 and p < _SPARE)
    covering = [view for view in views.values() if view.since <= world.final]
    view = max(covering, key=lambda view: view.number)
    end = view.start + fresh_before(view, world.final + 1)
    false = liars_cells(world)
    missing = set(range(end)) - held.keys() - owed.keys() - false
    claimed = view.start + fresh_before(view, max(world.final, lighthouse.newest_round) + 1)  # by a hostile member
    beyond = (held.keys() | owed.keys()) - set(range(claimed)) - false
    world.counts["missing"] += len(missing)
    assert not missing or world.has_liar, f"3: {len(missing)} cells are nobody's"
    assert not beyond, f"3: {len(beyond)} cells beyond the end"
    twice = sum(n for p, n in (held + owed).items() if p not in false) - len((held.keys() | owed.keys()) - false)
    world.longest["twice"] = twice
    losses = world.counts["lost"] + sum(worker.call for worker in lighthouse.workers.values())  # who is left out, too
    assert twice <= losses * world.rules.sync_every, f"3: {twice} cells twice"


def liars_cells(world: Schedule) -> set[int]:
    """All cells that were ever assigned to members of the hostile address."""
    if not world.has_liar:
        return set()
    views: list[View] = [from_plain(entry["view"]) for entry in world.journal if entry["event"] == "view"]
    known = {view.number: view for view in views}
    assert world.lighthouse is not None
    false = {one for one, worker in world.lighthouse.workers.items() if worker.address}
    cells = set()
    for view, following in zip(views, [*views[1:], None], strict=True):
        last = min(following.since if following else world.final + 1, world.final + 1)
        for round in range(view.since, last):
            for index, member in enumerate(view.members):
                if member in false:
                    cells |= {int(rows(*batch, batch_size=1)[0]) for batch in batches(known, view, round, index)}
    return cells


@pytest.mark.parametrize("form", FORMS)
def test_six_schedules(form: str) -> None:
    for seed in range(6):
        scheduled(seed, form)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", range(6, 10_006, 500))
def test_ten_thousand_schedules(first: int, form: str) -> None:
    for seed in range(first, first + 500):
        scheduled(seed, form)


def lands_alone(world: Schedule, node: Node, exchange: Exchange) -> None:
    """1. A member lands its answer by its own judgement."""
    part = exchange.part
    if part is not None and part.phase == "done" and node.exchange is exchange:
        world.decision(node, RoundDecision(part.round, "land", part.attempt, part.members))


class Forgetful(DataLedger):
    """3. What the dead had not shared is not owed."""

    def forgo(self, member: int) -> None:
        pass


def repeats_nothing(run: RoundsCoordinator, member: int, beat: Beat) -> BeatReply:
    """5. Which state to load is said once, and not again in replies to beats."""
    worker = run.workers[member]
    load, worker.load = worker.load, None
    reply = ANSWER(run, member, beat)
    worker.load = load
    return reply


def reaches_no_last_round(run: RoundsCoordinator, ahead: int = 0) -> int:
    """6. Rounds are decided once somebody has begun them, except for the last one."""
    return min(REACHED(run, ahead), (run.rules.last or 1 << 30) - 1)


ANSWER, REACHED = RoundsCoordinator._answer, RoundsCoordinator._reached
COORDINATOR, STATE = "isles.membership.coordinator.RoundsCoordinator.", "isles.membership.coordinator_state."
MUTANTS: dict[int, tuple[str, Any]] = {
    1: ("tests.membership.world.World._say_done", lands_alone),
    2: (STATE + "BanScores.are_enough", lambda scores, member, members: any(member in pair for pair in scores._rounds)),
    3: (STATE + "DataLedger", Forgetful),
    4: (STATE + "Ballots.decision", lambda ballots, round, member=None: None),  # decisions are told once
    5: (COORDINATOR + "_answer", repeats_nothing),
    6: (COORDINATOR + "_reached", reaches_no_last_round),
}
FOUND = {  # by form and mutant: the first seed that finds it
    "one mean": {1: 3, 2: 75, 3: 1, 4: 0, 5: 3, 6: 1},
    "quorum": {1: 8, 2: 75, 3: 1, 4: 0, 5: 3, 6: 1},
}


@pytest.mark.parametrize("form", FOUND)
@pytest.mark.parametrize("broken", MUTANTS)
def test_a_mutant_of_each_is_found_out(monkeypatch: pytest.MonkeyPatch, broken: int, form: str) -> None:
    monkeypatch.setattr(*MUTANTS[broken])
    with pytest.raises(AssertionError, match=f"^{broken}: "):
        for seed in range(FOUND[form][broken], 100):
            scheduled(seed, form)


if __name__ == "__main__":
    import sys

    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for form in sys.argv[3:] or FORMS:
            try:
                scheduled(seed, form)
            except AssertionError as error:
                print(form, seed, str(error).split("\n")[0], flush=True)

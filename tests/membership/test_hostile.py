"""One hostile address of four: it shuts out nobody, and stops neither rounds nor views for long, whatever it says.

Each seed draws how many members the hostile address has, whether they also work, and what they say; kinds of words are
drawn equally. The bounds are those of docs/guarantees.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from isles.membership.messages import (
    KINDS,
    About,
    Admitted,
    BeatReply,
    Entry,
    Examine,
    JoinSwarm,
    Later,
    Load,
    News,
    Over,
    PeerAddress,
    Proposal,
    Reachability,
    Refusal,
    Rejoin,
    RequestWork,
    RunStatus,
    StartSwarm,
    StatesSaved,
    SwarmBeat,
    View,
    Wait,
)
from isles.membership.round_commit import RoundDecision
from isles.membership.swarm_coordinator import SwarmCoordinator, SwarmRules
from tests.membership.hostile import MAY_SAY, SAID, HostileWorld, Liar
from tests.membership.test_bounds import Run, land
from tests.membership.test_muster import RUN
from tests.membership.test_muster import World as Swarm

ROUNDS, VIEWS = 60.0, 60.0  # seconds for which one of four can stop rounds and views
LIGHTHOUSES = (
    *(
        View,
        Proposal,
        BeatReply,
        Admitted,
        Load,
        Refusal,
        RoundDecision,
        Later,
        About,
        Entry,
        Reachability,
        PeerAddress,
    ),
    *(Examine, News, Over, RunStatus, StartSwarm, JoinSwarm, Wait, Rejoin, StatesSaved),
)
"""What the lighthouse alone says."""


class Besieged(HostileWorld):
    """Three honest nodes and one hostile one, a fourth honest one that joins, and what the hostile one says."""

    def __init__(self, seed: int, *, agrees: bool) -> None:
        super().__init__(founders=4, agrees=agrees, seed=seed)
        self.honest = self.nodes[:3]
        self.moved: dict[int, tuple[int, float]] = {}
        self.gaps: list[float] = []
        self.after(1.0, self._tick)

    def _tick(self) -> None:
        self.command(lambda m: m.tick(self.now))
        for node in self.honest:
            assert node.alive, f"node {node.name} was shut out"
            at = len(node.landed) if self.rules.agrees else 0 if node.state is None else node.state.round
            was, since = self.moved.get(node.name, (-1, self.now))
            if at != was:
                self.moved[node.name] = at, self.now
            self.gaps.append(self.now - since if at == was else 0.0)
        self.after(0.5, self._tick)


def stops_nobody(seed: int, *, agrees: bool) -> None:
    world = Besieged(seed, agrees=agrees)
    world.after(5.0, world.lie)
    world.run(20.0)
    world.join()
    comes = world.nodes[-1]
    world.run(20.0 + VIEWS)
    assert comes.training or comes.landed, "the joiner has not got in"
    world.honest.append(comes)
    world.run(90.0)
    banned = {entry["member"] for entry in world.journal if entry["event"] == "ban"}
    assert not banned & {node.member for node in world.honest}
    assert max(world.gaps) <= ROUNDS


def stops_no_quorum(seed: int) -> None:
    """Ten rounds, each of which lands within forty attempts, among all honest members that are in it."""
    draw = Random(seed)
    world, liar = Run(3, 1, draw.randrange(1, 4), agrees=True, quorum=0.75), Liar(draw)
    for round in range(1, 11):
        world.begin(round)
        for _ in range(20):
            workers = world.run.workers
            live = [one for one in world.hostile if workers[one].state in ("outside", "ready", "in")]
            if not live:
                live = [len(workers)]
                world.hostile.append(len(workers))
                world.run.join(world.now, "text", (), "hostile 0")
            member = draw.choice(live)
            liar.say(world.now, world.run, member, liar.word(world.run, member))
        for _ in range(40):
            if land(world, round, True):
                break
        else:
            raise AssertionError(f"round {round}: no decision")
        world.promise()
        world.ticks(0.5)
    assert world.shut_out() == [] and world.run.newest_round >= 10


def stops_no_swarm(seed: int, *, clustered: bool) -> None:
    """Three honest peers begin a swarm, work through twenty steps and stay in it; then one is lost, and comes back."""
    draw = Random(seed)
    liar, world = Liar(draw), Swarm(3 if clustered else 2, *([] if clustered else [1]), most=20)
    world.rules = SwarmRules(peers=world.rules.peers, most=20, last=50, clustered=clustered)
    run = world.coordinator = SwarmCoordinator(world.rules)
    stages = {0: 0, 1: 0, 2: int(not clustered)}
    hostile = draw.randrange(1, 3)
    for member in range(3 + hostile):
        world.answer(run.join(0.0, "text", (), f"honest {member}" if member < 3 else "hostile"))

    def lies(count: int) -> None:
        here = [member for member in range(3, len(run.peers)) if run.peers[member].here and not run.peers[member].left]
        if not here:
            world.answer(run.join(world.now, "text", (), "hostile"))
            here = [len(run.peers) - 1]
        for _ in range(count):
            own = draw.choice(here)
            world.answer(liar.say(world.now, run, own, liar.swarm_word(run)))

    for member in stages:
        world.ask(member, stages[member])
        lies(draw.randrange(4))
    for _ in range(3):  # whoever was told to wait asks again
        answers = [world.answer(run.hear(world.now, member, RequestWork(stages[member], RUN))) for member in stages]
        world.now += 6.0
        world.answer(run.tick(world.now))
    assert any(isinstance(answer, StartSwarm) for answer in answers), answers
    begun = stages  # they admit those whose place a hostile peer took, and go on without that one
    for step in range(1, 21):
        for member in stages:
            beat = SwarmBeat(run.epoch, step, (*begun,), (*begun.values(),), 0.1, 1.0, 4, 0.2, ())
            assert isinstance(world.answer(run.hear(world.now, member, beat)), StatesSaved)
            lies(draw.randrange(4))
        world.now += 1.0
        assert {*stages} <= run.members.keys() or step < 3
        assert run.step >= step - 2


SIEGES: dict[str, Callable[[int], None]] = {
    "pairs": partial(stops_nobody, agrees=False),
    "mean": partial(stops_nobody, agrees=True),
    "quorum": stops_no_quorum,
    "swarm": partial(stops_no_swarm, clustered=False),
    "clusters": partial(stops_no_swarm, clustered=True),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("siege", SIEGES)
def test_one_of_four_stops_nobody(siege: str, seed: int) -> None:
    """A hundred seeds of each: tests/training/elastic/test_hostile.py."""
    SIEGES[siege](seed)


def test_no_kind_of_message_is_left_out() -> None:
    assert {*MAY_SAY, *LIGHTHOUSES} == {*KINDS.values()} and not {*MAY_SAY} & {*LIGHTHOUSES}


def test_at_least_half_of_what_was_said_was_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Behind the others of this file, of their words."""
    kinds = sorted({kind for kind, _ in SAID})
    if not kinds:
        pytest.skip("no other test of this file has run in this process")
    with capsys.disabled():
        print("\nwords (taken, refused):", {kind: (SAID[kind, True], SAID[kind, False]) for kind in kinds})
    assert 2 * sum(SAID[kind, True] for kind in kinds) >= SAID.total()


if __name__ == "__main__":
    import sys

    first, last = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, last):
        for what in sys.argv[3:] or SIEGES:
            try:
                SIEGES[what](seed)
            except AssertionError as error:
                print(what, seed, str(error)[:300].replace("\n", " "))
    print(SAID)

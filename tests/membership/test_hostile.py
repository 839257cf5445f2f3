"""One hostile address of four: it shuts out nobody, and stops neither rounds nor views for long, whatever it says.

Each seed draws how many members the hostile address has, whether they also work, and what they say. The bounds are
those of docs/guarantees.md.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from tests.membership.hostile import Liar
from tests.membership.world import Node, World

ROUNDS, VIEWS = 60.0, 60.0  # seconds for which one of four can stop rounds and views
EVERY = 0.15  # seconds between two words
SAID = Counter[tuple[str, bool]]()


class Besieged(World):
    """Three honest nodes and one hostile one, a fourth honest one that joins, and what the hostile one says."""

    def __init__(self, seed: int, *, agrees: bool) -> None:
        super().__init__(founders=4, agrees=agrees, seed=seed)
        self.hostile = Random(seed ^ 0x5EED)
        self.liar = Liar(self.hostile)
        self.nodes[3].address = "hostile"
        self.works = self.hostile.random() < 0.5  # it trains besides
        self.silent = self.hostile.random() < 0.3  # it does not answer proposals
        self.honest = self.nodes[:3]
        self.moved: dict[int, tuple[int, float]] = {}
        self.gaps: list[float] = []
        self.after(1.0, self._tick)

    def acknowledge(self, node: Node, ack: Any) -> None:
        if not (self.silent and node.address):
            super().acknowledge(node, ack)

    def meet(self, node: Node, round: int, call: int) -> None:
        if self.works or not node.address:
            super().meet(node, round, call)

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

    def lie(self) -> None:
        """One word, from any member of the hostile address; sometimes it adds a member."""
        run = self.lighthouse
        assert run is not None
        seats = [member for member, worker in run.workers.items() if worker.address]
        live = [member for member in seats if run.workers[member].state in ("outside", "ready", "in")]
        leaving = [member for member in seats if run.workers[member].here and member not in live]
        if leaving and self.hostile.random() < 0.2:
            self.carry_out(run.disconnected(self.now, leaving[0]))
        elif len(live) < 4 and self.hostile.random() < 0.3:
            self._members[len(run.workers)] = Node(-1, 1.0, "hostile", cut=True)  # which gives no state
            self.carry_out(run.join(self.now, "toy", (), "hostile"))
        elif live:
            own = self.hostile.choice(live)
            word = self.liar.word(run, own)
            self.carry_out(self.liar.say(self.now, run, own, word))
        self.after(EVERY, self.lie)


@pytest.mark.parametrize("agrees", [False, True], ids=["pairs", "one mean"])
@pytest.mark.parametrize("seed", [*range(6)] + [pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 100)])
def test_one_of_four_stops_nobody(seed: int, agrees: bool) -> None:
    world = Besieged(seed, agrees=agrees)
    world.after(5.0, world.lie)
    world.run(30.0)
    world.join()
    comes = world.nodes[-1]
    world.run(30.0 + VIEWS)
    assert comes.training or comes.landed, "the joiner has not got in"
    world.honest.append(comes)
    world.run(150.0)
    banned = {entry["member"] for entry in world.journal if entry["event"] == "ban"}
    assert not banned & {node.member for node in world.honest}
    assert max(world.gaps) <= ROUNDS
    SAID.update(world.liar.said)


if __name__ == "__main__":
    import sys

    for agrees in (False, True):
        for seed in range(int(sys.argv[1]), int(sys.argv[2])):
            try:
                test_one_of_four_stops_nobody(seed, agrees)
            except AssertionError as error:
                print(agrees, seed, str(error)[:200].replace("\n", " "))
    print(SAID)

"""How long a worker waits for its exchanges if each takes the time that `costs` gives it, and they take turns on the
line. Exchange by exchange, not message by message: for searches over rates and rounds, and for many workers. Knows no
jitter and no end of a run, and takes all workers for one that waits as long as the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from isles.network.planner.costs import Lines, all_gather_seconds, partner_seconds, two_shot_seconds
from isles.network.planner.planned import Doubling, Mean, MessagePattern, PlannedExchange, Ragged, Swap, Then
from isles.network.planner.worker import Agenda

TURNS = 4
"""Rounds that are played; the last but one is looked at."""


class Turns:
    """Of rounds of `every` steps. exchanges: of TURNS rounds of them; their groups are all of the `workers`, or pairs
    of them.
    """

    def __init__(self, exchanges: Sequence[PlannedExchange], every: int, workers: int) -> None:
        known: dict[int, list[_Kind]] = {}
        self._every = every
        self._acts: list[tuple[int, float, int | None, list[_Kind]]] = []
        for act in Agenda((), exchanges).acts(TURNS * every):
            number, kinds = act.waits_for, []
            if act.starts is not None:
                number, one = act.starts
                if id(one.pattern) not in known:
                    size = len(one.groups[0])
                    known[id(one.pattern)] = _kinds(one.pattern(size), size, pair=size == 2 < workers)
                kinds = known[id(one.pattern)]
            self._acts.append((act.moment, act.computes, number, kinds))

    def waiting(self, lines: Lines, step_seconds: float) -> float:
        """Seconds of a round."""
        clock = line = waited = 0.0
        due: dict[int, float] = {}
        alone = cache(partial(_alone, lines))
        first, last = (TURNS - 2) * self._every + 1, (TURNS - 1) * self._every
        for moment, computes, number, kinds in self._acts:
            clock += computes * step_seconds
            if kinds and number is not None:
                empty = sum(alone(kind, 0.0, back) for kind, _, back in kinds)
                line = max(line, clock) + sum(alone(*kind) for kind in kinds) - empty
                due[number] = line + empty
            elif number is not None:
                if first <= moment <= last:
                    waited += max(due[number] - clock, 0.0)
                clock = max(clock, due[number])
        return waited


_Kind = tuple[str, float, float]
"""(what, bits of a member, bits of an entry of the mean per bit of one sent)."""


def _alone(lines: Lines, what: str, bits: float, back: float) -> float:
    if what == "pair":
        return partner_seconds(lines, bits)
    return all_gather_seconds(lines, bits) if what == "gather" else two_shot_seconds(lines, bits, back)


def _kinds(pattern: MessagePattern, size: int, pair: bool) -> list[_Kind]:
    """Of the exchanges that follow each other."""
    if isinstance(pattern, Then):
        side = [kind for mean in pattern.first for kind in _kinds(mean, size, pair)]
        what, _, back = side[0]
        return [(what, sum(bits for _, bits, _ in side), back), *_kinds(pattern.second, size, pair)]
    if isinstance(pattern, Mean):
        there = sum(sum(sent) for sent, _ in pattern.segments if sent is not None)
        backs = sum(sum(back) for sent, back in pattern.segments if sent is not None)
        if there:
            return [("two-shot", 8 * there, backs / there)]
        return [("pair" if pair else "gather", 8 * sum(back[0] for _, back in pattern.segments), 1.0)]
    assert isinstance(pattern, Swap | Doubling | Ragged), pattern
    return [("gather", 8 * (pattern.sizes[0] if isinstance(pattern, Swap) else pattern.nbytes), 1.0)]

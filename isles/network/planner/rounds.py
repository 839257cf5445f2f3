"""The exchanges of a method that goes in rounds, in the order of their starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from isles.network.planner.planned import BySize, Groups, PlannedExchange

_DRAINED, _SENT, _BEHIND = range(3)  # the order of what starts at one moment


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """sends: fragments that are sent after an inner step. lands: the step after which the answer to what was sent after
    a step lands. groups: of a round (1, 2, ...). pattern: of a fragment's "payload" or "anchor" in a round with these
    groups. anchors: they travel beside the payload, ahead of it (behind the landing before), or not.
    """

    fragments: int
    sends: Callable[[int], Sequence[int]]
    lands: Callable[[int], int]
    groups: Callable[[int], Groups]
    pattern: Callable[[int, str, int, Groups], BySize]
    anchors: Literal["none", "beside", "ahead"] = "none"
    _made: list[tuple[tuple[float, int], PlannedExchange]] = field(default_factory=list, init=False)

    def planned(self, steps: int) -> list[PlannedExchange]:
        """Those of `steps` inner steps and of `finish`, where what is left is sent in a last, shorter round."""
        self._made.clear()
        if not steps:
            return []
        end, rounds, landed = steps + 1, [0] * self.fragments, [0] * self.fragments
        usual = self.sends(steps)
        rest = [index for index in range(self.fragments) if index not in usual]
        for step in range(1, end + 1):
            for index in self.sends(step) if step < end else rest:
                rounds[index] += 1
                lands = end if step == end else self.lands(step)
                self._round(index, rounds[index], step, min(lands, end), landed[index], steps)
                landed[index] = min(lands, end)
        if self.anchors == "ahead":  # the run ends before the round that these were sent for
            for index in range(self.fragments):
                order = _BEHIND if landed[index] < end else _SENT if index in rest else _DRAINED
                self._add(index, rounds[index] + 1, "anchor", landed[index], end + 1, order, None)
        return [planned for _, planned in sorted(self._made, key=itemgetter(0))]

    def _round(self, index: int, round: int, sent: int, lands: int, landed: int, steps: int) -> None:
        flight = None
        if self.anchors == "beside":
            flight = self._add(index, round, "anchor", sent, lands, _SENT, None)
        elif self.anchors == "ahead" and round > 1:
            flight = self._add(index, round, "anchor", landed, lands, _BEHIND if landed <= steps else _DRAINED, None)
        self._add(index, round, "payload", sent, lands, _SENT, flight)

    def _add(self, index: int, round: int, what: str, sent: int, lands: int, order: int, flight: int | None) -> int:
        groups, number = self.groups(round), len(self._made) if flight is None else flight
        planned = PlannedExchange(sent, lands, index, what, groups, self.pattern(index, what, round, groups), number)
        self._made.append(((sent, order), planned))
        return number

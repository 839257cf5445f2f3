"""Who is shut out of a run: who and most of the others refuse each other's shares, in three rounds at least.

That two disagree says of neither who is wrong, so a refusal counts against both: who accuses many is shut out as who is
accused by many, and fewer than half of the members shut out nobody. Of two members neither is ever shut out.
"""

from __future__ import annotations

from collections.abc import Collection

_ROUNDS, _OTHERS = 3, 2


class Strikes:
    """Refusals by the two whom they are about; a lighthouse that is started again begins to count anew."""

    def __init__(self) -> None:
        self._rounds: dict[frozenset[int], set[int]] = {}

    def refused(self, accuser: int, accused: int, round: int, members: Collection[int]) -> int | None:
        """`accuser` refused the share of `accused` in `round`; who of the two is to be shut out now, if anybody."""
        rounds = self._rounds.setdefault(frozenset((accuser, accused)), set())
        if len(rounds) < _ROUNDS:
            rounds.add(round)
        against = {one: self._against(one, members) for one in (accused, accuser)}
        worst = max(against, key=lambda one: len(against[one]))
        told = against[worst]
        is_enough = len(told) >= _OTHERS and 2 * len(told) >= len(members) and len(set().union(*told)) >= _ROUNDS
        if is_enough:  # what it has said of others, and they of it, is over
            self._rounds = {pair: rounds for pair, rounds in self._rounds.items() if worst not in pair}
        return worst if is_enough else None

    def _against(self, one: int, members: Collection[int]) -> list[set[int]]:
        """The rounds in which `one` and another member disagreed, for each of those."""
        pairs = (frozenset((one, other)) for other in members if other != one)
        return [self._rounds[pair] for pair in pairs if pair in self._rounds]

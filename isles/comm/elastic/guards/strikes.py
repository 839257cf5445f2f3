"""Who is shut out of a run: who and at least half of the members refuse each other's shares, in three rounds or more.

That two disagree says of neither who is wrong, so a refusal counts against both: who accuses many is shut out as who is
accused by many, and fewer than half of the members shut out nobody. Of two members neither is ever shut out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_ROUNDS, _OTHERS = 3, 2
Pair = frozenset[int]


class Strikes:
    """Rounds of refusals by the two whom they are about; a lighthouse that is started again begins to count anew."""

    def __init__(self) -> None:
        self._rounds: dict[Pair, set[int]] = {}

    def refused(self, one: int, another: int, round: int) -> None:
        """One of the two has refused the other's share of `round`."""
        self._rounds.setdefault(frozenset((one, another)), set()).add(round)

    def are_enough(self, seat: int, members: Collection[int]) -> bool:
        """Whether `seat` is to be shut out. members: all who have trained and are there."""
        pairs = (frozenset((seat, other)) for other in members if other != seat)
        told = [self._rounds[pair] for pair in pairs if pair in self._rounds]
        return len(told) >= max(_OTHERS, len(members) / 2) and len(set().union(*told)) >= _ROUNDS

    def worst(self, seats: Iterable[int], more: Collection[Pair] = ()) -> int:
        """Who of `seats` disagrees with most, of equals the first. more: pairs beside those of refusals."""
        pairs = self._rounds.keys() | more
        return max(seats, key=lambda seat: sum(seat in pair for pair in pairs))

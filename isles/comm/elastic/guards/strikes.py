"""Who is shut out of a run: whose shares were refused thrice, by two others at least."""

from __future__ import annotations

_ROUNDS, _ACCUSERS = 3, 2


class Strikes:
    """Refusals by seat; a lighthouse that is started again begins to count anew."""

    def __init__(self) -> None:
        self._told: dict[int, set[tuple[int, int]]] = {}  # by accused: (accuser, round)

    def are_enough(self, accused: int, accuser: int, round: int) -> bool:
        """With one more: `accuser` refused the share of `accused` in `round`."""
        told = self._told.setdefault(accused, set())
        told.add((accuser, round))
        rounds, accusers = {round for _, round in told}, {accuser for accuser, _ in told}
        return len(rounds) >= _ROUNDS and len(accusers) >= _ACCUSERS

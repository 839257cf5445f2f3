"""How often one address may come: a bucket of turns for each, which fills again with time."""

from __future__ import annotations

from collections import OrderedDict

_ADDRESSES = 4096  # the oldest is forgotten beyond that: it has a full bucket again


class Admissions:
    """`most` turns at once, and as many again within `seconds`."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._each = most, seconds / most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by address: (turns, when that was so)

    def take(self, address: str, now: float) -> float:
        """Take a turn: 0; or the seconds until there is one. now: of a clock in seconds."""
        turns, then = self._left.pop(address, (float(self._most), now))
        turns = min(turns + (now - then) / self._each, float(self._most))
        wait = 0.0 if turns >= 1.0 else (1.0 - turns) * self._each
        self._left[address] = (turns if wait else turns - 1.0, now)
        if len(self._left) > _ADDRESSES:
            self._left.popitem(last=False)
        return wait

"""What became of every message of a virtual run: somebody received it, or a loss or a deadline that has a name ended
the exchange that it was part of.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from isles.comm.tags import Channel, Tag

Address = tuple[int, Channel, int, int, int]  # whose part in which exchange: rank, channel, round, fragment, attempt


@dataclass(slots=True)
class Fates:
    """Bytes of all messages. sent = received + the sum of `missed`, by why nobody received them, + those that nobody
    has asked for (`VirtualWire.unclaimed`) + those still on their way.
    """

    sent: int = 0
    received: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    failures: dict[Address, str] = field(default_factory=dict)
    """What ended somebody's part in an exchange."""

    def failed(self, rank: int, tag: Tag, error: BaseException) -> None:
        """The part of `rank` in the exchange of `tag` ended by `error`."""
        self.failures.setdefault(_address(rank, tag), type(error).__name__)

    def ended(self, nbytes: int, error: BaseException | None) -> None:
        """A message came to where it was waited for, or by `error` nobody waited any more."""
        if error is None:
            self.received += nbytes
        else:
            self.missed[type(error).__name__] += nbytes

    def why(self, source: int, target: int, tag: Tag) -> str | None:
        """What ended the exchange of a message that nobody has asked for, at either end; None: nothing did."""
        return self.failures.get(_address(target, tag)) or self.failures.get(_address(source, tag))


def _address(rank: int, tag: Tag) -> Address:
    return rank, tag.channel, tag.round, tag.fragment, tag.attempt

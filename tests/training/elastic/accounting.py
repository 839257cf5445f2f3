"""What became of every message of a virtual run, counted beside its wire: it was received, or a named loss or deadline
ended the exchange that it was part of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from typing_extensions import override

from isles.comm.errors import PeerLost, RoundClosed
from isles.comm.tags import Channel, Tag
from isles.comm.virtual import cluster
from isles.comm.virtual.wire import VirtualMessage, VirtualTransfer, VirtualWire, VirtualWork

Address = tuple[int, Channel, int, int, int]  # whose part in which exchange: rank, channel, round, fragment, attempt


def address(rank: int, tag: Tag) -> Address:
    return rank, tag.channel, tag.round, tag.fragment, tag.attempt


class AccountedWire(VirtualWire):
    """Bytes: sent = received + the sum of `missed`, by why nobody received them, + those that nobody has asked for
    (`unclaimed`) + those still on their way. late: messages whose round was over where they came.
    """

    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self.received, self.missed = 0, Counter[str]()
        self.failures: dict[Address, str] = {}  # what ended somebody's part in an exchange
        self.parts: dict[VirtualTransfer, Tag] = {}  # under way: of the latest message of each
        self.late: list[VirtualMessage] = []

    def why(self, source: int, target: int, tag: Tag) -> str | None:
        """What ended the exchange of a message that nobody has asked for, at either end; None: nothing did."""
        return self.failures.get(address(target, tag)) or self.failures.get(address(source, tag))

    def unclaimed(self) -> list[VirtualMessage]:
        """Those that have come and that nobody has asked for."""
        return [one for by in self._arrived.values() for queue in by.values() for one in queue]

    def under_way(self) -> int:
        """Bytes of messages that have not come yet."""
        return self.sent - self.received - self.missed.total() - sum(one.nbytes for one in self.unclaimed())

    def ended(self, nbytes: int, error: BaseException | None) -> None:
        """A message came to where it was waited for, or by `error` nobody waited any more."""
        if error is None:
            self.received += nbytes
        else:
            self.missed[type(error).__name__] += nbytes

    def transfer_ended(self, transfer: VirtualTransfer, error: BaseException | None) -> None:
        """Somebody's part in an exchange has ended."""
        tag = self.parts.pop(transfer, None)
        if error is not None and tag is not None:
            self.failures.setdefault(address(transfer._owner.rank, tag), type(error).__name__)

    @override
    def send(self, source: int, target: int, data: Tensor, tag: Tag, work: VirtualWork) -> None:
        self._is_part(work, tag)
        if target in self._lost:
            self.ended(data.nbytes, PeerLost(target))
        super().send(source, target, data, tag, work)

    @override
    def recv(self, target: int, source: int | None, tag: Tag, work: VirtualWork) -> None:
        self._is_part(work, tag)
        super().recv(target, source, tag, work)

    @override
    def lost(self, rank: int, why: str) -> None:
        for message in self.unclaimed():
            if message.target == rank:
                self.ended(message.nbytes, PeerLost(rank))
        super().lost(rank, why)

    @override
    def arrived(self, message: VirtualMessage) -> None:
        if message.receive is None and (message.target in self._lost or message.dropped):
            self.ended(message.nbytes, PeerLost(message.target))
        super().arrived(message)

    @override
    def _hand_over(self, message: VirtualMessage, receive: VirtualWork) -> None:
        self.ended(message.nbytes, receive.abandoned() or message.error)
        super()._hand_over(message, receive)

    @override
    def _came_late(self, message: VirtualMessage) -> None:
        self.late.append(message)
        self.ended(message.nbytes, RoundClosed(message.target))
        super()._came_late(message)

    def _is_part(self, work: VirtualWork, tag: Tag) -> None:
        if isinstance(work._transfer, VirtualTransfer):
            self.parts[work._transfer] = tag


@contextmanager
def accounted() -> Iterator[None]:
    """Virtual runs that are made within have an `AccountedWire`."""
    end = VirtualTransfer._end

    def ended(transfer: VirtualTransfer, result: Any, error: BaseException | None) -> None:
        for wire in wires:
            wire.transfer_ended(transfer, error)
        end(transfer, result, error)

    def wire(*made_of: Any) -> AccountedWire:
        wires.append(AccountedWire(*made_of))
        return wires[-1]

    wires = list[AccountedWire]()
    with patch.object(VirtualTransfer, "_end", ended), patch.object(cluster, "VirtualWire", wire):
        yield

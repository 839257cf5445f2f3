"""States on their way from one worker to another on the virtual clock: files as between processes, whose bytes go over
the same lines as everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from isles.comm.elastic.company import Company
from isles.comm.elastic.gifts.giving import is_written
from isles.comm.elastic.gifts.taking import GiftRequest, NotGiven, NotOffered
from isles.comm.errors import CommError
from isles.comm.tags import Tag
from isles.comm.transport import Steps
from isles.comm.virtual.churn.session import VirtualSession
from isles.comm.virtual.transport import VirtualTransport

_GIFTS = 1 << 30  # numbers of their messages, apart from those of control


class VirtualGifts:
    """What the worker of `transport` gives and takes; `others`: those of all workers, by the name of the giver.

    taken: the bytes of each gift that has come here.
    """

    def __init__(
        self, transport: VirtualTransport, session: VirtualSession, company: Company, others: dict[str, VirtualGifts]
    ) -> None:
        self.taken: list[int] = []
        self._transport, self._session, self._company, self._others = transport, session, company, others
        self._offers: dict[str, tuple[Path, dict[str, Any]]] = {}
        self._waiting: dict[int, tuple[str, int]] = {}  # what each seat waits for, and behind which round
        self._sent: dict[int, tuple[int, int, bytes, dict[str, Any]]] = {}  # to each seat: number, size, content, facts
        self._refused: set[int] = set()  # seats whose request came to nothing
        self._comes: Callable[[str], bool] = lambda what: True
        self._number = 0
        others[str(company.seat)] = self

    def offer(
        self, what: str, path: Path, facts: Mapping[str, Any], write: Callable[[Path], None] = is_written
    ) -> None:
        """See `Giver.offer`; here it is there at once."""
        write(path)
        self._offers[what] = path, dict(facts)
        with self._company.changed:
            for seat, wanted in list(self._waiting.items()):
                if wanted[0] == what and self._is_newer(*wanted):
                    self._send(seat, what)

    def is_wanted(self, what: str) -> bool:
        """See `Giver.is_wanted`."""
        return any(what == wanted for wanted, _ in self._waiting.values())

    def withdraw(self, what: str) -> None:
        """See `Giver.withdraw`."""
        self.shut(what)
        with self._company.changed:
            self._refuse(lambda wanted: wanted == what)

    def expect(self, comes: Callable[[str], bool]) -> None:
        """See `Giver.expect`."""
        self._comes = comes
        with self._company.changed:
            self._refuse(lambda wanted: not comes(wanted))

    def shut(self, what: str) -> None:
        """See `Giver.shut`."""
        offer = self._offers.pop(what, None)
        if offer is not None:
            offer[0].unlink(missing_ok=True)

    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]:
        """See `isles.comm.elastic.gifts.taking.take`."""
        other, own = self._others.get(asked.giver), self._company
        if other is None:
            raise NotOffered("there is none")
        with own.changed:
            other._sent.pop(own.seat, None)
            other._refused.discard(own.seat)
            other._ask(own.seat, asked.what, asked.after)
        if not own.wait(
            lambda: own.seat in {*other._sent, *other._refused} or own.member.lost(other._company.seat), asked.patience
        ):
            raise NotGiven(f"nothing came within {asked.patience:g} s")
        if own.seat not in other._sent:
            raise NotGiven("there is none" if own.seat in other._refused else "it is gone")
        number, size, content, facts = other._sent.pop(own.seat)
        try:
            self._transport.run(self._receive(other._company.seat, number, size), "control", asked.seconds).wait()
        except CommError as error:
            raise NotGiven(str(error)) from error
        path.write_bytes(content)
        self.taken.append(size)
        return facts

    def _receive(self, seat: int, number: int, size: int) -> Steps[None]:
        yield self._transport.recv(
            seat, torch.empty(size, dtype=torch.uint8, device="cpu"), Tag("control", _GIFTS + number)
        )

    def _is_newer(self, what: str, after: int) -> bool:
        return what in self._offers and self._offers[what][1].get("round", after + 1) > after

    def _ask(self, seat: int, what: str, after: int) -> None:
        self._waiting[seat] = what, after
        if self._is_newer(what, after) and not self._session.is_away:
            self._send(seat, what)
        elif not self._comes(what):
            self._refuse(lambda wanted: wanted == what)

    def _refuse(self, is_refused: Callable[[str], bool]) -> None:
        """In a turn: whoever waits for something of such a name asks elsewhere."""
        for seat in [seat for seat, (wanted, _) in self._waiting.items() if is_refused(wanted)]:
            del self._waiting[seat]
            self._refused.add(seat)
            self._others[str(seat)]._company.changed.notify_all()

    def _send(self, seat: int, what: str) -> None:
        """In a turn: the file goes on the line."""
        del self._waiting[seat]
        path, facts = self._offers[what]
        content = path.read_bytes()
        self._number += 1
        self._sent[seat] = self._number, len(content), content, facts
        self._transport.push(
            seat, torch.empty(len(content), dtype=torch.uint8, device="cpu"), Tag("control", _GIFTS + self._number)
        )
        self._others[str(seat)]._company.changed.notify_all()

"""By what a worker knows the members that it is connected with: whom views name, and who showed itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from isles.comm.elastic.guards.refusals import Refusals
from isles.comm.elastic.identity import spoken
from isles.comm.sockets.lost import LinkLost
from isles.comm.view import View


class KnownMembers:
    """Of the worker in `seat`, whose own member is `identity`. notice: called with a line for a person."""

    def __init__(self, seat: int, identity: str, refused: Refusals, notice: Callable[[str], None]) -> None:
        self._refused, self._notice, self._lock = refused, notice, threading.Lock()
        self._named: dict[int, str] = {}  # by views
        self._met = {seat: identity}  # whoever this worker is or was connected with, and itself
        self._told: set[tuple[int, str]] = set()

    def meet(self, view: View) -> list[int]:
        """Take in whom `view` names; with which of them somebody else is connected than whom it names."""
        others = list[int]()
        for seat, identity in zip(view.seats, view.identities, strict=False):
            with self._lock:
                self._named[seat] = identity
                met = self._met.get(seat, identity)
                if met != identity:
                    del self._met[seat]
            if met != identity:
                self._is_another(seat, met, identity)
                others.append(seat)
        return others

    def check(self, seat: int, identity: str) -> None:
        """Whoever says that it is `seat` shows this identity. LinkLost where views name another one."""
        with self._lock:
            named = self._named.get(seat, identity)
            if named == identity:
                self._met[seat] = identity
        if named != identity:
            self._is_another(seat, identity, named)
            raise LinkLost("views name somebody else")

    def spoken(self, seat: int) -> str:
        """Of whoever this worker is connected with as `seat`."""
        return spoken(self._met.get(seat, ""))

    def _is_another(self, seat: int, identity: str, named: str) -> None:
        why = f"its fingerprint is {spoken(identity)}, and {spoken(named)} where views name it"
        self._refused.note(seat, why)
        if (seat, identity) not in self._told:
            self._told.add((seat, identity))
            self._notice(f"warning: worker {seat} is not who the lighthouse says: {why}")

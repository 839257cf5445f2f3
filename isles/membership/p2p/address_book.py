"""The lighthouse's knowledge of where workers can be reached directly: it tries each address itself, once it is told.

An address that the lighthouse reaches may still be out of another worker's reach: then those two go over the
lighthouse, as everybody does who does not listen. For each worker the lighthouse vouches by the fingerprint of the
certificate with which it joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from isles.comm.sockets import loop
from isles.comm.sockets.reachability import echo_failure
from isles.membership.keys import SeatKeys, introduction
from isles.membership.messages import Find, Found, Listening, Reached
from isles.membership.p2p.relay import new_ticket

_AT_ONCE = 8  # addresses that are tried at the same time
_PLACES = 1024  # of an island

SeatPlace = tuple[int, int]
"""A seat, and a worker's place in its island."""


class Whereabouts:
    """keys: of all seats. seen(session): the address from which a session comes, "" for an unknown one.

    addresses: from which those who are there come.
    """

    def __init__(self, keys: SeatKeys, seen: Callable[[str], str]) -> None:
        self._keys, self._seen = keys, seen
        self._known: dict[SeatPlace, tuple[str, int]] = {}  # of those who are there: ("", 0) where it is not reached
        self._certificates: dict[int, tuple[str, ...]] = {}
        self.addresses: dict[SeatPlace, str] = {}
        self._trying = asyncio.Semaphore(_AT_ONCE)
        self._busy: set[SeatPlace] = set()
        self._relays: set[SeatPlace] = set()  # who carry for others

    def joined(self, seat: int, certificates: Sequence[str]) -> None:
        """Whoever has this seat shows these certificates, see `Hello`."""
        self._certificates[seat] = tuple(certificates)

    def find(self, asker: int, find: Find) -> Found:
        """The way from a worker of the seat `asker` to another one."""
        there = self._known.get((find.seat, find.place))
        word = introduction(self._keys.of(find.seat), asker).hex()
        certificates = self._certificates.get(find.seat, ()) if there else ()
        found = Found(find.seat, *(there or ("", 0)), certificates, word)
        both = {asker, find.seat}
        relays = sorted(seat for seat, place in [*self._relays] if place == find.place and seat not in both)
        if not relays:
            return found
        relay = relays[sum(both) % len(relays)]
        return replace(found, relay=relay, ticket=new_ticket(self._keys.of(relay).encode("ascii")).hex())

    def forget(self, seat: int, place: int) -> None:
        """Forget where that worker listens, for it may not any more."""
        self._known.pop((seat, place), None)
        self._relays.discard((seat, place))
        self.addresses.pop((seat, place), None)

    def listening(self, seat: int, said: Listening, answer: Callable[[Reached], None]) -> None:
        """Try the address of `seat` (-1: of somebody without one); answer(what came of it), in another thread.
        ValueError for what is no address, and where one of this seat's is being tried.
        """
        is_reached = bool(said.host or said.port)
        host, place = said.host or self._seen(said.session), (seat, said.place)
        if not 0 <= said.place < _PLACES or (is_reached and not (host and 0 < said.port < 65536)):
            raise ValueError("an address that is none")
        if seat >= 0 and self._certificates.get(seat, ())[said.place : said.place + 1] != (said.certificate,):
            raise ValueError("another certificate than that with which it joined")
        if place in self._busy:
            raise ValueError("an address while another one is being tried")
        seen = self._seen(said.session)
        if seat >= 0:
            self._known[place], self.addresses[place] = ("", 0), seen
            self._relays.discard(place)
        if not is_reached:
            answer(Reached(host, 0, "", seen))
            return
        self._busy.add(place)

        async def attempt() -> None:
            async with self._trying:
                why = await echo_failure(host, said.port, said.certificate)
            if not why and seat >= 0:
                self._known[place] = host, said.port
                if said.relays:
                    self._relays.add(place)
            self._busy.discard(place)
            answer(Reached(host, said.port, why, seen))

        loop.start(attempt())

"""Where workers can be reached directly: the lighthouse tries each address itself, once it is announced.

An address that the lighthouse reaches may still be out of another worker's reach: then those two are relayed, as is
everybody who does not listen. For each worker the lighthouse vouches by the fingerprint of the certificate with which
it joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from isles.comm.sockets import loop
from isles.comm.sockets.reachability import echo_failure
from isles.membership.keys import MemberKeys, peer_key
from isles.membership.messages import AnnounceAddress, Lookup, PeerAddress, Reachability
from isles.membership.p2p.relay import new_ticket

_AT_ONCE = 8  # addresses that are tried at the same time
_ISLAND_SIZE = 1024  # of an island

WorkerId = tuple[int, int]
"""A member, and a worker's place in its island."""


class AddressBook:
    """keys: of all members. seen(session): the address from which a session comes, "" for an unknown one.

    addresses: from which those who are there come.
    """

    def __init__(self, keys: MemberKeys, seen: Callable[[str], str]) -> None:
        self._keys, self._seen = keys, seen
        self._known: dict[WorkerId, tuple[str, int]] = {}  # of those who are there: ("", 0) where it is not reached
        self._certificates: dict[int, tuple[str, ...]] = {}
        self.addresses: dict[WorkerId, str] = {}
        self._trying = asyncio.Semaphore(_AT_ONCE)
        self._busy: set[WorkerId] = set()
        self._relays: set[WorkerId] = set()  # who carry for others

    def joined(self, member: int, certificates: Sequence[str]) -> None:
        """Whoever has this member shows these certificates, see `Hello`."""
        self._certificates[member] = tuple(certificates)

    def find(self, asker: int, find: Lookup) -> PeerAddress:
        """The way from a worker of the member `asker` to another one."""
        there = self._known.get((find.member, find.island_rank))
        key = peer_key(self._keys.of(find.member), asker).hex()
        certificates = self._certificates.get(find.member, ()) if there else ()
        found = PeerAddress(find.member, *(there or ("", 0)), certificates, key)
        both = {asker, find.member}
        relays = sorted(
            member for member, island_rank in [*self._relays] if island_rank == find.island_rank and member not in both
        )
        if not relays:
            return found
        relay = relays[sum(both) % len(relays)]
        return replace(found, relay=relay, ticket=new_ticket(self._keys.of(relay).encode("ascii")).hex())

    def forget(self, member: int, island_rank: int) -> None:
        """Forget where that worker listens, for it may not any more."""
        self._known.pop((member, island_rank), None)
        self._relays.discard((member, island_rank))
        self.addresses.pop((member, island_rank), None)

    def try_address(self, member: int, announced: AnnounceAddress, answer: Callable[[Reachability], None]) -> None:
        """Try the address of `member` (-1: of somebody without one); answer(what came of it), in another thread.
        ValueError for what is no address, and where one of this member's is being tried.
        """
        is_reached = bool(announced.host or announced.port)
        host, island_rank = announced.host or self._seen(announced.session), (member, announced.island_rank)
        if not 0 <= announced.island_rank < _ISLAND_SIZE or (is_reached and not (host and 0 < announced.port < 65536)):
            raise ValueError("an invalid address")
        if member >= 0 and self._certificates.get(member, ())[announced.island_rank : announced.island_rank + 1] != (
            announced.certificate,
        ):
            raise ValueError("another certificate than that with which it joined")
        if island_rank in self._busy:
            raise ValueError("an address while another one is being tried")
        seen = self._seen(announced.session)
        if member >= 0:
            self._known[island_rank], self.addresses[island_rank] = ("", 0), seen
            self._relays.discard(island_rank)
        if not is_reached:
            answer(Reachability(host, 0, "", seen))
            return
        self._busy.add(island_rank)

        async def attempt() -> None:
            async with self._trying:
                why = await echo_failure(host, announced.port, announced.certificate)
            if not why and member >= 0:
                self._known[island_rank] = host, announced.port
                if announced.relays:
                    self._relays.add(island_rank)
            self._busy.discard(island_rank)
            answer(Reachability(host, announced.port, why, seen))

        loop.start(attempt())

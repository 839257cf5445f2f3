"""The lighthouse's count of what it carries, over real sessions that end at any time."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from isles.comm import credentials
from isles.comm.tags import Tag
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.messages import Lookup
from isles.membership.p2p.relay import RelayCount, TicketExchange, new_ticket
from isles.membership.p2p.stream import TICKET, TICKET_SIZE
from isles.membership.tls_session import open_router, open_session
from tests.membership.sessions import router, settled, vanish, workers

MUCH = 3_000_000  # bytes


def test_a_lighthouse_that_is_lit_again_goes_on_from_what_it_noted() -> None:
    carried, journal = [0], list[dict[str, object]]()
    counter = RelayCount(lambda: carried[0])
    for more in (5_000_000, 30_000, 1_970_000, 38_000_000):  # the second is too little to be noted
        carried[0] += more
        if (note := counter.note(counter.relayed())) is not None:
            RoundsCoordinator(Rules(founders=1, sync_every=1), [note])  # nobody who reads the journal trips over it
            journal.append(note)
    assert [note["bytes"] for note in journal] == [5_000_000, 7_000_000, 45_000_000]
    again = RelayCount(lambda: 100, journal)
    assert again.relayed() == 45_000_100 and again.note(45_000_100) is None


def test_what_is_said_to_the_lighthouse_itself_is_not_carried(tmp_path: Path) -> None:
    """Nor what it answers: of 1000 bytes there and 500 back between two clients it carried 1500."""
    with router(tmp_path) as (mine, address, light):
        light.serve("own", lambda asked: asked.reply(bytes(7000)))
        one, two = (open_session(mine.token, address) for _ in range(2))
        try:
            two.serve("isles/dial/1", lambda asked: asked.reply(bytes(500)))
            assert one.answer("own", bytes(3000), seconds=5.0) == (bytes(7000), None) and light.relayed == 0
            answer = (None, None)
            while answer == (None, None):  # until it is known who serves
                answer = one.answer("isles/dial/1", bytes(1000), seconds=5.0)
            assert answer == (bytes(500), None) and light.relayed == 1500
        finally:
            one.close()
            two.close()
        assert light.relayed == 1500


def test_a_worker_that_ends_has_relayed_what_it_has(tmp_path: Path) -> None:
    """Its last message counts, though nobody looks between that and its end."""
    with workers(tmp_path, 2) as pair:
        (one, two), data = pair, torch.ones(MUCH, dtype=torch.uint8)
        tag = Tag("outer", 0, 0, 0, 0)
        settled(one.recv(1, torch.empty_like(data), tag), two.send(0, data, tag))
        assert two.carried["relayed"] == MUCH
        two.close()
        pair.sessions[1].close()
        assert 1.0 <= pair.router.relayed / MUCH <= 1.02


def test_short_messages_through_a_relay_leave_at_once() -> None:
    """Neither of the two connections that became one waits for an answer to what it sent before (Nagle's algorithm)."""
    key, ends, lines = b"key", list[socket.socket](), list[socket.socket]()
    ties, ticket = TicketExchange(key, lambda _: None), new_ticket(key)

    async def meet(listening: socket.socket) -> None:
        for _ in range(2):
            lines.append(socket.create_connection(listening.getsockname()))
            lines[-1].sendall(TICKET + ticket)
            ends.append(listening.accept()[0])
            ends[-1].setblocking(False)
            assert await ties.take(ends[-1])

    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            asyncio.run(asyncio.wait_for(meet(listening), 10.0))
        assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends)
    finally:
        ties.close()
        for line in lines:
            line.close()


def test_a_worker_carries_for_two_that_do_not_reach_each_other(tmp_path: Path) -> None:
    """All of it, by its own count; the lighthouse takes over once it is gone, in the middle of a message."""
    with workers(tmp_path, 3) as trio:
        carries, one, two = trio
        trio.pairs[0].listen("127.0.0.1", 0, relays=True)

        def exchanged(round: int) -> None:
            sent = [torch.full((MUCH,), round + me, dtype=torch.uint8) for me in (1, 2)]
            got = [torch.empty_like(data) for data in sent]
            works = [one.send(2, sent[0], Tag("outer", round)), two.send(1, sent[1], Tag("outer", round))]
            works += [two.recv(1, got[0], Tag("outer", round)), one.recv(2, got[1], Tag("outer", round))]
            settled(*works, seconds=20.0)
            assert not any(work.error for work in works)
            assert all(map(torch.equal, sent, got))

        exchanged(1)
        assert one.way(2) == two.way(1) == "relayed by worker 0" and one.carried["relayed"] == MUCH
        assert 1.0 <= carries.carried["relayed_by_workers"] / (2 * MUCH) <= 1.02
        assert trio.router.relayed < MUCH / 100
        began = one.send(2, torch.ones(20 * MUCH, dtype=torch.uint8), Tag("outer", 2))
        vanish(carries)
        settled(two.recv(1, torch.empty(20 * MUCH, dtype=torch.uint8), Tag("outer", 2)), began, seconds=20.0)
        assert began.error is None
        exchanged(3)
        assert one.way(2) == two.way(1) == "relayed" and not one.lost & {2} and not two.lost & {1}


def test_only_what_the_lighthouse_gave_makes_two_connections_one_and_once(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as trio:
        trio.pairs[0].listen("127.0.0.1", 0, relays=True)
        found = trio.known.address_book.find(1, Lookup(2))
        there = trio.known.address_book.find(1, Lookup(0))
        assert found.relay == 0 and there.relay == -1  # nobody carries for itself
        where, good = (there.host, there.port), bytes.fromhex(found.ticket)
        other = new_ticket(trio.known.keys.of(1).encode("ascii"))
        for ticket in (bytes(TICKET_SIZE), other, good[:-1] + bytes([good[-1] ^ 1])):
            with pytest.raises(OSError):
                trio.sessions[1].connect_by_ticket(ticket, 5.0, where)
        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(end.connect_by_ticket, good, 5.0, where) for end in trio.sessions[1:]]
            one, two = (end.result() for end in ends)
        with one, two:
            one.sendall(b"hello")
            assert two.recv(5) == b"hello"
        with pytest.raises(OSError):
            trio.sessions[1].connect_by_ticket(good, 5.0, where)


def test_the_address_may_be_a_number_of_ipv6_or_a_name(tmp_path: Path) -> None:
    for number, host in enumerate(("127.0.0.1", "[::1]", "localhost")):
        mine = credentials.found(tmp_path / str(number))
        light = open_router(mine, f"{host}:0")
        try:
            light.serve("own", lambda asked: asked.reply(b"yes"))
            guest = open_session(mine.token, f"{host}:{light.port}")
            try:
                assert guest.answer("own", b"", seconds=5.0) == (b"yes", None) and guest.is_local()
                assert light.seen(guest.name()) in ("127.0.0.1", "::1")
            finally:
                guest.close()
        finally:
            light.close()

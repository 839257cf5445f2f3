"""What the workers of an island hear of the lighthouse: three islands of two, over real sessions on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from isles.comm.collectives.basic import all_done
from isles.comm.errors import PeerLost, RoundClosed
from isles.comm.gloo.transfers import PostedWork
from isles.comm.tags import Tag
from isles.membership.client import FollowerClient, MembershipClient
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.failure_detector import IslandLiveness
from isles.membership.keys import HELLO, REQUESTS, MemberKeys, notify_key, signature, split_sequence
from isles.membership.lighthouse import Journal, Lighthouse
from isles.membership.messages import (
    Done,
    Entry,
    Hello,
    Load,
    PeerReport,
    Reload,
    Silent,
    View,
    decode,
    encode,
    identity_of,
)
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.round_commit import NOTHING, RoundDecision
from isles.membership.session import Query
from isles.membership.tls_session import Session, open_session
from tests.membership.sessions import NOBODYS, router, settled

SEATS = range(3)


class Islands:
    """By member. leaders: their lines, and firsts their sessions; second: transports of the other workers, and sessions
    theirs; met: the views that these have heard of.
    """

    def __init__(self) -> None:
        self.leaders: list[MembershipClient] = []
        self.second: list[ElasticTransport] = []
        self.entries: list[Entry] = []
        self.sessions: list[Session] = []
        self.firsts: list[Session] = []
        self.met: list[View] = []
        self.lighthouse: Lighthouse

    def waits(self, member: int, other: int, tag: Tag) -> PostedWork:
        """Its second worker waits for that of another."""
        return self.second[member].recv(other, torch.zeros(8, dtype=torch.uint8), tag)


def until(over: Callable[[], object], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < ends
        time.sleep(0.01)


@contextmanager
def islands(folder: Path) -> Iterator[Islands]:
    """In round 1 of a run of one mean for all."""
    world = Islands()
    with router(folder) as (mine, address, session), ExitStack() as stack:

        def opened() -> Session:
            found = open_session(mine.token, address)
            stack.callback(found.close)
            return found

        journal = Journal(folder)
        stack.callback(journal.close)
        rounds = RoundsCoordinator(Rules(founders=3, sync_every=5, agrees=True), journal.entries)
        lighthouse = Lighthouse(
            session,
            rounds,
            journal,
            MemberKeys(folder),
            config="",
            version="1.0",
            on_report=lambda member, event: None,
            island_size=2,
        )
        stack.callback(lighthouse.close)
        lighthouse.open()
        world.lighthouse = lighthouse
        for member in SEATS:
            first, second = opened(), opened()
            until(lambda first=first: first.answer(HELLO, b"", seconds=1.0) != (None, None))
            hello = encode(Hello("1.0", "abc", first.name(), NOBODYS * 2))
            entry = decode(first.answer(HELLO, hello, seconds=5.0)[0] or b"")
            assert isinstance(entry, Entry) and entry.member == member
            client, line = MembershipClient(first, entry), FollowerClient(second, entry, 1)
            stack.callback(client.close)
            own = (
                ElasticTransport(first, member, 3),
                ElasticTransport(second, member, 3, suspect=line.suspect, island_rank=1),
            )
            for transport in own:
                stack.callback(transport.close)
            client.transfers, line.transfers = own
            line.meets = world.met.append
            world.leaders.append(client)
            world.second.append(own[1])
            world.entries.append(entry)
            world.sessions.append(second)
            world.firsts.append(first)
        for client in world.leaders:
            said = client.next_decision(20.0)
            assert isinstance(said, Load)
            client.loaded(said, 0, {})
        for client in world.leaders:
            assert client.first(20.0) == 1 and client.start_round(1) is not None
        until(lambda: len(world.met) == 3)  # the other worker of each island hears of it
        assert {view.identities for view in world.met} == {(identity_of(NOBODYS * 2),) * 3}
        until(lambda: all(len(transport._seen) == 2 for transport in world.second))
        yield world


def test_a_second_worker_does_not_wait_for_who_is_left_out(tmp_path: Path) -> None:
    """At once, where its deadline is a minute: member 2 is late for both others, and left out of the next attempt."""
    with islands(tmp_path) as world:
        waits = [world.waits(member, 2, Tag("outer", 1)) for member in (0, 1)]
        other = world.waits(0, 1, Tag("outer", 1, attempt=1))
        time.sleep(0.3)
        assert not any(work.done() for work in waits)
        for client in world.leaders[:2]:
            client.ask(PeerReport(1, 0, 2, "late"))
        settled(*waits, seconds=5.0)
        assert [type(work.error) for work in waits] == [RoundClosed] * 2
        assert not other.done()  # the next attempt has begun


def test_it_believes_the_lighthouse_alone(tmp_path: Path) -> None:
    """Neither somebody with the token, nor another member; nor does the order of its own member help another one's."""
    with islands(tmp_path) as world:
        wait = world.waits(0, 2, Tag("outer", 1))
        decision, forged = encode(RoundDecision(1, "retry", 1, (0, 1))), world.sessions[1]
        own = world.entries[1]
        where = notify_key(0, 1)
        for attachment in (
            None,
            b"",
            signature(own.member, own.key, where, decision),
            signature(0, own.key, where, decision),
        ):
            answer = forged.answer(where, decision, attachment=attachment, seconds=5.0)
            assert answer == (None, b"never")
        assert not wait.done()
        assert world.sessions[0].refused[-1, "a notification that is not the lighthouse's"] == 4


def test_what_is_overheard_proves_no_other_word(tmp_path: Path) -> None:
    """A member may listen in where another one is told its orders: it hears neither its key nor a proof for others."""
    with islands(tmp_path) as world:
        entry, where, heard = world.entries[0], notify_key(0, 1), list[tuple[bytes, bytes]]()
        world.sessions[1].serve(where, lambda query: heard.append((query.payload, query.attachment)))
        until(lambda: world.lighthouse.notify([0], Silent(9)) or heard, 5.0)
        decision, proof = heard[0]
        assert decode(split_sequence(decision)[1]) == Silent(9) and proof == signature(0, entry.key, where, decision)
        assert entry.key.encode() not in proof
        wait = world.waits(0, 2, Tag("outer", 1))
        for said, there in ((Silent(2), where), (Silent(9), notify_key(0, 0))):
            assert world.sessions[2].answer(there, encode(said), attachment=proof, seconds=5.0) == (None, b"never")
        assert world.sessions[2].answer(REQUESTS, decision, attachment=proof, seconds=5.0) == (None, b"never")
        assert not wait.done()


def test_an_order_that_was_overheard_is_obeyed_once(tmp_path: Path) -> None:
    """Else whoever has the token could keep two members apart for ever with one word on one of them."""
    with islands(tmp_path) as world:
        firsts, heard = [client.session for client in world.leaders], dict[str, tuple[bytes, bytes]]()
        for island_rank in (0, 1):
            where = notify_key(0, island_rank)
            world.sessions[1].serve(
                where, lambda query, where=where: heard.update({where: (query.payload, query.attachment)})
            )
        until(lambda: world.lighthouse.notify([0], Silent(2)) or len(heard) == 2, 5.0)
        until(lambda: world.leaders[0].is_silent(2), 5.0)
        time.sleep(0.3)
        until(lambda: not world.leaders[0].is_silent(2), 10.0)
        wait = world.waits(0, 2, Tag("outer", 1))
        for where, (order, proof) in heard.items():
            assert world.sessions[2].answer(where, order, attachment=proof, seconds=5.0) == (None, b"never")
        assert not wait.done() and not world.leaders[0].is_silent(2)
        for session in (firsts[0], world.sessions[0]):
            assert session.refused[-1, "a replayed notification"] == 1
        world.lighthouse.notify([0], Silent(2))  # said again by the lighthouse it counts
        settled(wait, seconds=5.0)
        until(lambda: world.leaders[0].is_silent(2), 5.0)


def test_an_island_is_gone_once_one_of_its_workers_is(tmp_path: Path) -> None:
    """The others, their second workers too, go on without it although its first worker is there."""
    with islands(tmp_path) as world:
        wait, ends = world.waits(0, 1, Tag("outer", 1)), world.waits(1, 2, Tag("outer", 1))
        world.sessions[2].close()
        settled(ends, seconds=5.0)
        assert isinstance(ends.error, PeerLost) and not wait.done()
        world.leaders[1].ask(Done(1, 0, NOTHING))
        until(lambda: world.leaders[0].decisions.of(1) is not None, 5.0)
        decision = world.leaders[0].decisions.of(1)
        assert decision is not None and (decision.outcome, decision.attempt, decision.members) == ("retry", 1, (0, 1))
        settled(wait, seconds=5.0)
        assert isinstance(wait.error, RoundClosed)
        views = [client.state.views for client in world.leaders[:2]]
        until(lambda: all(known[max(known)].members == (0, 1) for known in views))


def test_who_begins_to_wait_for_one_that_is_gone_is_told(tmp_path: Path) -> None:
    """Although its second worker is there: the lighthouse's word on it has come before."""
    with islands(tmp_path) as world:
        world.firsts[2].close()
        views = world.leaders[0].state.views
        until(lambda: views[max(views)].members == (0, 1))
        wait = world.waits(0, 2, Tag("outer", 2))
        with pytest.raises(PeerLost):  # its own, or what the second one is told of it
            world.second[0].run(all_done([wait]), "outer", 30.0).wait()


def test_when_a_seat_is_there_as_a_whole() -> None:
    members = IslandLiveness()
    assert members.changed(4, 1, True) is None and members.changed(4, 1, False) is None  # nobody leads it
    assert members.changed(4, 0, True) is True
    assert [members.changed(4, 1, True), members.changed(4, 2, True)] == [None, None]
    assert [members.changed(4, 1, False), members.changed(4, 2, False)] == [False, None]
    assert [members.changed(4, 2, True), members.changed(4, 1, True)] == [None, True]
    assert members.changed(4, 0, False) is False and members.changed(4, 1, False) is None
    assert members.changed(5, 1, False) is None and not members._missing


def test_another_state_is_asked_for_until_the_lighthouse_has_heard_it(tmp_path: Path) -> None:
    """It is away when the state does not arrive: without another word it would take this worker for one at work, and a
    round would wait for it.
    """
    heard = list[object]()

    def hear(query: Query) -> None:
        heard.append(decode(query.payload))
        query.reply()

    with router(tmp_path) as (mine, address, session), ExitStack() as stack:
        own = open_session(mine.token, address)
        stack.callback(own.close)
        client = MembershipClient(own, Entry(0, "0" * 32))
        stack.callback(client.close)
        client.reload()
        session.serve(REQUESTS, hear)
        for _ in range(3):
            client.next_decision(0.1)
        assert [one for one in heard if isinstance(one, Reload)] == [Reload()]

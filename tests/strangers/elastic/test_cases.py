"""Everything in `cases`, done to a lighthouse and two workers: refused, counted, named; and after each all goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.comm import credentials
from isles.comm.tags import Tag
from isles.membership.client import MembershipClient
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.keys import HELLO, MemberKeys
from isles.membership.lighthouse import Journal, Lighthouse
from isles.membership.messages import Entry, Hello, decode, encode
from isles.membership.p2p.pairs import PeerConnections
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.tls_session import Session, open_session
from tests.membership.sessions import router, settled
from tests.membership.test_lighthouse import ask
from tests.strangers.elastic.attacker import Attacker
from tests.strangers.elastic.cases import ANYBODY, CASES, Case

VERSION, CORPUS = "1.0", "abc"


class Worker:
    """An honest one, without anything to train."""

    def __init__(self, session: Session, secret: str, folder: Path) -> None:
        own = credentials.own(secret, folder)
        said = encode(Hello(VERSION, CORPUS, session.name(), (own.token.fingerprint,)))
        entry = decode(ask(session, HELLO, said)[0] or b"")
        assert isinstance(entry, Entry)
        self.session, self.client, self.notices = session, MembershipClient(session, entry), list[str]()
        self.links = PeerConnections(session, entry, self.client.ask, own, lease=3.0, notice=self.notices.append)
        self.transport = ElasticTransport(session, entry.member, 2, peers=self.links)
        self.links.start(self.transport)

    def close(self) -> None:
        self.transport.close()
        self.links.close()
        self.client.close()
        self.session.close()


class World:
    """A lighthouse, members 0 and 1, and the attacker."""

    def __init__(self, folder: Path, mine: Any, address: str, session: Session) -> None:
        self.reported: list[Any] = []
        self.journal = Journal(folder)
        self.lighthouse = Lighthouse(
            session,
            RoundsCoordinator(Rules(founders=2, sync_every=5, last=1000)),
            self.journal,
            MemberKeys(folder),
            config="[run]\n",
            version=VERSION,
            on_report=lambda member, event: self.reported.append((member, event)),
        )
        self.lighthouse.open()
        self.pair = [
            Worker(open_session(mine.token, address), mine.token.secret, folder / f"links-{number}")
            for number in range(2)
        ]
        self.attacker = Attacker(address, mine.token, folder / "attacker", version=VERSION, corpus=CORPUS, victim=0)
        self._round = 0

    def counted(self, case: Case) -> Counter[str]:
        """What was refused so far, by whom the case says."""
        refused = self.pair[0].session.refused if case.by == "victim" else self.lighthouse.refused
        member = -1 if case.member == ANYBODY else self.attacker.entry.member
        return Counter({why: times for one, why, times in refused.rows() if one == member})

    def exchange(self) -> None:
        """The honest ones do what they do all the time."""
        self._round += 1
        sent, got, works = torch.full((100_000,), self._round % 256, dtype=torch.uint8), list[Any](), list[Any]()
        for one, other in ((0, 1), (1, 0)):
            got.append(torch.zeros_like(sent))
            works.append(self.pair[one].transport.recv(other, got[-1], Tag("outer", self._round)))
            works.append(self.pair[other].transport.send(one, sent, Tag("outer", self._round)))
        settled(*works)
        assert [work.error for work in works] == [None] * 4
        assert all(torch.equal(sent, one) for one in got)

    def close(self) -> None:
        self.attacker.close()
        for one in self.pair:
            one.close()
        self.lighthouse.close()
        self.journal.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hostile")
    with router(folder) as (mine, address, session):
        made = World(folder, mine, address, session)
        made.exchange()
        yield made
        made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_refused_counted_and_named(world: World, case: Case) -> None:
    before = world.counted(case)
    case.do(world.attacker)
    if case.reason:
        ends = time.monotonic() + 5.0
        while not (now := world.counted(case) - before)[case.reason]:
            assert time.monotonic() < ends, now
            time.sleep(0.01)
    world.exchange()
    assert all(one.client.has_answers and one.client.ended is None for one in world.pair)


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 30 and len({case.name for case in CASES}) == len(CASES)


def test_with_the_token_the_same_way_leads_in(world: World) -> None:
    assert world.attacker.enters()

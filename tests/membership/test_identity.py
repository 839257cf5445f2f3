"""What members know each other by: whom views name, and who shows that a certificate is its own."""

from __future__ import annotations

import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isles.comm import credentials
from isles.comm.sockets.connection import LinkLost
from isles.comm.tags import Tag
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.messages import Beat, View, identity_of, spoken
from isles.membership.p2p.stream import PairHello, as_dialler, show
from tests.membership.sessions import Workers, workers
from tests.membership.test_transport import within

UNSHOWN = "it does not prove that it owns its certificate"
ONE, TWO = "0123456789abcdef" * 2, "f" * 32


def test_of_an_island_all_certificates_count_in_their_order() -> None:
    assert identity_of([ONE]) == ONE and identity_of([]) == ""
    assert identity_of([ONE, TWO]) == hashlib.sha256((ONE + TWO).encode()).hexdigest()[:32] != identity_of([TWO, ONE])
    assert spoken(ONE) == "0123-4567-89ab-cdef"


def test_views_name_who_is_in_them() -> None:
    """Also by a lighthouse that was started again; 32 digits for each, and none where nobody has a certificate."""
    for certificates, named in (([[ONE], [TWO]], (ONE, TWO)), ([[], []], ())):
        run = RoundsCoordinator(Rules(founders=2, sync_every=5))
        records = [order for one in certificates for order in run.join(0.0, "text", one)]
        for member in (0, 1):
            records += run.beat(0.0, member, Beat(ready=0))
        assert run.view is not None and run.view.identities == named
        again = RoundsCoordinator(run.rules, [one.entry for one in records if hasattr(one, "entry")])
        assert again.view == run.view


def identities(trio: Workers) -> tuple[str, ...]:
    return tuple(one._mine.token.fingerprint for one in trio.pairs)


def exchanged(trio: Workers, one: int, other: int, round: int) -> bool:
    """Whether bytes pass from `one` to `other`."""
    data, out = torch.full((9,), round, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    works = trio[other].recv(one, out, Tag("outer", round)), trio[one].send(other, data, Tag("outer", round))
    if within(2.0, lambda: all(work.done() for work in works)):
        return torch.equal(data, out)
    trio[one].give_up(other, "enough")
    trio[other].give_up(one, "enough")
    return False


@pytest.mark.parametrize("direct", [True, False])
def test_whom_the_lighthouse_vouches_for_and_views_do_not_name_is_cut_off(tmp_path: Path, direct: bool) -> None:
    """Worker 0 hears a view that names another one as 1, in whichever direction they were connected."""
    with workers(tmp_path, 3, direct=direct) as trio:
        assert all(exchanged(trio, *pair, 1) for pair in ((0, 1), (1, 0), (0, 2), (1, 2)))
        own = identities(trio)
        trio.pairs[0].meet(View(0, 1, (0, 1, 2), identities=(own[0], TWO, own[2])))
        for member in (1, 2):
            trio.pairs[member].meet(View(0, 1, (0, 1, 2), identities=own))
        assert within(5.0, lambda: not trio[0]._alive[1])
        assert not exchanged(trio, 0, 1, 2) and not exchanged(trio, 1, 0, 3)
        assert exchanged(trio, 0, 2, 4) and exchanged(trio, 2, 1, 5)
        why = f"its fingerprint is {spoken(own[1])}, but views name {spoken(TWO)}"
        assert {member: reason for member, reason in trio.sessions[0].refused if "fingerprint" in reason} == {1: why}
        assert not any("fingerprint" in reason for member in (1, 2) for _, reason in trio.sessions[member].refused)
        named = f"warning: worker 1 is not who the lighthouse says: {why}"
        assert trio.known.notices[0].count(named) == 1
        assert any(line.endswith(f", fingerprint {spoken(own[0])}") for line in trio.known.notices[1])


def test_a_worker_that_views_name_otherwise_says_so(tmp_path: Path) -> None:
    with workers(tmp_path, 1) as alone:
        own = identities(alone)
        alone.pairs[0].meet(View(0, 1, (0,), identities=own))
        assert alone.known.notices[0] == []
        alone.pairs[0].meet(View(1, 4, (0,), identities=(TWO,)))
        (told,) = alone.known.notices[0]
        assert f"its fingerprint is {spoken(own[0])}, but views name {spoken(TWO)}" in told


def test_who_dials_shows_a_key(tmp_path: Path) -> None:
    """Neither another's certificate, nor a signature for somebody else, nor another place's, lets anybody in."""
    with workers(tmp_path, 2) as pair, ThreadPoolExecutor(1) as aside:
        host, found = pair.pairs[0], pair.pairs[1]._find(0)
        assert found is not None
        mine, other = pair.pairs[1]._mine, credentials.own("0" * 32, tmp_path / "other")
        (to,), named = found.certificates, mine.token.fingerprint

        def is_let_in(shows: credentials.Credentials, certificates: tuple[str, ...], signs: str) -> bool:
            near, far = socket.socketpair()
            hosted = aside.submit(host._authenticate, far)
            with as_dialler(near, credentials.Token(to, found.peer_key), PairHello(1, 0, True)) as talk:
                show(talk, shows, certificates, signs)
                try:
                    hosted.result(10.0)[0].close()
                except LinkLost as error:
                    assert str(error) in (UNSHOWN, "views name another fingerprint")
                    return False
            return True

        assert is_let_in(mine, (named,), to)
        host.meet(View(0, 1, (0, 1), identities=(to, named)))
        assert is_let_in(mine, (named,), to)
        assert not is_let_in(replace(mine, key=other.key), (named,), to)
        assert not is_let_in(mine, (named,), named)
        assert not is_let_in(mine, (TWO, named), to) and not is_let_in(mine, (named, TWO), to)
        assert not is_let_in(mine, (), to)
        assert not is_let_in(other, (other.token.fingerprint,), to)
        assert exchanged(pair, 1, 0, 7)

"""The lighthouse's count of what it carries, over real sessions that end at any time."""

from __future__ import annotations

from pathlib import Path

import torch

from isles.comm import credentials
from isles.comm.elastic.lasting.journalled import of_another_version
from isles.comm.elastic.links.relayed import RelayCount
from isles.comm.elastic.session import open_router, open_session
from isles.comm.tags import Tag
from tests.comm.elastic.sessions import router, settled, workers

MUCH = 3_000_000  # bytes


def test_a_lighthouse_that_is_lit_again_goes_on_from_what_it_noted() -> None:
    carried, journal = [0], list[dict[str, object]]()
    counter = RelayCount(lambda: carried[0])
    for more in (5_000_000, 30_000, 1_970_000, 38_000_000):  # the second is too little to be noted
        carried[0] += more
        if (note := counter.note(counter.relayed())) is not None:
            of_another_version(note)  # nobody who reads the journal trips over it
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
            two.serve("isles/mail/1", lambda asked: asked.reply(bytes(500)))
            assert one.answer("own", bytes(3000), seconds=5.0) == (bytes(7000), None) and light.relayed == 0
            answer = (None, None)
            while answer == (None, None):  # until it is known who serves
                answer = one.answer("isles/mail/1", bytes(1000), seconds=5.0)
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

"""What a lighthouse takes from its members: no more than fits the model that the run began with, and not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.membership.keys import MemberKeys
from isles.membership.state_transfer import MODEL, STATE, StateServer, StateUnavailable
from isles.membership.tls_session import Session, open_session
from isles.training.lighthouse.rounds import RoundsLighthouseServer
from tests.membership.sessions import router
from tests.membership.test_gifts import Known
from tests.training.elastic.test_support import config


@pytest.fixture
def met(tmp_path: Path) -> Iterator[tuple[RoundsLighthouseServer, Session, MemberKeys]]:
    """A lighthouse's keeper, and the session of a member."""
    with router(tmp_path) as (mine, address, host):
        made = config("run.steps=20")
        keeper = RoundsLighthouseServer(made, tmp_path / "run", address, print, print, print)
        keeper.out.mkdir()
        keeper.session, keeper.keys = host, MemberKeys(tmp_path)
        session = open_session(mine.token, address)
        try:
            yield keeper, session, keeper.keys
        finally:
            session.close()


@pytest.mark.parametrize(("what", "copies"), [(MODEL, 1), (STATE, 16)])
def test_it_is_bounded_by_the_first_model(
    met: tuple[RoundsLighthouseServer, Session, MemberKeys], tmp_path: Path, what: str, copies: int
) -> None:
    """A file that is announced as longer is refused before a byte of it comes. The model: one block of width 16 and an
    embedding of 256 tokens, which is the head as well and may be in a file twice.
    """
    keeper, session, keys = met
    weights = 4 * (4 * 16**2 + 3 * 16 * 24 + 3 * 16 + 2 * 256 * 16)
    most = copies * weights + (1 << 20)
    for member, size in (("3", most), ("4", most + 1)):
        path = tmp_path / member
        path.write_bytes(bytes(size))
        StateServer(session, member, print, peer_keys=Known(keys, int(member))).publish(what, path, {})
    assert keeper.fetch("3", what, keeper.out / "taken", 20.0, copies)["size"] == most
    before = keeper.session.taken
    with pytest.raises(StateUnavailable, match=f"it has {most + 1} bytes, more than the {most} that fit this model"):
        keeper.fetch("4", what, keeper.out / "more", 20.0, copies)
    assert keeper.session.taken - before < 1000 and not (keeper.out / "more").exists()


def test_ctrl_c_ends_a_fetch_at_once(met: tuple[RoundsLighthouseServer, Session, MemberKeys]) -> None:
    """Of a member that says that its model is on its way, and never gives it."""
    keeper, session, keys = met
    state_server = StateServer(session, "3", print, peer_keys=Known(keys, 3))
    ended = list[float]()

    def fetch() -> None:
        try:
            keeper.fetch("3", MODEL, keeper.out / "taken", 60.0)
        except InterruptedError:
            ended.append(time.monotonic())

    thread = threading.Thread(target=fetch)
    thread.start()
    while not state_server.is_requested(MODEL):
        time.sleep(0.01)
    keeper.stopping.set()
    began = time.monotonic()
    thread.join(10.0)
    assert len(ended) == 1 and ended[0] - began < 5.0

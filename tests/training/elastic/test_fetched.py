"""What a lighthouse takes from its members: no more than fits the model that the run began with, and not for ever."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.membership import state_transfer
from isles.membership.keys import LIGHTHOUSE, MemberKeys
from isles.membership.state_transfer import MODEL, STATE, FetchRequest, StateServer, StateUnavailable
from isles.membership.tls_session import Session, open_session
from isles.training.lighthouse.rounds import RoundsLighthouseServer
from tests.membership.sessions import router
from tests.membership.test_gifts import Known
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import small
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


class Drips(StateServer):
    """Sends a piece each `pause` seconds."""

    pause = 0.2

    def _piece(self, *asked: Any) -> bytes:
        time.sleep(self.pause)
        return super()._piece(*asked)


@pytest.mark.parametrize("slow", ["deadline", "rate"])
def test_a_drip_ends_with_a_line_that_names_the_key(
    met: tuple[RoundsLighthouseServer, Session, MemberKeys],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: str,
) -> None:
    """100 pieces of 1 MB, 5 a second: 20 s. It says so after a tenth of a second, and ends after a second."""
    keeper, session, keys = met
    monkeypatch.setattr(state_transfer, "_TELL", 0.1)
    monkeypatch.setattr(state_transfer, "_WINDOW", 1.0)
    seconds = 20.0
    if slow == "deadline":
        keeper.config = config("run.steps=20", "world.elastic.state_deadline=8")
    else:
        monkeypatch.setattr(state_transfer, "_LEAST", 20e6)  # bytes a second: 5 s and `seconds`
        seconds = 3.0
    told = list[str]()
    keeper.on_notice, keeper.rules = told.append, replace(keeper.rules, weights=1 << 27)
    path = tmp_path / "3"
    path.write_bytes(bytes(100 << 20))
    Drips(session, "3", print, peer_keys=Known(keys, 3)).publish(MODEL, path, {})
    began = time.monotonic()
    with pytest.raises(StateUnavailable) as why:
        keeper.fetch("3", MODEL, keeper.out / "taken", seconds)
    assert time.monotonic() - began < 5.0
    assert re.search(r"104\.9 MB at \d+ Mbit/s take \d\d s, more than is allowed", str(why.value)), why.value
    assert ("world.elastic.state_deadline = 8" if slow == "deadline" else "of 8 s") in str(why.value)
    assert re.search(r"of 104\.9 MB are here; it takes \d\d s in all", told[0]), told


def test_ctrl_c_ends_a_member_s_fetch_at_once(
    met: tuple[RoundsLighthouseServer, Session, MemberKeys], tmp_path: Path
) -> None:
    """Of a lighthouse that does not say whether it has a state."""
    keeper, session, _ = met
    StateServer(keeper.session, LIGHTHOUSE, print)
    leaving, transfers = threading.Event(), StateServer(session, "3", print, changed=session.condition())
    transfers.stops = leaving.is_set
    threading.Timer(0.3, leaving.set).start()
    began = time.monotonic()
    with pytest.raises(StateUnavailable):
        transfers.fetch(FetchRequest(source=LIGHTHOUSE, what=STATE, most=1 << 20, seconds=60.0), tmp_path / "taken")
    assert time.monotonic() - began < 3.0


def test_who_sends_no_result_holds_the_end_for_eval_deadline(tmp_path: Path) -> None:
    """It says that it has finished, beats on, and is named. The run ends with the other's model."""
    made = Run(small(tmp_path, 20, 2, "world.eval_deadline=2"), tmp_path / "run")
    taken = made.keeper._on_event
    made.keeper._on_event = lambda *what: what[:2] == (1, "result") or taken(*what)
    for _ in range(2):
        made.join()
    made.end()
    assert any("worker 1 is left out: it has sent no result for 2 s" in line for line in made.notices), made.notices

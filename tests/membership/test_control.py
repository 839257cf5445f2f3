"""What every session of the control plane keeps: the engine's between processes, and the one on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isles.comm.virtual.cluster import VirtualCluster, VirtualTransport
from isles.membership.session import ControlSession, Query
from isles.membership.simulated import SimulatedNetwork, SimulatedSession
from isles.membership.tls_session import open_session
from tests.membership.sessions import router

Program = Callable[[ControlSession, ControlSession], None]


def on_the_engine(program: Program, folder: Path) -> None:
    """`program` with a member's session and the lighthouse's."""
    pytest.importorskip("zenoh")
    with router(folder) as (mine, address, lighthouse):
        member = open_session(mine.token, address)
        try:
            program(member, lighthouse)
        finally:
            member.close()


def on_the_virtual_clock(program: Program, folder: Path) -> None:
    sessions: list[SimulatedSession] = []

    def before(scheduler: Any, wire: Any, transports: Any) -> None:
        network = SimulatedNetwork(scheduler, wire)
        sessions.extend((SimulatedSession(network, scheduler.workers[0]), SimulatedSession(network)))

    def work(transport: VirtualTransport) -> None:
        program(*sessions)

    VirtualCluster(1, links="lan").run(work, before=before)


@pytest.fixture(params=[on_the_engine, on_the_virtual_clock])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Program], None]:
    return partial(request.param, folder=tmp_path)


class Heard(list[Any]):
    """What callbacks have told, waited for by the program's own thread."""

    def __init__(self, session: ControlSession) -> None:
        super().__init__()
        self.changed = session.condition()

    def __call__(self, *told: Any) -> None:
        with self.changed, self.changed:  # its holder may take it again
            self.append(told[0] if len(told) == 1 else told)
            self.changed.notify_all()

    def wait(self, number: int, seconds: float = 10.0) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self) >= number, seconds)


def test_timers_ring_in_their_order_and_cancelled_ones_never(run: Callable[[Program], None]) -> None:
    def program(here: ControlSession, _: ControlSession) -> None:
        heard, began = Heard(here), here.now()
        here.later(partial(heard, "third"), 0.3)
        gone = [here.later(partial(heard, "cancelled"), seconds) for seconds in (0.05, 0.2)]
        here.later(partial(heard, "first"))
        here.later(partial(heard, "second"), 0.1)
        for cancel in (*gone, *gone):
            cancel()
        assert heard.wait(3) and here.now() - began >= 0.3
        assert heard == ["first", "second", "third"]

    run(program)


def test_a_wait_ends_at_its_time(run: Callable[[Program], None]) -> None:
    def program(here: ControlSession, _: ControlSession) -> None:
        began = here.now()
        assert not Heard(here).wait(1, 0.2)
        assert 0.2 <= here.now() - began < 1.0

    run(program)


def test_a_timer_that_fails_keeps_no_other_from_ringing(tmp_path: Path) -> None:
    """Between processes; on the virtual clock the run ends."""

    def program(here: ControlSession, _: ControlSession) -> None:
        heard = Heard(here)
        here.later(partial(int, "none"), 0.05)
        here.later(partial(heard, "later"), 0.1)
        assert heard.wait(1)

    on_the_engine(program, tmp_path)


def test_a_question_is_answered_once(run: Callable[[Program], None]) -> None:
    """By a reply, made when it leaves or before; a refusal; nobody; or the end of its time, behind which a reply comes
    in vain.
    """

    def program(here: ControlSession, there: ControlSession) -> None:
        heard, held = Heard(here), list[Query]()

        def serve(query: Query) -> None:
            match query.payload:
                case b"refuse":
                    query.refuse(b"never")
                case b"hold":
                    held.append(query)
                case said:
                    query.reply(partial(bytes.upper, said) if said == b"made" else query.attachment)

        def ask(said: bytes, key: str = "isles/requests", seconds: float = 5.0) -> Any:
            known = len(heard)
            here.ask(key, said, heard, attachment=b"beside", seconds=seconds, urgent=True)
            assert heard.wait(known + 1)
            return heard[-1]

        there.serve("isles/requests", serve)
        for _ in range(50):  # a fresh session does not know at once who serves what
            if ask(b"made") != (None, None):
                break
        assert ask(b"made") == (b"MADE", None) and ask(b"said") == (b"beside", None)
        assert ask(b"refuse") == (None, b"never")
        assert ask(b"x", "isles/nobody", 0.3) == (None, None)
        assert ask(b"hold", seconds=0.3) == (None, None)
        known = len(heard)
        there.later(held[0].reply)
        assert not heard.wait(known + 1, 0.5)

    run(program)

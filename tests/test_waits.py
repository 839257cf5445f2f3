"""No wait without a bound: a walk through the code of everything that waits for another thread, process or machine.

A call of one of `BOUNDED` needs a time-out, by position or by name. The exceptions are listed, each with what ends it.
The bounds themselves, with their settings, are a table in docs/guarantees.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from isles.training.config.world import ElasticConfig, WorldConfig

PACKAGE = Path(__file__).resolve().parent.parent / "isles"
ROOMS = ("membership", "comm", "training", "running", "launch")
SIMULATED = ("comm/virtual/", "membership/simulated.py")  # time stands still there while nobody acts
BOUNDED = {"wait": 1, "wait_for": 2, "get": 1, "join": 1, "result": 1, "acquire": 1, "recv": 1, "recv_bytes": 1}
"""By name: the position behind which the time-out stands; `recv`: of a socket or pipe, which takes none."""
TIMED = {"timeout", "seconds", "blocking"}
_COLLECTIVE = "a transfer of a group: the channel's deadline ends it (`deadlines`)"
_PIPE = "read once something is there (`poll`, `wait`)"
_ASYNC = "cancelled with its connection, whose silence is bounded"
EXCEPTIONS = {
    ("membership/late_shares.py", "delivery.wait"): "`Delivery.wait` waits a moment",
    ("membership/p2p/stream.py", "talk.recv"): "the socket has the time-out of the handshake",
    ("membership/p2p/stream.py", "self._awake.recv"): "the socket does not block",
    ("membership/p2p/stream.py", "self._link.recv"): "the time-out is 0",
    ("membership/p2p/transport.py", "inbox.wait"): "`Inbox.wait` waits a moment",
    ("membership/tls_session.py", "self._welcomed.wait"): "a task beside a wait with a time-out",
    ("membership/tls_session.py", "link.recv"): "the socket has the time-out of its dial",
    ("membership/tls_session.py", "self._todo.get"): "the session's own thread: `close` ends it",
    ("comm/collectives/message_queue.py", "self.group.start(any_done([event]), self.group.channel, math.inf).wait"): (
        "the event has a time-out"
    ),
    ("comm/collectives/message_queue.py", "self.group.start(any_done([work, event]), self.group.channel).wait"): (
        _COLLECTIVE
    ),
    ("comm/gloo/transfers.py", "inbox.get"): "the waiters' own thread: `close` ends it",
    ("comm/gloo/transport.py", "message[0].wait"): "a waiter's thread: its work has a deadline of its own",
    ("comm/group.py", "*.wait"): _COLLECTIVE,
    ("comm/sockets/connection.py", "self._left.wait"): _ASYNC,
    ("comm/sockets/connection.py", "self._any.wait"): _ASYNC,
    ("comm/sockets/connection.py", "task.result"): "the task is done",
    ("comm/sockets/listener.py", "connection.recv"): "the socket is readable, and does not block",
    ("comm/stopping.py", "self._changed.wait"): "a launcher that is gone ends its workers; one that is there goes on",
    ("training/elastic/connect.py", "pool.join"): "workers that are silent count as lost",
    ("running/torchrun.py", "begun.get"): "the other thread puts something there at its end",
    ("running/torchrun.py", "thread.join"): "the launcher in this process: workers that are silent count as lost",
    ("running/torchrun.py", "self.pipe.recv"): "the launcher is a thread of this process",
    ("launch/handles.py", "self.pipe.recv"): _PIPE,
    ("launch/handles.py", "process.join"): "the process was killed",
    ("launch/nodes.py", "self._room.wait"): _ASYNC,
    ("launch/nodes.py", "self._awake.recv"): "the socket does not block",
    ("launch/worker.py", "closing.wait"): "a worker that is done; its launcher's end ends it",
    ("launch/worker.py", "launcher.recv"): "a thread of its own; the launcher's end is an EOF",
    ("launch/workers.py", "pool.join"): "workers that are silent count as lost",
}


def unbounded(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(the called text, line) of each wait without a time-out. A post of a receive has more arguments than a read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BOUNDED:
            is_read = node.func.attr.startswith("recv") and len(node.args) < 2
            timed = len(node.args) >= BOUNDED[node.func.attr] and not is_read
            if not timed and not TIMED & {keyword.arg for keyword in node.keywords}:
                yield ast.unparse(node.func), node.lineno


def test_every_wait_has_a_bound() -> None:
    used, found = set(), []
    for path in sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(SIMULATED):
            continue
        for called, line in unbounded(ast.parse(path.read_text(encoding="utf-8"))):
            known = {(name, called), (name, "*." + called.rpartition(".")[2])} & EXCEPTIONS.keys()
            used |= known
            if not known:
                found.append(f"isles/{name}:{line}: {called} waits without a bound")
    assert not found, "\n".join(found)
    assert used == EXCEPTIONS.keys(), f"no such waits any more: {EXCEPTIONS.keys() - used}"


@pytest.mark.parametrize(
    ("line", "fires"),
    [
        ("event.wait()", True),
        ("event.wait(2.0)", False),
        ("changed.wait_for(over)", True),
        ("changed.wait_for(over, timeout=2.0)", False),
        ("queue.get()", True),
        ("table.get(key)", False),
        ("thread.join()", True),
        ("lock.acquire(blocking=False)", False),
        ("link.recv(64)", True),
        ("transport.recv(peer, out, tag)", False),
        ("future.result()", True),
    ],
)
def test_the_walk_fires(line: str, fires: bool) -> None:
    assert bool([*unbounded(ast.parse(line))]) == fires


def test_every_setting_of_time_is_in_the_table() -> None:
    text = (PACKAGE.parent / "docs" / "guarantees.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"<!-- waits -->\n(.*?)<!-- /waits -->", text, re.DOTALL)
    named = {*re.findall(r"`(world\.[a-z_.]+)`", rows)}
    known = {f"world.{one.name}" for one in fields(WorldConfig)}
    known |= {f"world.elastic.{one.name}" for one in fields(ElasticConfig)}
    assert named <= known, named - known
    assert {name for name in known if re.search("deadline|lease|stall|silence", name)} <= named

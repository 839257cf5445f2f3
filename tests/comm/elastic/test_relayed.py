"""The lighthouse's count of what it carries, on real connections that end at any time."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from isles.comm.elastic.lasting.journalled import of_another_version
from isles.comm.elastic.links.relayed import RelayCounter
from isles.comm.tags import Tag
from tests.comm.elastic.sessions import settled, workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not count")
MUCH = 3_000_000  # bytes
END = 1  # what TCP counts the end of a connection as


class Ends(NamedTuple):
    """A connection. far: who sends; near: the router's end of it."""

    far: socket.socket
    near: socket.socket

    def carry(self, size: int) -> None:
        """`size` bytes, read by the router."""
        thread = threading.Thread(target=self.far.sendall, args=(bytes(size),))
        thread.start()
        while size:
            size -= len(self.near.recv(min(size, 1 << 16)))
        thread.join()


class Port:
    """One that is listened at, as a router does."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.number = self.listener.getsockname()[1]

    def connected(self) -> Ends:
        far = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.number)))
        return Ends(far, self._stack.enter_context(self.listener.accept()[0]))

    def counter(self, *entries: dict[str, object], own: list[int] | None = None) -> RelayCounter:
        counter = RelayCounter(self.number, lambda: sum(own or ()), entries)
        self._stack.callback(counter.close)
        return counter


@pytest.fixture
def port() -> Iterator[Port]:
    with ExitStack() as stack:
        yield Port(stack)


@pytest.mark.parametrize("first", ["sender", "router"])
def test_what_comes_after_the_last_look_counts(port: Port, first: str) -> None:
    """Whoever closes it: a connection that sends and is closed between two looks has brought what it brought."""
    ends, counter = port.connected(), port.counter()
    ends.carry(1000)
    assert counter.relayed() == 1000
    ends.carry(MUCH)
    for end in ends if first == "sender" else reversed(ends):
        end.close()
    assert counter.relayed() - (1000 + MUCH) in (0, END)
    assert counter.relayed() - (1000 + MUCH) in (0, END)


def test_what_a_killed_sender_had_sent_counts(port: Port) -> None:
    """A reset ends a connection in the kernel, and not its count."""
    ends, counter = port.connected(), port.counter()
    assert counter.relayed() == 0
    ends.carry(MUCH)
    ends.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.far.close()
    with pytest.raises(ConnectionResetError):
        ends.near.recv(1)
    ends.near.close()
    assert counter.relayed() == MUCH


def test_connections_come_and_go_and_others_do_not_count(port: Port) -> None:
    own = [0]
    counter = port.counter(own=own)
    one, two = port.connected(), port.connected()
    with ExitStack() as stack:
        elsewhere = Port(stack).connected()
        elsewhere.carry(7000)
        one.far.sendall(bytes(100))
        two.carry(50)
        assert counter.relayed() == 150
        one.near.sendall(bytes(5000))  # what the router sends is not what it carries
        own[0] = 20
        one.carry(200)
        assert counter.relayed() == 330
    for end in two:
        end.close()
    port.connected().carry(10)
    assert counter.relayed() == 340 + END


def test_a_closed_connection_is_let_go(port: Port) -> None:
    """The other end hears that it is over at the next look, no descriptor is left, and the port is free."""
    counter = port.counter()
    before = len(os.listdir("/proc/self/fd"))
    ends = port.connected()
    assert counter.relayed() == 0
    ends.near.close()
    assert counter.relayed() == 0
    ends.far.settimeout(5.0)
    assert ends.far.recv(1) == b""
    ends.far.close()
    assert len(os.listdir("/proc/self/fd")) == before
    held = port.connected()
    assert counter.relayed() == 0
    held.far.sendall(bytes(10))
    counter.close()
    assert counter.relayed() == 10
    for end in (*held, port.listener):
        end.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number))


def test_a_lighthouse_that_is_lit_again_goes_on_from_what_it_noted(port: Port) -> None:
    ends, counter, journal = port.connected(), port.counter(), list[dict[str, object]]()
    for more in (5_000_000, 30_000, 1_970_000, 38_000_000):  # the second is too little to be noted
        ends.carry(more)
        if (note := counter.note(counter.relayed())) is not None:
            of_another_version(note)  # nobody who reads the journal trips over it
            journal.append(note)
    assert [note["bytes"] for note in journal] == [5_000_000, 7_000_000, 45_000_000]
    counter.close()
    for end in ends:
        end.close()
    again = port.counter(*journal)
    port.connected().carry(100)
    assert again.relayed() == 45_000_100 and again.note(45_000_100) is None


def test_a_worker_that_ends_between_two_looks_has_relayed_what_it_has(tmp_path: Path) -> None:
    """Over the engine: its last message counts, though nobody looks between that and its end."""
    pytest.importorskip("zenoh")
    with workers(tmp_path, 2) as (one, two, *rest):
        assert not rest
        port = two.way(0)._session.info.links()[0].dst
        counter = RelayCounter(int(str(port).rpartition(":")[2].partition("?")[0]), lambda: 0)
        try:
            at_first, data = counter.relayed(), torch.ones(MUCH, dtype=torch.uint8)
            tag = Tag("outer", 0, 0, 0, 0)
            settled(one.recv(1, torch.empty_like(data), tag), two.send(0, data, tag))
            assert two.carried["relayed"] == MUCH
            two.close()
            two.way(0).close()
            assert 1.0 <= (counter.relayed() - at_first) / MUCH <= 1.02
        finally:
            counter.close()

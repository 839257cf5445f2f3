"""Links between launchers, and how they meet: over this machine's own loopback, with a thread for each machine."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from isles.comm import credentials
from isles.comm.credentials import Credentials
from isles.comm.errors import (
    CommError,
    DeadlinePassed,
    Diverged,
    NodeLost,
    PeerLost,
    RendezvousFailed,
    WorkerFailed,
    from_plain,
    to_plain,
)
from isles.comm.sockets import loop
from isles.comm.sockets.connection import ALIVE, LinkLost, packed
from isles.comm.sockets.listener import EchoServer, echo_failure, opened
from isles.comm.sockets.proof import dial
from isles.comm.tcp import interface_of, listen, parse_address
from isles.launch import rendezvous
from isles.launch import workers as local
from isles.launch.nodes import Link, NodeGroup, NodeSpec, connect, split

# ---------------------------------------------------------------------------------------------------------------------
# Links


def accepted(listening: socket.socket) -> Link:
    """The end of a link whose other end has just connected to `listening`."""

    async def begin() -> Link:
        return Link(*await opened(connection, None))

    connection = listening.accept()[0]
    connection.setblocking(False)
    return loop.run(begin(), 5.0)


async def dialled(port: int) -> Link:
    return Link(*await dial("127.0.0.1", port, 5.0))


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Two ends of a link."""
    with listen(0, "127.0.0.1") as listening:
        here = loop.run(dialled(listening.getsockname()[1]))
        there = accepted(listening)
    yield here, there
    here.close()
    there.close()


def raw(data: bytes) -> Link:
    """The end of a link on whose other end somebody says `data`."""
    with listen(0, "127.0.0.1") as listening:
        other = socket.create_connection(("127.0.0.1", listening.getsockname()[1]))
        end = accepted(listening)
    other.sendall(data)
    other.close()
    return end


def test_messages_come_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    """Of any JSON, floats to the bit; signs of life are no messages."""
    here, there = ends
    sent = [{"loss": 0.1 + 0.2}, [1, "two", None], "x" * 50_000, {}]
    loop.call(here._connection._writer.write, ALIVE)
    for message in sent:
        here.send(message)
    assert [there.receive(5.0) for _ in sent] == sent
    assert there.ready() == [] and there.next() is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it closed the connection"),
        (b"GET / HTTP/1.1\r\n\r\n", "is not Isles"),
        (struct.pack(">4sI", b"isle", 1 << 30), "is not Isles"),
        (struct.pack(">4sI", b"isle", 3) + b"{,}", "is not Isles"),
        (struct.pack(">4sI", b"isle", 9) + b"{", "it closed the connection"),
    ],
    ids=["nothing", "another protocol", "too long", "no JSON", "cut off"],
)
def test_what_is_no_message_ends_the_line(data: bytes, words: str) -> None:
    with pytest.raises(LinkLost, match=words):
        raw(data).receive(5.0)


def test_what_came_before_the_end_is_heard_first() -> None:
    body = json.dumps("last words").encode()
    end = raw(struct.pack(">4sI", b"isle", len(body)) + body)
    time.sleep(0.1)
    assert end._lost is not None
    assert end.receive(5.0) == "last words"
    with pytest.raises(LinkLost):
        end.receive(5.0)


def test_silence_is_loss_and_a_sign_of_life_is_none(ends: tuple[Link, Link]) -> None:
    _, there = ends
    for end in ends:
        end.patience(1.5)
    with pytest.raises(LinkLost, match=r"no answer within 3 s"):  # alive, but says nothing
        there.receive(3.0)
    with listen(0, "127.0.0.1") as listening, socket.create_connection(listening.getsockname()):
        silent = accepted(listening)
        silent.patience(0.6)
        started = time.monotonic()
        with pytest.raises(LinkLost, match=r"no sign of life for 0.6 s"):
            silent.receive(5.0)
        assert time.monotonic() - started < 5.0
    silent.close()


def test_a_long_message_over_a_slow_line_is_a_sign_of_life() -> None:
    """A byte now and then is enough, and the message comes whole."""
    said = packed("x" * 20)
    with listen(0, "127.0.0.1") as listening, socket.create_connection(listening.getsockname()) as slow:
        end = accepted(listening)
        end.patience(0.5)
        for byte in said:
            slow.send(bytes([byte]))
            assert end.ready() in ([], ["x" * 20])
            time.sleep(0.05)
    end.close()


def test_who_takes_nothing_holds_the_sender_back(ends: tuple[Link, Link]) -> None:
    """Beyond what is held at both ends; a sender that nobody listens to is told so, and who is alive is not lost."""
    here, there = ends
    for end in ends:
        end.patience(1.5)
    much, sent = "x" * (4 << 20), 0
    with pytest.raises(LinkLost, match=r"no answer within 1.5 s"):
        while sent < 40:
            here.send(much)
            sent += 1
    assert 8 <= sent < 40 and there._bytes <= 40 << 20
    got = 0
    while got < sent:
        assert there.receive(10.0) == much
        got += 1


def test_who_gives_a_link_up_says_why(ends: tuple[Link, Link]) -> None:
    """Not what the reader meets when the connection is broken off for that reason."""
    here, _ = ends
    here.patience(0.05)  # the other side says something each second
    with pytest.raises(LinkLost, match=r"no sign of life"):
        here.receive(5.0)
    time.sleep(0.2)
    with pytest.raises(LinkLost, match=r"no sign of life"):
        here.send("more")


def test_addresses() -> None:
    assert parse_address("host:1", "--peer") == ("host", 1)
    assert parse_address("[::1]:29400", "--peer") == ("::1", 29400)
    for text in ("host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:x"):
        with pytest.raises(ValueError, match=r"--peer .*: write HOST:PORT"):
            parse_address(text, "--peer")


def test_an_echo_server_answers_until_it_is_closed() -> None:
    with EchoServer("127.0.0.1") as echo:
        assert loop.run(echo_failure("127.0.0.1", echo.port)) == ""
    assert loop.run(echo_failure("127.0.0.1", echo.port)) == "connection refused"
    with EchoServer("127.0.0.1", name="one") as echo:
        assert loop.run(echo_failure("127.0.0.1", echo.port, "one")) == ""
        assert loop.run(echo_failure("127.0.0.1", echo.port, "other")) == "something else answers there"
    with listen(0, "127.0.0.1") as silent:
        assert loop.run(echo_failure("127.0.0.1", silent.getsockname()[1], seconds=0.3)) == "no answer within 0.3 s"
    assert loop.run(echo_failure("no.such.host.invalid", 1)) == "no such host name"
    assert loop.run(echo_failure("x" * 70 + ".y", 1)) == "it is no address"
    assert interface_of("127.0.0.1") in ("lo", None) and interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    "error",
    [
        PeerLost(3, "gone"),
        DeadlinePassed(1, "outer", 2.5),
        Diverged(2, 7, "hash"),
        WorkerFailed(1, "text"),
        NodeLost(1, "(a) is lost"),
        RendezvousFailed("late"),
        ValueError("steps = 0"),
        CommError("other"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel(error: Exception) -> None:
    """As JSON, to an equal error of the same class; anything else arrives as its words."""
    there = from_plain(json.loads(json.dumps(to_plain(error))))
    assert (type(there), str(there), there.__reduce__()[1]) == (type(error), str(error), error.__reduce__()[1])


def test_no_other_class_is_made_from_what_comes() -> None:
    assert str(from_plain(to_plain(OSError("disk")))) == "disk"
    for plain in (["OSError", ["x"]], ["eval", ["1"]], ["PeerLost", []], None, 3, ["a"], {"ValueError": []}):
        assert type(from_plain(plain)) is CommError


# ---------------------------------------------------------------------------------------------------------------------
# Shares


def test_workers_are_split_evenly_and_in_order() -> None:
    assert [list(ranks) for ranks in split(5, 2)] == [[0, 1, 2], [3, 4]]
    for workers in range(1, 12):
        for nodes in range(1, workers + 1):
            shares = split(workers, nodes)
            assert [rank for share in shares for rank in share] == list(range(workers))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert sorted(map(len, shares), reverse=True) == list(map(len, shares))


@pytest.mark.parametrize(
    ("node_spec", "words"),
    [
        ({"nodes": 0}, "--nodes 0: choose 1 or more"),
        ({"nodes": 2, "node": 2, "rendezvous": "a:1"}, "--node 2: with --nodes 2 it is one of 0 to 1"),
        ({"nodes": 2, "node": -1, "rendezvous": "a:1"}, "--node -1"),
        ({"node": 1}, "--node 1: with --nodes 1"),
        ({"nodes": 2}, "needs --rendezvous HOST:PORT"),
        ({"rendezvous": "a:1"}, "needs --nodes"),
        ({"nodes": 2, "rendezvous": "a"}, "--rendezvous a: write HOST:PORT"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ",
)
def test_impossible_places(node_spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        NodeSpec(**node_spec)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# The rendezvous


class Meeting:
    """Nodes that come to one rendezvous, each in a thread of its own."""

    def __init__(self, mine: Credentials, nodes: int, seconds: float = 10.0) -> None:
        with listen(0, "127.0.0.1") as free:
            self.port = free.getsockname()[1]
        self.mine = mine
        self.nodes, self.seconds = nodes, seconds
        self.told: list[str] = []
        self.pool = ThreadPoolExecutor(8)

    def come(
        self, node: int, description: Any = "same", nodes: int | None = None, seconds: float | None = None
    ) -> Future:
        """What `meet` returns to that node."""
        node_spec = NodeSpec(nodes=nodes or self.nodes, node=node, rendezvous=f"127.0.0.1:{self.port}")

        def agree(theirs: Any, node: int) -> str:
            return (
                ""
                if theirs == {"description": "same"}
                else f"node {node} has another description: {theirs['description']}"
            )

        def take_part() -> NodeGroup:
            patience = seconds or self.seconds
            if node == 0:
                node_group = rendezvous.host(node_spec, self.mine, agree, patience, self.told.append)
                node_group.go(store=7)
                return node_group
            token = self.mine.token
            return rendezvous.come(node_spec, token, {"description": description}, patience, self.told.append)

        return self.pool.submit(take_part)

    def hears(self, words: str) -> None:
        """Wait until node 0, or another, says so."""
        ends_at = time.monotonic() + 10.0
        while not any(words in text for text in self.told):
            assert time.monotonic() < ends_at, (words, self.told)
            time.sleep(0.01)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return credentials.found(tmp_path_factory.mktemp("run") / "credentials")


@pytest.fixture
def gathering(mine: Credentials) -> Iterator[Callable[..., Meeting]]:
    """Meetings whose threads have ended by the end of the test."""
    made: list[Meeting] = []

    def make(*arguments: Any) -> Meeting:
        made.append(Meeting(mine, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.pool.shutdown()


def test_all_meet_in_any_order(gathering: Callable[..., Meeting]) -> None:
    """Node 1 comes before anybody listens, node 0 last but one; all know where node 0 is and what it told."""
    group = gathering(3)
    early = group.come(1)
    group.hears("nobody answers at")
    node_groups = [group.come(0), early, group.come(2)]
    found = [node_group.result(15.0) for node_group in node_groups]
    assert [node_group.spec.node for node_group in found] == [0, 1, 2]
    assert all((node_group.host, node_group.facts["store"]) == ("127.0.0.1", 7) for node_group in found)
    assert sorted(found[0].links) == [1, 2] and list(found[1].links) == list(found[2].links) == [0]
    found[0].links[2].send("for two")
    assert found[2].links[0].receive(5.0) == "for two"
    for node_group in found:
        node_group.part()


HELLO: dict[str, Any] = {
    "isles": rendezvous.__version__,
    "node": 1,
    "nodes": 3,
    "echo_port": 1,
    "ports": "1-2",
    "description": {"description": "same"},
}


def test_who_does_not_belong_is_told_why(gathering: Callable[..., Meeting]) -> None:
    """Each in one line, on both sides; node 0 goes on waiting, and the right ones still come together."""
    group = gathering(3)
    host = group.come(0)
    group.hears("waiting at")
    first = group.come(1)
    group.hears("node 1 (127.0.0.1) is here; waiting for node 2")

    def refusal(*arguments: Any, **more: Any) -> str:
        with pytest.raises(ValueError) as caught:
            group.come(*arguments, **more).result(10.0)
        group.hears(f"refused 127.0.0.1: {caught.value}")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refusal(2, description="other") == "node 2 has another description: other"
    assert "is taken by 127.0.0.1: give every machine a --node of its own" in refusal(1)
    assert "started with --nodes 4, node 0 with --nodes 3" in refusal(2, nodes=4)
    other = connect("127.0.0.1", group.port, group.mine.token, 5.0)
    other.send({**HELLO, "isles": "9.9.9", "node": 2})
    why = from_plain(other.receive(5.0)["over"])
    assert isinstance(why, ValueError) and "node 2 runs isles 9.9.9, node 0 runs isles 0." in str(why)
    group.hears(f"refused 127.0.0.1: {why}")
    other.close()
    for said in (b"GET / HTTP/1.1\r\n\r\n", packed({"doctor": "0.1.0"})):  # programs of another kind
        with socket.create_connection(("127.0.0.1", group.port), 5.0) as stranger:
            stranger.sendall(said)
            heard = stranger.recv(1000)
            assert not heard or heard[0] == 0x15, heard  # nothing but TLS's own alert
        group.hears("turned away 127.0.0.1: it does not speak TLS as isles does")

    second = group.come(2)
    for node_group in [host.result(10.0), first.result(10.0), second.result(10.0)]:
        node_group.part()


def test_one_that_goes_away_is_waited_for_again(gathering: Callable[..., Meeting]) -> None:
    group = gathering(3)
    host = group.come(0)
    group.hears("waiting at")
    gone = connect("127.0.0.1", group.port, group.mine.token, 5.0)
    gone.send(HELLO)
    group.hears("node 1 (127.0.0.1) is here")
    gone.close()
    group.hears("node 1 (127.0.0.1) went away")
    for node_group in [group.come(1), group.come(2), host]:
        node_group.result(10.0).part()


def test_nobody_comes(gathering: Callable[..., Meeting]) -> None:
    """Node 0 alone, node 1 alone, and one of three missing: those who are there are told who is not."""
    with pytest.raises(RendezvousFailed, match=r"node 1 did not come to 127.0.0.1:\d+ within 0.5 s"):
        gathering(2, 0.5).come(0).result(5.0)
    with pytest.raises(RendezvousFailed, match=r"nobody answers at 127.0.0.1:\d+ since 0.5 s \(connection refused\)"):
        gathering(2, 0.5).come(1).result(5.0)
    group = gathering(3)
    both = [group.come(0, seconds=2.0), group.come(1)]
    for node_group in both:
        with pytest.raises(RendezvousFailed, match="node 2 did not come"):
            node_group.result(10.0)


def test_a_rendezvous_that_cannot_be(gathering: Callable[..., Meeting]) -> None:
    """A port in use, an address of another machine, an unknown name: a user's mistakes, told at once."""
    group = gathering(2)
    with listen(group.port, "127.0.0.1"), pytest.raises(ValueError, match=f":{group.port}: the port is taken"):
        group.come(0).result(5.0)
    for host, words in (("192.0.2.1", "is no address of this machine"), ("no.such.host.invalid", "no such host name")):
        for node in (0, 1) if "name" in words else (0,):
            node_spec = NodeSpec(nodes=2, node=node, rendezvous=f"{host}:29400")
            with pytest.raises(ValueError, match=words):
                if node == 0:
                    rendezvous.host(node_spec, group.mine, lambda description, node: "", 5.0, group.told.append)
                rendezvous.come(node_spec, group.mine.token, {}, 5.0, group.told.append)


def test_seats_of_the_second_machine() -> None:
    """Its workers count from 0 on their own machine, which is what a GPU is chosen by; the store is node 0's."""
    node_group = NodeGroup(
        spec=NodeSpec(nodes=2, node=1, rendezvous="10.0.0.1:29400"), here="127.0.0.1", host="10.0.0.1"
    )
    own = local.worker_specs(node_group, 5, 1234, threads=1, deadlines=None, logs=None)
    assert [(spec.rank, spec.local_rank, spec.size) for spec in own] == [(3, 0, 5), (4, 1, 5)]
    assert {(spec.host, spec.port, spec.interface) for spec in own} == {("10.0.0.1", 1234, interface_of("127.0.0.1"))}

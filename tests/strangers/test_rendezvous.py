"""Strangers at node 0's rendezvous, and a machine that has the token and lies: they are told nothing, one line is said,
and the right ones still come together.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.base.version import __version__
from isles.comm import credentials
from isles.comm.credentials import Credentials, Token
from isles.comm.errors import RendezvousFailed
from isles.comm.sockets.connection import packed
from isles.comm.sockets.proof import TokenRefused
from isles.comm.tcp import listen
from isles.launch import rendezvous
from isles.launch.nodes import NodeGroup, NodeSpec
from tests.strangers.callers import ESCAPES, GARBAGE, call, framed, many, prove, read, reset, say, tls


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return credentials.found(tmp_path_factory.mktemp("run") / "credentials")


class Host:
    """Node 0 of a meeting, in a thread of its own."""

    def __init__(self, mine: Credentials, nodes: int, seconds: float) -> None:
        with listen(0, "127.0.0.1") as free:
            self.port = free.getsockname()[1]
        self.mine, self.nodes, self.told = mine, nodes, list[str]()
        self.pool = ThreadPoolExecutor(nodes + 1)
        spec = self.spec(0)
        self.meeting = self.pool.submit(rendezvous.host, spec, mine, lambda theirs, node: "", seconds, self.told.append)
        self.hears("waiting at")

    def spec(self, node: int) -> NodeSpec:
        return NodeSpec(nodes=self.nodes, node=node, rendezvous=f"127.0.0.1:{self.port}")

    def come(self, node: int, token: Token | None = None) -> Future[NodeGroup]:
        token = token or self.mine.token
        return self.pool.submit(rendezvous.come, self.spec(node), token, {}, 60.0, self.told.append)

    def hears(self, words: str) -> str:
        """The line with these words, once somebody has said it."""
        ends_at = time.monotonic() + 30.0
        while not (found := [line for line in self.told if words in line]):
            assert time.monotonic() < ends_at, (words, self.told)
            time.sleep(0.01)
        return found[0]

    def all_meet(self) -> None:
        others = [self.come(node) for node in range(1, self.nodes)]
        group = self.meeting.result(60.0)
        group.go(store=1)
        for other in others:
            other.result(60.0).part()
        group.part()


@contextmanager
def hosting(mine: Credentials, nodes: int = 2, seconds: float = 30.0) -> Iterator[Host]:
    host = Host(mine, nodes, seconds)
    try:
        yield host
    finally:
        host.pool.shutdown()


def test_who_does_not_know_the_token_is_told_nothing(mine: Credentials) -> None:
    """Garbage of all kinds, in the clear and inside TLS, connections that are broken off and such as say nothing: node
    0 answers with an alert of TLS at most, or with its challenge, and the right node still comes in.
    """
    with hosting(mine) as host:
        for said in GARBAGE.values():
            with call(host.port, said) as stranger:
                stranger.settimeout(0.3)
                heard = read(stranger, 1000)
                assert not heard or (heard[0] == 0x15 and len(heard) < 20), heard
        for said in GARBAGE.values():
            with tls(host.port) as line:
                line.settimeout(0.3)
                say(line, said)
                heard = read(line, 1000)
                assert len(heard) in (0, 32), heard  # a challenge: random bytes
        for _ in range(20):
            reset(host.port)
        with many(host.port, 200):
            host.all_meet()


def test_a_crowd_costs_little(mine: Credentials) -> None:
    """300 connections that each begin a message of 16 MB: a few MB, and they are cut off for each other alone."""
    process = psutil.Process()
    with hosting(mine) as host:
        before = process.memory_info().rss
        callers = [call(host.port, GARBAGE["16 MB announced"] * 20) for _ in range(300)]
        time.sleep(0.5)
        assert process.memory_info().rss - before < 50e6
        host.all_meet()
        for caller in callers:
            caller.close()


@pytest.mark.long
def test_four_nodes_meet_within_two_seconds(mine: Credentials) -> None:
    began = time.monotonic()
    with hosting(mine, nodes=4) as host:
        host.all_meet()
        assert time.monotonic() - began < 2.0


@pytest.mark.long
def test_two_thousand_that_say_nothing(mine: Credentials) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))  # for the callers: they are of this process
    process = psutil.Process()
    try:
        with hosting(mine) as host:
            before = process.memory_info().rss
            with many(host.port, 2000):
                assert process.memory_info().rss - before < 50e6
                host.all_meet()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wrong_token_is_one_line_on_both_sides(mine: Credentials, tmp_path: Path) -> None:
    """The token of another run; the right machine with another secret; a certificate that has expired."""
    with hosting(mine) as host:
        other = credentials.found(tmp_path / "other").token
        with pytest.raises(TokenRefused, match="is not the machine of this token: look at address and token"):
            host.come(1, other).result(20.0)
        host.hears("turned away 127.0.0.1: it has the token of another run")
        with pytest.raises(TokenRefused, match="does not take this token; copy the one that it shows"):
            host.come(1, Token(mine.token.fingerprint, "0" * 32)).result(20.0)
        host.hears("turned away 127.0.0.1: it does not know the token of this run")
        host.all_meet()
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=800)
    with hosting(credentials.found(tmp_path / "old", now=long_ago), seconds=3.0) as host:
        with pytest.raises(TokenRefused, match="has expired; look at both clocks"):
            host.come(1).result(20.0)
        host.hears("turned away 127.0.0.1: by its clock the certificate of the token has expired")


def test_what_was_overheard_is_of_no_use(mine: Credentials) -> None:
    """A proof that was right once, said again word for word, and node 0's own proof said back to it."""
    with hosting(mine) as host:
        with tls(host.port) as line:
            assert prove(line, mine.token)
        own = bytes(32)
        with tls(host.port) as line:
            line.sendall(own)
            said = b"y" + credentials.proof(mine.token, "node", own, read(line, 32))
            say(line, said)
            answer = read(line, 32)
            assert len(answer) == 32
        for words in (said, b"y" + answer):
            with tls(host.port) as line:
                line.sendall(own)
                read(line, 32)
                say(line, words)
                assert read(line, 33) == bytes(32)  # no proof
        host.hears("it does not know the token of this run")
        host.all_meet()


HELLO = {"isles": __version__, "node": 1, "nodes": 2, "echo_port": 1, "ports": "1-2", "description": {}}
LIES: list[Any] = [
    [], None, 3, "x", {}, {"doctor": "1"}, [[[[]]]],
    *(HELLO | lie for lie in (
        {"isles": None}, {"isles": ESCAPES}, {"echo_port": 10**30}, {"echo_port": -1}, {"echo_port": True},
        {"echo_port": 1.5}, {"node": 10**30}, {"node": -1}, {"node": True}, {"node": 0}, {"node": "1"}, {"nodes": [2]},
        {"ports": {}}, {"ports": "x" * 5000}, {"description": []},
    )),
]  # fmt: skip


def test_one_with_the_token_that_lies_in_its_hello_is_refused(mine: Credentials) -> None:
    """Each in a line that shows no control characters; too long or too deep, it is not parsed. Node 0 goes on."""
    with hosting(mine) as host:
        for number, lie in enumerate(LIES):
            before = len(host.told)
            with tls(host.port) as line:
                assert prove(line, mine.token)
                say(line, framed(json.dumps(lie).encode()))
                heard = read(line, 10_000)
                assert b"over" in heard, (number, lie, heard)
            host.hears("refused 127.0.0.1")
            assert len(host.told) > before
        for said in (GARBAGE["nested"], GARBAGE["nested tables"], GARBAGE["16 MB announced"], GARBAGE["no JSON"]):
            with tls(host.port) as line:
                assert prove(line, mine.token)
                say(line, said)
                assert read(line, 1000) == b""
        assert all(text.isprintable() for text in host.told)
        host.all_meet()


LONG = [pytest.param(value, marks=pytest.mark.long) for value in ({"0": 3}, {"0": ["x"]}, [], None)]


@pytest.mark.parametrize("reached", [{"77": ""}, 10**30, *LONG], ids=lambda value: str(value)[:12])
def test_one_with_the_token_that_lies_about_echoes(mine: Credentials, reached: Any) -> None:
    """It came in, so the meeting ends, by name, for all."""
    with hosting(mine) as host:
        with tls(host.port) as line:
            assert prove(line, mine.token)
            say(line, framed(json.dumps(HELLO).encode()))
            host.hears("node 1 (127.0.0.1) is here")
            say(line, framed(json.dumps({"reached": reached}).encode()))
            with pytest.raises(RendezvousFailed, match=r"node 1 \(127.0.0.1\) does not answer as isles"):
                host.meeting.result(60.0)


def test_silence_after_the_hello_ends_nothing_for_others(mine: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who said hello and is silent from then on goes away by itself; the place is free for the right one."""
    from isles.launch import nodes

    monkeypatch.setattr(nodes, "SILENCE", 1.0)
    with hosting(mine, 3) as host:
        with tls(host.port) as line:
            assert prove(line, mine.token)
            say(line, framed(json.dumps({**HELLO, "nodes": 3}).encode()))
            host.hears("node 1 (127.0.0.1) is here")
            host.hears("node 1 (127.0.0.1) went away: no sign of life for 1 s")
        host.all_meet()
        assert threading.active_count() < 50


# ---------------------------------------------------------------------------------------------------------------------
# Fuzzed


KEYS = st.sampled_from(
    ["isles", "node", "nodes", "echo_port", "ports", "description", "reached", "doctor", "go", "over"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
CHANGED = st.dictionaries(st.sampled_from(sorted(HELLO)), JSON, max_size=3).map(lambda lie: HELLO | {"node": 0} | lie)
FRAME = st.binary(max_size=200) | (st.dictionaries(KEYS, JSON, max_size=4) | JSON | CHANGED).map(packed)


def shout(host: Host, frames: list[bytes], how: str) -> None:
    """Say it in the clear, inside TLS before the proof, or with the token."""
    said = b"".join(frames)
    with contextlib.suppress(OSError):
        if how == "clear":
            with call(host.port, said) as line:
                line.settimeout(0.01)
                read(line, 100)
            return
        with tls(host.port) as line:
            if how == "token":
                assert prove(line, host.mine.token)
            say(line, said)
            line.settimeout(0.01)
            read(line, 100)


def fuzz(mine: Credentials, examples: int, at_least: int = 1) -> None:
    """Whatever is said, by strangers and by one with the token who never says a right hello: the right ones meet."""
    process = psutil.Process()
    with hosting(mine, seconds=3600.0) as host:
        before = process.memory_info().rss
        ways = st.sampled_from(["clear", "clear", "clear", "tls", "token"])

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(FRAME, min_size=at_least, max_size=4), ways)
        def said(frames: list[bytes], how: str) -> None:
            shout(host, frames, how)

        said()
        if examples < 100:  # hypothesis and the callers live here too, and keep more the longer it goes on
            assert process.memory_info().rss - before < 50e6
        assert all(text.isprintable() for text in host.told)
        host.all_meet()


def test_fuzzed_frames_end_no_meeting(mine: Credentials) -> None:
    fuzz(mine, 40)


@pytest.mark.long
def test_ten_thousand_fuzzed_frames_end_no_meeting(mine: Credentials) -> None:
    fuzz(mine, 2_500, at_least=4)

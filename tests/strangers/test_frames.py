"""Whatever bytes come, they are a message of Isles, or they are refused: by the parser, and by ports that listen."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.base.errors import printable
from isles.base.version import __version__
from isles.comm.errors import from_plain
from isles.comm.sockets import listener as rates
from isles.comm.sockets import loop
from isles.comm.sockets.connection import HEAD, STRANGERS, BadFrame, LinkLost, head_of, message_of, packed
from isles.comm.sockets.listener import EchoServer, echo_failure
from isles.comm.tcp import listen
from isles.launch import probe
from tests.strangers.callers import ESCAPES, GARBAGE, call, framed, many, read, reset, say

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
KEYS = st.sampled_from(
    ["doctor", "port", "ports", "reached", "want", "fill", "out", "back", "round_trip", "echo", "isles"]
)
SAID = st.binary(max_size=200) | st.dictionaries(KEYS, JSON, max_size=4).map(packed) | JSON.map(packed)
FEW, MANY = settings(max_examples=60, deadline=None), settings(max_examples=10_000, deadline=None)


def is_kept(body: bytes) -> None:
    try:
        message = message_of(body)
    except BadFrame:
        return
    assert json.dumps(message) == json.dumps(json.loads(body))


@FEW
@given(st.binary(max_size=100) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_body_is_a_message_or_malformed(body: bytes) -> None:
    is_kept(body)


@pytest.mark.long
@MANY
@given(st.binary(max_size=2000) | JSON.map(lambda value: json.dumps(value).encode()))
def test_many_bodies(body: bytes) -> None:
    is_kept(body)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_depth_is_measured_before_it_is_parsed(opening: bytes) -> None:
    """Brackets inside texts are none; more than 32 in each other are refused, closed or not."""
    for times in (40, 200_000):
        with pytest.raises(BadFrame):
            message_of(opening * times)
    with pytest.raises(BadFrame):
        message_of(b"[" * 40 + b"]" * 40)
    assert message_of(b'["' + b"[" * 1000 + b'\\"[[{{"]')[0].startswith("[[[")
    assert message_of(b"[" * 30 + b"]" * 30) is not None


def test_length_is_looked_at_before_it_is_read() -> None:
    assert head_of(HEAD.pack(b"isle", STRANGERS), STRANGERS) == (STRANGERS, False, False)
    assert head_of(HEAD.pack(b"isle", 1 << 31 | 1 << 30 | 5), STRANGERS) == (5, True, True)
    for head in (HEAD.pack(b"isle", STRANGERS + 1), HEAD.pack(b"elsi", 1), HEAD.pack(b"isle", 1 << 30)):
        with pytest.raises(BadFrame):
            head_of(head, STRANGERS)


@FEW
@given(st.text())
def test_what_others_wrote_is_one_line_of_printable_characters(text: str) -> None:
    assert printable(text).isprintable()


def test_errors_of_others_show_no_control_characters() -> None:
    for plain in (["ValueError", [ESCAPES]], ["PeerLost", [1, ESCAPES]], ["WorkerFailed", [ESCAPES, ESCAPES]], ESCAPES):
        assert str(from_plain(plain)).isprintable()
    for plain in (["DeadlinePassed", [1, "a", 10**400]], ["PeerLost", [10**400, ""]], ["PeerLost", [[], ""]]):
        assert "cannot be read" in str(from_plain(plain))


# ---------------------------------------------------------------------------------------------------------------------
# Ports that listen


class Doctor:
    """`isles doctor --listen` as a thread."""

    def __init__(self, seconds: float) -> None:
        listening = listen(0, "127.0.0.1")
        self.port: int = listening.getsockname()[1]
        self.failures: list[str] = []
        self.found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._wait, args=(listening, seconds))
        self.thread.start()

    def _wait(self, listening: socket.socket, seconds: float) -> None:
        try:
            self.found.put(probe.wait_for_call(listening, seconds, self.failures.append))
        except LinkLost as error:
            self.found.put(error)

    def is_well(self) -> None:
        """The right one calls, and both know the same."""
        found = probe.call("127.0.0.1", self.port)
        heard = self.found.get(timeout=60.0)
        assert (found.out, found.back, heard.out, heard.back) == ("", "", "", "")
        assert found.rate_out == heard.rate_back and found.version_there == __version__
        self.thread.join(30.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_ENOUGH", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_doctor_survives_strangers() -> None:
    """Garbage, resets, silence, callers that lie, callers that begin and stop: then the right one."""
    doctor = Doctor(120.0)
    for said in GARBAGE.values():
        call(doctor.port, said).close()
    for _ in range(20):
        reset(doctor.port)
    hello = {"doctor": ESCAPES, "port": 1, "ports": ESCAPES}
    with many(doctor.port, 100), call(doctor.port, packed(hello)) as liar, call(doctor.port, packed(hello)):
        read(liar, 10)
        say(liar, packed({"reached": ""}) + packed({"round_trip": -1, "out": 10**30, "back": 1}))
        doctor.is_well()
    assert doctor.failures and len(doctor.failures) <= 20 and all(text.isprintable() for text in doctor.failures)


def shout(port: int, frames: list[bytes]) -> None:
    with call(port, b"".join(frames)) as caller:
        caller.settimeout(0.02)
        read(caller, 100)


@pytest.mark.usefixtures("quick")
def test_a_doctor_survives_fuzzed_frames() -> None:
    fuzz(settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck)))


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_a_doctor_survives_ten_thousand_fuzzed_frames() -> None:
    fuzz(settings(max_examples=2_500, deadline=None, suppress_health_check=list(HealthCheck)), at_least=4)


def fuzz(how: Callable[..., Any], at_least: int = 1) -> None:
    doctor = Doctor(900.0)
    how(given(st.lists(SAID, min_size=at_least, max_size=4))(lambda frames: shout(doctor.port, frames)))()
    doctor.is_well()


def test_an_echo_server_survives_strangers() -> None:
    with EchoServer("127.0.0.1") as echo:
        for said in (*GARBAGE.values(), framed(b'{"echo": [1]}'), framed(b'{"echo": "%s"}' % (b"x" * 5000))):
            call(echo.port, said).close()
        with many(echo.port, 100):
            assert loop.run(echo_failure("127.0.0.1", echo.port)) == ""

"""Run a function in a fresh network namespace, where the loopback interface counts this run's bytes and no others.

    answer = run_isolated("tests.comm.loopback_cases:compared", "mean", ["int8"])        # in a test
    result, wire = on_the_wire(lambda: isles.run_local(worker, 4))                        # inside such a function
    wire.payload                         # what the processes handed to the kernel; wire.bytes: with packets' headers

`run_isolated` starts a process in the namespace, calls the function there with JSON-able arguments and returns its
JSON-able answer. Linux only, and it takes the right to make namespaces: `unavailable()` says what is
missing, `skip_unless_available()` skips the test with that reason.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks._wire import HEADERS, wire_of
from isles.running.backends import PRELOAD

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_NEW_NET, _NEW_USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER


@cache
def unshare() -> list[str]:
    """The command that starts another in a namespace of its own; empty where there is no way.

    Root makes one directly, another user inside a user namespace, where the system allows it.
    """
    tool = shutil.which("unshare")
    for command in ([tool, "-n"], [tool, "-r", "-n"]) if tool else ():
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:  # type: ignore[list-item]
            return command  # type: ignore[return-value]
    return []


def unavailable() -> str:
    """Why there are no namespaces here; empty where there are."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if not unshare():
        return "no network namespace here: needs util-linux' unshare and root, or user namespaces that are allowed"
    return ""


def skip_unless_available() -> None:
    """Skip the running test where namespaces cannot be made."""
    import pytest

    if reason := unavailable():
        pytest.skip(reason)


def run_isolated(function: str, *arguments: Any, timeout: float = 300.0) -> Any:
    """`module:function`(*arguments) in a process of its own in a new namespace. RuntimeError with its error if it
    fails. The process is forked from the tests' fork server, and workers that it starts are forked from it: none of
    them loads torch again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        process = context.Process(target=_isolated, args=(function, json.dumps(arguments), str(answer)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{function} took more than {timeout:g} s in its namespace")
        told = json.loads(answer.read_text()) if answer.exists() else {"error": f"exit code {process.exitcode}"}
        if "error" in told:
            raise RuntimeError(f"{function} failed in its namespace:\n{told['error']}")
        return told["result"]


class Wire(NamedTuple):
    """What the loopback interface sent, by its own count."""

    bytes: int
    packets: int
    repeats: int
    """Segments that TCP sent once more, because the answer was late; up to 64 kB each. Frequent on a busy machine."""

    def __sub__(self, earlier: Wire) -> Wire:
        return Wire(*(late - early for late, early in zip(self, earlier, strict=True)))

    @property
    def payload(self) -> int:
        """The bytes without headers: a kernel under load cuts a stream into more packets and acknowledges more often;
        this does not depend on it.
        """
        return self.bytes - HEADERS * self.packets

    def agrees_with(self, counted: int, share: float = 0.02) -> bool:
        """Whether the payload is within `share` of the bytes that somebody counted, but for the kernel's repeats."""
        return (1 - share) * counted <= self.payload <= (1 + share) * counted + (1 << 16) * self.repeats


def counted_so_far() -> Wire:
    """The interface's count now, in this process or in any other of the namespace."""
    names, values = [
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"
    ]
    seen = wire_of("lo")
    return Wire(seen.bytes_sent, seen.packets_sent, int(values[names.index("RetransSegs")]))


def on_the_wire(action: Callable[[], T]) -> tuple[T, Wire]:
    """What `action` returns, and all that the interface sent meanwhile, counted by somebody or not.

    Only inside `run_isolated`, where nothing else is on the line.
    """
    before = counted_so_far()
    return action(), counted_so_far() - before


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        name, flags, rest = struct.unpack("16sH14s", fcntl.ioctl(handle, _GET_FLAGS, request))
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sH14s", name, flags | _UP, rest))


def _isolated(function: str, arguments: str, answer: str) -> None:
    os.chdir(ROOT)
    _enter()
    assert len(socket.if_nameindex()) == 1, "not a fresh network namespace"
    _loopback_up()
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]  # the server is outside
    module, _, name = function.partition(":")
    try:
        told = {"result": getattr(import_module(module), name)(*json.loads(arguments))}
    except BaseException:
        told = {"error": traceback.format_exc()}
    Path(answer).write_text(json.dumps(told))


def _enter() -> None:
    """A new namespace for this process, as `unshare` makes one for a command."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEW_NET) == 0:
        return
    if libc.unshare(_NEW_USER | _NEW_NET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace")
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", file).write_text(text)

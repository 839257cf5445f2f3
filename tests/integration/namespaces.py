"""Two machines on one: network namespaces joined by a cable (a veth pair), with a rate and a firewall if wanted.

    with two_machines() as (left, right):          # 10.x.y.1 and 10.x.y.2, each with a loopback of its own
        subprocess.run([*left.enter, "isles", "train", ...])
        right.firewall("ip saddr", left.address, "tcp dport 32768-60999")     # right drops what comes in
        left.limit("10mbit")                       # token bucket on what leaves left
        left.cut()                                 # the cable is pulled

Names carry this process's number, and everything is removed at the end, also of processes that died there. For tests of
one namespace alone, without root, see tests/netns.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

import pytest

_NUMBERS = count()


@cache
def unavailable() -> str:
    """Why there are no two machines here; empty where there are."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "two machines as namespaces: needs root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"two machines as namespaces: needs {tool} (Debian: apt install {package})"
    probe = f"isles-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"two machines as namespaces: ip netns add says {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


def skip_unless_available() -> None:
    """Skip the running test, with one line, where namespaces cannot be made."""
    if reason := unavailable():
        pytest.skip(reason)


@dataclass(frozen=True)
class Machine:
    """One namespace, and its end of the cable."""

    name: str
    address: str

    @property
    def enter(self) -> list[str]:
        """What to put before a command so that it runs on this machine."""
        return ["ip", "netns", "exec", self.name]

    def firewall(self, *conditions: str) -> None:
        """Drop incoming packets that meet the nftables conditions, without an answer."""
        self._run("nft", "add", "table", "inet", "isles")
        chain = "{ type filter hook input priority 0; policy accept; }"
        self._run("nft", "add", "chain", "inet", "isles", "input", chain)
        self._run("nft", "add", "rule", "inet", "isles", "input", *" ".join(conditions).split(), "drop")

    def limit(self, rate: str, latency: str = "400ms", burst: str = "32kb") -> None:
        """Let no more than `rate` (tc's words, as "10mbit") leave this machine."""
        self._run("tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, "burst", burst,
                  "latency", latency)  # fmt: skip

    def cut(self) -> None:
        """Pull the cable: packets vanish in both directions, and nobody is told."""
        self._run("nft", "add", "table", "inet", "cut")
        for hook in ("input", "output"):
            chain = f"{{ type filter hook {hook} priority 0; policy accept; }}"
            self._run("nft", "add", "chain", "inet", "cut", hook, chain)
            self._run("nft", "add", "rule", "inet", "cut", hook, "meta", "iifname" if hook == "input" else "oifname",
                      "cable", "drop")  # fmt: skip

    def _run(self, *command: str) -> None:
        _run(*self.enter, *command)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that can reach each other; removed at the end, whatever happens."""
    skip_unless_available()
    number = next(_NUMBERS)
    tag, third = f"{os.getpid()}-{number}", f"10.{77 + os.getpid() % 100}.{number % 256}"
    machines = tuple(Machine(f"isles-{tag}-{side}", f"{third}.{side + 1}") for side in (0, 1))
    ends = [f"v{os.getpid() % 10**6}n{number}s{side}" for side in (0, 1)]  # at most 15 letters
    try:
        for machine in machines:
            _run("ip", "netns", "add", machine.name)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, end in zip(machines, ends, strict=True):
            _run("ip", "link", "set", end, "netns", machine.name)
            machine._run("ip", "link", "set", end, "name", "cable")
            machine._run("ip", "address", "add", f"{machine.address}/24", "dev", "cable")
            machine._run("ip", "link", "set", "cable", "up")
            machine._run("ip", "link", "set", "lo", "up")
        yield machines  # type: ignore[misc]
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "delete", machine.name], capture_output=True)
        subprocess.run(["ip", "link", "delete", ends[0]], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

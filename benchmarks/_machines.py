"""Several machines on one: network namespaces whose cables end in one switch, with rates and firewalls if wanted.

    with machines(3) as (a, b, c):                 # 10.x.y.1, .2, .3, each with a loopback of its own
        subprocess.run([*a.enter, "isles", "train", ...])
        a.limit(10e6)                              # bits per second, out of a and into a: a token bucket each
        a.wire()                                   # bytes and packets that its end of the cable has seen so far
        b.firewall("ip saddr", a.address, "tcp dport 32768-60999")     # b drops what comes in
        c.cut()                                    # the cable is pulled (nft); c.detach(), c.attach(): without nft

Names carry this process's number, and everything is removed at the end, also of processes that died there. Linux and
root: `unavailable()` says what is missing. For one namespace alone, without root, see tests/netns.py.

TCP here is Reno, which every kernel has, whatever the system's default: numbers of two systems can be compared. And BBR
left one direction of a connection that was full both ways at half its rate for seconds, with nothing lost; Reno keeps
both at 0.99 and more.
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
from typing import Literal

from benchmarks._wire import Wire, wire_of

CABLE = "cable"  # the interface's name on every machine
BURST = 128 * 1024  # bytes that a token bucket lets pass at once: more than the 64 kB that the kernel sends at once
_QUEUE = "200ms"  # what waits longer for its tokens is dropped
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
_NUMBERS = count()


@cache
def unavailable(*tools: str) -> str:
    """Why there are no machines here; empty where there are. tools: needed beside ip and tc, such as nft."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "machines as network namespaces need root"
    for tool in ("ip", "tc", *tools):
        if shutil.which(tool) is None:
            return f"machines as network namespaces need {tool} (Debian: apt install {_PACKAGES[tool]})"
    probe = f"isles-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"machines as network namespaces: ip netns add says {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


@dataclass(frozen=True)
class Machine:
    """One namespace, and its cable to the switch."""

    name: str
    address: str
    switch: str
    """The namespace of the switch."""
    port: str
    """The switch's end of the cable."""

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

    def limit(self, rate: float) -> None:
        """Let no more than `rate` bits per second leave this machine, and no more come in; headers included."""
        for namespace, device in ((self.name, CABLE), (self.switch, self.port)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate:.0f}bit",
                 "burst", str(BURST), "latency", _QUEUE)  # fmt: skip

    def wire(self) -> Wire:
        """What this end of the cable has seen so far."""
        return wire_of(CABLE, self._run("cat", "/proc/self/net/dev"))

    def cut(self) -> None:
        """Pull the cable: packets vanish in both directions, and nobody is told."""
        self._run("nft", "add", "table", "inet", "cut")
        for hook in ("input", "output"):
            chain = f"{{ type filter hook {hook} priority 0; policy accept; }}"
            self._run("nft", "add", "chain", "inet", "cut", hook, chain)
            self._run("nft", "add", "rule", "inet", "cut", hook, "meta", "iifname" if hook == "input" else "oifname",
                      CABLE, "drop")  # fmt: skip

    def detach(self) -> None:
        """Take its cable out of the switch: packets vanish in both directions, nobody is told, the carrier stays."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "nomaster")

    def attach(self) -> None:
        """Put it back."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "master", "bridge")

    def interface(self, state: Literal["up", "down"]) -> None:
        """Its own end of the cable."""
        _run("ip", "-n", self.name, "link", "set", CABLE, state)

    def _run(self, *command: str) -> str:
        return _run(*self.enter, *command)


@contextlib.contextmanager
def machines(number: int) -> Iterator[tuple[Machine, ...]]:
    """`number` machines (2..254) that can all reach each other; removed at the end, whatever happens."""
    turn = next(_NUMBERS)
    tag, third = f"isles-{os.getpid()}-{turn}", f"10.{77 + os.getpid() % 100}.{turn % 256}"
    switch = f"{tag}-switch"
    made = tuple(Machine(f"{tag}-{side}", f"{third}.{side + 1}", switch, f"port{side}") for side in range(number))
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine in made:
            name, port = machine.name, machine.port
            _run("ip", "netns", "add", name)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", CABLE, "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{machine.address}/24", "dev", CABLE)
            _run("ip", "-n", name, "link", "set", CABLE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            machine._run("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
        yield made
    finally:
        for name in (switch, *(machine.name for machine in made)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout

"""Several machines on one: network namespaces whose cables end in one switch, with rates and firewalls if wanted.

    with machines(3) as (a, b, c):                 # 10.x.y.1, .2, .3, each with a loopback of its own
        subprocess.run([*a.enter, "isles", "train", ...])
        a.limit(10e6)                              # bits per second, out of a and into a: a token bucket each
        a.wire()                                   # bytes and packets that its end of the cable has seen so far
        b.firewall("ip saddr", a.address, "tcp dport 32768-60999")     # b drops what comes in
        c.cut()                                    # the cable is pulled (nft); c.detach(), c.attach(): without nft
        c.drop("out"); c.carry()                   # a line that is dead in one direction, and whole again

Names carry this process's number, and everything is removed at the end, also of processes that died there. Linux and
root: `unavailable()` says what is missing. For one namespace alone, without root, see tests/netns.py.

TCP here is Reno, which every kernel has, whatever the system's default: numbers of two systems can be compared. And BBR
left one direction of a connection that was full both ways at half its rate for seconds, with nothing lost; Reno keeps
both at 0.99 and more.
"""

from __future__ import annotations

import contextlib
import ctypes
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
_NEW_NET = 0x40000000  # CLONE_NEWNET
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

    def go(self) -> None:
        """This thread, and what it starts from now on, is on this machine."""
        with open(f"/run/netns/{self.name}") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NET) != 0:
                raise OSError(ctypes.get_errno(), f"{self.name}: no way into this network namespace")

    def firewall(self, *conditions: str) -> None:
        """Drop incoming packets that meet the nftables conditions, without an answer."""
        self._run("nft", "add", "table", "inet", "isles")
        chain = "{ type filter hook input priority 0; policy accept; }"
        self._run("nft", "add", "chain", "inet", "isles", "input", chain)
        self._run("nft", "add", "rule", "inet", "isles", "input", *" ".join(conditions).split(), "drop")

    def limit(self, rate: float, into: float | None = None) -> None:
        """Let no more than `rate` bits per second leave this machine, and no more than `into` (the same) come in;
        headers included.
        """
        for (namespace, device), most in zip(self._ends, (rate, into or rate), strict=True):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{most:.0f}bit",
                 "burst", str(BURST), "latency", _QUEUE)  # fmt: skip

    def drop(self, way: Literal["in", "out"]) -> None:
        """Packets vanish in this direction only, and nobody is told."""
        if way == "in":
            _run("tc", "-n", self.switch, "qdisc", "replace", "dev", self.port, "root", "blackhole")
            return
        # A locked port takes packets of known senders alone. The machine's own end could drop them, too, but its TCP
        # would know, and send again at once.
        self._port("learning", "off", "locked", "on")
        self._port("fdb_flush")

    def carry(self) -> None:
        """The end of `limit` and `drop`."""
        for namespace, device in self._ends:
            subprocess.run(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"], capture_output=True)
        self._port("learning", "on", "locked", "off")

    @property
    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The cable's: what leaves by the first comes from this machine."""
        return (self.name, CABLE), (self.switch, self.port)

    def _port(self, *settings: str) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.port, "type", "bridge_slave", *settings)

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

    def move(self, address: str) -> None:
        """It has this address (of the switch's network) and no longer the old one, as after a change of provider."""
        length = "64" if ":" in address else "24"
        _run("ip", "-n", self.name, "address", "flush", "dev", CABLE, "scope", "global")
        _run("ip", "-n", self.name, "address", "add", f"{address}/{length}", "dev", CABLE, *_at_once(address))

    def put_behind(self, router: Machine) -> None:
        """Plug its cable into `router` and not into the switch: others see the router's address, and no connection
        comes in. Needs nft.
        """
        inside = f"192.168.{self.address.split('.')[2]}"
        _run("ip", "-n", self.switch, "link", "set", self.port, "nomaster", "netns", router.name)
        router._run("ip", "address", "add", f"{inside}.1/24", "dev", self.port)
        router._run("ip", "link", "set", self.port, "up")
        router._run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        router._run("nft", "add", "table", "ip", "nat")
        router._run("nft", "add", "chain", "ip", "nat", "out", "{ type nat hook postrouting priority 100; }")
        router._run("nft", "add", "rule", "ip", "nat", "out", "oifname", CABLE, "masquerade")
        self.move(f"{inside}.2")
        self._run("ip", "route", "add", "default", "via", f"{inside}.1")

    def interface(self, state: Literal["up", "down"]) -> None:
        """Its own end of the cable."""
        _run("ip", "-n", self.name, "link", "set", CABLE, state)

    def _run(self, *command: str) -> str:
        return _run(*self.enter, *command)


@contextlib.contextmanager
def machines(number: int, *, ipv6: bool = False) -> Iterator[tuple[Machine, ...]]:
    """`number` machines (2..254) that can all reach each other; removed at the end, whatever happens. ipv6: they have
    addresses of IPv6, and no others.
    """
    turn = next(_NUMBERS)
    tag, third = f"isles-{os.getpid()}-{turn}", f"10.{77 + os.getpid() % 100}.{turn % 256}."
    switch, network = f"{tag}-switch", f"fd00:{turn:x}::" if ipv6 else third
    made = tuple(Machine(f"{tag}-{side}", f"{network}{side + 1}", switch, f"port{side}") for side in range(number))
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine in made:
            name, port = machine.name, machine.port
            _run("ip", "netns", "add", name)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", CABLE, "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "link", "set", CABLE, "up")
            machine.move(machine.address)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            machine._run("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
        yield made
    finally:
        for name in (switch, *(machine.name for machine in made)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _at_once(address: str) -> list[str]:
    """For `ip address add`: that the machine need not ask first whether another one has it."""
    return ["nodad"] if ":" in address else []


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout

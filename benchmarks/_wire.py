"""What a network interface of Linux has counted, read from the text of /proc/self/net/dev."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HEADERS = 66  # bytes of a packet's headers: Ethernet 14, IPv4 20, TCP with time stamps 32


class Wire(NamedTuple):
    """Totals of an interface since it was made; differences are what happened in between.

    The kernel hands up to 64 kB at once to a virtual interface, which counts that as one packet with one header.
    """

    bytes_received: int
    packets_received: int
    bytes_sent: int
    packets_sent: int

    def __sub__(self, earlier: Wire) -> Wire:
        return Wire(*(late - early for late, early in zip(self, earlier, strict=True)))

    @property
    def payload_sent(self) -> int:
        """Bytes without headers."""
        return self.bytes_sent - HEADERS * self.packets_sent

    @property
    def payload_received(self) -> int:
        """Bytes without headers."""
        return self.bytes_received - HEADERS * self.packets_received


def wire_of(interface: str, table: str | None = None) -> Wire:
    """The totals of `interface` in `table`: this process's /proc/self/net/dev, unless another's is given."""
    for line in (Path("/proc/self/net/dev").read_text() if table is None else table).splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            numbers = [int(number) for number in counts.split()]
            return Wire(numbers[0], numbers[1], numbers[8], numbers[9])
    raise RuntimeError(f"this network namespace has no interface {interface!r}")

"""By which of its addresses, and which network interface, this machine speaks to another one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

_ELSEWHERE = "192.0.2.1"  # of documentation: nobody's, so it is reached as any machine outside is; nothing is sent
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """That of a worker which torchrun's variables describe; None: gloo's own choice. It goes by the machine's own name,
    and Debian gives that 127.0.1.1, at which no other machine is.
    """
    first = environment.get("MASTER_ADDR", "localhost")
    if environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"] or first in ("localhost", "127.0.0.1"):
        return loopback()
    with contextlib.suppress(ValueError):
        own = outward_address(first)
        return interface_of(outward_address() if own.startswith("127.") else own)
    return None


def refuse_unknown_interfaces(environment: Mapping[str, str]) -> None:
    """ValueError for names in GLOO_SOCKET_IFNAME that no network interface of this machine has."""
    wanted, here = environment.get("GLOO_SOCKET_IFNAME", ""), {name for _, name in socket.if_nameindex()}
    if wanted and not here.issuperset(wanted.split(",")):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME = {wanted}: this machine has no network interface of that name; choose of "
            f"{', '.join(sorted(here))}, or unset it (NCCL's ^ for all but one is not known to gloo)"
        )


def outward_address(to: str = _ELSEWHERE) -> str:
    """The address under which this machine speaks to `to`: another one for a machine of the same private network, and
    for itself. ValueError where it has no way out.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            handle.connect((to, 9))
        except OSError:  # a name that nobody knows, too: whoever speaks to it says so
            if to != _ELSEWHERE:
                return outward_address()
            raise ValueError(
                "--listen: this machine has no default route; name one of its addresses, as HOST:PORT"
            ) from None
        return handle.getsockname()[0]


def loopback() -> str | None:
    """The name of the interface over which processes of one machine talk."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, or None where the system does not say (Linux says)."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if int(digits, 16) == int(wanted):
                    return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(handle, _GET_ADDRESS, struct.pack("16s16x8x", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == wanted.packed:
                return name
    return None

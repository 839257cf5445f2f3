"""Addresses: as they are written, whose they are, and listening at one of them, never at all."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from isles.comm.tcp import outward_address


def listen(port: int, host: str) -> socket.socket:
    """A listening socket at the address `host` alone; port 0 takes a free one. ValueError where that cannot be had."""
    place = written(host, port)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{place}: the port is taken; choose another one") from None
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise ValueError(f"{place}: is no address of this machine; name one that is (--host, --listen)") from None
        raise ValueError(f"{place}: cannot be listened at ({error.strerror}); choose another one") from None


def refuse_unknown(host: str, option: str = "") -> None:
    """ValueError for a name of no machine, begun with `option`."""
    try:
        socket.getaddrinfo(host, 0)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            mend = "look at its spelling, or write its address"
            raise ValueError(f"{option}{host} is no name that this machine knows: {mend}") from None


def is_own(host: str) -> bool:
    """Whether this machine can listen at `host`."""
    try:
        with listen(0, host):
            return True
    except ValueError:
        return False


def own_address(host: str, option: str) -> str:
    """The address behind `host`, if it is one of this machine's that others can reach too (or localhost, for those who
    mean it). ValueError otherwise, begun with `option`.
    """
    try:
        addresses = [info[4][0] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        raise ValueError(f"{option}: no such host name; give an address of this machine") from None
    for address in addresses:
        with contextlib.suppress(ValueError), listen(0, str(address)):
            break
    else:
        raise ValueError(
            f"{option}: is no address of this machine, and node 0 listens there; give one that is, or another --node"
        )
    if host not in (address, "localhost") and ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
        raise ValueError(
            f"{option}: is {address} on this machine, which no other can reach; give its address as a number"
        )
    return str(address)


def listen_address(text: str) -> tuple[str, int]:
    """What --listen names: PORT, at the address under which this machine speaks to others, or HOST:PORT."""
    if ":" in text:
        return parse_address(text, "--listen")
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"--listen {text}: choose a port from 1 to 65535, or write HOST:PORT")
    return outward_address(), int(text)


def parse_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT; [::1]:PORT for IPv6. ValueError names the option."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{option} {text}: write HOST:PORT, such as 192.168.1.10:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def written(host: str, port: int) -> str:
    """HOST:PORT, as `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""TCP connections of this process: their state as Linux reports it, and faster retransmission. Addresses: which address
and interface lead to another machine, their text form, and listening at a single address.

After a loss on a full slow link, TCP's retransmission timeout is seconds long and doubles with each try. So traffic may
resume only an outage's length after the link does. `TCP_RTO_MAX_MS` (Linux 6.15) limits the timeout to two seconds.
Linux limits the number of tries too, and these would then be over in half a minute; `TCP_USER_TIMEOUT` sets how long to
continue. Never set the first without the second.

If this machine's interface is down, nothing can be sent at all. Then Linux probes, and gives up after fifteen probes
whatever the user timeout is. `keep_trying` spaces the probes, and sends queued data as soon as possible.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_TCP_INFO, _USER_TIMEOUT, _RTO_MAX = 11, 18, 44  # of linux/tcp.h
_AGAIN = 2000  # milliseconds until the next try, at most
_SELDOM = 120_000  # the largest interval that Linux accepts, milliseconds
_PATIENCE = 600.0  # seconds for which Linux keeps trying, at least
_PROBES = 6.0  # remaining probes that last for at least one `silence`
_LONGEST = (1 << 31) - 1  # the largest value of a socket option, milliseconds
_CUTS = 10.0  # Linux tries for this many times the `silence` after which a worker counts as lost
# state, retransmits, probes, rto (us); unacked (segments); bytes_acked, bytes_received (Linux 4.1);
# notsent_bytes (4.6); busy_time (us, 4.10)
_INFO = struct.Struct("=B1xBB4xI12xI92xQQ8xI20xQ")
_LEAST = 148  # bytes of tcp_info that the kernel must return
_ENOUGH = 1 << 16  # acknowledged bytes from which on a rate is meaningful
_ESTABLISHED = 1


class ConnectionState(NamedTuple):
    """The state of a connection at one moment."""

    name: str
    """"local remote", both as written by `endpoint`."""
    is_established: bool
    moved: int
    """Bytes received plus bytes acknowledged since the connection began."""
    retry_in: float
    """Seconds until the kernel retransmits, if the last try was not acknowledged; else 0."""
    is_idle: bool
    """Whether the peer has acknowledged all data."""
    probes: int
    """Unanswered probes, while no data is in flight."""
    rate: float | None
    """Acknowledged bits per second, over the time with data to send; None: too little data so far."""
    received: int
    """Bytes received since the connection began."""


def endpoint(address: tuple[object, ...]) -> str:
    """One end's address and port as text, the same on both sides."""
    return f"{address[0]}|{address[1]}"


def connection_state(connection: socket.socket) -> ConnectionState | None:
    """The state of a TCP connection. None for other sockets, and where the kernel does not report it."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            if len(info) < _LEAST:
                return None
            fields = _INFO.unpack_from(info.ljust(_INFO.size, b"\0"))
            state, tries, probes, rto, unacked, acked, received, unsent, busy = fields
            established = state == _ESTABLISHED
            name = f"{endpoint(connection.getsockname())} {endpoint(connection.getpeername())}" if established else ""
            retry_in = rto / 1e6 if tries and established else 0.0
            rate = 8e6 * acked / busy if busy and acked > _ENOUGH else None
            return ConnectionState(
                name, established, acked + received, retry_in, not (unacked or unsent), probes, rate, received
            )
    return None


def looks() -> dict[int, ConnectionState]:
    """This process's established TCP connections, by descriptor. Empty where the kernel does not report them."""
    if sys.platform != "linux":
        return {}
    states = {
        int(fd): state
        for fd in os.listdir("/proc/self/fd")
        for end in opened(int(fd))
        if (state := connection_state(end))
    }
    return {fd: state for fd, state in states.items() if state.is_established}


def opened(fd: int) -> Iterator[socket.socket]:
    """Yield a temporary duplicate of the socket behind a descriptor; nothing if the descriptor is not a socket."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as end:
                yield end


def room_for(descriptors: int) -> None:
    """Allow this process this many open files and connections, or as many as the system permits."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < descriptors:
            limit = descriptors if hard < 0 else min(descriptors, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def is_far(name: str) -> bool:
    """Whether the connection called `name` leads to another machine."""
    local, remote = (end.partition("|")[0] for end in name.split(" "))
    return local != remote and not remote.startswith("127.")


def try_soon(connection: socket.socket, silence: float) -> bool:
    """Let Linux retransmit within two seconds, for at least ten times `silence` seconds. False if it cannot."""
    if sys.platform != "linux":
        return False
    # First, because older kernels refuse it: there the other one must stay as it is (see above).
    try:
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, _AGAIN)
    except OSError:
        return False
    patience = int(min(1000 * max(_PATIENCE, _CUTS * silence), _LONGEST))
    connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, patience)
    return True


def keep_trying(connection: socket.socket, look: ConnectionState, silence: float) -> None:
    """Space the probes of a connection for which `try_soon` was true (see the module). Call this at every look."""
    with contextlib.suppress(OSError):
        longest = int(min(max(1000 * silence / _PROBES, _AGAIN), _SELDOM)) if look.probes else _AGAIN
        if connection.getsockopt(socket.IPPROTO_TCP, _RTO_MAX) != longest:
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, longest)
        if look.probes:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # this also sends queued data


_ELSEWHERE = "192.0.2.1"  # reserved for documentation: routed like any outside machine; nothing is sent to it
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """The network interface for gloo, from torchrun's variables; None: leave the choice to gloo. By default gloo
    resolves the machine's own name, which is 127.0.1.1 on Debian: an address that other machines cannot reach.
    """
    first = environment.get("MASTER_ADDR", "localhost")
    if environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"] or first in ("localhost", "127.0.0.1"):
        return loopback()
    with contextlib.suppress(ValueError):
        address = outward_address(first)
        return interface_of(outward_address() if address.startswith("127.") else address)
    return None


def refuse_unknown_interfaces(environment: Mapping[str, str]) -> None:
    """ValueError for names in GLOO_SOCKET_IFNAME that no network interface of this machine has."""
    names, available = environment.get("GLOO_SOCKET_IFNAME", ""), {name for _, name in socket.if_nameindex()}
    if names and not available.issuperset(names.split(",")):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME = {names}: this machine has no network interface of that name; choose from "
            f"{', '.join(sorted(available))}, or unset it (gloo does not support NCCL's ^ for all but one)"
        )


def outward_address(to: str = _ELSEWHERE) -> str:
    """This machine's source address for traffic to `to`. It differs for machines of a private network, and for this
    machine itself. ValueError without a default route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            handle.connect((to, 9))
        except OSError:  # also an unknown name, which the code that connects to it reports
            if to != _ELSEWHERE:
                return outward_address()
            raise ValueError(
                "--listen: this machine has no default route; name one of its addresses, as HOST:PORT"
            ) from None
        return handle.getsockname()[0]


def loopback() -> str | None:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`; None if unknown, and on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if int(digits, 16) == int(ip):
                    return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(handle, _GET_ADDRESS, struct.pack("16s16x8x", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == ip.packed:
                return name
    return None


def listen(port: int, host: str) -> socket.socket:
    """Listen at the address `host` alone; port 0 takes a free port. ValueError if this is not possible."""
    named = written(host, port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{named}: the port is taken; choose another one") from None
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise ValueError(f"{named}: is no address of this machine; name one that is (--host, --listen)") from None
        raise ValueError(f"{named}: cannot listen there ({error.strerror}); choose another address") from None


def refuse_unknown(host: str, option: str = "") -> None:
    """ValueError, beginning with `option`, for a host name that cannot be resolved."""
    try:
        socket.getaddrinfo(host, 0)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            advice = "check its spelling, or give its address"
            raise ValueError(f"{option}{host} is no name that this machine knows: {advice}") from None


def is_own(host: str) -> bool:
    """Whether this machine can listen at `host`."""
    try:
        with listen(0, host):
            return True
    except ValueError:
        return False


def own_address(host: str, option: str) -> str:
    """The address of `host`, if it belongs to this machine and others can reach it, or if `host` is localhost.
    Otherwise ValueError, beginning with `option`.
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
    """Parse --listen: PORT, which listens at this machine's outward address, or HOST:PORT."""
    if ":" in text:
        return parse_address(text, "--listen")
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"--listen {text}: choose a port from 1 to 65535, or write HOST:PORT")
    return outward_address(), int(text)


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Parse HOST:PORT; [::1]:PORT for IPv6. The ValueError names the option."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{option} {text}: write HOST:PORT, such as 192.168.1.10:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def written(host: str, port: int) -> str:
    """Format HOST:PORT as `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

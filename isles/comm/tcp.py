"""TCP connections of this process: their state as Linux reports it, and sooner retransmission. Addresses: which one
and which interface lead to another machine, their text form, and listening at a single one.

After a loss on a full slow link TCP's retransmission timeout is seconds and doubles with each try, so traffic comes
back up to one outage's length after the link does. `TCP_RTO_MAX_MS` (Linux 6.15) bounds it to two seconds; then the
number of tries that Linux makes would be over in half a minute, so `TCP_USER_TIMEOUT` says how long to go on. Never the
first without the second.

If this machine's own interface is down, nothing can be sent at all. Linux then probes instead, and gives up after
fifteen probes, whatever `TCP_USER_TIMEOUT` says. `keep_trying` spreads these probes, and sends what is queued as soon
as possible.
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
_AGAIN = 2000  # most milliseconds until the kernel's next try
_SELDOM = 120_000  # the most milliseconds that Linux takes for this
_PATIENCE = 600.0  # least seconds for which the kernel goes on trying
_PROBES = 6.0  # so many probes last a silence; Linux gives up after fifteen, some of them before the first look
_LONGEST = (1 << 31) - 1  # milliseconds that a socket option takes
_CUTS = 10.0  # silences for which the kernel goes on: Isles decides that a connection is lost, not the kernel
# state, retransmits, probes, rto (us); unacked (segments); bytes_acked, bytes_received (Linux 4.1);
# notsent_bytes (4.6); busy_time (us, 4.10)
_INFO = struct.Struct("=B1xBB4xI12xI92xQQ8xI20xQ")
_LEAST = 148  # bytes of tcp_info up to notsent_bytes; what a kernel before 4.6 reports is not used
_ENOUGH = 1 << 16  # acknowledged bytes from which on a rate is more than chance
_ESTABLISHED = 1


class ConnectionState(NamedTuple):
    """One look at a connection."""

    name: str
    """"local remote", both as written by `endpoint`."""
    is_established: bool
    moved: int
    """Bytes received, and sent and acknowledged, since it began."""
    retry_in: float
    """Seconds until the kernel tries once more, where nothing was acknowledged at the last try; else 0."""
    is_idle: bool
    """Whether all that was to be sent has arrived."""
    probes: int
    """That were not answered, while nothing is under way."""
    rate: float | None
    """Bits per second at which what was sent was acknowledged, while there was any; None: not enough yet."""
    received: int
    """Bytes, since it began."""


def endpoint(address: tuple[object, ...]) -> str:
    """One end's address and port, as both sides write it."""
    return f"{address[0]}|{address[1]}"


def connection_state(connection: socket.socket) -> ConnectionState | None:
    """The state of a TCP connection; None for other sockets, and if the kernel does not report it."""
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
    """This process's established TCP connections, by descriptor. Empty where the kernel does not say."""
    if sys.platform != "linux":
        return {}
    states = {
        int(fd): look
        for fd in os.listdir("/proc/self/fd")
        for end in opened(int(fd))
        if (look := connection_state(end))
    }
    return {fd: look for fd, look in states.items() if look.is_established}


def opened(fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor, as a duplicate that lives for one look; nothing where it is none."""
    with contextlib.suppress(OSError):  # gloo may have closed it since it was listed
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as end:
                yield end


def room_for(descriptors: int) -> None:
    """Let this process have so many open files and connections, or as many as the system allows it."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < descriptors:
            limit = descriptors if hard < 0 else min(descriptors, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def is_far(name: str) -> bool:
    """Whether a connection leads to another machine, by its name."""
    here, there = (end.partition("|")[0] for end in name.split(" "))
    return here != there and not there.startswith("127.")


def try_soon(connection: socket.socket, silence: float) -> bool:
    """Have it try again within two seconds, for at least ten times `silence` seconds; False where Linux does not."""
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
    """At every look at a connection for which `try_soon` was true: see above."""
    # It was closed since the look: the next look reports that.
    with contextlib.suppress(OSError):
        longest = int(min(max(1000 * silence / _PROBES, _AGAIN), _SELDOM)) if look.probes else _AGAIN
        if connection.getsockopt(socket.IPPROTO_TCP, _RTO_MAX) != longest:
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, longest)
        if look.probes:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which sends what waits


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
        outward = outward_address(first)
        return interface_of(outward_address() if outward.startswith("127.") else outward)
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
    """ValueError, beginning with `option`, for a host name that cannot be resolved."""
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
    """The address of `host`, if it is one of this machine's that others can reach (or localhost itself). ValueError
    otherwise, beginning with `option`.
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

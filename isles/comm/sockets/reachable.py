"""Can one machine reach another? Asked before gloo or a pair needs it, whose own answer would be a time-out.

Who is to be reached opens an `EchoServer` and tells the others its port, in a fixed world one that the system picks;
each of them asks it for an echo:

    echo_failure(address, port, name)  ---- {"echo": token} ----------------->   EchoServer
                                       <-- {"echoed": token, "name": name} ---
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from isles.comm.sockets.addresses import listen
from isles.comm.sockets.frames import BadFrame, heard, packed
from isles.comm.sockets.listener import Listener
from isles.comm.sockets.lost import close, reason
from isles.comm.sockets.proof import dial
from isles.fields import OneLine, table, value_of

PATIENCE = 5.0  # seconds for an echo
_LONGEST = 256  # bytes of a question, and of an answer
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EchoServer(Listener):
    """Returns every token that it is sent at the address `host` while the context is open. port: 0 for one that the
    system picks. name: by which it is told from others. seconds, raw: as of `Listener`. ValueError where the address
    cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        name: str = "",
        seconds: float = PATIENCE,
        raw: Callable[[socket.socket], Awaitable[bool]] | None = None,
    ) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = table(await heard(reader, _LONGEST), "the question")
            writer.write(packed({"echoed": value_of(asked, "echo", OneLine), "name": name}))
            await close(writer)

        listening = listen(port, host)
        self.port: int = listening.getsockname()[1]
        super().__init__(listening, echo, seconds=seconds, raw=raw)


async def echo_failure(address: str, port: int, name: str = "", seconds: float = PATIENCE) -> str:
    """Empty where the echo server of that name answers at `address`, else why it does not, as in "no answer within
    5 s". In the loop's thread.
    """
    token = secrets.token_hex(8)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await dial(address, port, seconds)
            try:
                writer.write(packed({"echo": token}))
                answer = await heard(reader, _LONGEST)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, BadFrame) as error:
        return reason(error, seconds)
    except ValueError:
        return "it is no address"
    return "" if answer == {"echoed": token, "name": name} else "something else answers there"


def port_range() -> str:
    """The ports that this system picks from, as in "32768-60999": what a firewall must let through."""
    try:
        first, last = _PORTS.read_text().split()
    except (OSError, ValueError):
        first, last = "49152", "65535"  # IANA's, which other systems keep to
    return f"{first}-{last}"

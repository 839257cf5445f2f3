"""Can two machines reach each other? Asked before gloo needs it, whose own answer would be a time-out.

Workers connect to each other on ports that the system picks, in both directions. So each side opens an `EchoServer` on
such a port, tells the other its number, and the other asks it for an echo:

    echo_failure(address, port)  ---- {"echo": token} ---->   EchoServer
                                 <-- {"echoed": token} ---
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path

from isles.comm.sockets.addresses import listen
from isles.comm.sockets.frames import heard, packed
from isles.comm.sockets.listener import Listener
from isles.comm.sockets.lost import LinkLost, close
from isles.fields import OneLine, table, value_of
from isles.launch.link import connect

PATIENCE = 5.0  # seconds for an echo
_LONGEST = 256  # bytes of a question
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EchoServer:
    """A port of the address `host`, picked by the system, that returns every token that it is sent while the context is
    open.
    """

    def __init__(self, host: str) -> None:
        listening = listen(0, host)
        self.port: int = listening.getsockname()[1]
        self._listener = Listener(listening, _echo, seconds=PATIENCE)

    def __enter__(self) -> EchoServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.__exit__(*error)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    asked = table(await heard(reader, _LONGEST), "the question")
    writer.write(packed({"echoed": value_of(asked, "echo", OneLine)}))
    await close(writer)


def echo_failure(address: str, port: int, seconds: float = PATIENCE) -> str:
    """Empty where the echo server at `address` answers, else why it did not, as in "no answer within 5 s"."""
    token = secrets.token_hex(8)
    try:
        with contextlib.closing(connect(address, port, seconds)) as link:
            link.send({"echo": token})
            answer = link.receive(seconds)
    except LinkLost as error:
        return str(error)
    return "" if answer == {"echoed": token} else "something else answers there"


def port_range() -> str:
    """The ports that this system picks from, as in "32768-60999": what a firewall must let through."""
    try:
        first, last = _PORTS.read_text().split()
    except (OSError, ValueError):
        first, last = "49152", "65535"  # IANA's, which other systems keep to
    return f"{first}-{last}"

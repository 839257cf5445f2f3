"""Why a connection is of no use, in words; and the little that all who hold one need."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl

from isles.comm.errors import CommError
from isles.comm.sockets.frames import BadFrame

SILENCE = 10.0  # seconds without a sign of life until the other side counts as lost, while the machines meet
_FLUSH = 2.0  # seconds for what was sent to leave when a connection is closed


class LinkLost(CommError):
    """The connection is of no use any more; the text says why, as in "it closed the connection"."""


def ends(writer: asyncio.StreamWriter) -> tuple[str, str]:
    """The addresses of this end and the other one; empty for a connection that is gone already."""
    names = (writer.get_extra_info("sockname"), writer.get_extra_info("peername"))
    here, there = (plain(name[0]) if name else "" for name in names)
    return here, there


def plain(address: str) -> str:
    """An IPv4 address that an IPv6 socket saw, as people write it."""
    return address.removeprefix("::ffff:")


def reason(error: BaseException, seconds: float | None = None) -> str:
    """Why a connection is of no use, in words. seconds: how long it was waited; None: SILENCE."""
    if isinstance(error, BadFrame):
        return str(error)
    if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError | RuntimeError):
        return "it closed the connection"
    if isinstance(error, TimeoutError) and error.errno == errno.ETIMEDOUT:
        return "nothing reaches it any more (the kernel gave the connection up)"
    if isinstance(error, TimeoutError):
        return f"no answer within {SILENCE if seconds is None else seconds:g} s"
    if isinstance(error, socket.gaierror):
        return "no such host name"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS as isles does"
    number = error.errno if isinstance(error, OSError) else None
    return (os.strerror(number) if number else str(error)).lower()


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection once what was sent has left, or it takes too long."""
    try:
        writer.close()
        async with asyncio.timeout(_FLUSH):
            await writer.wait_closed()
    except (OSError, RuntimeError):
        pass
    finally:
        writer.transport.abort()

"""JSON messages over one TCP connection between two machines, with signs of life.

    frame = b"isle" + length (4 bytes, big-endian) + JSON in UTF-8; a frame of length 0 says only "I am here"

No pickle: what comes is plain data, and anything else ends the connection. A link that is silent for `SILENCE` seconds
counts as lost: the other side's program was killed, its machine went down, or the link was cut.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from typing import Any

from isles.comm.errors import CommError

SILENCE = 10.0  # seconds without a sign of life until the other side counts as lost
_BEAT = 2.0  # seconds between signs of life
_MARK = b"isle"
_HEAD = struct.Struct(">4sI")
_LONGEST = 16 << 20  # bytes of one message; those of Isles have some hundred


class LinkLost(CommError):
    """The connection is of no use any more; the text says why, as in "it closed the connection"."""


class Link:
    """One end of a connection. Messages are anything that JSON holds; all methods but `send` are for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._peer = _plain(connection.getpeername()[0])  # kept: a broken connection does not tell any more
        connection.settimeout(SILENCE)  # of a send: nobody takes what is sent
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._bytes = bytearray()
        self._messages: list[Any] = []
        self._heard = time.monotonic()
        self._closing = threading.Event()

    @property
    def here(self) -> str:
        """The address of this end."""
        return _plain(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """The address of the other end."""
        return self._peer

    def fileno(self) -> int:
        """For select and its relatives."""
        return self._socket.fileno()

    def keep_alive(self) -> None:
        """Begin to send signs of life, whatever the other threads do."""
        threading.Thread(target=self._beat, name="isles-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send one message. LinkLost where the connection is broken or nobody takes what is sent."""
        self._send(json.dumps(message).encode())

    def ready(self) -> list[Any]:
        """The messages that have come, without waiting. LinkLost where no more will come, once all were taken."""
        try:
            while select.select([self._socket], [], [], 0)[0]:
                self._take(self._socket.recv(1 << 16))
                self._heard = time.monotonic()
        except (LinkLost, OSError) as error:
            if not self._messages:
                raise error if isinstance(error, LinkLost) else LinkLost(_reason(error)) from error
        if not self._messages and time.monotonic() - self._heard > SILENCE:
            raise LinkLost(f"no sign of life for {SILENCE:g} s")
        messages, self._messages = self._messages, []
        return messages

    def next(self) -> Any:
        """The first message that has come, without waiting; None if there is none."""
        messages = self.ready()
        self._messages = messages[1:]
        return messages[0] if messages else None

    def receive(self, seconds: float) -> Any:
        """The next message. LinkLost where it does not come within `seconds`."""
        ends_at = time.monotonic() + seconds
        while (message := self.next()) is None:
            left = ends_at - time.monotonic()
            if left <= 0:
                raise LinkLost(f"no answer within {seconds:g} s")
            self.wait(min(left, 1.0))
        return message

    def wait(self, seconds: float) -> None:
        """Return when something comes, or after `seconds`."""
        select.select([self._socket], [], [], seconds)

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self._closing.set()
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._sending:
            try:
                self._socket.sendall(_HEAD.pack(_MARK, len(data)) + data)
            except OSError as error:
                raise LinkLost(_reason(error)) from error

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT):
            try:
                self._send(b"")
            except LinkLost:
                return  # whoever reads finds out

    def _take(self, data: bytes) -> None:
        if not data:
            raise LinkLost("it closed the connection")
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            mark, length = _HEAD.unpack_from(self._bytes)
            if mark != _MARK or length > _LONGEST:
                raise LinkLost("what answers there is not Isles")
            if len(self._bytes) < _HEAD.size + length:
                return
            body = bytes(self._bytes[_HEAD.size : _HEAD.size + length])
            del self._bytes[: _HEAD.size + length]
            if body:
                try:
                    self._messages.append(json.loads(body))
                except ValueError as error:
                    raise LinkLost("what answers there is not Isles") from error


def connect(host: str, port: int, seconds: float) -> Link:
    """A link to whoever listens there. LinkLost with the reason: refused, no answer, no route, unknown name."""
    try:
        return Link(socket.create_connection((host, port), timeout=seconds))
    except OSError as error:
        raise LinkLost(_reason(error, seconds)) from error


def listen(port: int, host: str = "") -> socket.socket:
    """A listening socket on every interface (`host` "": IPv4; or "::" for IPv6 too); port 0 takes a free one.

    ValueError where the port is taken or not ours to take.
    """
    try:
        if ":" in host:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ValueError(f"port {port} cannot be listened on ({error.strerror}): choose another one") from error


def checked_port(port: int) -> int:
    """A port that --listen may name."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--listen {port}: choose a port from 1 to 65535")
    return port


def parse_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT; [::1]:PORT for IPv6. ValueError names the option."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{option} {text}: write HOST:PORT, such as 192.168.1.10:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _plain(address: str) -> str:
    """An IPv4 address that an IPv6 socket saw, as people write it."""
    return address.removeprefix("::ffff:")


def _reason(error: OSError, seconds: float = SILENCE) -> str:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    if isinstance(error, socket.gaierror):
        return "no such host name"
    return (error.strerror or str(error)).lower()

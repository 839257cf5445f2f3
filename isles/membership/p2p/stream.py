"""One TLS 1.3 connection of a pair: one end sends messages in segments, the other one acknowledges them.

    forward    head (kind, number, offset, bytes of all, tag), then the segment's bytes, straight into their buffer
    back       head (kind, number): taken, refused, or that its round is closed; and now and then that it is there

Each direction of a pair has a connection of its own, so each end is read and written by one thread: TLS in Python is
not safe for two, and acknowledgements leave however much is on its way back. TCP holds back a sender that is too fast.

Inside TLS the dialler proves that it has the key of its certificate, to the worker whose certificate it has compared:

    certificate (DER), fingerprints of all workers of its island, signature of the fingerprint of who is dialled

Nobody but the worker that it names reads that signature, and to nobody else is it of any use: so there is no challenge.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from isles.comm import credentials
from isles.comm.credentials import Credentials, Token
from isles.comm.sockets.connection import LinkLost
from isles.comm.sockets.proof import Read, blocking, prove_as_host, prove_as_node
from isles.comm.tags import CHANNELS, Tag
from isles.membership.messages import identity_of

PAIR, TICKET = b"islp", b"islt"
"""What somebody says first, in the clear: before TLS with a worker, and before a ticket at a lighthouse."""
CHUNK = 1 << 20
"""Bytes of a piece."""
TICKET_SIZE = 24
WAYS = ("direct", "relayed")
"""How what workers say to each other goes; "relayed by worker N" where that is not the lighthouse."""
CARRIED = (*WAYS, "relayed_by_workers")
"""Of which a worker counts bytes: what it sends, and what it carries for others."""
PIECE, CLOSE_ROUND, ALIVE, TAKEN, REFUSED, ROUND_CLOSED = range(6)
_HEAD = struct.Struct(f"<B{len(Tag._fields) + 3}q")
_BACK = struct.Struct("<Bq")
_HELLO = struct.Struct("<qHBB")
_HANDSHAKE = 10.0  # seconds
_SHORT = 1 << 14  # bytes that leave with their head


Handle = Callable[[int, int], None]
"""Called with what is said back: its kind, and the number of its message."""


class Head(NamedTuple):
    """Of a piece of message `number`: where in it, and how long it is as a whole; or of a word without bytes."""

    kind: int
    number: int = 0
    offset: int = 0
    total: int = 0
    tag: Tag = Tag("outer", 0)

    @property
    def size(self) -> int:
        """Bytes that follow."""
        return max(min(CHUNK, self.total - self.offset), 0) if self.kind == PIECE else 0


class PairHello(NamedTuple):
    """Who dials: a member, and a place in its island. sends: whether it is the one that sends. lane: which of the
    pair's connections in that direction this is.
    """

    member: int
    island_rank: int
    sends: bool
    lane: int = 0


class Stream:
    """A connection after its handshake. lease: seconds of silence until it counts as broken. sends: whether this end
    does. lane: see `PairHello`. round_trip: the shortest so far in seconds, for the end that sends; 0 while unknown.
    """

    def __init__(self, link: ssl.SSLSocket, way: str, lease: float, lane: int = 0) -> None:
        self.lane = lane
        self.way, self.sends, self.lease, self.round_trip = way, False, lease, 0.0
        self._link, self._moment = link, lease / 4
        self._last_received = self._last_sent = time.monotonic()
        link.settimeout(self._moment)  # a glance at who has fallen silent
        self._wakes, self._awake = socket.socketpair()
        self._wakes.setblocking(False)
        self._awake.setblocking(False)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._poll.register(self._awake, select.POLLIN)
        self._back, self._ended = bytearray(), ""
        self.busy = threading.Lock()  # while a message is being handed on, and until that is said

    def wake(self) -> None:
        """Have `wait` return, from any thread."""
        with contextlib.suppress(OSError):
            self._wakes.send(b"x")

    def cut(self) -> None:
        """Break it off, from any thread: whoever reads or writes it fails."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._link, socket.SHUT_RDWR)
        self.wake()

    def finish(self) -> None:
        """Say nothing any more once what was handed on is said, from any thread: the other end closes it then."""
        with self.busy, contextlib.suppress(OSError):
            socket.socket.shutdown(self._link, socket.SHUT_WR)

    def close(self) -> None:
        """Give it back; for the thread whose it is."""
        self.cut()
        self._link.close()
        self._wakes.close()
        self._awake.close()

    # The end that sends

    def probe(self, handle: Handle) -> None:
        """Have the other end show that it is there: it says back when it was asked. As `send`."""
        self.send(Head(ALIVE, time.monotonic_ns()), b"", handle)

    def send(self, head: Head, data: memoryview | bytes, handle: Handle) -> None:
        """Send a piece. LinkLost where it breaks or is silent. handle: called with what is said back meanwhile."""
        channel = CHANNELS.index(head.tag.channel)
        packed = _HEAD.pack(head.kind, head.number, head.offset, head.total, channel, *head.tag[1:])
        parts = (packed + data,) if len(data) < _SHORT else (packed, data)
        for part in map(memoryview, parts):
            while part:
                try:
                    part = part[self._link.send(part) :]
                except TimeoutError:
                    # The other end may hold this piece back for as long as it likes; what it has taken counts now.
                    self._receive(handle)
                except (OSError, ValueError) as error:
                    self._ended = str(error)
                    self._receive(handle)
        self._receive(handle)

    def wait(self, seconds: float, handle: Handle) -> None:
        """Until something is said back, or `wake`, or `seconds` have passed. As `send`."""
        try:
            self._poll.poll(1000 * seconds)
            with contextlib.suppress(BlockingIOError):
                while self._awake.recv(4096):
                    pass
        except (OSError, ValueError) as error:
            raise LinkLost(str(error)) from None
        self._receive(handle)

    def _receive(self, handle: Handle) -> None:
        """Hand on what has been said back. LinkLost where nothing more comes."""
        try:
            self._link.settimeout(0.0)
            while piece := self._link.recv(1 << 12):
                self._last_received = time.monotonic()
                self._back += piece
            self._ended = "it closed the connection"
        except ssl.SSLWantReadError:
            self._link.settimeout(self._moment)
        except (OSError, ValueError) as error:
            self._ended = str(error)
        if time.monotonic() - self._last_received > self.lease:
            self._ended = f"no sign of life for {self.lease:g} s"
        whole = len(self._back) // _BACK.size * _BACK.size
        replies = [*_BACK.iter_unpack(bytes(self._back[:whole]))]
        del self._back[:whole]
        now = time.monotonic_ns()  # before anything is handled, which would count as time on the way
        for kind, number in replies:
            trip = (now - number) / 1e9
            if kind != ALIVE:
                handle(kind, number)
            elif 0 < trip < self.lease:  # else it has said so unasked
                self.round_trip = min(self.round_trip or trip, trip)
        if self._ended:  # what was said before counts
            raise LinkLost(self._ended)

    # The end that takes

    def head(self) -> Head:
        """The next one. LinkLost where it breaks, is silent, or is none."""
        packed = bytearray(_HEAD.size)
        self.fill(memoryview(packed))
        kind, number, offset, total, channel, *rest = _HEAD.unpack(packed)
        if kind > ALIVE or not 0 <= channel < len(CHANNELS):
            raise LinkLost("what it sends is not what isles sends")
        return Head(kind, number, offset, total, Tag(CHANNELS[channel], *rest))

    def fill(self, out: memoryview) -> None:
        """All of `out` with the bytes that come. Errors as `head`."""
        link, at, size = self._link, 0, len(out)
        while at < size:
            try:
                more = link.recv_into(out[at:])
                now = time.monotonic()
                if not more:
                    raise LinkLost("it closed the connection")
                self._last_received = now
                at += more
            except TimeoutError:
                now = time.monotonic()
                if now - self._last_received > self.lease:
                    raise LinkLost(f"no sign of life for {self.lease:g} s") from None
            except (OSError, ValueError) as error:
                raise LinkLost(str(error)) from None
            if now - self._last_sent > self._moment:
                self.say(ALIVE)

    def holds(self) -> None:
        """This end does not read for a while: what it has not heard meanwhile is no silence."""
        self._last_received = time.monotonic()
        if self._last_received - self._last_sent > self._moment:
            self.say(ALIVE)

    def say(self, kind: int, number: int = 0) -> None:
        """Say what became of a message. LinkLost where it breaks."""
        try:
            self._link.sendall(_BACK.pack(kind, number))
        except (OSError, ValueError) as error:
            raise LinkLost(str(error)) from None
        self._last_sent = time.monotonic()


def as_dialler(link: socket.socket, token: Token, hello: PairHello) -> ssl.SSLSocket:
    """TLS with whoever has the certificate of `token`, once both have proved that they know its secret. LinkLost."""
    with _handshake(link):
        talk = credentials.unverified_context().wrap_socket(link, server_hostname=credentials.NAME)
        talk.sendall(_HELLO.pack(*hello))
        certificate = talk.getpeercert(binary_form=True)
        blocking(prove_as_node(_reader(talk), talk.sendall, token, certificate, "the other worker"))
    return talk


def as_host(
    link: socket.socket, mine: Credentials, token_of: Callable[[PairHello], Token]
) -> tuple[ssl.SSLSocket, PairHello]:
    """The same for the other end. token_of: what that one must know."""

    async def come() -> PairHello:
        read = _reader(talk)
        member, island_rank, sends, lane = _HELLO.unpack(await read(_HELLO.size))
        hello = PairHello(member, island_rank, bool(sends), lane)
        await prove_as_host(read, talk.sendall, token_of(hello))
        return hello

    with _handshake(link):
        talk = credentials.server_context(mine).wrap_socket(link, server_side=True)
        return talk, blocking(come())


def tuned(link: socket.socket) -> socket.socket:
    """For messages: small ones leave at once."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


@contextlib.contextmanager
def _handshake(link: socket.socket) -> Generator[None]:
    link.settimeout(_HANDSHAKE)
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        link.close()
        raise LinkLost(str(error)) from None
    except LinkLost:
        link.close()
        raise


def exactly(talk: ssl.SSLSocket, size: int) -> bytes:
    """So many bytes. EOFError where there are fewer."""
    data = b""
    while len(data) < size:
        piece = talk.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _reader(talk: ssl.SSLSocket) -> Read:
    async def read(size: int) -> bytes:
        return exactly(talk, size)

    return read


_SIZES = struct.Struct("<HHH")
_DIALS = b"isles dials\0"
_DIGITS = 32  # of a fingerprint
_BY = ec.ECDSA(hashes.SHA256())


def show(talk: ssl.SSLSocket, mine: Credentials, certificates: Sequence[str], host: str) -> None:
    """Prove it to whoever has the certificate of the fingerprint `host`. certificates: of this island. OSError."""
    assert mine.key is not None
    key = serialization.load_pem_private_key(mine.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    der = ssl.PEM_cert_to_DER_cert(mine.certificate.read_text(encoding="ascii"))
    signed, island = key.sign(_DIALS + host.encode("ascii"), _BY), "".join(certificates).encode("ascii")
    talk.sendall(_SIZES.pack(len(der), len(signed), len(island)) + der + signed + island)


def shown(talk: ssl.SSLSocket, host: str, island_rank: int) -> str:
    """The identity of the member whose worker at `island_rank` has dialled this one, of the fingerprint `host`.
    LinkLost.
    """
    try:
        der, signed, island = (exactly(talk, size) for size in _SIZES.unpack(exactly(talk, _SIZES.size)))
        key = x509.load_der_x509_certificate(der).public_key()
        certificates = [island[at : at + _DIGITS].decode("ascii") for at in range(0, len(island), _DIGITS)]
        if not isinstance(key, ec.EllipticCurvePublicKey) or certificates[island_rank] != credentials.fingerprint(der):
            raise ValueError
        key.verify(signed, _DIALS + host.encode("ascii"), _BY)
    except (OSError, EOFError, ValueError, IndexError, InvalidSignature):
        raise LinkLost("it does not show that its certificate is its own") from None
    return identity_of(certificates)

"""One TLS 1.3 connection of a pair: one end sends messages in segments, the other one acknowledges them.

    forward    head (kind, number, offset, total bytes, tag), then the segment's bytes, straight into their buffer
    back       head (kind, number): taken, refused, or round closed; and now and then a sign of life

Each direction of a pair has its own connection, and each end is read and written by one thread, because TLS in Python
is not safe for two, and acknowledgements never queue behind data. TCP slows down a sender that is too fast.

Inside TLS the dialler proves that it owns the key of its certificate, to a worker whose certificate it has compared:

    certificate (DER), fingerprints of all workers of its island, signature of the dialled worker's fingerprint

Only the named worker can read that signature, and it is of use to no other one: so no challenge is needed.
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
"""The first bytes of a connection, unencrypted: before TLS with a worker, and before a ticket at a relay."""
CHUNK = 1 << 20
"""The most bytes of a piece."""
TICKET_SIZE = 24
WAYS = ("direct", "relayed")
"""How messages between workers travel; "relayed by worker N" if the relay is not the lighthouse."""
CARRIED = (*WAYS, "relayed_by_workers")
"""The kinds of bytes that a worker counts: sent ones by way, and those relayed for others."""
PIECE, CLOSE_ROUND, ALIVE, TAKEN, REFUSED, ROUND_CLOSED = range(6)
_HEAD = struct.Struct(f"<B{len(Tag._fields) + 3}q")
_BACK = struct.Struct("<Bq")
_HELLO = struct.Struct("<qHBB")
_HANDSHAKE = 10.0  # seconds
_SHORT = 1 << 14  # up to so many bytes are copied behind their head, so that both leave in one packet


Handle = Callable[[int, int], None]
"""Called with (kind, message number) of an acknowledgement."""


class Head(NamedTuple):
    """The head of a piece of message `number` (its offset and the total length), or of a control message."""

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
    """The first message of a dialler: its member and its rank in the island. sends: whether it is the sending end.
    lane: index among the pair's connections in that direction.
    """

    member: int
    island_rank: int
    sends: bool
    lane: int = 0


class Stream:
    """A connection after its handshake. lease: seconds of silence after which it counts as broken. sends: whether this
    end sends. lane: see `PairHello`. round_trip: the shortest so far, seconds, at the sending end; 0: unknown.
    """

    def __init__(self, link: ssl.SSLSocket, way: str, lease: float, lane: int = 0) -> None:
        self.lane = lane
        self.way, self.sends, self.lease, self.round_trip = way, False, lease, 0.0
        # A quarter: several signs of life in a lease, of which some may be late.
        self._link, self._moment = link, lease / 4
        self._last_received = self._last_sent = time.monotonic()
        link.settimeout(self._moment)  # wake up often enough to notice silence
        self._wakes, self._awake = socket.socketpair()
        self._wakes.setblocking(False)
        self._awake.setblocking(False)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._poll.register(self._awake, select.POLLIN)
        self._back, self._ended = bytearray(), ""
        self.busy = threading.Lock()  # held from a message's delivery to its acknowledgement

    def wake(self) -> None:
        """Make `wait` return; from any thread."""
        with contextlib.suppress(OSError):  # closed; or full of earlier bytes, which wake it as well
            self._wakes.send(b"x")

    def cut(self) -> None:
        """Break the connection, from any thread: reads and writes fail."""
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(self._link, socket.SHUT_RDWR)
        self.wake()

    def finish(self) -> None:
        """Send no more after the present acknowledgement, from any thread; the other end then closes."""
        # Under `busy`: a message that was delivered must be acknowledged, or it is sent again.
        with self.busy, contextlib.suppress(OSError):
            socket.socket.shutdown(self._link, socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; only for the thread that uses it."""
        self.cut()
        self._link.close()
        self._wakes.close()
        self._awake.close()

    # The sending end

    def probe(self, handle: Handle) -> None:
        """Request a sign of life; its reply carries the time of the request. See `send`."""
        self.send(Head(ALIVE, time.monotonic_ns()), b"", handle)

    def send(self, head: Head, data: memoryview | bytes, handle: Handle) -> None:
        """Send a piece. LinkLost if the connection breaks or is silent. handle: called with acknowledgements."""
        channel = CHANNELS.index(head.tag.channel)
        packed = _HEAD.pack(head.kind, head.number, head.offset, head.total, channel, *head.tag[1:])
        parts = (packed + data,) if len(data) < _SHORT else (packed, data)
        for part in map(memoryview, parts):
            while part:
                try:
                    part = part[self._link.send(part) :]
                except TimeoutError:
                    # The other end may not read for a while; handle its acknowledgements meanwhile.
                    self._receive(handle)
                except (OSError, ValueError) as error:
                    self._ended = str(error)
                    self._receive(handle)
        self._receive(handle)

    def wait(self, seconds: float, handle: Handle) -> None:
        """Wait for an acknowledgement, `wake`, or `seconds`. See `send`."""
        try:
            self._poll.poll(1000 * seconds)
            with contextlib.suppress(BlockingIOError):
                while self._awake.recv(4096):
                    pass
        except (OSError, ValueError) as error:
            raise LinkLost(str(error)) from None
        self._receive(handle)

    def _receive(self, handle: Handle) -> None:
        """Handle the acknowledgements that have arrived. LinkLost if no more can arrive."""
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
        now = time.monotonic_ns()  # before handling, whose duration must not count as round trip
        for kind, number in replies:
            trip = (now - number) / 1e9
            if kind != ALIVE:
                handle(kind, number)
            elif 0 < trip < self.lease:  # else an unrequested sign of life, number 0
                self.round_trip = min(self.round_trip or trip, trip)
        if self._ended:  # only after handling what arrived before the end
            raise LinkLost(self._ended)

    # The receiving end

    def head(self) -> Head:
        """The next head. LinkLost if the connection breaks, is silent, or sends something else."""
        packed = bytearray(_HEAD.size)
        self.fill(memoryview(packed))
        kind, number, offset, total, channel, *rest = _HEAD.unpack(packed)
        if kind > ALIVE or not 0 <= channel < len(CHANNELS):
            raise LinkLost("it sends something else than isles messages")
        return Head(kind, number, offset, total, Tag(CHANNELS[channel], *rest))

    def fill(self, out: memoryview) -> None:
        """Fill all of `out` with received bytes. Errors as in `head`."""
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
        """This end does not read for a while, so the time until it reads again is no silence of the other end."""
        self._last_received = time.monotonic()
        if self._last_received - self._last_sent > self._moment:
            self.say(ALIVE)

    def say(self, kind: int, number: int = 0) -> None:
        """Send an acknowledgement. LinkLost if the connection breaks."""
        try:
            self._link.sendall(_BACK.pack(kind, number))
        except (OSError, ValueError) as error:
            raise LinkLost(str(error)) from None
        self._last_sent = time.monotonic()


def as_dialler(link: socket.socket, token: Token, hello: PairHello) -> ssl.SSLSocket:
    """TLS as client with the owner of `token`'s certificate; both prove that they know its secret. Raises LinkLost."""
    with _handshake(link):
        talk = credentials.unverified_context().wrap_socket(link, server_hostname=credentials.NAME)
        talk.sendall(_HELLO.pack(*hello))
        certificate = talk.getpeercert(binary_form=True)
        blocking(prove_as_node(_reader(talk), talk.sendall, token, certificate, "the other worker"))
    return talk


def as_host(
    link: socket.socket, mine: Credentials, token_of: Callable[[PairHello], Token]
) -> tuple[ssl.SSLSocket, PairHello]:
    """TLS as server. token_of: the token that a dialler must know. Raises LinkLost."""

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
    """Disable Nagle's algorithm: small messages leave at once."""
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
    """Read `size` bytes. EOFError if the connection ends before."""
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
_DIGITS = 32  # hex digits of a fingerprint
_BY = ec.ECDSA(hashes.SHA256())


def show(talk: ssl.SSLSocket, mine: Credentials, certificates: Sequence[str], host: str) -> None:
    """Prove this worker's certificate to the worker with fingerprint `host`. certificates: of this island. OSError."""
    assert mine.key is not None
    key = serialization.load_pem_private_key(mine.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    der = ssl.PEM_cert_to_DER_cert(mine.certificate.read_text(encoding="ascii"))
    signed, island = key.sign(_DIALS + host.encode("ascii"), _BY), "".join(certificates).encode("ascii")
    talk.sendall(_SIZES.pack(len(der), len(signed), len(island)) + der + signed + island)


def shown(talk: ssl.SSLSocket, host: str, island_rank: int) -> str:
    """The identity of the member whose worker at `island_rank` has dialled this one, whose fingerprint is `host`.
    LinkLost if the proof fails.
    """
    try:
        der, signed, island = (exactly(talk, size) for size in _SIZES.unpack(exactly(talk, _SIZES.size)))
        key = x509.load_der_x509_certificate(der).public_key()
        certificates = [island[at : at + _DIGITS].decode("ascii") for at in range(0, len(island), _DIGITS)]
        if not isinstance(key, ec.EllipticCurvePublicKey) or certificates[island_rank] != credentials.fingerprint(der):
            raise ValueError
        key.verify(signed, _DIALS + host.encode("ascii"), _BY)
    except (OSError, EOFError, ValueError, IndexError, InvalidSignature):
        raise LinkLost("it does not prove that it owns its certificate") from None
    return identity_of(certificates)

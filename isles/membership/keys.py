"""Where the lighthouse and the workers find each other in a session, and how a seat's word is known to be its own.

    CONFIG, HELLO            anybody with the token: the run's configuration; a seat
    ABOUT, ECHO, REACH       anybody with the token: how it stands; how fast the line is; whether an address is reached
    STATUS                   anybody with the token: who serves what, of a swarm
    ASKED, REPORTED          from a seat: questions to `Membership`, lines of metrics
    TOLD / seat              to a seat: orders; TOLD / seat / place: the same, to the others of its island
    GIFT / seat / giver      of a worker: files; of the lighthouse: GIFT / `LIGHTHOUSE`
    TIES                     anybody with the token: a ticket, with which two connections become one
    LIT                      there while the lighthouse is

Everybody in the session knows the token, and may listen in where another seat is addressed. So no key is ever said but
to whom it is given: what is said in a seat's name, or to it, bears a proof (HMAC-SHA256) over the address and the word,
by a key that only the lighthouse and that worker know. What one worker sends to another bears a seal over all of it, by
an introduction, which the lighthouse gives to the sender, and which the receiver can make from its own key. What was
overheard can be said again, and nothing else: so the lighthouse's orders are numbered, and an old one is none. At the
lighthouse's own addresses nobody else can listen, nor answer in its place: its router lets others serve
`SERVED_BY_SEATS` alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from pathlib import Path

from isles.comm.credentials import write_private

CONFIG, HELLO, ABOUT, ECHO, REACH, STATUS, ASKED, REPORTED, TOLD, GIFT, TIES = (
    f"isles/{name}"
    for name in ("config", "hello", "about", "echo", "reach", "status", "asked", "reported", "told", "gift", "ties")
)
SERVED_BY_SEATS = (f"{TOLD}/**", f"{GIFT}/seat/**", "isles/mail/*", "isles/place/*/mail/*")
PRESENT_AS_SEATS = ("isles/seat/*", "isles/place/*/seat/*")
PIECE = 1 << 20  # bytes that ECHO sends at most
LIGHTHOUSE = "lighthouse"
LIT = "isles/lit"
_FILE = "seats"
PROOF = 16
"""Bytes of a proof, and of a seal."""
_MOST = 64  # bytes of a signature that are looked at
_NUMBER = struct.Struct("<q")


class SeatKeys:
    """The keys of all seats of a run: made from one secret in `folder`, so that they outlive the lighthouse."""

    def __init__(self, folder: Path) -> None:
        path = folder / _FILE
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        self._secret = path.read_bytes()

    def of(self, seat: int) -> str:
        """32 hex digits."""
        return hmac.new(self._secret, b"isles seat %d" % seat, hashlib.sha256).hexdigest()[:32]

    def introduction(self, seat: int) -> bytes:
        """Of the lighthouse to a seat, which gives it a file."""
        return introduction(self.of(seat), -1)

    def seat(self, word: bytes, where: str, said: bytes) -> int | None:
        """Whose `signature` of `said` at `where` it is; None for a forged one."""
        number = word[:_MOST].partition(b":")[0]
        if not (number.isdigit() and len(number) <= 9):
            return None
        seat = int(number)
        return seat if hmac.compare_digest(word, signature(seat, self.of(seat), where, said)) else None


def told_at(seat: int, place: int) -> str:
    """Where the worker at `place` in the island of a seat hears orders."""
    return f"{TOLD}/{seat}/{place}" if place else f"{TOLD}/{seat}"


def numbered(number: int, said: bytes) -> bytes:
    """An order as it is said; each of the lighthouse's has a higher number than those before."""
    return _NUMBER.pack(number) + said


def number_of(order: bytes) -> tuple[int, bytes]:
    """What `numbered` was given. ValueError where it is too short."""
    if len(order) < _NUMBER.size:
        raise ValueError("an order without a number")
    return _NUMBER.unpack_from(order)[0], order[_NUMBER.size :]


def gift_at(giver: str) -> str:
    """Where the worker of that name, or the `LIGHTHOUSE`, gives files."""
    return f"{GIFT}/{giver}" if giver == LIGHTHOUSE else f"{GIFT}/seat/{giver}"


def introduction(key: str, sender: int) -> bytes:
    """16 bytes: by which `sender` seals what it sends to the seat of `key`."""
    return hmac.new(key.encode("ascii"), b"isles mail from %d" % sender, hashlib.sha256).digest()[:16]


def signature(seat: int, key: str, where: str, said: bytes) -> bytes:
    """What goes beside what `seat` says at the address `where`, and beside what is said to it."""
    proof = hmac.digest(key.encode("ascii"), where.encode("ascii") + b"\0" + said, "sha256")
    return b"%d:" % seat + proof[:PROOF]


def sealed(word: bytes, head: bytes, chunk: bytes) -> bytes:
    """The seal of a piece of a message and of what goes beside it, by the introduction `word`: `PROOF` bytes."""
    seal = hmac.new(word, head, "sha256")
    seal.update(chunk)
    return seal.digest()[:PROOF]

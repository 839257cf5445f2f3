"""Where the lighthouse and the workers find each other in a session, and how a seat's word is known to be its own.

    CONFIG, HELLO            anybody with the token: the run's configuration; a seat
    ABOUT, ECHO, REACH       anybody with the token: how it stands; how fast the line is; whether an address is reached
    STATUS                   anybody with the token: who serves what, of a swarm
    ASKED, REPORTED          from a seat: questions to `Membership`, lines of metrics
    TOLD / seat              to a seat: orders; TOLD / seat / place: the same, to the others of its island
    GIFT / seat              of a seat (of the lighthouse: `LIGHTHOUSE`): files
    LIT                      there while the lighthouse is

Everybody in the session knows the token, so what is said in a seat's name bears that seat's key, which only the
lighthouse and that worker know. What one worker sends to another bears an introduction, which the lighthouse gives to
the sender, and which the receiver can make from its own key: nobody else can send in that seat's name.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from isles.comm.credentials import write_private

CONFIG, HELLO, ABOUT, ECHO, REACH, STATUS, ASKED, REPORTED, TOLD, GIFT = (
    f"isles/{name}"
    for name in ("config", "hello", "about", "echo", "reach", "status", "asked", "reported", "told", "gift")
)
PIECE = 1 << 20  # bytes that ECHO sends at most
LIGHTHOUSE = "lighthouse"
LIT = "isles/lit"
_FILE = "seats"
_MOST = 64  # characters of a seat and its key


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

    def seat(self, word: bytes) -> int | None:
        """Whose word `signature` is; None for a forged one."""
        number, _, key = word[:_MOST].decode("ascii", "replace").partition(":")
        if not (number.isdecimal() and len(number) <= 9):
            return None
        return int(number) if hmac.compare_digest(key.encode(), self.of(int(number)).encode()) else None


def told_at(seat: int, place: int) -> str:
    """Where the worker at `place` in the island of a seat hears orders."""
    return f"{TOLD}/{seat}/{place}" if place else f"{TOLD}/{seat}"


def introduction(key: str, sender: int) -> bytes:
    """16 bytes: what `sender` must show to the seat of `key`."""
    return hmac.new(key.encode("ascii"), b"isles mail from %d" % sender, hashlib.sha256).digest()[:16]


def signature(seat: int, key: str) -> bytes:
    """What goes beside a word of `seat`, and beside one to it."""
    return f"{seat}:{key}".encode("ascii")

"""Where the lighthouse and the workers find each other in a session, and how a member's word is known to be its own.

    CONFIG, HELLO            anybody with the token: the run's configuration; a member
    ABOUT, ECHO, REACH       anybody with the token: how it stands; how fast the line is; whether an address is reached
    STATUS                   anybody with the token: who serves what, of a swarm
    ASKED, REPORTED          from a member: questions to `RoundsCoordinator`, lines of metrics
    TOLD / member              to a member: orders; TOLD / member / place: the same, to the others of its island
    GIFT / member / giver      of a worker: files; of the lighthouse: GIFT / `LIGHTHOUSE`
    TIES                     anybody with the token: a ticket, with which two connections become one
    LIT                      there while the lighthouse is

Everybody in the session knows the token, and may listen in where another member is addressed. So no key is ever said but
to whom it is given: what is said in a member's name, or to it, bears a proof (HMAC-SHA256) over the address and the word,
by a key that only the lighthouse and that worker know. What one worker sends to another bears a seal over all of it, by
an introduction, which the lighthouse gives to the sender, and which the receiver can make from its own key. What was
overheard can be said again, and nothing else: so the lighthouse's orders are numbered, and an old one is none. At the
lighthouse's own addresses nobody else can listen, nor answer in its place: its router lets others serve
`SERVED_BY_MEMBERS` alone.
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
SERVED_BY_MEMBERS = (f"{TOLD}/**", f"{GIFT}/member/**", "isles/mail/*", "isles/place/*/mail/*")
PRESENT_AS_MEMBERS = ("isles/member/*", "isles/place/*/member/*")
PIECE = 1 << 20  # bytes that ECHO sends at most
LIGHTHOUSE = "lighthouse"
LIT = "isles/lit"
_FILE = "members"
PROOF = 16
"""Bytes of a proof, and of a seal."""
_MOST = 64  # bytes of a signature that are looked at
_NUMBER = struct.Struct("<q")


class MemberKeys:
    """The keys of all members of a run: made from one secret in `folder`, so that they outlive the lighthouse."""

    def __init__(self, folder: Path) -> None:
        path = folder / _FILE
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        self._secret = path.read_bytes()

    def of(self, member: int) -> str:
        """32 hex digits."""
        return hmac.new(self._secret, b"isles member %d" % member, hashlib.sha256).hexdigest()[:32]

    def introduction(self, member: int) -> bytes:
        """Of the lighthouse to a member, which gives it a file."""
        return introduction(self.of(member), -1)

    def member(self, word: bytes, where: str, said: bytes) -> int | None:
        """Whose `signature` of `said` at `where` it is; None for a forged one."""
        number = word[:_MOST].partition(b":")[0]
        if not (number.isdigit() and len(number) <= 9):
            return None
        member = int(number)
        return member if hmac.compare_digest(word, signature(member, self.of(member), where, said)) else None


def told_at(member: int, place: int) -> str:
    """Where the worker at `place` in the island of a member hears orders."""
    return f"{TOLD}/{member}/{place}" if place else f"{TOLD}/{member}"


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
    return f"{GIFT}/{giver}" if giver == LIGHTHOUSE else f"{GIFT}/member/{giver}"


def introduction(key: str, sender: int) -> bytes:
    """16 bytes: by which `sender` seals what it sends to the member of `key`."""
    return hmac.new(key.encode("ascii"), b"isles mail from %d" % sender, hashlib.sha256).digest()[:16]


def signature(member: int, key: str, where: str, said: bytes) -> bytes:
    """What goes beside what `member` says at the address `where`, and beside what is said to it."""
    proof = hmac.digest(key.encode("ascii"), where.encode("ascii") + b"\0" + said, "sha256")
    return b"%d:" % member + proof[:PROOF]


def sealed(word: bytes, head: bytes, chunk: bytes) -> bytes:
    """The seal of a piece of a message and of what goes beside it, by the introduction `word`: `PROOF` bytes."""
    seal = hmac.new(word, head, "sha256")
    seal.update(chunk)
    return seal.digest()[:PROOF]

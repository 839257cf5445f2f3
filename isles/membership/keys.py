"""The addresses of a session, and how a message is known to be from the member that it names.

    CONFIG, HELLO            anybody with the token: the run's configuration; a member id
    ABOUT, ECHO, REACH       anybody with the token: the run's progress; the link's rates; whether an address is reached
    STATUS                   anybody with the token: the members
    REQUESTS, REPORTS        from a member: questions to the coordinator, lines of metrics
    NOTIFY / member          to a member: notifications; NOTIFY / member / rank: the same, to other workers of its
    island STATE / member / name    of a member: files; of the lighthouse: STATE / `LIGHTHOUSE`
    RELAY_TICKETS            anybody with the token: a ticket that joins two connections
    UP                       present while the lighthouse is running

Everybody in the session knows the token, and may listen at another member's address. So a key is only ever sent to its
owner. Messages from or to a member bear a MAC (HMAC-SHA256) over address and message, by a key that only the lighthouse
and that worker know (`signature`). Messages between workers bear a MAC by the pair's key (`peer_key`): the lighthouse
gives it to the sender, and the receiver derives it from its own key. An overheard message can only be replayed: so
notifications are numbered, and an old number is refused. At the lighthouse's own addresses nobody else can listen or
answer, because its hub lets clients serve `SERVED_BY_MEMBERS` alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from pathlib import Path

from isles.comm.credentials import write_private

CONFIG, HELLO, ABOUT, ECHO, REACH, STATUS = (
    f"isles/{name}" for name in ("config", "hello", "about", "echo", "reach", "status")
)
REQUESTS, REPORTS, NOTIFY, STATE, RELAY_TICKETS = (
    f"isles/{name}" for name in ("requests", "reports", "notify", "state", "tickets")
)
SERVED_BY_MEMBERS = (f"{NOTIFY}/**", f"{STATE}/member/**", "isles/dial/*", "isles/rank/*/dial/*")
PRESENT_AS_MEMBERS = ("isles/member/*", "isles/rank/*/member/*")
PIECE = 1 << 20  # the most bytes of an ECHO reply
LIGHTHOUSE = "lighthouse"
UP = "isles/up"
_FILE = "member-keys"
PROOF = 16
"""Bytes of a MAC."""
_MOST = 64  # the longest prefix of a signature to parse
_NUMBER = struct.Struct("<q")


class MemberKeys:
    """The keys of all members of a run, derived from one secret in `folder`, so that they survive a restart."""

    def __init__(self, folder: Path) -> None:
        path = folder / _FILE
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        self._secret = path.read_bytes()

    def of(self, member: int) -> str:
        """The key of a member, 32 hex digits."""
        return hmac.new(self._secret, b"isles member %d" % member, hashlib.sha256).hexdigest()[:32]

    def peer_key(self, member: int) -> bytes:
        """The key of messages from the lighthouse to a member."""
        return peer_key(self.of(member), -1)

    def member(self, signed: bytes, where: str, payload: bytes) -> int | None:
        """The member whose `signature` of `payload` at `where` it is; None for a forged one."""
        number = signed[:_MOST].partition(b":")[0]
        if not (number.isdigit() and len(number) <= 9):
            return None
        member = int(number)
        return member if hmac.compare_digest(signed, signature(member, self.of(member), where, payload)) else None


def notify_key(member: int, rank: int) -> str:
    """The address of notifications to the worker of rank `rank` in a member's island."""
    return f"{NOTIFY}/{member}/{rank}" if rank else f"{NOTIFY}/{member}"


def add_sequence(number: int, message: bytes) -> bytes:
    """Prefix a notification with its number; the lighthouse numbers them in increasing order."""
    return _NUMBER.pack(number) + message


def split_sequence(numbered: bytes) -> tuple[int, bytes]:
    """The arguments of `add_sequence`. ValueError where it is too short."""
    if len(numbered) < _NUMBER.size:
        raise ValueError("a notification without a number")
    return _NUMBER.unpack_from(numbered)[0], numbered[_NUMBER.size :]


def state_key(name: str) -> str:
    """The address of files of the worker of that name, or of the `LIGHTHOUSE`."""
    return f"{STATE}/{name}" if name == LIGHTHOUSE else f"{STATE}/member/{name}"


def peer_key(key: str, sender: int) -> bytes:
    """16 bytes: the key of messages from `sender` to the member whose own key is `key`."""
    return hmac.new(key.encode("ascii"), b"isles message from %d" % sender, hashlib.sha256).digest()[:16]


def signature(member: int, key: str, where: str, payload: bytes) -> bytes:
    """The MAC of a message from `member` to the address `where`, or to `member` at that address."""
    proof = hmac.digest(key.encode("ascii"), where.encode("ascii") + b"\0" + payload, "sha256")
    return b"%d:" % member + proof[:PROOF]


def authenticate(key: bytes, head: bytes, body: bytes) -> bytes:
    """The MAC of a message and its header, by a `peer_key`: `PROOF` bytes."""
    mac = hmac.new(key, head, "sha256")
    mac.update(body)
    return mac.digest()[:PROOF]

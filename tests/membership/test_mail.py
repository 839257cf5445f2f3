"""Messages in pieces: any order, twice, too early, too long, from somebody who lies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from isles.comm.errors import PeerLost
from isles.comm.tags import Tag
from isles.membership.p2p.inbox import UNEXPECTED, UNEXPECTED_OF_ALL, Inbox
from isles.membership.p2p.stream import CHUNK, PIECE, REFUSED, TAKEN, Head

TAG = Tag("outer", 7)


def take(inbox: Inbox, tag: Tag, data: bytes, *, number: int = 0, sender: int = 3, until: int | None = None) -> Any:
    """A message comes, or its first bytes; what is said of it last, "later" where there is no room for it."""
    said = None
    for offset in range(0, max(len(data), 1), CHUNK):
        if until is not None and offset >= until:
            return said
        said = piece(inbox, Head(PIECE, number, offset, len(data), tag), data[offset : offset + CHUNK], sender)
        if said == "later":
            return said
    return said


def piece(inbox: Inbox, head: Head, data: bytes, sender: int = 3) -> Any:
    island_rank = inbox.begin(sender, head, lambda: None)
    if island_rank is None:
        return "later"
    assert len(island_rank) == head.size
    island_rank[:] = data[: head.size].ljust(head.size, b"x")
    return inbox.end(sender, head, whole=True)


class Posted:
    """A receive of `size` bytes."""

    def __init__(self, inbox: Inbox, size: int, tag: Tag = TAG, sender: int = 3) -> None:
        self.out = np.zeros(size, np.uint8)
        self.ended: list[str | PeerLost | None] = []
        inbox.post(sender, tag, self.out, self.ended.append)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 17])
@pytest.mark.parametrize("posted_after", [0, 1, 99])
def test_a_message_that_breaks_off_and_comes_again(size: int, posted_after: int) -> None:
    """A receive that is posted before, in the middle and after; the message comes up to three times, is taken once."""
    data, draw = random.Random(size).randbytes(size), random.Random(posted_after)
    inbox = Inbox()
    posted = Posted(inbox, size) if posted_after == 0 else None
    take(inbox, TAG, data, until=draw.randint(0, 4) * CHUNK)
    if posted_after == 1:
        posted = Posted(inbox, size)
    for _ in range(draw.randint(1, 3)):
        assert take(inbox, TAG, data) == TAKEN
    posted = posted or Posted(inbox, size)
    assert posted.ended == [None] and posted.out.tobytes() == data and inbox.held() == 0
    assert take(inbox, TAG, data) == TAKEN  # the word on it was lost: said again
    assert inbox.held() == 0 and posted.ended == [None]


@pytest.mark.parametrize(
    ("offset", "total"), [(-CHUNK, 5), (1, 5), (CHUNK, 5), (0, -1), (CHUNK, 2 * CHUNK), (1 << 50, 1 << 40)]
)
def test_pieces_that_do_not_fit_together(offset: int, total: int) -> None:
    """Their bytes go nowhere, and few of them."""
    inbox = Inbox()
    head = Head(PIECE, 0, offset, total, TAG)
    assert 0 <= head.size <= CHUNK
    assert piece(inbox, head, b"") == REFUSED
    assert inbox.held() == 0 and sum(inbox.refused.values()) == 1
    assert inbox.refused[3, "pieces that do not fit together"] == 1


def test_another_length_than_was_asked_for_is_refused_and_the_right_one_taken() -> None:
    inbox = Inbox()
    posted = Posted(inbox, 10)
    assert take(inbox, TAG, bytes(11)) == REFUSED
    assert piece(inbox, Head(PIECE, 1, 0, 1 << 40, TAG), bytes(CHUNK)) == REFUSED  # a terabyte is announced
    assert inbox.refused == {(3, "another length than the receive's"): 1, (3, "a message beyond the size limit"): 1}
    assert take(inbox, TAG, b"0123456789", number=2) == TAKEN
    assert posted.ended == [None] and posted.out.tobytes() == b"0123456789"


def test_what_nobody_asked_for_is_kept_up_to_a_limit() -> None:
    """64 MB: the first 16 are kept, for the rest there is no room; of all together no more than 32."""
    inbox, data = Inbox(), bytes(CHUNK)
    verdicts = [take(inbox, Tag("outer", n), data, number=n) for n in range(64)]
    assert verdicts == [TAKEN] * (UNEXPECTED // CHUNK) + ["later"] * (64 - UNEXPECTED // CHUNK)
    for sender in range(4, 9):
        for number in range(16):
            take(inbox, Tag("outer", number), data, number=number, sender=sender)
    assert inbox.held() == UNEXPECTED_OF_ALL
    posted = Posted(inbox, CHUNK, Tag("outer", 0))
    assert posted.ended == [None] and inbox.held() == UNEXPECTED_OF_ALL - CHUNK
    assert take(inbox, Tag("outer", 63), data, number=63) == TAKEN


def test_a_receive_that_ends_while_it_is_read_into_ends_once_nobody_does() -> None:
    """Its buffer is somebody else's from then on: whoever reads into it is cut off first."""
    inbox, cut = Inbox(), list[int]()
    posted, head = Posted(inbox, 2 * CHUNK), Head(PIECE, 0, 0, 2 * CHUNK, TAG)
    assert inbox.begin(3, head, lambda: cut.append(1)) is not None
    inbox.drop(3, "its connection is gone")
    assert cut == [1] and posted.ended == []
    assert inbox.end(3, head, whole=False) is None
    assert posted.ended == ["its connection is gone"]
    again = Posted(inbox, 2 * CHUNK)
    assert take(inbox, TAG, bytes(2 * CHUNK), number=1) == TAKEN and again.ended == [None]


def test_rounds_long_over_are_forgotten() -> None:
    """A receive that missed its deadline, and data behind a header that was refused, stay eight rounds."""
    inbox = Inbox()
    missed = Posted(inbox, 5, Tag("outer", 1))
    take(inbox, Tag("outer", 1, 1), bytes(100))
    take(inbox, Tag("eval", 1), bytes(10), number=1)
    Posted(inbox, 5, Tag("outer", 9))
    assert missed.ended == [] and inbox.held() == 110
    Posted(inbox, 5, Tag("outer", 10))
    assert missed.ended == ["it is no longer waited for"] and inbox.held() == 10
    assert take(inbox, Tag("outer", 1, 1), bytes(100)) == TAKEN  # and not kept again
    assert inbox.held() == 10


def test_messages_of_one_address_are_taken_in_their_order() -> None:
    """Of two chunks each; the one that its sender has given up in between is not missed."""
    inbox, size = Inbox(), CHUNK + 1
    first, second = (random.Random(seed).randbytes(size) for seed in (1, 2))
    one = Posted(inbox, size)
    assert take(inbox, TAG, bytes(size), number=3, until=CHUNK) is None
    for data, number in ((first, 4), (second, 9), (first, 4)):
        assert take(inbox, TAG, data, number=number) == TAKEN
    assert one.ended == [None] and one.out.tobytes() == first
    two = Posted(inbox, size)
    assert two.ended == [None] and two.out.tobytes() == second and inbox.held() == 0


def test_a_lost_sender_ends_its_own_receives_alone() -> None:
    inbox = Inbox()
    lost, other = Posted(inbox, 5), Posted(inbox, 5, sender=4)
    take(inbox, Tag("outer", 8), bytes(5))
    inbox.drop(3, "its connection is gone")
    assert lost.ended == ["its connection is gone"] and other.ended == [] and inbox.held() == 0
    inbox.drop(99, "never seen")


def test_of_earlier_attempts_nobody_waits_any_more() -> None:
    """Neither for what was asked for before the newer one began, nor after; other rounds go on."""
    inbox = Inbox()
    first, second = Posted(inbox, 5, Tag("outer", 7, attempt=1)), Posted(inbox, 5, Tag("outer", 7, attempt=2))
    later = Posted(inbox, 5, Tag("outer", 8))
    inbox.again(Tag("outer", 7, attempt=2))
    inbox.again(Tag("outer", 6, attempt=3))  # comes late
    assert [str(one) for one in first.ended] == ["worker 3 is lost (another attempt of that round has begun)"]
    assert second.ended == later.ended == []
    assert len(Posted(inbox, 5, Tag("outer", 7, 0, 4, attempt=1)).ended) == 1
    take(inbox, Tag("outer", 7, attempt=2), bytes(5))
    assert second.ended == [None]


def test_the_room_of_a_message_that_still_arrives_is_freed_once() -> None:
    """Its sender is given up meanwhile; then the connection breaks, or the message is taken."""
    for ends in ("breaks", "is taken"):
        inbox, data = Inbox(), bytes(4 * CHUNK)
        take(inbox, TAG, data, until=2 * CHUNK)
        inbox.drop(3, "silent")
        if ends == "breaks":
            inbox.begin(3, Head(PIECE, 1, 0, 1, TAG), lambda: None)  # another message in its place
        else:
            for offset in (2 * CHUNK, 3 * CHUNK):
                piece(inbox, Head(PIECE, 0, offset, len(data), TAG), data[offset : offset + CHUNK])
            assert Posted(inbox, len(data)).ended == [None]
        assert inbox._senders[3].bytes >= 0

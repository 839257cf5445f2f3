"""Messages in pieces: any order, twice, too early, too long, from somebody who lies."""

from __future__ import annotations

import random

import numpy as np
import pytest

from isles.comm.elastic.chunks.incoming import CHUNK, EARLY, EARLY_OF_ALL, Chunk, Inbox, Verdict, offsets
from isles.comm.errors import PeerLost
from isles.comm.tags import Tag

TAG = Tag("outer", 7)


def take(inbox: Inbox, tag: Tag, offset: int, total: int, data: bytes, *, number: int = 0, sender: int = 3) -> Verdict:
    return inbox.take(sender, Chunk(tag, number, offset, total), data)


def chunks(data: bytes) -> list[tuple[int, int, bytes]]:
    """(offset, total, piece) of each."""
    return [(offset, len(data), data[offset : offset + CHUNK]) for offset in offsets(len(data))]


class Posted:
    """A receive of `size` bytes."""

    def __init__(self, inbox: Inbox, size: int, tag: Tag = TAG, sender: int = 3) -> None:
        self.out = np.zeros(size, np.uint8)
        self.ended: list[str | PeerLost | None] = []
        inbox.post(sender, tag, self.out, self.ended.append)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 17])
@pytest.mark.parametrize("posted_after", [0, 1, 99])
def test_pieces_in_any_order_and_twice(size: int, posted_after: int) -> None:
    """A receive that is posted before, in the middle and after; each piece comes up to three times."""
    data = random.Random(size).randbytes(size)
    inbox, draw = Inbox(), random.Random(posted_after)
    pieces = [piece for piece in chunks(data) for _ in range(draw.randint(1, 3))]
    draw.shuffle(pieces)
    posted = Posted(inbox, size) if posted_after == 0 else None
    for number, piece in enumerate(pieces):
        assert take(inbox, TAG, *piece) == "kept"
        if posted is None and number + 1 == posted_after:
            posted = Posted(inbox, size)
    posted = posted or Posted(inbox, size)
    assert posted.ended == [None] and posted.out.tobytes() == data and inbox.held() == 0
    assert take(inbox, TAG, *pieces[0]) == "kept"  # its receipt was lost: said again
    assert inbox.held() == 0 and posted.ended == [None]


@pytest.mark.parametrize(
    ("offset", "total", "size"),
    [
        (-CHUNK, 5, 5),
        (1, 5, 4),
        (CHUNK, 5, 5),
        (0, 5, 4),
        (0, 5, 6),
        (0, -1, 0),
        (0, 2 * CHUNK, CHUNK - 1),
        (0, 1 << 40, 5),
        (1 << 50, 1 << 40, CHUNK),
    ],
)
def test_pieces_that_do_not_fit_together(offset: int, total: int, size: int) -> None:
    inbox = Inbox()
    assert take(inbox, TAG, offset, total, bytes(size)) == "never"
    assert inbox.held() == 0 and sum(inbox.refused.values()) == 1
    assert inbox.refused[3, "pieces that do not fit together"] == 1


def test_another_length_than_was_asked_for_is_refused_and_the_right_one_taken() -> None:
    inbox = Inbox()
    posted = Posted(inbox, 10)
    assert take(inbox, TAG, 0, 11, bytes(11)) == "never"
    assert take(inbox, TAG, 0, 1 << 40, bytes(CHUNK), number=1) == "never"  # a terabyte is announced
    assert take(inbox, TAG, 0, 10, b"0123456789", number=2) == "kept"
    assert posted.ended == [None] and posted.out.tobytes() == b"0123456789"
    assert inbox.refused[3, "another length than was asked for"] == 2


def test_what_nobody_asked_for_is_kept_up_to_a_limit() -> None:
    """64 MB: the first 16 are kept, the rest is to come later; of all together no more than 32."""
    inbox, data = Inbox(), bytes(CHUNK)
    verdicts = [take(inbox, Tag("outer", n), 0, CHUNK, data, number=n) for n in range(64)]
    assert verdicts == ["kept"] * (EARLY // CHUNK) + ["later"] * (64 - EARLY // CHUNK)
    for sender in range(4, 9):
        for number in range(16):
            take(inbox, Tag("outer", number), 0, CHUNK, data, number=number, sender=sender)
    assert inbox.held() == EARLY_OF_ALL
    posted = Posted(inbox, CHUNK, Tag("outer", 0))
    assert posted.ended == [None] and inbox.held() == EARLY_OF_ALL - CHUNK
    assert take(inbox, Tag("outer", 63), 0, CHUNK, data, number=63) == "kept"


def test_rounds_long_over_are_forgotten() -> None:
    """A receive that missed its deadline, and data behind a header that was refused, stay eight rounds."""
    inbox = Inbox()
    missed = Posted(inbox, 5, Tag("outer", 1))
    take(inbox, Tag("outer", 1, 1), 0, 100, bytes(100))
    take(inbox, Tag("eval", 1), 0, 10, bytes(10), number=1)
    Posted(inbox, 5, Tag("outer", 9))
    assert missed.ended == [] and inbox.held() == 110
    Posted(inbox, 5, Tag("outer", 10))
    assert missed.ended == ["nobody waits for it any more"] and inbox.held() == 10
    assert take(inbox, Tag("outer", 1, 1), 0, 100, bytes(100)) == "kept"  # and not kept again
    assert inbox.held() == 10


def test_messages_of_one_address_are_taken_in_their_order() -> None:
    """Two of two chunks each, mixed: the second one waits for a receive of its own."""
    inbox, size = Inbox(), CHUNK + 1
    first, second = (chunks(random.Random(seed).randbytes(size)) for seed in (1, 2))
    one = Posted(inbox, size)
    for number, piece in ((4, first[1]), (9, second[0]), (4, first[0]), (9, second[1]), (4, first[0])):
        assert take(inbox, TAG, *piece, number=number) == "kept"
    assert one.ended == [None] and one.out.tobytes() == first[0][2] + first[1][2]
    two = Posted(inbox, size)
    assert two.ended == [None] and two.out.tobytes() == second[0][2] + second[1][2] and inbox.held() == 0


def test_a_lost_sender_ends_its_own_receives_alone() -> None:
    inbox = Inbox()
    lost, other = Posted(inbox, 5), Posted(inbox, 5, sender=4)
    take(inbox, Tag("outer", 8), 0, 5, bytes(5))
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
    take(inbox, Tag("outer", 7, attempt=2), 0, 5, bytes(5))
    assert second.ended == [None]

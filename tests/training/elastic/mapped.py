"""What became of every message and exchange of a worker process, in a mapped file: a killed one's last word counts.

A row for each message that it handed to its transport, and for each receive that it posted, with what ended it; and one
for each exchange that ended by an error.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from isles.comm.tags import CHANNELS, Tag

FOLDER = "messages"
_ROWS = 1 << 19
_SENT, _RECEIVED, _EXCHANGE = 0, 1, 2
_UNDER_WAY, _DONE = 0, 1
_ERRORS = (
    "PeerLost",
    "RoundPassed",
    "PeerSilent",
    "DeadlinePassed",
    "Elsewhere",
    "Diverged",
    "Malformed",
    "Refused",
)
FATES = ("under way", "done", *_ERRORS, "another error")
ROW = np.dtype(
    [
        ("kind", "i1"),
        ("fate", "i1"),
        ("member", "i4"),
        ("peer", "i4"),
        ("tag", "i8", (6,)),
        ("bytes", "i8"),
        ("crc", "u4"),
    ]
)


class Book:
    """Of this process, in `file`. The first row counts the others, in `bytes`."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        self._rows = np.memmap(file, ROW, "w+", shape=(1 + _ROWS,))
        self._lock = threading.Lock()

    def attach(self) -> None:
        """Note what all transports and transfers of this process do from now on."""
        from isles.comm.gloo.transfers import BackgroundTransfer
        from isles.membership.p2p.transport import ElasticTransport

        send, receive, end = ElasticTransport.send, ElasticTransport.recv, BackgroundTransfer._end

        def sends(transport: ElasticTransport, peer: int, data: Any, tag: Tag) -> Any:
            row = self._add(_SENT, transport.rank, peer, tag, data.numpy())
            self._rows["crc"][row] = crc32(data.numpy())
            return self._followed(send(transport, peer, data, tag), row, None)

        def receives(transport: ElasticTransport, peer: int | None, out: Any, tag: Tag) -> Any:
            row = self._add(_RECEIVED, transport.rank, -1 if peer is None else peer, tag, out.numpy())
            return self._followed(receive(transport, peer, out, tag), row, out.numpy())

        def ends(transfer: BackgroundTransfer, result: Any, error: Exception | None) -> None:
            watch = transfer._watch
            rows = [] if watch is None else [work.row for work in watch.works if hasattr(work, "row")]
            if error is not None and rows:
                kept = self._rows[rows[0]]
                row = self._add(_EXCHANGE, int(kept["member"]), -1, kept["tag"], np.zeros(0, np.uint8))
                self._rows["fate"][row] = _fate(error)
            end(transfer, result, error)

        ElasticTransport.send, ElasticTransport.recv = sends, receives  # type: ignore[method-assign]
        BackgroundTransfer._end = ends  # type: ignore[method-assign]

    def _add(self, kind: int, member: int, peer: int, tag: Sequence[Any], data: np.ndarray) -> int:
        numbers = [CHANNELS.index(tag[0]), *tag[1:]] if isinstance(tag[0], str) else tag
        with self._lock:
            row = int(self._rows["bytes"][0]) + 1
            self._rows[row] = kind, _UNDER_WAY, member, peer, numbers, data.nbytes, 0
            self._rows["bytes"][0] = row
        return row

    def _followed(self, work: Any, row: int, out: np.ndarray | None) -> Any:
        """`work`, of which is noted how it ends; out: where a message will lie by then."""
        finish: Callable[[Exception | None], None] = work.finished
        told = threading.Lock()  # taken for good by whoever tells how it ended

        def note(error: Exception | None) -> None:
            if told.acquire(blocking=False):
                if out is not None and error is None:
                    self._rows["crc"][row] = crc32(out)
                self._rows["fate"][row] = _fate(error)

        def finished(error: Exception | None = None) -> None:
            if not work.done():
                note(error)
            finish(error)

        work.row, work.finished = row, finished
        if work.done():
            note(work.error)
        return work


def _fate(error: Exception | None) -> int:
    name = type(error).__name__
    return _DONE if error is None else FATES.index(name if name in _ERRORS else FATES[-1])


def book_of(file: Path) -> np.ndarray:
    """The rows of a process, dead or alive."""
    if not file.exists() or file.stat().st_size < ROW.itemsize:
        return np.zeros(0, ROW)
    (head,) = np.fromfile(file, ROW, count=1)
    return np.fromfile(file, ROW, count=int(head["bytes"]), offset=ROW.itemsize)


def ended(rows: np.ndarray) -> Counter[str]:
    """How many exchanges ended by which error."""
    return Counter(FATES[fate] for fate in rows["fate"][rows["kind"] == _EXCHANGE])


def ledger(books: Iterable[np.ndarray], last: Mapping[int, int]) -> Counter[str]:
    """Bytes of all messages: "sent"; of these "received", and by what ended the others; "unexplained". last: the last
    round of each, by member, after all have ended: what is of that one or later its end explains. AssertionError for
    what somebody received that nobody sent like that.
    """
    rows = np.concatenate([*books])
    sent, failed = rows[rows["kind"] == _SENT], rows[(rows["kind"] != _SENT) & (rows["fate"] > _DONE)]
    why: dict[tuple[int, ...], str] = {}
    for row in np.concatenate([failed, sent[sent["fate"] > _DONE]]):
        why.setdefault(_part(row["member"], row["tag"]), FATES[row["fate"]])
    waiting: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for row in sent:
        waiting[_address(row["member"], row["peer"], row["tag"])].append((row["bytes"], row["crc"]))
    told: Counter[str] = Counter(sent=int(sent["bytes"].sum()))
    for row in rows[(rows["kind"] == _RECEIVED) & (rows["fate"] == _DONE)]:
        address = _address(row["peer"], row["member"], row["tag"])
        assert (row["bytes"], row["crc"]) in waiting[address], f"{row} was never sent"
        waiting[address].remove((row["bytes"], row["crc"]))
        told["received"] += int(row["bytes"])
    for (source, target, *tag), left in waiting.items():
        ends = why.get(_part(target, tag)) or why.get(_part(source, tag))
        over = any(tag[1] >= last.get(member, 0) for member in (source, target))
        ends = ends or ("the end of its worker" if over else "unexplained")
        told[ends] += int(sum(size for size, _ in left))
    return told


def _address(source: int, target: int, tag: Iterable[int]) -> tuple[int, ...]:
    return (int(source), int(target), *map(int, tag))


def _part(member: int, tag: Sequence[int]) -> tuple[int, ...]:
    """Whose part in which exchange: channel, round, fragment and attempt."""
    channel, round, fragment, _, _, attempt = tag
    return (int(member), int(channel), int(round), int(fragment), int(attempt))

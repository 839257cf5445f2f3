"""What the control plane needs of its carrier: messages, time and waits all go through a session.

`tls_session.Session` is one between processes, `simulated.SimulatedSession` one on the virtual clock.

    callbacks   one at a time, in the order of arrival; a callback never waits
    condition   guards what callbacks and a worker's own thread share; all waits use its `wait_for`
    later       timers, in place of threads

A session also counts what it rejected (`Rejections`), by the member that sent it and by the reason.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from ipaddress import IPv6Network
from itertools import chain
from typing import Annotated, Any, Protocol

from pydantic import Field

from isles.base.parsing import Str, read

_MOST = 256  # distinct (member, reason): strangers must not fill the memory
_LONGEST = 100  # characters
OTHERS = "other reasons"
RejectionRow = tuple[int, str, int]
_Rows = Annotated[
    list[
        tuple[
            Annotated[int, Field(strict=True, ge=-1, lt=1 << 30)],
            Annotated[Str, Field(max_length=_LONGEST)],
            Annotated[int, Field(strict=True, gt=0, lt=1 << 53)],
        ]
    ],
    Field(max_length=_MOST + 1, fail_fast=True),
]


class Rejections(Counter[tuple[int, str]]):
    """Counts by (member, reason); member -1: a sender without a member, or with a forged one. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # `note` is called in any thread, also while `rows` goes through the counts

    def note(self, member: int, why: str) -> None:
        """Count one rejection."""
        key = (member, why[:_LONGEST])
        with self._lock:
            if key not in self and len(self) >= _MOST:
                key = (-1, OTHERS)
            self[key] += 1

    def rows(self) -> list[RejectionRow]:
        """(member, reason, how often), JSON-able."""
        with self._lock:
            return [(member, why, times) for (member, why), times in sorted(self.items())]


def merge_rejections(tables: Iterable[Sequence[RejectionRow]]) -> list[RejectionRow]:
    """The rows of several workers as those of one."""
    every = Rejections()
    for member, why, times in chain.from_iterable(tables):
        key = (member, why) if (member, why) in every or len(every) < _MOST else (-1, OTHERS)
        every[key] += times
    return every.rows()


def read_rejections(tables: object) -> list[RejectionRow]:
    """`rows` received from another machine. ValueError for invalid ones."""
    return read(_Rows, tables, "an invalid list of refusals")


_KEYS = 4096  # beyond that the oldest is dropped, which refills its bucket


class RateLimit:
    """A token bucket per key: `most` tokens at once, and as many again within `seconds`."""

    def __init__(self, most: int, seconds: float = 60.0) -> None:
        self._most, self._each = most, seconds / most
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # by key: (tokens, when counted)

    def take(self, key: Hashable, now: float, amount: int = 1) -> float:
        """Take `amount` tokens: 0.0; or the seconds until there are so many. now: seconds of any clock."""
        tokens, then = self._left.pop(key, (float(self._most), now))
        tokens = min(tokens + (now - then) / self._each, float(self._most))
        wait = max(amount - tokens, 0.0) * self._each
        self._left[key] = (tokens if wait else tokens - amount, now)
        if len(self._left) > _KEYS:
            self._left.popitem(last=False)
        return wait


def network_of(address: str) -> str:
    """The address; of an IPv6 one its network of 64 bits, because one machine may have all addresses in it."""
    return str(IPv6Network((address.partition("%")[0], 64), strict=False)) if ":" in address else address


Answered = Callable[[bytes | None, bytes | None], None]
"""Called with (reply, None), with (None, refusal), or with (None, None) if there is no answer."""


class Query:
    """A question that arrived; answer it once, now or later. payload: the question; attachment: what was sent with it,
    such as a MAC. answered: called with the reply or the refusal.
    """

    def __init__(self, payload: bytes, attachment: bytes, answered: Answered) -> None:
        self.payload, self.attachment, self._answered = payload, attachment, answered

    def reply(self, data: bytes | Callable[[], bytes] = b"") -> None:
        """Answer with `data`, or with the result of `data()`."""
        self._answered(data if isinstance(data, bytes) else data(), None)

    def refuse(self, why: bytes) -> None:
        """Answer with a refusal, which the asker can tell from a reply."""
        self._answered(None, why)


class Condition(Protocol):
    """Like `threading.Condition` with a re-entrant lock."""

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> Any: ...
    def notify_all(self) -> None: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...


class ControlSession(Protocol):
    """The control-plane session of a member or of the lighthouse.

    refused: counts rejected messages. taken: bytes received. beats: whether members send a heartbeat each second. If
    not (on the virtual clock), they send messages only when something changes, and connections break by events.
    """

    refused: Rejections
    taken: int
    beats: bool

    @property
    def relayed(self) -> int:
        """Bytes that other clients have sent each other through this session."""

    def now(self) -> float:
        """Seconds of the clock of `later`."""

    def wall(self) -> float:
        """Seconds of the clock of journals."""

    def condition(self) -> Condition:
        """A new condition."""

    def later(self, call: Callable[[], None], seconds: float = 0.0) -> Callable[[], None]:
        """Schedule `call` as a callback after `seconds`; 0: behind the callbacks that are due by now. Returns a
        function that cancels it, which is safe to call twice.
        """

    def aside(self, work: Callable[[], None]) -> Callable[[float], None]:
        """Run `work`, which may take a while, beside the callbacks. Returns a function that waits for its end, for so
        many seconds at most.
        """

    def serve(self, key: str, answer: Callable[[Query], None]) -> None:
        """Call `answer` with every `Query` to `key`."""

    def ask(
        self,
        key: str,
        payload: bytes,
        answered: Answered,
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> None:
        """Ask the client that serves `key`. `answered` is called once, in a callback; with (None, None) if no answer
        arrives within `seconds`. `urgent` questions go before bulk data. Returns at once. OSError after `close`.
        """

    def present(self, key: str) -> None:
        """Appear under `key` to clients that `watch` it."""

    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None:
        """Call `changed(key, whether it is present)` for each key that matches `keys`, now and at each change."""

    def seen(self, name: str) -> str:
        """The address of the session of that name; "" if there is none."""

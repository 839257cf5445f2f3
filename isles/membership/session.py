"""What the control plane of a run needs of whatever carries it: all of its messages, all of its time, all of its waits.

`tls_session.Session` is one between processes, `simulated.SimulatedSession` one on the virtual clock.

    callbacks   one at a time, in the order of what came; no callback waits
    condition   guards what callbacks and a worker's own thread share; its `wait_for` is the only place where one waits
    later       replaces threads of one's own

A session also counts what was not accepted from others (`Rejections`): by the member that sent it, and by the reason.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Protocol

from pydantic import Field

from isles.base.parsing import Str, read

_MOST = 256  # reasons that are told apart: what a stranger writes must not fill the memory
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
    """By (member, reason); member -1: somebody without a member, or in another's name. Safe to call from several
    threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def note(self, member: int, why: str) -> None:
        """Once more."""
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
    """The rows of several workers put together, as if one had refused all of it."""
    every = Rejections()
    for member, why, times in chain.from_iterable(tables):
        key = (member, why) if (member, why) in every or len(every) < _MOST else (-1, OTHERS)
        every[key] += times
    return every.rows()


def read_rejections(tables: object) -> list[RejectionRow]:
    """`rows` as another machine tells them. ValueError where they are none."""
    return read(_Rows, tables, "a list of refusals that is none")


Answered = Callable[[bytes | None, bytes | None], None]
"""Called with a reply, or with why there is none."""


class Query:
    """A question that came in; answer it once, now or later. payload: what is asked; attachment: what is said beside.
    answered: called with the reply, or with the refusal.
    """

    def __init__(self, payload: bytes, attachment: bytes, answered: Answered) -> None:
        self.payload, self.attachment, self._answered = payload, attachment, answered

    def reply(self, data: bytes | Callable[[], bytes] = b"") -> None:
        """Answer with `data`, or with what `data()` is."""
        self._answered(data if isinstance(data, bytes) else data(), None)

    def refuse(self, why: bytes) -> None:
        """Answer with a refusal, which the asker gets apart from replies."""
        self._answered(None, why)


class Condition(Protocol):
    """As `threading.Condition` of a lock that its holder may take again."""

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> Any: ...
    def notify_all(self) -> None: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...


class ControlSession(Protocol):
    """Of one member, or of the lighthouse. refused: counts what is not taken. taken: bytes that were said to it.

    beats: whether who is there must say so each second; else members speak where they have something to say, and the
    lighthouse acts when it is told to.
    """

    refused: Rejections
    taken: int
    beats: bool

    @property
    def relayed(self) -> int:
        """Bytes that others have said to each other over this one."""

    def now(self) -> float:
        """Seconds of the clock that `later` counts by."""

    def wall(self) -> float:
        """Seconds of the clock that journals are written by."""

    def condition(self) -> Condition:
        """A new one."""

    def later(self, call: Callable[[], None], seconds: float = 0.0) -> Callable[[], None]:
        """Have `call` called in a callback after `seconds`; 0: behind what has come by now. What is returned has it not
        called, if it was not yet, and is safe to call twice.
        """

    def aside(self, work: Callable[[], None]) -> Callable[[float], None]:
        """Have `work`, which may take a while, done beside all callbacks. What is returned waits for its end, so many
        seconds at most.
        """

    def serve(self, key: str, answer: Callable[[Query], None]) -> None:
        """Have `answer` called with every `Query` to `key`."""

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
        """Ask whoever serves `key`; `answered` is called once, in a callback, with (None, None) where no answer has
        come within `seconds`. What is `urgent` goes before bulk, and returns at once. OSError once it is closed.
        """

    def present(self, key: str) -> None:
        """Be seen under `key` by those who `watch` it."""

    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None:
        """Have `changed(key, whether it is present)` called for those that match `keys`, now and at each change."""

    def seen(self, name: str) -> str:
        """The address from which the session of that name comes; "" where it does not."""

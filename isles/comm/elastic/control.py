"""What the control plane of a run needs of whatever carries it: all of its messages, all of its time, all of its waits.

`session.Session` is one between processes, `comm.virtual.churn.session.VirtualSession` one on the virtual clock.

    callbacks   one at a time, in the order of what came; no callback waits
    condition   guards what callbacks and a worker's own thread share; its `wait_for` is the only place where one waits
    later       in the place of threads of one's own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from isles.comm.elastic.guards.refusals import Refusals

Answered = Callable[[bytes | None, bytes | None], None]
"""Called with a reply, or with why there is none."""


class Query(Protocol):
    """A question that came in; answer it once, now or later. A reply may be made only when it can leave, so that long
    ones are not kept in memory; a refusal the asker gets apart from replies.
    """

    @property
    def payload(self) -> bytes: ...
    @property
    def attachment(self) -> bytes: ...
    def reply(self, data: bytes | Callable[[], bytes] = b"") -> None: ...
    def refuse(self, why: bytes) -> None: ...


class Condition(Protocol):
    """As `threading.Condition` of a lock that its holder may take again."""

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> Any: ...
    def notify_all(self) -> None: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...


class Timer(Protocol):
    """What `later` has begun; cancelled, once or twice, it is not called if it was not yet."""

    def cancel(self) -> None: ...


class SideWork(Protocol):
    """What `aside` has made; `start` once."""

    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...


class ControlSession(Protocol):
    """Of one member, or of the lighthouse; its methods are documented at `isles.comm.elastic.session.Session`.

    refused: counts what is not taken. taken: bytes that were said to it. beats: whether who is there must say so each
    second; else members speak where they have something to say, and the lighthouse acts when it is told to.
    """

    refused: Refusals
    taken: int
    beats: bool

    def now(self) -> float: ...
    def wall(self) -> float: ...
    def condition(self) -> Condition: ...
    def later(self, call: Callable[[], None], seconds: float = 0.0) -> Timer: ...
    def aside(self, work: Callable[[], None]) -> SideWork: ...
    def serve(self, key: str, answer: Callable[[Any], None]) -> None: ...
    def ask(
        self,
        key: str,
        payload: bytes,
        answered: Answered,
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> None: ...
    def present(self, key: str) -> None: ...
    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None: ...
    def lines(self, changed: Callable[[str, str, bool], None]) -> None: ...
    def seen(self, name: str) -> str: ...

"""Launchers of several machines during a run: node 0 decides, the others pass on what their workers and node 0 say.

node k's workers  <--pipes-->  node k's launcher, `RemoteWorkers`  <--a line-->  a `NodeLink` of node 0's `Workers`

    up      [rank, "event" | "held" | "done" | "error", value]    of a worker
            [-1, "interrupt", None]    Ctrl-C on node k            [-1, "leaving", error]    it ends early, and why
    down    "hold" | ["stop", step] | "close"                      orders for every worker
            {"order": ...}                                         an order for the launcher itself
            {"over": error | None}                                 after "close": how the run ended
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, cast

from isles.comm.errors import NodeLost, WorkerFailed, from_plain, to_plain
from isles.launch.link import Line, LineLost
from isles.launch.nodes import Party
from isles.launch.processes import Crew, Message
from isles.launch.worker import Seat

_GLANCE = 0.2  # seconds between looks at the line
_VERDICT = 60.0  # seconds in which node 0 writes down how the run ended


class NodeLink:
    """All workers of another machine, on node 0; a Link of `isles.launch.processes`."""

    def __init__(self, node: int, ranks: tuple[int, ...], line: Line) -> None:
        self.node, self.ranks, self.line = node, ranks, line
        self.lost = False

    def fileno(self) -> int:
        """See Link."""
        return self.line.fileno()

    def read(self) -> list[Message]:
        """See Link."""
        if self.lost:
            return []
        try:
            messages = [self._message(message) for message in self.line.ready()]
        except LineLost as error:
            return self._gone(self.loss(error))
        left = [value for rank, kind, value in messages if kind == "leaving"]
        return messages if not left else self._gone(NodeLost(self.node, f"({self.line.there}) gave up: {left[0]}"))

    def tell(self, order: Any) -> None:
        """See Link."""
        with contextlib.suppress(LineLost):
            self.line.send(order)

    def loss(self, why: LineLost) -> Exception:
        """What to call it when the connection is gone."""
        return _lost(self.node, self.line, why)

    def _gone(self, error: Exception) -> list[Message]:
        self.lost = True
        return [(rank, "error", error) for rank in self.ranks]

    def _message(self, message: Any) -> Message:
        try:
            rank, kind, value = message
            assert rank in (-1, *self.ranks) and isinstance(kind, str)
        except (TypeError, ValueError, AssertionError):
            raise LineLost("what it sends is not what isles sends") from None
        return rank, kind, from_plain(value) if kind in ("error", "leaving") else value


class ProcessLink(NodeLink):
    """Likewise a single worker that somebody else has started, such as torchrun."""

    def loss(self, why: LineLost) -> Exception:
        """See NodeLink."""
        return WorkerFailed(self.ranks[0], f"its process is gone: {why}")


class RemoteWorkers:
    """The workers of a machine that is not node 0; `join` passes their words on until node 0 ends the run."""

    def __init__(
        self,
        worker: Callable[..., Any],
        seats: Sequence[Seat],
        *,
        args: Sequence[Any] = (),
        party: Party,
    ) -> None:
        self._line = party.lines[0]
        self._stop_wanted = False
        self._crew = Crew(worker, seats, args)
        self.processes = self._crew.processes

    def stop(self) -> None:
        """Ask node 0 to stop the run. May be called from a signal handler."""
        self._stop_wanted = True

    def join(self, on_event: Callable[[Any], None], on_order: Callable[[Any], None]) -> list[Any]:
        """The results of this machine's workers, once node 0 has ended the run. Ends every process of this machine.

        on_event: as in LocalWorkers, with this machine's events. on_order: is given what node 0 sends under "order".
        Raises what node 0 says was wrong; NodeLost where node 0 itself is gone.
        """
        results: dict[int, Any] = {}
        asked, patience = False, 1.0
        try:
            try:
                while True:
                    if self._stop_wanted and not asked:
                        asked = True
                        self._line.send([-1, "interrupt", None])
                    wait(cast(Any, [self._line, *(link for link in self._crew.links if not link.lost)]), _GLANCE)
                    for rank, kind, value in [message for link in self._crew.links for message in link.read()]:
                        if kind == "event":
                            on_event(value)
                        elif kind == "done":
                            results[rank] = value
                        self._pass_on(rank, kind, value)
                    if self._obey(on_order):
                        patience = 10.0
                        break
            finally:
                self._crew.end(patience)
            self._hear_how_it_ended()
        except LineLost as error:
            raise _lost(0, self._line, error) from None
        return [results[rank] for rank in sorted(results)]

    def _obey(self, on_order: Callable[[Any], None]) -> bool:
        """Do what node 0 has said meanwhile; True once it closes."""
        while (order := self._line.next()) is not None:
            if order == "close":
                return True
            if isinstance(order, dict):
                on_order(order.get("order"))
            else:
                for link in self._crew.links:
                    link.tell(order)
        return False

    def _hear_how_it_ended(self) -> None:
        while not isinstance(message := self._line.receive(_VERDICT), dict) or "over" not in message:
            pass
        if message["over"] is not None:
            raise from_plain(message["over"])

    def _pass_on(self, rank: int, kind: str, value: Any) -> None:
        if kind == "error":
            value = to_plain(value)
        try:
            self._line.send([rank, kind, value])
        except (TypeError, ValueError):
            told = to_plain(WorkerFailed(rank, f"its {kind} cannot be sent to node 0: JSON holds no such value"))
            self._line.send([rank, "error", told])


def _lost(node: int, line: Line, why: LineLost) -> NodeLost:
    return NodeLost(node, f"({line.there}) is lost: {why}")

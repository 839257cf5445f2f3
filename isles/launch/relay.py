"""Launchers of several machines during a run: node 0 decides, the others pass on what their workers and node 0 say.

node k's workers  <--pipes-->  node k's launcher, `RemoteWorkers`  <--a link-->  a `NodeHandle` of node 0's `Workers`

    up      [rank, "joined" | "beat" | "event" | "held" | "done" | "error", value]    of a worker
            [-1, "interrupt", None]    Ctrl-C on node k    [-1, "leaving", error]    it ends early, and why
    down    "hold" | ["stop", step] | ["lost", rank] | ["moved", counts] | "close"    commands for every worker
            {"command": ...}                                       a command for the launcher itself
            {"over": error | None}                                 after "close": how the run ended
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from multiprocessing.connection import wait
from typing import Annotated, Any, Literal, cast

from typing_extensions import override

from isles.base.errors import printable
from isles.base.parsing import MANY, Int, Unfit, integer, read
from isles.comm.errors import NodeLost, WorkerFailed, from_plain, to_plain
from isles.comm.sockets.connection import LinkLost
from isles.launch.nodes import Link, NodeGroup
from isles.launch.processes import WorkerMessage, WorkerProcesses
from isles.launch.worker import WorkerSpec

_GLANCE = 0.2  # seconds between looks at the link
_WORKERS = ("joined", "beat", "event", "held", "done", "error")  # what a launcher passes on, and what it says itself
_LAUNCHERS = ("interrupt", "leaving")
_SIGNS = ("joined", "beat")
_COUNT = 1 << 63
_Counts = Annotated[list[Int], MANY]
_Order = Literal["hold", "close"] | tuple[Literal["stop", "lost"], Int] | tuple[Literal["moved"], _Counts]
_ERRORS = ("error", "leaving")
MessageCheck = Callable[[str, Any, Container[int]], Any]
"""(kind, value, ranks) of a message of another machine about its workers -> the value, fit for use. Raises
`fields.Unfit` where it is not.
"""
_VERDICT = 60.0  # seconds in which node 0 writes down how the run ended


def anything(kind: str, value: Any, ranks: Container[int]) -> Any:
    """The check of those who run on one machine alone, and hear nobody."""
    return value


def order(command: Any) -> Any:
    """What node 0 says to every worker; None for a word to launchers. LinkLost for what is neither."""
    if isinstance(command, dict):
        return None
    try:
        return read(_Order, command, "an order")
    except Unfit:
        raise LinkLost("what it sends is not what isles sends") from None


def await_outcome(link: Link) -> None:
    """Wait for node 0's word on that, and raise the error with which the run ended, if it did."""
    while not isinstance(message := link.receive(_VERDICT), dict) or "over" not in message:
        pass
    if message["over"] is not None:
        raise from_plain(message["over"])


class NodeHandle:
    """All workers of another machine, on node 0; a WorkerHandle of `isles.launch.processes`."""

    def __init__(self, node: int, ranks: tuple[int, ...], link: Link, check: MessageCheck) -> None:
        self.node, self.ranks, self.link, self._check = node, ranks, link, check
        self.lost = False

    def fileno(self) -> int:
        return self.link.fileno()

    def read(self) -> list[WorkerMessage]:
        if self.lost:
            return []
        try:
            messages = [self._message(message) for message in self.link.ready()]
        except LinkLost as error:
            return self._gone(self.loss(error))
        left = [value for rank, kind, value in messages if kind == "leaving"]
        return messages if not left else self._gone(NodeLost(self.node, f"({self.link.there}) gave up: {left[0]}"))

    def tell(self, command: Any) -> None:
        with contextlib.suppress(LinkLost):
            self.link.send(command)

    def loss(self, why: LinkLost) -> Exception:
        """What to call it when the connection is gone."""
        return _lost(self.node, self.link, why)

    def _gone(self, error: Exception) -> list[WorkerMessage]:
        self.lost = True
        return [(rank, "error", error) for rank in self.ranks]

    def _message(self, message: Any) -> WorkerMessage:
        try:
            rank, kind, value = message
            if type(rank) is not int or kind not in (_LAUNCHERS if rank == -1 else _WORKERS):
                raise Unfit("a message of no kind that isles has")
            if rank not in (-1, *self.ranks):
                raise Unfit(f"worker {rank} is none of its")
            if kind in _SIGNS:
                return rank, kind, integer({kind: value or 0}, kind, 0, _COUNT)
            return rank, kind, from_plain(value) if kind in _ERRORS else self._check(kind, value, self.ranks)
        except (TypeError, ValueError) as error:
            why = f": {printable(str(error))}" if isinstance(error, Unfit) else ""
            raise LinkLost(f"what it sends is not what isles sends{why}") from None


class ProcessHandle(NodeHandle):
    """Likewise a single worker that somebody else has started, such as torchrun."""

    @override
    def loss(self, why: LinkLost) -> Exception:
        return WorkerFailed(self.ranks[0], f"its process is gone: {why}")


class RemoteWorkers:
    """The workers of a machine that is not node 0; `join` passes their words on until node 0 ends the run."""

    def __init__(
        self,
        worker: Callable[..., Any],
        worker_specs: Sequence[WorkerSpec],
        *,
        args: Sequence[Any] = (),
        node_group: NodeGroup,
    ) -> None:
        self._link = node_group.links[0]
        self._stop_wanted = False
        self._pool = WorkerProcesses(worker, worker_specs, args)
        self.processes = self._pool.processes

    def stop(self) -> None:
        """Ask node 0 to stop the run. May be called from a signal handler."""
        self._stop_wanted = True

    def join(self, on_event: Callable[[Any], None], on_command: Callable[[Any], None]) -> list[Any]:
        """The results of this machine's workers, once node 0 has ended the run. Ends every process of this machine.

        on_event: as in LocalWorkers, with this machine's events. on_command: is given what node 0 sends under
        "command". Raises what node 0 says was wrong; NodeLost where node 0 itself is gone.
        """
        results: dict[int, Any] = {}
        asked, patience = False, 1.0
        try:
            try:
                while True:
                    if self._stop_wanted and not asked:
                        asked = True
                        self._link.send([-1, "interrupt", None])
                    wait(
                        cast(Any, [self._link, *(handle for handle in self._pool.handles if not handle.lost)]), _GLANCE
                    )
                    for rank, kind, value in [message for handle in self._pool.handles for message in handle.read()]:
                        if kind == "event":
                            on_event(value)
                        elif kind == "done":
                            results[rank] = value
                        if kind == "interrupt":
                            self._stop_wanted = True
                        else:
                            self._pass_on(rank, kind, value)
                    if self._obey(on_command):
                        patience = 10.0 if len(results) == len(self._pool.handles) else patience
                        break
            finally:
                self._pool.end(patience)
            await_outcome(self._link)
        except LinkLost as error:
            raise _lost(0, self._link, error) from None
        return [results[rank] for rank in sorted(results)]

    def _obey(self, on_command: Callable[[Any], None]) -> bool:
        """Do what node 0 has said meanwhile; True once it closes."""
        while (command := self._link.next()) is not None:
            if command == "close":
                return True
            if (answer := order(command)) is None:
                on_command(command.get("command"))
            else:
                for handle in self._pool.handles:
                    handle.tell(answer)
        return False

    def _pass_on(self, rank: int, kind: str, value: Any) -> None:
        if kind == "error":
            value = to_plain(value)
        try:
            self._link.send([rank, kind, value])
        except (TypeError, ValueError):
            answer = to_plain(WorkerFailed(rank, f"its {kind} cannot be sent to node 0: JSON holds no such value"))
            self._link.send([rank, "error", answer])


def _lost(node: int, link: Link, why: LinkLost) -> NodeLost:
    return NodeLost(node, f"({link.there}) is lost: {why}")

"""Signs of life of the other workers, beside their messages: gloo shows nothing between post and done.

    the kernel's counters   what gloo's connections have carried (`isles.comm.tcp`): a slow link lives while bytes move
    launchers' reports      who is lost; and bytes that others have moved between each other, so that a peer that itself
                            waits for a third one counts as alive

gloo has one TCP connection a pair and process group, among this process's own descriptors: those that are new since
before it joined. The ranks tell each other over the store the names of their own ends; at the other end a connection
has the same two addresses, the other way round. The descriptors are gloo's: a duplicate lives only for one look,
because one that lives longer would hold the connection open when gloo closes it, and the other side would not notice.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from isles.base.parsing import parse_json
from isles.comm.tcp import ConnectionState, connection_state, is_far, keep_trying, looks, opened, try_soon
from isles.comm.transport import Deadlines, LinkEstimate

GLANCE = 0.1  # seconds between looks
_CLOSED = 1.0  # seconds that gloo has to read what came before a connection was closed
_UNSEEN = 0.5e6  # bits per second of the slowest line that is waited for where nobody can see whether it moves
T = TypeVar("T")


class Liveness:
    """What one worker knows of the others' lives. silence: seconds until somebody counts as lost; None: the default."""

    def __init__(self, silence: float | None = None) -> None:
        self._silence = Deadlines().silence if silence is None else silence
        self._looking = threading.Lock()  # never waited for: one thread's look serves all others
        self._looked = -math.inf
        self._known: dict[int, dict[str, int]] = {}  # by peer: its connections' names and descriptors
        self._moved: dict[int, int] = {}  # by peer: bytes
        self._at: dict[int, float] = {}  # by peer: host clock when they last changed
        self._again: dict[int, float] = {}
        self._idle: set[int] = set()  # all that was for them has arrived there
        self._others: dict[int, tuple[int, float]] = {}  # by worker: bytes moved by its own word, and when that changed
        self._closed: dict[int, float] = {}  # by peer: when its connections were first seen closed
        self._losses: dict[int, str] = {}
        self._tries_soon = True

    def meet(self, make: Callable[[], T], rank: int, ranks: Sequence[int], store: Callable[[], dist.Store]) -> T:
        """What `make` returns: it joins the workers `ranks`; the connections that it makes are known from then on.
        store: where they all can write, for this group alone.
        """
        before = connections()
        made = make()
        mine = {name: fd for name, fd in connections().items() if name not in before}
        shared = store()
        shared.set(str(rank), json.dumps(sorted(mine)))
        for fd in mine.values():
            for end in opened(fd):
                self._tries_soon &= try_soon(end, self._silence)
        for peer in ranks:
            if peer != rank:
                theirs = {" ".join(reversed(name.split(" "))) for name in parse_json(shared.get(str(peer)))}
                found = {name: fd for name, fd in mine.items() if name in theirs}
                if found:
                    self._known[peer] = {**self._known.get(peer, {}), **found}
        self.look()
        return made

    def waits(self, deadlines: Deadlines, peers: Iterable[int]) -> Deadlines:
        """These, or with more time for long transfers where the connection to some peer cannot be seen."""
        if all(peer in self._known for peer in peers):
            return deadlines
        return replace(deadlines, slowest_link=min(deadlines.slowest_link, _UNSEEN))

    def look(self) -> None:
        """Ask the kernel, if that was not done a moment ago."""
        now = time.monotonic()
        if now - self._looked < GLANCE or not self._looking.acquire(blocking=False):
            return
        try:
            self._looked = now
            for peer, known in list(self._known.items()):
                silence = self._silence if self._tries_soon else None
                looks = [look for name, fd in known.items() if (look := _look(fd, name, silence)) is not None]
                self._note(peer, looks, now)
        finally:
            self._looking.release()

    def moved(self) -> int:
        """Bytes that this worker's connections have carried so far, as of the last look."""
        self.look()
        return sum(list(self._moved.values()))

    def link_estimate(self) -> LinkEstimate | None:
        """The slowest one to another machine; None where no connection is known that leads to one."""
        known = [(name, fd) for own in self._known.values() for name, fd in own.items() if is_far(name)]
        rates = [look.rate for name, fd in known if (look := _look(fd, name)) is not None and look.rate is not None]
        return LinkEstimate(min(rates, default=None), self._tries_soon) if known else None

    def set_counts(self, counts: Sequence[int]) -> None:
        """A launcher's word: by rank, the bytes that each worker says to have moved."""
        for worker, count in enumerate(counts):
            if count != self._others.get(worker, (0, 0.0))[0]:
                self._others[worker] = count, time.monotonic()

    def lose(self, peer: int, why: str) -> None:
        """From now on nobody waits for `peer`."""
        self._losses.setdefault(peer, why)

    def notify_blocked(self, peers: Collection[int | None], seconds: float) -> None:
        """A worker has been blocked for so long because nothing comes from `peers`: called at each glance."""

    def loss_of(self, peer: int | None) -> str | None:
        """Why nothing will come from a peer any more; None for who may still answer."""
        return None if peer is None else self._losses.get(peer)

    def last(self, peer: int | None) -> float:
        """When a byte last moved to or from a peer (None: to or from anyone), host clock; -inf for who is not seen."""
        if peer is None:
            return max(list(self._at.values()), default=-math.inf)
        return self._at.get(peer, -math.inf)

    def last_elsewhere(self, peer: int | None) -> float:
        """When a peer last moved a byte between itself and anyone, by its own word; -inf while we owe it something."""
        if peer is None or peer not in self._idle or peer not in self._others:
            return -math.inf
        return self._others[peer][1]

    def retry_in(self, peer: int | None) -> float:
        """Seconds until the kernel tries once more to reach a peer that did not acknowledge; else 0."""
        return 0.0 if peer is None else self._again.get(peer, 0.0)

    def _note(self, peer: int, looks: Sequence[ConnectionState], now: float) -> None:
        if not looks:
            if now - self._closed.setdefault(peer, now) > _CLOSED:
                self.lose(peer, "the connection to it is closed")
            return
        moved = sum(look.moved for look in looks)
        if moved != self._moved.get(peer):
            self._moved[peer], self._at[peer] = moved, now
        self._again[peer] = max(look.retry_in for look in looks)
        (self._idle.add if all(look.is_idle for look in looks) else self._idle.discard)(peer)


def connections() -> dict[str, int]:
    """Descriptors of this process's TCP connections by `ConnectionState.name`; empty where the kernel does not say."""
    return {look.name: fd for fd, look in looks().items()}


def _look(fd: int, name: str, silence: float | None = None) -> ConnectionState | None:
    """Of the connection `name` behind a descriptor; None where it is no more. silence: have it tried on for so long."""
    for end in opened(fd):
        look = connection_state(end)
        if look is not None and look.name == name:
            if silence is not None:
                keep_trying(end, look, silence)
            return look
    return None

"""Collectives of torch's own on GPUs: a member that is lost is missed, by name, and its group is aborted. NCCL is not
here; its messages are stand-ins that end when they are told to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from isles.comm.errors import PeerLost
from isles.comm.gloo import transport
from isles.comm.gloo import transport as meeting
from isles.comm.gloo import transport as native
from isles.comm.gloo.transfers import Liveness, PostedWork
from isles.comm.gloo.transport import DistributedTransport, NativeGroup
from isles.replicas.island.fsdp import NativeGather


class Clock:
    """Time that passes in sleeps alone. at: (when, what is done then)."""

    def __init__(self) -> None:
        self.now, self.at = 100.0, list[tuple[float, Callable[[], object]]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10_000, "nobody is missed"
        due, self.at = [one for one in self.at if one[0] <= self.now], [one for one in self.at if one[0] > self.now]
        for _, act in due:
            act()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(native, "time", found)
    monkeypatch.setattr(native, "_SOON", 0.01)
    return found


class Message:
    """Ends after some seconds; by itself never."""

    def __init__(self, clock: Clock, seconds: float = 1e9) -> None:
        self.clock, self.ends_at = clock, clock.now + seconds

    def is_completed(self) -> bool:
        return self.clock.now >= self.ends_at


class Processes:
    """A process group that records `abort`."""

    aborted = 0

    def abort(self) -> None:
        self.aborted += 1


def made(silence: float = 60.0) -> tuple[NativeGroup, Liveness]:
    """Worker 1 of the ranks 1, 4 and 6."""
    life = Liveness()
    return NativeGroup(Processes(), 1, (1, 4, 6), life, silence), life


def followed(group: NativeGroup, message: Message) -> PostedWork:
    work = PostedWork(None, None, message.clock.monotonic)
    group.follow([message], work)()
    return work


def test_one_that_ends_is_done(clock: Clock) -> None:
    group, _ = made()
    assert followed(group, Message(clock, 5.0)).error is None and group.error is None and not group.processes.aborted


def test_a_member_that_is_lost_is_named_at_once(clock: Clock) -> None:
    group, life = made()
    clock.at.append((103.0, lambda: life.lose(6, "the connection to it is closed")))
    error = followed(group, Message(clock)).error
    assert isinstance(error, PeerLost) and error.rank == 6 and "closed" in str(error)
    assert group.processes.aborted == 1 and clock.now == pytest.approx(103.0, abs=0.1)


def test_a_member_that_is_silent_is_named_after_the_silence(clock: Clock) -> None:
    """That which was heard of longest ago, from then on."""
    group, life = made(silence=30.0)
    life._at = {4: 98.0, 6: 99.0}
    clock.at.append((105.0, lambda: life._at.update({6: 110.0})))
    clock.at.append((115.0, lambda: life._at.update({4: 108.0})))
    error = followed(group, Message(clock)).error
    assert isinstance(error, PeerLost) and error.rank == 4 and "for 30 s" in str(error)
    assert group.processes.aborted == 1 and clock.now == pytest.approx(138.0, abs=0.1)


def test_a_queue_of_many_is_waited_for_while_it_moves(clock: Clock) -> None:
    """The host is ahead: the last of six ends after five times the silence, and each of the others within it."""
    group, _ = made(silence=30.0)
    others = [Message(clock, 25.0 * number) for number in range(1, 6)]
    clock.at += [(one.ends_at, partial(group.follow, [one])) for one in others]
    group.follow([Message(clock, 150.0)])
    assert group.error is None and not group.processes.aborted and clock.now >= 250


def test_a_lost_group_is_made_anew_under_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its members would find what they left behind when they met before."""
    prefixes: list[str] = []
    monkeypatch.setattr(meeting, "meet", lambda *_: None)
    monkeypatch.setattr(Liveness, "meet", lambda life, make, *_: make())
    monkeypatch.setattr(transport, "_new_group", lambda join, **_: Processes())
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, _: prefixes.append(prefix))
    own = DistributedTransport(1, 7)
    own._store = dist.HashStore()
    first = own.process_group((1, 4, 6), "cuda")
    assert own.process_group((1, 4, 6), "cuda") is first
    own._native_groups[(1, 4, 6), "nccl"].error = PeerLost(4, "killed")
    again = own.process_group((1, 4, 6), "cuda")
    assert again is not first and len(set(prefixes)) == len(prefixes) == 2
    own.close()


def test_the_next_call_of_a_sharded_model_raises_the_loss(clock: Clock) -> None:
    """Nobody waits for FSDP's own collectives: the next one says who was lost."""
    own = DistributedTransport()
    group, life = made()
    own._native_groups[(1, 4, 6), "nccl"] = group
    life.lose(4, "killed")
    group.follow([Message(clock)])
    calls: list[str] = []
    over: Any = SimpleNamespace(ranks=(1, 4, 6), channel="inner", transport=own)
    with pytest.raises(PeerLost, match="worker 4"):
        NativeGather(over, 0)._native(lambda async_op: calls.append("posted"), False)
    assert not calls and group.processes.aborted == 1
    own.close()

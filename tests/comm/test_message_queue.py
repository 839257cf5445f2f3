"""Letters: whole, in order, from anyone; what cannot be one ends its sender's mail, is counted and named."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import isles
from isles.comm.collectives.message_queue import MAGIC, MessageHeader, MessageQueue
from isles.comm.mesh import Mesh
from tests.gloo import run_gloo

RUN, WORK, CONTROL = 77, 1, 2
LENGTHS = {WORK: range(1000, 1001), CONTROL: range(1)}


def mailbox(world: Mesh) -> MessageQueue:
    return MessageQueue(world.world.among(range(world.size), "pipeline"), run=RUN, lengths=LENGTHS)


def taken(box: MessageQueue, messages: int) -> list[Any]:
    """As many letters as that, or fewer where all others are lost."""
    found = []
    while len(found) < messages and len(box.lost) < box.group.size - 1:
        while (message := box.take()) is not None:
            found.append(message)
        if len(found) < messages:
            box.wait()
    while (message := box.take()) is not None:
        found.append(message)
    return found


def talk(world: Mesh) -> Any:
    """Everybody sends 20 letters to everybody, long and short; all must come whole and in order."""
    box = mailbox(world)
    for number in range(20):
        for position in world.world.others:
            body = torch.full((1000,), (7 * world.rank + number) % 251, dtype=torch.uint8)
            kind = WORK if number % 3 else CONTROL
            box.send(position, MessageHeader(kind, 1, 0, number, queue=world.rank), body if kind == WORK else None)
    messages = taken(box, 20 * (world.size - 1))
    box.settle()
    world.world.barrier()
    for message in messages:
        assert message.body.numel() == (1000 if message.header.kind == WORK else 0)
        assert (message.body == (7 * message.sender + message.header.number) % 251).all()
        assert message.header.queue == message.sender
    by = {
        position: [each.header.number for each in messages if each.sender == position]
        for position in world.world.others
    }
    return by


@pytest.mark.parametrize("run", [isles.run_virtual, run_gloo])
def test_messages_come_whole_and_in_order(run: Any) -> None:
    for rank, found in enumerate(run(talk, 3)):
        assert found == {position: list(range(20)) for position in range(3) if position != rank}


def wake(world: Mesh) -> float:
    """Seconds that a wait of a quarter of a second takes, while nothing comes; then one that a letter ends."""
    box, now = mailbox(world), world.transport.now
    world.world.barrier()
    began = now()
    if world.rank == 0:
        box.wait(0.25)
        waited = now() - began
        box.wait(30.0)
        assert box.take() is not None and now() - began < 10
        world.world.barrier()
        return waited
    world.transport.compute(0.6)
    time.sleep(0.6 if world.transport.native else 0.0)
    box.send(0, MessageHeader(CONTROL, 1))
    world.world.barrier()
    return 0.25


@pytest.mark.parametrize("run", [isles.run_virtual, run_gloo])
def test_a_wait_ends_with_its_seconds_or_with_a_message(run: Any) -> None:
    assert run(wake, 2)[0] == pytest.approx(0.25, abs=1e-9 if run is isles.run_virtual else 0.3)


LONG = 2
"""Worker to which a long letter goes while a short one goes to worker 1."""


def crowded(world: Mesh, channel: Any) -> float:
    """Seconds until the short one is there."""
    group, kinds = world.world.among(range(world.size), "pipeline"), {WORK: range(125_001), CONTROL: range(1)}
    box, now = MessageQueue(group, run=RUN, lengths=kinds, channels={WORK: channel}), world.transport.now
    world.world.barrier()
    began = now()
    if world.rank == 0:
        box.send(LONG, MessageHeader(WORK, 1), torch.ones(125_000, dtype=torch.uint8))
        box.send(1, MessageHeader(CONTROL, 1))
        box.settle()
    else:
        (message,) = taken(box, 1)
        assert message.body.numel() == (125_000 if world.rank == LONG else 0) and bool(message.body.all())
    took = now() - began
    world.world.barrier()
    return took


@pytest.mark.parametrize(("channel", "seconds"), [("pipeline", 1.0), ("inner", 0.0)])
def test_a_long_message_on_a_channel_of_its_own_delays_no_short_one(channel: str, seconds: float) -> None:
    """A long one takes a second of the line."""
    took = isles.run_virtual(crowded, 3, args=(channel,), links=isles.Links(bandwidth=1e6, latency=0.0))
    assert took[1] == pytest.approx(seconds, abs=0.01) and took[LONG] == pytest.approx(1.0, abs=0.01)


HOSTILE = {
    "magic": ([MAGIC + 1, RUN, CONTROL, 1, 0, 0, 0, 0, 0, 0], "begins with something else"),
    "run": ([MAGIC, RUN + 1, CONTROL, 1, 0, 0, 0, 0, 0, 0], "another run"),
    "length": ([MAGIC, RUN, WORK, 1, 0, 0, 999, 0, 0, 0], "999 bytes"),
    "huge": ([MAGIC, RUN, WORK, 1, 0, 0, 1 << 62, 0, 0, 0], "bytes"),
    "below": ([MAGIC, RUN, WORK, 1, 0, 0, -1, 0, 0, 0], "bytes"),
    "kind": ([MAGIC, RUN, 9, 1, 0, 0, 0, 0, 0, 0], "kind 9"),
    "number": ([MAGIC, RUN, CONTROL, 1, 0, -5, 0, 0, 0, 0], "below 0"),
}


def attacked(world: Mesh, head: list[int]) -> Any:
    """Worker 2 sends a head that is none, and more; 0 and 1 go on with each other."""
    box = mailbox(world)
    if world.rank == 2:
        call = world.world.call("pipeline", round=0)
        works = [call.send(position, torch.tensor(head), 62) for position in (0, 1)]
        box.send(0, MessageHeader(CONTROL, 1))
        world.world.barrier()
        return [work.error for work in works]
    for number in range(3):
        box.send(1 - world.rank, MessageHeader(WORK, 1, 0, number), torch.zeros(1000, dtype=torch.uint8))
    messages = [message for message in taken(box, 3) if message.sender != 2]
    while 2 not in box.lost:
        box.wait(20.0)
    box.settle()
    found = len(messages), str(box.lost[2]), dict(box.refused), list(box.lost)
    world.world.barrier()
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_message_of_this_run_ends_reception_from_its_sender_alone(name: str) -> None:
    head, why = HOSTILE[name]
    for messages, error, refused, lost in isles.run_virtual(attacked, 3, args=(head,))[:2]:
        assert (messages, refused, lost) == (3, {2: 1}, [2])
        assert error.startswith("worker 2 sent what cannot be read") and why in error


def test_the_same_with_real_processes() -> None:
    head, _ = HOSTILE["huge"]
    for messages, _, refused, lost in run_gloo(attacked, 3, args=(head,))[:2]:
        assert (messages, refused, lost) == (3, {2: 1}, [2])


def left(world: Mesh) -> Any:
    """Worker 1 sends one letter and ends; its letter is read, then its loss is told once."""
    box = mailbox(world)
    if world.rank == 1:
        box.send(0, MessageHeader(WORK, 3), torch.ones(1000, dtype=torch.uint8))
        box.settle()
        raise KeyError("gone")
    while 1 not in box.lost:
        box.wait(30.0)
    message = box.take()
    box.send(1, MessageHeader(CONTROL, 1))
    before = world.transport.now()
    box.wait(0.0)  # told at once, as it was not told yet
    box.wait(0.1)
    assert world.transport.now() >= before + 0.1
    return message is not None and message.header.step, type(box.lost[1]).__name__, math.isfinite(before)


def test_a_loss_is_reported_after_the_last_message() -> None:
    assert isles.run_virtual(left, 2, return_errors=True)[0] == (3, "PeerLost", True)


def test_a_sender_that_is_not_read_waits() -> None:
    """No more than 256 letters of one sender lie here unread; all come in the end."""

    def flood(world: Mesh) -> Any:
        box = mailbox(world)
        if world.rank == 1:
            for number in range(700):
                box.send(0, MessageHeader(CONTROL, 1, 0, number))
            world.world.barrier()
            return None
        world.transport.compute(60.0)
        box.wait(60.0)
        held = len(box.messages)
        messages = taken(box, 700)
        world.world.barrier()
        return held, [message.header.number for message in messages] == list(range(700))

    assert isles.run_virtual(flood, 2)[0] == (256, True)

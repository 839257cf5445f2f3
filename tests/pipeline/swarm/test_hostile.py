"""A peer that sends what cannot be is named, counted and left out; the others' step is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isles
from isles.comm.collectives.message_queue import MAGIC, MessageHeader
from isles.comm.errors import CommError
from isles.comm.mesh import Mesh
from isles.pipeline.peers.inbox import BACKWARD, FORWARD, MEAN, SHARD, STATE_TRANSFER, TAKEN, VOTE, WELCOME
from isles.pipeline.swarm.ledger import from_words
from isles.pipeline.swarm.swarm import Swarm
from tests.pipeline.swarm.peers import Setting, furthest, swarm_of, text

SETTING = Setting(microbatches=12, charged=True, patience=100.0)
LIAR = 4  # of stage 1, whose peers are 3, 4 and 5
LINKS = isles.Links(bandwidth=1e7, latency=0.02)


def spoil(swarm: Swarm, what: str) -> None:
    """Make this peer send it."""
    work, inbox, queue = swarm.peer.work, swarm.agreement.inbox, swarm.agreement.inbox.queue
    honest_forward, honest_backward = work.forward, work.backward

    def forward(*args: Any) -> Any:
        done = honest_forward(*args)
        assert done.sent is not None
        done.sent = torch.full_like(done.sent, 0xFF)
        return done

    def backward(*args: Any) -> Any:
        saved_pass = honest_backward(*args)
        object.__setattr__(saved_pass, "back", torch.full_like(saved_pass.back, 0xFF))
        return saved_pass

    epoch = inbox.epoch

    def everybody(kind: int, nbytes: int) -> None:
        for other in queue.group.others:
            queue.send(other, MessageHeader(kind, 0, epoch), torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None)

    if what == "activations":
        work.forward = forward  # type: ignore[method-assign]
    elif what == "gradients":
        work.backward = backward  # type: ignore[method-assign]
    elif what == "word":
        epoch += 1
        everybody(VOTE, 24)
    elif what == "sums":
        swarm._own = lambda: torch.full_like(torch.cat([p.reshape(-1) for p in work.stage.parameters()]), torch.nan)  # type: ignore[method-assign]
    elif what == "one share":
        honest_send = queue.send

        def send(position: int, note: MessageHeader, body: Any = None) -> None:
            is_shard = note.kind == SHARD and position == min(queue.group.others, key=lambda other: abs(other - LIAR))
            honest_send(position, note, torch.full_like(body, 0xFF) if is_shard else body)

        queue.send = send  # type: ignore[method-assign]
    elif what == "share":
        everybody(SHARD, 8)
        everybody(MEAN, 8)
    elif what == "length":
        everybody(FORWARD, 3)
    elif what == "long":
        everybody(WELCOME, 1 << 20)
    elif what == "another run":
        for other in queue.group.others:
            head = torch.tensor([MAGIC, 1, FORWARD, 0, 0, 0, 0, 0, 0, 0])
            queue.group.call("pipeline", round=0).send(other, head, 62)
    elif what == "unasked":  # is no message for those who get it, and changes nothing
        everybody(TAKEN, 0)
        everybody(STATE_TRANSFER, 100)
        form = work.form
        everybody(BACKWARD, form.gradient_bytes + form.loss_dtype.itemsize)


def train(world: Mesh, what: str, setting: Setting = SETTING, liar: int = LIAR) -> Any:
    torch.set_num_threads(1)
    swarm = swarm_of(world, setting)
    swarm.peer.work.text = lambda microbatch: text(microbatch, 1)
    if world.rank == liar:
        spoil(swarm, what)
    try:
        result = swarm.step()
    except CommError as error:
        return str(error)
    queue = swarm.agreement.inbox.queue
    queue.settle()
    gradients = {name: parameter.grad for name, parameter in swarm.peer.work.stage.named_parameters()}
    told = [(gradients, result.loss)], dict(queue.refused), str(queue.lost.get(liar)), swarm.agreement.members
    return *told, world.transport.now()


@pytest.mark.parametrize(
    "what",
    [
        *("activations", "word", "length", "another run", "share", "unasked", "sums"),
        *(pytest.param(what, marks=pytest.mark.long) for what in ("gradients", "long", "one share")),
    ],
)
def test_who_sends_what_cannot_be_is_left_out(what: str) -> None:
    done = isles.run_virtual(train, 9, links=LINKS, args=(what,), step_seconds=0.3)
    honest = [each for rank, each in enumerate(done) if rank != LIAR]
    assert furthest(SETTING, [each[0] for each in honest]) < 1e-12
    if what in ("unasked", "share"):
        return
    assert sum(each[1].get(LIAR, 0) for each in honest) >= 1 and all(set(each[1]) <= {LIAR} for each in honest)
    assert any("worker 4" in each[2] for each in honest)
    assert all(each[3] == (0, 1, 2, 3, 5, 6, 7, 8) for each in honest)
    assert max(each[4] for each in honest) < min(SETTING.deadlines), "nobody waits for what was refused elsewhere"
    assert isinstance(done[LIAR], str)  # it has ended, by whatever it saw of that first


@pytest.mark.parametrize("liar", [1, 2])
def test_who_is_told_of_a_liar_by_the_last_letter_does_not_sleep_over_it(liar: int) -> None:
    """Of the one microbatch, which goes to either of stage 1: nothing else comes that would wake anybody."""
    setting = Setting(peers=(1, 2, 1), microbatches=1, charged=True, patience=100.0)
    done = isles.run_virtual(train, 4, links=LINKS, args=("gradients", setting, liar), step_seconds=0.3)
    told = [each for each in done if not isinstance(each, str)]
    assert furthest(setting, [each[0] for each in told]) < 1e-12
    assert all(each[-1] < setting.patience / 2 for each in told)


def test_a_set_of_peers_that_nobody_writes_is_read_all_the_same() -> None:
    """A number below 0 has no highest bit: reading it bit by bit took for ever."""
    assert from_words([-8, 1], 70) == {*range(3, 63), 63}

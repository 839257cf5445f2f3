"""A swarm's validation loss, and the whole model at one peer, even if peers are lost meanwhile.

The loss is computed by forward passes through the stages:

origin   the first peer of stage 0: batches -> LOOK -> a peer of stage 1 -> ... -> LOSS from the last stage
others   serve until the origin has all losses
all      agree on the sum; if the origin is lost, they begin again with the next one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor, nn

from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import Malformed, Refused
from isles.models.cuts import Piece
from isles.models.stages import Stage
from isles.network.routing.events import Task
from isles.pipeline.peers.inbox import HOME, LOOK, LOSS, STATE, as_bits, as_number
from isles.pipeline.swarm.swarm import Swarm
from isles.pipeline.wire import StageForm

_UNDER_WAY = 8  # the origin's batches in flight, per peer of stage 1


class SwarmEvaluator:
    """Evaluates the weights of `swarm`; all peers call it together."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm, self.work = swarm, swarm.peer.work
        self.inbox, self.agreement = swarm.agreement.inbox, swarm.agreement

    def loss(self, batches: Callable[[], Iterable[Tensor]], rebuild: Callable[[], None] | None = None) -> float:
        """Mean loss in nats over the rows of `batches` (b, T+1), which only the origin calls; the same at all peers.
        NaN without rows. rebuild: see `Swarm.step`.
        """
        with self.work.evaluating():
            while True:
                self.agreement.agree([])
                self.swarm.apply_placement(rebuild)
                self.work.stage.eval()  # again: a rebuild may have replaced the stage
                origin = self.swarm.peers(0)[0]
                if origin == self.swarm.me:
                    own = self._ask(batches())
                else:
                    self._serve(origin)
                    own = (0.0, -1)
                votes = self.agreement.agree([as_bits(own[0]), own[1]])
                self.swarm.apply_placement(rebuild)
                if origin in votes and votes[origin][1] >= 0:
                    total, rows = as_number(votes[origin][0]), votes[origin][1]
                    return total / rows if rows else float("nan")

    def _ask(self, batches: Iterable[Tensor]) -> tuple[float, int]:
        """The sum of the losses over rows, and the number of rows; (0, -1) if a stage was lost meanwhile."""
        parts = [part for batch in batches for part in batch.split(self.work.form.sequences)]
        losses: dict[int, float] = {}
        waiting, under_way, lost = deque(range(len(parts))), dict[int, int](), set[int]()
        epochs = cycle(self.swarm.peer.stages[1])
        while len(losses) < len(parts):
            for message in self._messages():
                if message.header.kind == LOSS and message.body.numel() == 8:
                    losses[message.header.number] = float(message.body.view(torch.float64))
                    under_way.pop(message.header.number, None)
            if self.agreement.lost != lost:  # any batch in flight may have been at the lost peer: send all again
                lost = set(self.agreement.lost)
                waiting.extendleft(under_way)
                under_way.clear()
            if self.agreement.is_due or any(set(peers) <= lost for peers in self.swarm.peer.stages):
                return 0.0, -1
            if waiting and len(under_way) < _UNDER_WAY * len(self.swarm.peer.stages[1]):
                number = waiting.popleft()
                receiver = next(peer for peer in epochs if peer not in lost)
                form = replace(self.work.form, sequences=len(parts[number]))
                self._send(receiver, number, self.swarm.me, form, self.work.run_alone(form, parts[number], None, "on"))
                under_way[number] = receiver
            elif len(losses) < len(parts):
                self._wait()
        for position in self.agreement.members:
            if position != self.swarm.me:
                self.inbox.queue.send(position, MessageHeader(HOME, 0, self.inbox.epoch))
        return sum(losses[number] * len(part) for number, part in enumerate(parts)), sum(map(len, parts))

    def _serve(self, origin: int) -> None:
        while True:
            messages = self._messages()
            for message in messages:
                if message.header.kind == HOME and message.sender == origin:
                    return
                if message.header.kind == LOOK:
                    self._pass_on(message)
            lost = self.agreement.lost
            if self.agreement.is_due or origin in lost or any(set(peers) <= lost for peers in self.swarm.peer.stages):
                return
            if not messages:
                self._wait()

    def _pass_on(self, message: QueuedMessage) -> None:
        rows, ends = message.header.extra, self.work.ends
        form = replace(self.work.form, sequences=min(max(rows, 1), self.work.form.sequences))
        if form.sequences != rows or message.body.numel() != form.nbytes(Task("F", 0, 1)):
            rank = self.inbox.queue.group.ranks[message.sender]
            self.inbox.queue.refuse(message.sender, Malformed(rank, "a batch of another length"))
            return
        try:
            out = self.work.run_alone(form, None, message.body, "loss" if ends else "on")
        except Refused as error:
            self.inbox.queue.refuse(message.sender, error)
            return
        origin, number = message.header.queue, message.header.number
        if not ends:
            lost = self.agreement.lost
            following = [peer for peer in self.swarm.peer.stages[self.swarm.peer.stage + 1] if peer not in lost]
            if following:
                self._send(following[number % len(following)], number, origin, form, out)
        elif origin in self.agreement.members and origin != self.swarm.me:
            body = out.to(device="cpu", dtype=torch.float64).reshape(1).view(torch.uint8)
            self.inbox.queue.send(origin, MessageHeader(LOSS, 0, self.inbox.epoch, number), body)

    def _send(self, receiver: int, number: int, origin: int, form: StageForm, wire: Tensor) -> None:
        note = MessageHeader(LOOK, 0, self.inbox.epoch, number, queue=origin, extra=form.sequences)
        self.inbox.queue.send(receiver, note, wire)

    def _messages(self) -> Sequence[QueuedMessage]:
        self.inbox.sort()
        return self.inbox.of_epoch()

    def _wait(self) -> None:
        self.inbox.wait_for_news(self.agreement.patience, self.agreement.patience)


def state_bytes(whole: nn.Module, piece: Piece) -> int:
    """Bytes of the state of one stage of `whole`, which may be on the meta device."""
    return sum(tensor.nbytes for tensor in Stage(whole, piece).state_dict().values())


@torch.no_grad()
def gathered(
    swarm: Swarm, whole: nn.Module, pieces: Sequence[Piece], rebuild: Callable[[], None] | None = None
) -> bool:
    """Fill `whole` with the weights of all stages at the first remaining peer of stage 0; returns whether this is that
    peer. All peers call it together; at the others `whole` may be on the meta device. Bytes sent: a stage's state, by
    the first peer of each other stage. rebuild: see `Swarm.step`.
    """
    inbox, agreement = swarm.agreement.inbox, swarm.agreement
    while True:
        agreement.agree([])
        swarm.apply_placement(rebuild)
        firsts = [swarm.peers(stage)[0] for stage in range(swarm.count)]
        has_model = 1
        if swarm.me == firsts[0]:
            has_model = int(_fill(swarm, whole, pieces, firsts))
        elif swarm.me in firsts:
            state = swarm.peer.work.stage.state_dict().values()
            body = torch.cat([as_bytes(tensor.detach().to("cpu").contiguous().view(-1)) for tensor in state])
            inbox.queue.send(firsts[0], MessageHeader(STATE, 0, inbox.epoch, swarm.peer.stage), body)
        votes = agreement.agree([has_model])
        swarm.apply_placement(rebuild)
        if firsts[0] in votes and votes[firsts[0]][0]:
            return swarm.me == firsts[0]


def _fill(swarm: Swarm, whole: nn.Module, pieces: Sequence[Piece], firsts: Sequence[int]) -> bool:
    """Receive the other stages into `whole`; False if a sender is lost before."""
    inbox, queue = swarm.agreement.inbox, swarm.agreement.inbox.queue
    state = whole.state_dict()
    for name, tensor in swarm.peer.work.stage.state_dict().items():
        state[name].copy_(tensor)
    missing = set(range(1, swarm.count))
    while missing:
        inbox.sort()
        for message in inbox.of_epoch():
            stage = message.header.number
            if message.header.kind != STATE or stage not in missing or message.sender != firsts[stage]:
                continue
            names = list(Stage(whole, pieces[stage]).state_dict())
            if message.body.numel() != sum(state[name].nbytes for name in names):
                queue.refuse(message.sender, Malformed(queue.group.ranks[message.sender], "a stage of another length"))
                continue
            _copy(message.body, [state[name] for name in names])
            missing.discard(stage)
        if any(firsts[stage] in swarm.agreement.lost for stage in missing):
            return False
        if missing:
            inbox.wait_for_news(swarm.agreement.patience, swarm.agreement.patience, firsts[min(missing)])
    return True


def _copy(body: Tensor, tensors: Sequence[Tensor]) -> None:
    begin = 0
    for tensor in tensors:
        part = body[begin : begin + tensor.nbytes].clone().view(tensor.dtype)  # a copy: the slice may be unaligned
        tensor.copy_(part.view(tensor.shape))
        begin += tensor.nbytes

"""One peer of a swarm: the message loop of a step, and its repair.

    origin      a peer of stage 0: text -> forward -> a peer of stage 1, chosen by its speed
    FORWARD     forward -> TAKEN to the sender -> a peer of the next stage
    BACKWARD    backward along the microbatch's route
    HOME        an origin has all of its gradients; when all have, the peers settle (`isles.pipeline.swarm.swarm`)

A peer retains its output until the gradient arrives: if the receiver is lost or late, it sends it to another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import Refused
from isles.comm.group import Group
from isles.models.stages import Stage
from isles.network.routing.events import Task
from isles.pipeline.compute import Context, OpenPass, StageCompute, StageShares
from isles.pipeline.config import PipelineConfig
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import BACKWARD, FORWARD, HOME, TAKEN
from isles.pipeline.swarm.balancer import PeerBalancer
from isles.pipeline.swarm.ledger import PartialRoute, RepairPlan
from isles.pipeline.wire import StageForm

_FORWARD, _BACKWARD = Task("F", 0, 0), Task("B", 0, 0)


@dataclass(slots=True)
class OpenWork:
    """A microbatch whose backward pass is pending here. wire: input from position `sender`, sent: output, both as
    bytes. seconds: compute time so far.

    receiver: position that it was sent to last, at second `since`; taken: whether that one has done its forward pass.
    asked: all positions that it was sent to; a gradient from any of them is accepted.
    """

    passed: OpenPass
    wire: Tensor | None
    sent: Tensor | None
    seconds: float
    sender: int | None
    receiver: int | None = None
    since: float = 0.0
    taken: bool = False
    asked: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SavedPass:
    """What a peer saves of a microbatch that it has counted, as bytes. wire: input; sent: output; gradient: of the
    output; back: of the input. wire and back are None at the first stage, sent and gradient at the last.
    """

    wire: Tensor | None
    sent: Tensor | None
    gradient: Tensor | None
    back: Tensor | None
    loss: Tensor


class StageWork(StageCompute):
    """The computation of `stage` on messages. text: the microbatch of a number in the current step, (B, T+1) int64, for
    the first stage. scale: the divisor of a loss, the microbatches of a step.
    """

    def __init__(
        self,
        stage: Stage,
        group: Group,
        form: StageForm,
        scale: int,
        *,
        shares: StageShares | None,
        autocast: Context,
    ) -> None:
        super().__init__(stage, group, form, scale, autocast=autocast)
        self.text: Callable[[int], Tensor] | None = None
        self.shares = shares

    @property
    def ends(self) -> bool:
        """Whether this stage makes the loss."""
        return self.stage.piece.leaves

    def forward(self, microbatch: int, wire: Tensor | None, sender: int | None) -> OpenWork:
        """Run the forward pass of a microbatch. wire: input from position `sender`; None at the first stage. Refused if
        it is no valid payload.
        """
        began, text = self.group.transport.now(), None
        if wire is None:
            assert self.text is not None
            text = self.text(microbatch)
        passed, sent = self.run_forward(_FORWARD, text, wire, sender, "loss" if self.ends else "on")
        self.charge(0.0 if self.shares is None else self.shares.forward)
        return OpenWork(passed, wire, sent, self.group.transport.now() - began, sender)

    def backward(self, done: OpenWork, gradient: Tensor | None, sender: int | None) -> SavedPass:
        """Add to the stage's gradients. gradient: of the output, from position `sender`; None at the last stage."""
        began, shares = self.group.transport.now(), self.shares
        loss, back = self.run_backward(_BACKWARD, done.passed, gradient, sender)
        if shares is not None:
            self.charge(shares.both - shares.forward if gradient is None else shares.backward)
        done.seconds += self.group.transport.now() - began
        return SavedPass(done.wire, done.sent, gradient, back, loss)

    def take_back(self, microbatch: int, saved_pass: SavedPass) -> None:
        """Subtract from the gradients what `backward` added for the microbatch, by computing it again."""
        gradients = [(parameter, parameter.grad) for parameter in self.stage.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        self.backward(self.forward(microbatch, saved_pass.wire, None), saved_pass.gradient, None)
        with torch.no_grad():
            for parameter, before in gradients:
                if before is not None and parameter.grad is not None:
                    before -= parameter.grad
                parameter.grad = before


@dataclass(slots=True)
class SwarmCounts:
    """Counts of the run so far, in microbatches. sent_again: to another peer; repaired: run again from ledgers;
    taken_back: counted twice and subtracted; counted: added to gradients. restarted: steps. seconds: compute time of
    the current step's microbatches.
    """

    sent_again: int = 0
    repaired: int = 0
    taken_back: int = 0
    restarted: int = 0
    counted: int = 0
    seconds: float = 0.0


class StepTally(NamedTuple):
    """What a peer has counted in a step. counted: microbatches added to its gradients (twice if counted twice). ledger:
    their saved passes ("exact" only). losses: of these microbatches, nats.
    """

    counted: list[int]
    ledger: dict[int, SavedPass]
    losses: dict[int, Tensor]


class SwarmPeer:
    """One peer and its microbatches. room: the most that an origin has in flight; None: no limit. stages: the positions
    of each stage's peers (`set_stages`).
    """

    def __init__(
        self, work: StageWork, agreement: Agreement, config: PipelineConfig, room: int | None, seed: int
    ) -> None:
        self.work, self.agreement, self.config, self.room = work, agreement, config, room
        self.inbox, queue = agreement.inbox, agreement.inbox.queue
        self._chooses_again = config.swarm.consistency != "strict"
        self.me, self.now = queue.group.rank, queue.group.transport.now
        self.stages: list[tuple[int, ...]] = []
        self.stage = 0
        self.forget()
        self.counts = SwarmCounts()
        self._seed = seed
        self._balancer = PeerBalancer(seed)
        self._under: dict[int, OpenWork] = {}
        self._forwards: deque[QueuedMessage] = deque()
        self._backwards: deque[QueuedMessage] = deque()
        self._queued: list[int] = []
        self._home: set[int] = set()
        self._pending: set[int] = set()
        self._routes: Mapping[int, PartialRoute] = {}

    @property
    def queue(self) -> int:
        return len(self._forwards) + len(self._backwards)

    def set_stages(self, stages: Sequence[Sequence[int]], stage: int) -> None:
        """Set the peers of all stages; this one serves `stage`."""
        if stage != self.stage:
            self._balancer = PeerBalancer(self._seed)
        self.stages, self.stage = [tuple(sorted(peers)) for peers in stages], stage
        following = self.stages[stage + 1] if stage + 1 < len(self.stages) else ()
        for peer in set(self._balancer.peers) - set(following):
            self._balancer.lose(peer)
        for peer in following:
            self._balancer.join(peer)

    def forget(self) -> None:
        """Clear the tally, at the start of a step."""
        self.tally = StepTally([], {}, {})

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, between two steps."""
        return {"balancer": self._balancer.state_dict(), "counts": asdict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; this peer must serve the same stage."""
        self._balancer.load_state_dict(state["balancer"])
        self.counts = SwarmCounts(**state["counts"])

    def mean_queue(self) -> int:
        """Mean number of microbatches that waited here since the last call, in thousandths."""
        queued, self._queued = self._queued, []
        return round(1000 * sum(queued) / len(queued)) if queued else 0

    def run(self, mine: Collection[int]) -> bool:
        """Start the microbatches `mine` (at an origin), and serve those of others until all remaining origins have
        their gradients, or an agreement is due. False if a peer was lost meanwhile.
        """
        self._clear()
        waiting, self._pending = deque(sorted(mine)), set(mine)
        while not self._is_broken():
            self._take()
            self._forget_lost()
            if self.stage == 0 and not self._pending and self.me not in self._home:
                self._go_home()
            if self._backwards:
                self._backward(self._backwards.popleft())
            elif waiting and (self.room is None or len(self._under) < self.room):
                self._originate(waiting.popleft())
            elif self._forwards:
                self._forward(self._forwards.popleft())
            elif set(self.stages[0]) - self.agreement.lost <= self._home:
                break
            else:
                self._wait()
        return not self.agreement.lost

    def repair(self, plan_repairs: RepairPlan) -> None:
        """Do this peer's part of `plan_repairs`. Returns early if this or another peer has lost one."""
        self._clear()
        for microbatch, peer in plan_repairs.doubles:
            if peer == self.me:
                self.work.take_back(microbatch, self.tally.ledger.pop(microbatch))
                self.tally.counted.remove(microbatch)
                self.counts.taken_back += 1
        self._routes = {route.microbatch * len(self.stages) + route.first: route for route in plan_repairs.runs}
        own = [route for route in plan_repairs.runs if self.me in route.visits]
        answers = {route.microbatch for route in plan_repairs.runs if route.sink == self.me}
        for route in plan_repairs.runs:
            if route.feed == self.me:
                sent = self.tally.ledger[route.microbatch].sent
                self._send(route.visits[0], FORWARD, route.microbatch, sent)
        starts = deque(route.microbatch for route in own if route.first == 0 and self.stage == 0)
        self.counts.repaired += len(own)
        while not self.agreement.lost and not self.agreement.is_due:
            self._take()
            if self._backwards:
                self._backward(self._backwards.popleft())
            elif self._forwards:
                message = self._forwards.popleft()
                answers.discard(message.header.number)
                self._forward(message)
            elif starts and (self.room is None or len(self._under) < self.room):
                self._originate(starts.popleft())
            elif not answers and all(route.microbatch in self.tally.ledger for route in own):
                break
            else:
                self._wait()
        self._routes = {}

    # One message

    def _take(self) -> None:
        self.inbox.sort()
        for message in self.inbox.of_epoch():
            kind, sender, number = message.header.kind, message.sender, message.header.number
            if kind == FORWARD and self.stage and sender in self.stages[self.stage - 1]:
                self._forwards.append(message)
            elif kind == BACKWARD:
                under = self._under.get(number)
                if under is not None and sender in under.asked:
                    under.receiver = None  # its gradient is here: no deadline any more
                    self._backwards.append(message)
            elif kind == TAKEN:
                under = self._under.get(number)
                if under is not None and under.receiver == sender and not under.taken:
                    under.taken, under.since = True, self.now()
            elif kind == HOME and sender in self.stages[0]:
                self._home.add(sender)

    def _originate(self, microbatch: int) -> None:
        self._under[microbatch] = self.work.forward(microbatch, None, None)
        self._send_on(microbatch)

    def _forward(self, message: QueuedMessage) -> None:
        number, sender = message.header.number, message.sender
        if number in self.tally.ledger:  # counted here already, on another route
            self._answer(sender, number, self.tally.ledger[number], 0.0)
            return
        if number in self._under:  # it came on another route as well: answer the later sender
            self._under[number].sender = sender
            return
        try:
            self._under[number] = self.work.forward(number, message.body, sender)
        except Refused as error:
            self.inbox.queue.refuse(sender, error)
            return
        if self.work.ends:
            self._count(number, None, None)
            return
        self.inbox.queue.send(sender, self._note(TAKEN, number))
        self._send_on(number)

    def _backward(self, message: QueuedMessage) -> None:
        number, sender = message.header.number, message.sender
        if number not in self._under:
            return  # a late answer of another route
        self._balancer.answered(
            sender, message.header.nanoseconds / 1e9, 1, wire=message.wire, queue=message.header.queue
        )
        self._count(number, message.body, sender)

    def _count(self, number: int, gradient: Tensor | None, source: int | None) -> None:
        under = self._under[number]
        try:
            saved_pass = self.work.backward(under, gradient, source)
        except Refused as error:
            assert source is not None
            self.inbox.queue.refuse(source, error)
            under.receiver = source  # lost now, so `_forget_lost` sends the microbatch to another peer
            return
        self._queued.append(self.queue)
        del self._under[number]
        self._pending.discard(number)
        self.tally.counted.append(number)
        self.tally.losses[number] = saved_pass.loss
        self.counts.counted += 1
        self.counts.seconds += under.seconds
        if self.config.swarm.consistency == "exact":
            self.tally.ledger[number] = saved_pass
        if under.sender is not None:
            self._answer(under.sender, number, saved_pass, under.seconds)

    def _answer(self, receiver: int, number: int, saved_pass: SavedPass, seconds: float) -> None:
        self.inbox.queue.send(receiver, self._note(BACKWARD, number, seconds), saved_pass.back)

    def _send_on(self, number: int) -> None:
        under = self._under[number]
        route = self._route(number)
        late = under.receiver if route is None else None
        receiver = self._balancer.choose(besides=late) if route is None else route.after(self.me)
        assert receiver is not None
        under.receiver, under.since, under.taken = receiver, self.now(), False
        under.asked.add(receiver)
        self._send(receiver, FORWARD, number, under.sent)

    def _route(self, number: int) -> PartialRoute | None:
        return next(
            (
                route
                for first in range(self.stage + 1)
                if (route := self._routes.get(number * len(self.stages) + first)) is not None
                and self.me in route.visits
            ),
            None,
        )

    def _send(self, receiver: int, kind: int, number: int, body: Tensor | None) -> None:
        self.inbox.queue.send(receiver, self._note(kind, number), body)

    def _note(self, kind: int, number: int, seconds: float = 0.0) -> MessageHeader:
        return MessageHeader(kind, 0, self.inbox.epoch, number, nanoseconds=round(seconds * 1e9), queue=self.queue)

    def _go_home(self) -> None:
        self._home.add(self.me)
        for position in self.agreement.members:
            if position != self.me:
                self._send(position, HOME, 0, None)

    # Who is lost or late

    def _clear(self) -> None:
        self._under.clear()
        self._forwards.clear()
        self._backwards.clear()
        self._home.clear()

    def _is_broken(self) -> bool:
        """Whether this run of the step cannot be completed."""
        lost = self.agreement.lost
        if self.agreement.is_due:
            return True
        return bool(lost) and (not self._chooses_again or any(set(peers) <= lost for peers in self.stages))

    def _forget_lost(self) -> None:
        """Send microbatches whose receiver is lost or late to another peer."""
        lost = self.agreement.lost
        for peer in lost & self._balancer.peers.keys():
            self._balancer.lose(peer)
        if not self._chooses_again or not len(self._balancer):
            return
        for number, under in list(self._under.items()):
            if under.receiver is None:
                continue
            if under.receiver in lost:
                self.counts.sent_again += 1
                self._send_on(number)
            elif self.now() >= self._until(under):
                self._balancer.late(under.receiver, self.now() - under.since, 1)
                self.counts.sent_again += 1
                self._send_on(number)

    def _until(self, under: OpenWork) -> float:
        limits = self.config.swarm
        return under.since + (limits.backward_deadline if under.taken else limits.forward_deadline)

    def _wait(self) -> None:
        """Wait for a message, or until a receiver is late. DeadlinePassed if no message arrives at all."""
        if self.agreement.is_due:
            return  # the message that made it due was sorted already, so the wait below would not end by it
        seconds = patience = self.agreement.patience
        if self._chooses_again and not self._routes:
            limits = [self._until(under) for under in self._under.values() if under.receiver is not None]
            seconds = min([seconds, *(max(until - self.now(), 0.0) for until in limits)])
        self.inbox.wait_for_news(seconds, patience)

"""One peer of a swarm: a loop over messages, and what all agree on between two steps.

    origin      text -> forward -> some peer of stage 1, by its speed
    FORWARD     forward -> TAKEN to the sender -> some peer of the next stage
    BACKWARD    backward along the way that the microbatch came
    HOME        an origin has all of its gradients; when all have, the ledger are opened

What leaves a stage is kept until its gradient has come, so another peer can do the rest where one is lost or late.
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
    """A microbatch under way here: its forward pass, whose backward is to come. wire: what came from position `sender`,
    sent: what left, as bytes. seconds: that it computed so far.

    receiver: whom it went to last, since when, and whether it is `taken`, its forward pass done there. asked: all whom
    it went to, whose gradients are taken.
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
    """What a peer keeps of a microbatch that it has counted, as bytes: what came, what left, the gradient of that, and
    the gradient of what came. wire and back are None at the first stage, sent and gradient at the last.
    """

    wire: Tensor | None
    sent: Tensor | None
    gradient: Tensor | None
    back: Tensor | None
    loss: Tensor


class StageWork(StageCompute):
    """`stage` and its messages. text: a microbatch of the step under way by its number, (B, T+1) int64, for the first
    stage. scale: what a loss is divided by, the microbatches of a step.
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
        """wire: what came from position `sender`; None at the first stage. Refused where that cannot be a payload."""
        began, text = self.group.transport.now(), None
        if wire is None:
            assert self.text is not None
            text = self.text(microbatch)
        passed, sent = self.run_forward(_FORWARD, text, wire, sender, "loss" if self.ends else "on")
        self.charge(0.0 if self.shares is None else self.shares.forward)
        return OpenWork(passed, wire, sent, self.group.transport.now() - began, sender)

    def backward(self, done: OpenWork, gradient: Tensor | None, sender: int | None) -> SavedPass:
        """Add to the gradients of the stage. gradient: what came from position `sender`; None where the loss is."""
        began, shares = self.group.transport.now(), self.shares
        loss, back = self.run_backward(_BACKWARD, done.passed, gradient, sender)
        if shares is not None:
            self.charge(shares.both - shares.forward if gradient is None else shares.backward)
        done.seconds += self.group.transport.now() - began
        return SavedPass(done.wire, done.sent, gradient, back, loss)

    def take_back(self, microbatch: int, saved_pass: SavedPass) -> None:
        """Take what `backward` added of it out of the gradients again, by doing it once more."""
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
    """Of a run so far. sent_again: microbatches, to another peer; repaired: run by the ledger; taken_back: doubles;
    restarted: steps; counted: microbatches added to gradients. seconds: computed for those of this step.
    """

    sent_again: int = 0
    repaired: int = 0
    taken_back: int = 0
    restarted: int = 0
    counted: int = 0
    seconds: float = 0.0


class StepTally(NamedTuple):
    """What a peer has counted of a step: the microbatches added to its gradients, doubles twice; the ledger of them,
    where they are kept; the losses that it knows.
    """

    counted: list[int]
    ledger: dict[int, SavedPass]
    losses: dict[int, Tensor]


class SwarmPeer:
    """This worker's share of the microbatches. room: that an origin has under way at most; None: as many as there are.
    stages: the positions of each stage's peers, kept by whoever settles.
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
        """The peers are these from now on, and this one serves `stage`."""
        if stage != self.stage:
            self._balancer = PeerBalancer(self._seed)
        self.stages, self.stage = [tuple(sorted(peers)) for peers in stages], stage
        following = self.stages[stage + 1] if stage + 1 < len(self.stages) else ()
        for peer in set(self._balancer.peers) - set(following):
            self._balancer.lose(peer)
        for peer in following:
            self._balancer.join(peer)

    def forget(self) -> None:
        """Count a step from its beginning."""
        self.tally = StepTally([], {}, {})

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, between two steps."""
        return {"balancer": self._balancer.state_dict(), "counts": asdict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, at the stage where it was made."""
        self._balancer.load_state_dict(state["balancer"])
        self.counts = SwarmCounts(**state["counts"])

    def mean_queue(self) -> int:
        """Microbatches that waited here since this was asked last, on average, in thousandths."""
        queued, self._queued = self._queued, []
        return round(1000 * sum(queued) / len(queued)) if queued else 0

    def run(self, mine: Collection[int]) -> bool:
        """Send the microbatches `mine` (of an origin) on their way, and serve those of others until all origins that
        are left have their gradients, or all are to agree. False where somebody was lost meanwhile.
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
        """Do this peer's share of `plan_repairs`. Comes back early where somebody is lost, here or to another one."""
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
                    under.receiver = None  # nobody is waited for any more
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
        if number in self.tally.ledger:  # it was counted here, on another way
            self._answer(sender, number, self.tally.ledger[number], 0.0)
            return
        if number in self._under:  # it came on another way as well: answer there
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
            return  # the late answer of another way
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
            under.receiver = source  # which is lost now: somebody else is asked
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
        """Whether this run is not to be gone on with."""
        lost = self.agreement.lost
        if self.agreement.is_due:
            return True
        return bool(lost) and (not self._chooses_again or any(set(peers) <= lost for peers in self.stages))

    def _forget_lost(self) -> None:
        """What went to who is lost, or late, goes to somebody else."""
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
        """For news, or until somebody is late. DeadlinePassed where nothing comes at all."""
        if self.agreement.is_due:
            return  # by a message that was sorted since that was asked last: it would wake nobody any more
        seconds = patience = self.agreement.patience
        if self._chooses_again and not self._routes:
            limits = [self._until(under) for under in self._under.values() if under.receiver is not None]
            seconds = min([seconds, *(max(until - self.now(), 0.0) for until in limits)])
        self.inbox.wait_for_news(seconds, patience)

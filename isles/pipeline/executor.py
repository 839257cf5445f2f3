"""One worker's share of a pipelined step, for any routes.

    F   tokens, or the received payload -> decode -> stage -> encode -> the next visit
    L   the returned stream -> loss and its gradient -> back to the last visit            loss at the origin only
    B   gradient of F's output -> backward through the stage -> gradient of F's input -> the visit before

Guarantee. With `order = "plan"` the gradients are the same bits on any network and any backend: tasks run in the order
of one list that all workers compute from the routes. If a peer is lost or late, `step` raises PeerLost or
DeadlinePassed with its name; if it sends an invalid payload or gradient, Refused with its name (`isles.comm.trust`).
The step's gradients are then invalid, and nothing else has changed. Between steps nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from isles.comm.collectives.basic import all_done
from isles.comm.group import Group
from isles.comm.transport import Work
from isles.models.stages import Stage
from isles.network.routing.events import Route, Span, Task, orders
from isles.network.routing.replay import TaskSeconds, seconds_of
from isles.pipeline.compute import Context, Goes, OpenPass, StageCompute, give_up_numbers
from isles.pipeline.routers import StepRoutes
from isles.pipeline.wire import ARRIVALS, StageForm, StageInbox, arrived, phase, planned, receives_ahead, sender

Announce = Callable[[Sequence[Task]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How a step runs.

    room:      the most forwards that each position holds; positions without an entry: no limit.
    order:     "plan"; or by arrival, which is not the same bits on a real network: "arrival", backwards and losses
               first; "first come", in order of arrival.
    recompute: save only a stage's input from forward to backward, and run its forward pass again.
    shares:    fraction of an inner step's computation in each kind of task, by position; None: no time is charged.
    rest:      fraction charged in addition, after a task has sent its output.
    tasks:     the lists of order "plan", by position; None: `orders` computes them from the routes.
    gains:     if some microbatches skip a worker: factor of its gradient after the last task, by position. Then all
               backward passes are quiet, and a worker that no microbatch visits gets a gradient of zeros.
    """

    room: Mapping[int, int] = field(default_factory=dict)
    order: Literal["plan", "arrival", "first come"] = "plan"
    recompute: bool = False
    shares: TaskSeconds | None = None
    rest: Callable[[Task], float] | None = None
    tasks: Mapping[int, Sequence[Task]] | None = None
    gains: Mapping[int, float] | None = None


class Executor:
    """Runs this worker's tasks of each step through `stage`.

    group: mesh.pipeline; routes name its positions. microbatches: of one replica's batch, over which the loss is a
    mean. quiet: entered around every backward pass but the step's last (`optimizer.no_sync`). autocast: entered around
    every forward pass. announce: called with a worker's tasks of each step, if their order is known in advance.
    """

    def __init__(
        self,
        stage: Stage,
        group: Group,
        router: StepRoutes,
        form: StageForm,
        microbatches: int,
        ways: Ways,
        *,
        quiet: Context = nullcontext,
        autocast: Context = nullcontext,
        announce: Announce = lambda tasks: None,
    ) -> None:
        self.announce = announce
        self.compute = StageCompute(stage, group, form, microbatches, autocast=autocast, recompute=ways.recompute)
        self.stage, self.group, self.router, self.form = stage, group, router, form
        self.ways, self.quiet = ways, quiet
        self.most_held = 0
        """The most forwards held at once, in all steps so far."""
        self.played: list[Span] = []
        """The last step's tasks at this worker, without waits, in seconds of its clock."""

    def step(self, number: int, tokens: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run forward and backward of inner step `number`, counted from 1: `.grad` of the stage becomes the mean over
        the `microbatches` that visit it. tokens: (B, T+1) int64 of each microbatch whose origin this worker is, by its
        number in the step. Returns the mean loss of each visiting microbatch, in nats.

        PeerLost or DeadlinePassed, naming the peer, if one does not do its share.
        """
        routes = tuple(self.router(number))
        listed = _orders(routes, tuple(sorted(self.ways.room.items()))) if self.ways.tasks is None else self.ways.tasks
        tasks = listed.get(self.group.rank, [])
        self._begin(routes, tokens, (number - 1) * len(routes))
        self._run(tasks)
        if self.ways.gains is not None:
            self._scale(self.ways.gains[self.group.rank], visited=bool(tasks))
        return self._losses

    def _begin(self, routes: Sequence[Route], tokens: Mapping[int, Tensor], first: int) -> None:
        self._routes = {route.microbatch: route for route in routes}
        self._inbox = StageInbox(self.group, self.form, self._routes, first)
        self._tokens = dict(tokens)
        self._held: dict[tuple[int, int], OpenPass] = {}
        self._local: dict[Task, Tensor] = {}
        """Messages from this worker to itself."""
        self._since = {Task("F", route.microbatch, 0): 0.0 for route in routes if route.after is None}
        """By task: when the input was ready that needs no message."""
        self._sends: list[Work] = []
        self._losses: dict[int, Tensor] = {}
        self.played = []

    @torch.no_grad()
    def _scale(self, gain: float, *, visited: bool) -> None:
        trained = [parameter for parameter in self.stage.parameters() if parameter.requires_grad]
        if not visited:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        elif gain != 1.0:
            torch._foreach_mul_([own.grad for own in trained if own.grad is not None], gain)

    def _run(self, tasks: Sequence[Task]) -> None:
        """Do `tasks`, then wait until all their messages are sent."""
        if self.ways.order == "plan":
            self.announce(tasks)
        backwards, now = sum(task.kind != "F" for task in tasks), self.group.transport.now
        for task in self._in_order(tasks):
            self._began = now()
            if task.kind == "F":
                self._forward(task)
                self.most_held = max(self.most_held, len(self._held))
            else:
                backwards -= 1
                with self.quiet() if backwards or self.ways.gains is not None else nullcontext():
                    self._loss(task) if task.kind == "L" else self._backward(task)
            self.played.append(Span(self.group.rank, task, self._began, now()))
            self._ended(task)
        if self._sends:
            self.group.start(all_done(self._sends), "pipeline", nbytes=self.form.nbytes(tasks[0])).wait()
            self._sends = []

    def _in_order(self, tasks: Sequence[Task]) -> Iterator[Task]:
        limit = self.ways.room.get(self.group.rank)
        ahead = receives_ahead(limit)
        if self.ways.order == "plan":
            return planned(tasks, self._inbox, ahead)
        rank = ARRIVALS[self.ways.order]
        return arrived(tasks, self._inbox, self._since, lambda: limit is None or len(self._held) < limit, rank, ahead)

    def _ended(self, task: Task) -> None:
        """Record when this worker can start its next task without a message, and charge `rest`."""
        now, route = self.group.transport.now(), self._routes[task.microbatch]
        if self.ways.rest is not None:
            self.compute.charge(self.ways.rest(task))
        following = route.following(task)
        if following is not None:
            if route.worker(following) == self.group.rank:
                self._since[following] = now
            return
        for microbatch, other in self._routes.items():
            if other.after == task.microbatch:
                self._since[Task("F", microbatch, 0)] = now

    def _forward(self, task: Task) -> None:
        route, text = self._routes[task.microbatch], None if task.hop else self._tokens[task.microbatch]
        ends = task.hop == route.last
        goes: Goes = "on" if not ends else "home" if route.home else "loss"
        wire = self._message(task) if task.hop else None
        done, sent = self.compute.run_forward(task, text, wire, sender(route, task), goes)
        self._held[task[1:]] = done
        self._charge(task)
        if done.loss is not None:
            self._losses[task.microbatch] = done.loss
        self._send(task, sent)
        if done.out is not None and done.loss is None:
            give_up_numbers(done.out)

    def _loss(self, task: Task) -> None:
        """The loss at the origin, and its gradient."""
        text, wire = self._tokens[task.microbatch], self._message(task)
        done, _ = self.compute.run_forward(task, text, wire, sender(self._routes[task.microbatch], task), "loss")
        self._back(task, done, None)

    def _backward(self, task: Task) -> None:
        done = self._held.pop(task[1:])
        self._tokens.pop(task.microbatch, None)  # all of its forwards here are done
        self._back(task, done, self._message(task) if done.loss is None else None)

    def _back(self, task: Task, done: OpenPass, wire: Tensor | None) -> None:
        source = sender(self._routes[task.microbatch], task)
        self._losses[task.microbatch], sent = self.compute.run_backward(task, done, wire, source)
        self._charge(task)
        self._send(task, sent)

    def _message(self, task: Task) -> Tensor:
        if task in self._local:
            return self._local.pop(task)
        self._inbox.expect(task)
        wire = self._inbox.take(task)
        self._began = self.group.transport.now()
        return wire

    def _send(self, task: Task, wire: Tensor | None) -> None:
        if wire is None:
            return
        route = self._routes[task.microbatch]
        following = route.following(task)
        assert following is not None
        target = route.worker(following)
        if target == self.group.rank:
            self._local[following] = wire
            return
        number, _ = self._inbox.address(following)
        self._sends = [work for work in self._sends if not work.done() or work.error is not None]
        self._sends.append(self.group.call("pipeline", round=number).send(target, wire, phase(following)))

    def _charge(self, task: Task) -> None:
        shares = self.ways.shares
        if shares is not None:
            self.compute.charge(seconds_of(shares, self._routes[task.microbatch], self.group.rank, task))


@lru_cache(maxsize=16)  # workers of one process ask for the same
def _orders(routes: tuple[Route, ...], room: tuple[tuple[int, int], ...]) -> dict[int, list[Task]]:
    return orders(routes, dict(room))

"""One node of a cluster: a loop over microbatches whose updates do not wait for each other.

    root, stem    forward      at the newest weights, which are retained
                  backward     the gradient that came goes back through that pass, at the weights that it used
    leaf          both at once, and the loss
    all           every `every` backward passes one update, of the newest weights

    w_s(k + 1) = w_s(k) - lr g_s(k),   g_s(k) at the weights that each stage had when microbatch k came by

With S stages and S microbatches in flight the gradient of stage s is S - 1 - s updates old in steady state.

    recompute     the first pass has no gradients, its input and random state are kept; the backward pass runs it again:
                  activations take the memory of one microbatch, and a third more is computed (Ravnest)
    else          what the backward pass needs is kept, of every microbatch in flight; the same bits

    order = "plan"      warm up with in_flight - s forwards, then a backward and a forward in turn: the same bits on any
                        network, for what every node does is known beforehand
    order = "arrival"   backward if a gradient is here, else forward if there is room: never more in flight, but how old
                        a gradient is depends on the network

From each neighbour one message, `[number, flag | body]`, is awaited at most, and never more than `in_flight` can be on
their way. The flag `LAST` says that nothing comes after this microbatch until the cluster has drained: Ravnest's FLUSH,
which rides with the last message here, down and back up. `BROKEN` says that nothing comes at all, for a node of the
cluster is lost.

Weights that forward passes under way began with are versions, retained until the backward pass is over. Copy on write:
a version costs memory only where an update comes while it is still needed. The newest one is what the parameters hold;
the optimizer sees no other, and its state has no versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from isles.comm.collectives.basic import all_done, any_done
from isles.comm.errors import CommError, Malformed, PeerLost
from isles.comm.group import Group
from isles.comm.transport import Work
from isles.models.stages import Stage
from isles.network.routing.events import Span, Task
from isles.pipeline.compute import Context, OpenPass, StageCompute, StageShares
from isles.pipeline.config import PipelineConfig
from isles.pipeline.wire import StageForm, phase


class WeightVersions:
    """Versions of `parameters`, numbered from 0 by update."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._users: Counter[int] = Counter()
        self._retained: dict[int, list[Tensor]] = {}
        self.newest = 0
        """Number of updates so far."""

    @property
    def live(self) -> int:
        """How many versions take memory now, the newest among them."""
        return 1 + len(self._retained)

    def hold(self) -> int:
        """Keep the newest for whoever asks, until it is released. Returns its number."""
        self._users[self.newest] += 1
        return self.newest

    def release(self, version: int) -> None:
        """One user less; the last one's memory is given back."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            self._retained.pop(version, None)

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """The parameters hold the weights of a version that somebody keeps. Nobody may write to them meanwhile."""
        if version == self.newest:
            yield
            return
        newest = [parameter.data for parameter in self._parameters]
        self._put(self._retained[version])
        try:
            yield
        finally:
            self._put(newest)

    def saving(self) -> saved_tensors_hooks:
        """A forward pass in it may be gone back through after updates, as long as its version is held: its graph keeps
        the tensors as they are now, not the parameters, which hold other ones then.
        """
        return saved_tensors_hooks(Tensor.detach, lambda retained: retained)

    def update(self) -> None:
        """Call before the parameters are written to: what is still needed of them stays as it is."""
        if self.newest in self._users:
            self._retained[self.newest] = [parameter.data for parameter in self._parameters]
            self._put([data.clone() for data in self._retained[self.newest]])
        self.newest += 1

    def _put(self, weights: Iterable[Tensor]) -> None:
        for parameter, data in zip(self._parameters, weights, strict=True):
            parameter.data = data


HEADER = 16  # bytes: two int64
MORE, LAST, BROKEN = range(3)


def pack_message(number: int, flag: int, body: Tensor) -> Tensor:
    """The bytes of a message, (16 + n,) uint8. flag: `MORE`, `LAST` or `BROKEN`."""
    wire = torch.empty(HEADER + body.numel(), dtype=torch.uint8, device="cpu")
    wire[:HEADER] = torch.tensor([number, flag], dtype=torch.int64, device="cpu").view(torch.uint8)
    wire[HEADER:] = body
    return wire


class NeighbourReceiver:
    """Messages from position `source` of a cluster, one awaited at a time. task: of the kind and hop that begins with
    such a message. nbytes: of a body.
    """

    def __init__(self, group: Group, source: int, task: Task, nbytes: int) -> None:
        self._group, self._source, self._task = group, source, task
        self._length = HEADER + nbytes
        self._posted: tuple[int, Work, Tensor] | None = None

    @property
    def work(self) -> Work | None:
        """The receive that is posted; None where there is none."""
        return None if self._posted is None else self._posted[1]

    @property
    def nbytes(self) -> int:
        return self._length

    def expect(self, number: int) -> None:
        """Take the message about microbatch `number` of the run when it comes, unless it is awaited."""
        if self._posted is None:
            buffer = torch.empty(self._length, dtype=torch.uint8, device="cpu")
            call = self._group.call("pipeline", round=number)
            self._posted = number, call.recv(self._source, buffer, phase(self._task)), buffer

    def is_here(self) -> bool:
        return self._posted is not None and self._posted[1].done()

    def take(self) -> tuple[Tensor, bool]:
        """The body of the message that is here, as `StageForm.pack` and `pack_back` make it, and whether nothing
        follows until the cluster has drained. What it failed with is raised; PeerLost where the neighbour says that
        somebody is; Malformed, naming the neighbour, where it is about something else.
        """
        assert self._posted is not None
        expected, work, wire = self._posted
        self._posted = None
        if work.error is not None:
            raise work.error
        number, flag = wire[:HEADER].view(torch.int64).tolist()
        rank = self._group.ranks[self._source]
        if number != expected or flag not in (MORE, LAST, BROKEN):
            raise Malformed(rank, f"microbatch {number}, flag {flag}, where microbatch {expected} was due")
        if flag == BROKEN:
            raise PeerLost(-1, f"of this cluster, as worker {rank} says")
        return wire[HEADER:], flag == LAST


StaleUpdate = Callable[[int], None]
"""Steps the newest weights by the gradients in place and clears them; told how many updates old these are at most."""


def room_of(config: PipelineConfig, stage: int, stages: int) -> int:
    """Forwards that a stage of a cluster of so many holds at most: in_flight, a number or as many as stages, is of the
    whole cluster.
    """
    in_flight = config.in_flight if isinstance(config.in_flight, int) else stages
    if stage == stages - 1:
        return 0
    return max(1, in_flight - stage) if config.order == "plan" else in_flight


def most_versions(config: PipelineConfig, stage: int, stages: int) -> int:
    """Versions of its weights that a stage holds at most, the newest among them."""
    return 1 + -(-max(room_of(config, stage, stages) - 1, 0) // config.microbatches)


class AsyncStage:
    """One node's stage. group: its cluster, whose positions are the stages. update: see `StaleUpdate`. config: says
    how the cluster runs; an update is the mean of `microbatches` backward passes (Ravnest's update_frequency). shares:
    of an inner step's computation that this stage's tasks are; None: nothing is charged.

    A neighbour that is lost or late raises PeerLost or DeadlinePassed with its name out of `run`; one that sends what
    cannot be Malformed or Refused. What was under way is then worthless, and so are this cluster's weights since. Of a
    loss the other nodes of the cluster are told: PeerLost of rank -1 there.
    """

    def __init__(
        self,
        stage: Stage,
        update: StaleUpdate,
        group: Group,
        form: StageForm,
        config: PipelineConfig,
        *,
        shares: StageShares | None = None,
        autocast: Context = nullcontext,
    ) -> None:
        here, last = self.here, last = group.rank, group.size - 1
        self.stage, self.group, self.form, self.config, self.shares = stage, group, form, config, shares
        again = config.recompute and here < last
        self.compute = StageCompute(stage, group, form, config.microbatches, autocast=autocast, recompute=again)
        self.versions = WeightVersions(parameter for parameter in stage.parameters() if parameter.requires_grad)
        self.most_versions, self.most_held = 1, 0
        """Versions of the weights, and inputs, that were in memory at once."""
        self.passed: list[tuple[int, int]] = []
        """The last run's backward passes: the version of the weights that each was computed at, and the newest then."""
        self.played: list[Span] = []
        """The last run's tasks at this node, in seconds of its clock."""
        self.losses: list[Tensor] = []
        """Of the run under way, or the last one: of every microbatch whose backward pass is over, nats."""
        self.done = 0
        """Microbatches of the run so far, until its last drained state."""
        self._update = update
        self._held: dict[int, tuple[OpenPass, int, bool]] = {}
        """The version of the weights that each was computed at, and whether it is the last."""
        self._is_leaf, self._room = here == last, max(room_of(config, here, group.size), 1)
        sizes = form.nbytes(Task("F", 0, 0)), form.nbytes(Task("B", 0, 0))
        self._down = NeighbourReceiver(group, here - 1, Task("F", 0, here), sizes[0]) if here else None
        self._up = NeighbourReceiver(group, here + 1, Task("B", 0, here), sizes[1]) if here < last else None
        self._sends: list[Work] = []

    def resume(self, microbatches: int, updates: int) -> None:
        self.done, self.versions.newest = microbatches, updates

    def refuse(self) -> None:
        """In place of `run`, where this node knows that its cluster is broken: whoever runs hears of it."""
        self._begin(iter(()))
        self._report_broken()

    def run(self, batches: Iterable[Tensor] = ()) -> list[Tensor]:
        """Train on `batches` (B, T+1) int64, which the root alone has, one or more; then drain: nothing is in flight
        afterwards. Their losses in order, nats.
        """
        self._begin(batches)
        try:
            return self._train()
        except PeerLost as error:
            self._report_broken(error.rank)
            raise

    def _begin(self, batches: Iterable[Tensor]) -> None:
        """In a drained state."""
        self._texts, self._has_ended = _with_last(batches), False
        self._forwards = self._backwards = self.done
        """Microbatches of the run that have gone each way here."""
        self._in_update = self._oldest = 0
        self.losses = []

    def _train(self) -> list[Tensor]:
        self.passed.clear()
        self.played.clear()
        if self._down is not None:
            self._down.expect(self._forwards)
        while not self._has_ended or self._held:
            if self._goes_forward():
                self._forward()
            else:
                self._backward()
        if self._in_update:
            raise ValueError(f"{len(self.losses)} microbatches are no whole updates of {self.config.microbatches}")
        self.done = self._forwards
        if self._sends:
            self.group.start(all_done(self._sends), "pipeline", nbytes=self._nbytes()).wait()
            self._sends.clear()
        return self.losses

    def _report_broken(self, lost: int = -1) -> None:
        """Whoever still waits for this node waits for nothing. lost: the rank that need not be told."""
        here, ranks = self.here, self.group.ranks
        if not self._is_leaf and not self._has_ended and ranks[here + 1] != lost:
            self._send_broken(here + 1, Task("F", self._forwards, here + 1))
        number = self._forwards if self._is_leaf else self._backwards
        if here and ranks[here - 1] != lost and (self._held or not self._has_ended):
            self._send_broken(here - 1, Task("B", number, here - 1))

    def _send_broken(self, position: int, task: Task) -> None:
        body = torch.zeros(self.form.nbytes(task), dtype=torch.uint8, device="cpu")
        call = self.group.call("pipeline", round=task.microbatch)
        with suppress(CommError):  # it may be gone as well
            call.send(position, pack_message(task.microbatch, BROKEN, body), phase(task))

    def _goes_forward(self) -> bool:
        """Whether the next task is a forward pass. What it begins with is here then."""
        has_room = not self._has_ended and len(self._held) < self._room
        if self.config.order == "plan":
            box = self._down if has_room else self._up
            self._await(*([] if box is None else [box]))
            return has_room
        while True:
            if self._up is not None and self._up.is_here():
                return False
            if has_room and (self._down is None or self._down.is_here()):
                return True
            boxes = [self._up, *([self._down] if has_room else [])]
            self._await(*(box for box in boxes if box is not None and box.work is not None))

    def _await(self, *boxes: NeighbourReceiver) -> None:
        works = [box.work for box in boxes if box.work is not None]
        if works and not any(work.done() for work in works):
            self.group.start(any_done(works), "pipeline", nbytes=self._nbytes()).wait()

    def _nbytes(self) -> int:
        return max((box.nbytes for box in (self._down, self._up) if box is not None), default=0)

    def _forward(self) -> None:
        began, task = self.group.transport.now(), Task("F", self._forwards, self.here)
        text, wire, source = None, None, None
        if self._down is None:
            text, self._has_ended = next(self._texts)
        else:
            (wire, self._has_ended), source = self._down.take(), self.here - 1
        self._forwards += 1
        if not self._has_ended and self._down is not None:
            self._down.expect(self._forwards)
        if self._up is None:
            done, _ = self.compute.run_forward(task, text, wire, source, "loss")
            self._back(task, done, None, self._has_ended)
            self._pass(self.versions.newest)
        else:
            with nullcontext() if self.config.recompute else self.versions.saving():
                done, sent = self.compute.run_forward(task, text, wire, source)
            self._held[task.microbatch] = done, self.versions.hold(), self._has_ended
            self.most_held = max(self.most_held, len(self._held))
            self._charge("forward")
            self._send(task._replace(hop=self.here + 1), sent, is_last=self._has_ended)
            self._up.expect(self._backwards)
        self._end(task, began)

    def _backward(self) -> None:
        began, task = self.group.transport.now(), Task("B", self._backwards, self.here)
        assert self._up is not None
        wire, _ = self._up.take()
        self._backwards += 1
        done, version, is_last = self._held.pop(task.microbatch)
        if self._held:
            self._up.expect(self._backwards)
        with self.versions.at(version):
            self._back(task, done, wire, is_last)
        self.versions.release(version)
        self._pass(version)
        self._end(task, began)

    def _back(self, task: Task, done: OpenPass, wire: Tensor | None, is_last: bool) -> None:
        loss, sent = self.compute.run_backward(task._replace(kind="B"), done, wire, self.here + 1)
        self.losses.append(loss)
        self._charge("both" if wire is None else "backward")
        if sent is not None:
            self._send(Task("B", task.microbatch, self.here - 1), sent, is_last=is_last)

    def _pass(self, used: int) -> None:
        self.passed.append((used, self.versions.newest))
        self._oldest, self._in_update = max(self._oldest, self.versions.newest - used), self._in_update + 1
        if self._in_update < self.config.microbatches:
            return
        self.versions.update()
        self.most_versions = max(self.most_versions, self.versions.live)
        self._update(self._oldest)
        self._oldest = self._in_update = 0

    def _send(self, task: Task, body: Tensor | None, *, is_last: bool) -> None:
        """What `task` begins with, to the neighbour that does it."""
        assert body is not None
        wire = pack_message(task.microbatch, LAST if is_last else MORE, body)
        self._sends = [work for work in self._sends if not work.done() or work.error is not None]
        self._sends.append(self.group.call("pipeline", round=task.microbatch).send(task.hop, wire, phase(task)))

    def _charge(self, what: Literal["forward", "backward", "both"]) -> None:
        if self.shares is not None:
            self.compute.charge(getattr(self.shares, what))

    def _end(self, task: Task, began: float) -> None:
        self.played.append(Span(self.group.rank, task, began, self.group.transport.now()))


def _with_last(batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Each, and whether it is the last. ValueError for none."""
    rest = iter(batches)
    batch = next(rest, None)
    if batch is None:
        raise ValueError("a root trains on one batch or more: give it some")
    for following in rest:
        yield batch, False
        batch = following
    yield batch, True

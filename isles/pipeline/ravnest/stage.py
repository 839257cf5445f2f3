"""One node of a cluster: a loop over microbatches with asynchronous updates.

    root, stem    forward      at the newest weights, which are retained
                  backward     at the weights of the forward pass, with the gradient from the next stage
    leaf          forward, loss and backward at once
    all           one update of the newest weights after every `microbatches` backward passes

    w_s(k + 1) = w_s(k) - lr g_s(k),   g_s(k) at the weights that each stage had in the forward pass of microbatch k

With S stages and S microbatches in flight the gradient of stage s is S - 1 - s updates old in steady state.

    recompute     the forward pass saves only its input and random state, and the backward pass runs it again:
                  activations take the memory of one microbatch, and a third more is computed (Ravnest)
    else          the activations of every microbatch in flight stay in memory; the same bits

    order = "plan"      warm up with in_flight - s forwards, then alternate backward and forward: the order of tasks is
                        fixed, so the bits are the same on any network
    order = "arrival"   backward if a gradient has arrived, else forward if there is room: never more in flight, but the
                        age of a gradient depends on the network

A node awaits at most one message, `[number, flag | body]`, from each neighbour, and never more than `in_flight` are in
transit. The flag `LAST` marks the last microbatch before the cluster drains (Ravnest's FLUSH; here it travels with the
last message, down and back up). `BROKEN` means that no message follows, as a node of the cluster is lost.

Weights that pending forward passes used are versions, retained until their backward pass is over. Copy on write: a
version costs memory only if an update happens while it is still needed. The parameters hold the newest version; the
optimizer sees no other, and its state has no versions.
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
        """The newest version: the number of updates so far."""

    @property
    def live(self) -> int:
        """Number of versions in memory now, including the newest."""
        return 1 + len(self._retained)

    def hold(self) -> int:
        """Retain the newest version until `release`. Returns its number."""
        self._users[self.newest] += 1
        return self.newest

    def release(self, version: int) -> None:
        """Release one `hold` of `version`; the last one frees its memory."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            self._retained.pop(version, None)

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Context: the parameters hold the weights of a retained `version`. Do not write to them inside."""
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
        """Context for a forward pass whose backward pass may run after updates, while its version is held: the graph
        saves the current tensors instead of the parameters, whose data is replaced later.
        """
        return saved_tensors_hooks(Tensor.detach, lambda retained: retained)

    def update(self) -> None:
        """Call before the parameters are written to: a newest version that is still held stays unchanged."""
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
    """Receives messages from position `source` of a cluster, one at a time. task: kind and hop of the tasks that start
    with such a message. nbytes: of a message's body.
    """

    def __init__(self, group: Group, source: int, task: Task, nbytes: int) -> None:
        self._group, self._source, self._task = group, source, task
        self._length = HEADER + nbytes
        self._posted: tuple[int, Work, Tensor] | None = None

    @property
    def work(self) -> Work | None:
        """The posted receive, or None."""
        return None if self._posted is None else self._posted[1]

    @property
    def nbytes(self) -> int:
        return self._length

    def expect(self, number: int) -> None:
        """Post the receive for microbatch `number` of the run, unless one is posted."""
        if self._posted is None:
            buffer = torch.empty(self._length, dtype=torch.uint8, device="cpu")
            call = self._group.call("pipeline", round=number)
            self._posted = number, call.recv(self._source, buffer, phase(self._task)), buffer

    def is_here(self) -> bool:
        return self._posted is not None and self._posted[1].done()

    def take(self) -> tuple[Tensor, bool]:
        """The body of the received message, as `StageForm.pack` and `pack_back` make it, and whether it is the last
        until the cluster has drained. Raises the receive's own error, PeerLost if the neighbour reports a lost node,
        and Malformed, naming the neighbour, for another microbatch or an unknown flag.
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
            raise PeerLost(-1, f"of this cluster, as worker {rank} reports")
        return wire[HEADER:], flag == LAST


StaleUpdate = Callable[[int], None]
"""Steps the newest weights by the gradients in place and clears these; its argument is their greatest age in updates.
"""


def room_of(config: PipelineConfig, stage: int, stages: int) -> int:
    """The most forward passes that `stage` holds at once. `config.in_flight` counts those of the whole cluster; unless
    it is a number, it is `stages`.
    """
    in_flight = config.in_flight if isinstance(config.in_flight, int) else stages
    if stage == stages - 1:
        return 0
    return max(1, in_flight - stage) if config.order == "plan" else in_flight


def most_versions(config: PipelineConfig, stage: int, stages: int) -> int:
    """The most versions of its weights that a stage holds, including the newest."""
    return 1 + -(-max(room_of(config, stage, stages) - 1, 0) // config.microbatches)


class AsyncStage:
    """One node's stage. group: its cluster; its positions are the stages. update: see `StaleUpdate`. config: how the
    cluster runs; an update is the mean of `microbatches` backward passes (Ravnest's update_frequency). shares: the
    fractions of an inner step's compute time that this stage's tasks take; None: no time is charged.

    If a neighbour is lost or late, `run` raises PeerLost or DeadlinePassed with its rank; if it sends an invalid
    message, Malformed or Refused. Discard the work in flight and the cluster's weights then. The other nodes of the
    cluster are notified of a loss: their `run` raises PeerLost with rank -1.
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
        """The most versions of the weights, and the most forward passes, that were held at once."""
        self.passed: list[tuple[int, int]] = []
        """The last run's backward passes: the version of the weights that each used, and the newest one then."""
        self.played: list[Span] = []
        """The last run's tasks at this node, with start and end in seconds of its clock."""
        self.losses: list[Tensor] = []
        """Losses, in nats, of the current or last run, of every microbatch whose backward pass is over."""
        self.done = 0
        """Microbatches done up to the last drained state."""
        self._update = update
        self._held: dict[int, tuple[OpenPass, int, bool]] = {}
        """By microbatch: its forward pass, the version of the weights that it used, and whether it is the last."""
        self._is_leaf, self._room = here == last, max(room_of(config, here, group.size), 1)
        sizes = form.nbytes(Task("F", 0, 0)), form.nbytes(Task("B", 0, 0))
        self._down = NeighbourReceiver(group, here - 1, Task("F", 0, here), sizes[0]) if here else None
        self._up = NeighbourReceiver(group, here + 1, Task("B", 0, here), sizes[1]) if here < last else None
        self._sends: list[Work] = []

    def resume(self, microbatches: int, updates: int) -> None:
        self.done, self.versions.newest = microbatches, updates

    def refuse(self) -> None:
        """Call it instead of `run` at a node that knows its cluster is broken: it notifies the running neighbours."""
        self._begin(iter(()))
        self._report_broken()

    def run(self, batches: Iterable[Tensor] = ()) -> list[Tensor]:
        """Train on `batches` (B, T+1) int64 (one or more; at the root only), then drain: nothing is in flight
        afterwards. Returns their losses in order, in nats.
        """
        self._begin(batches)
        try:
            return self._train()
        except PeerLost as error:
            self._report_broken(error.rank)
            raise

    def _begin(self, batches: Iterable[Tensor]) -> None:
        self._texts, self._has_ended = _with_last(batches), False
        self._forwards = self._backwards = self.done
        """Forward and backward passes of the run done here."""
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
        """Notify both neighbours that this cluster is broken. lost: the rank of a lost one, which is skipped."""
        here, ranks = self.here, self.group.ranks
        if not self._is_leaf and not self._has_ended and ranks[here + 1] != lost:
            self._send_broken(here + 1, Task("F", self._forwards, here + 1))
        number = self._forwards if self._is_leaf else self._backwards
        if here and ranks[here - 1] != lost and (self._held or not self._has_ended):
            self._send_broken(here - 1, Task("B", number, here - 1))

    def _send_broken(self, position: int, task: Task) -> None:
        body = torch.zeros(self.form.nbytes(task), dtype=torch.uint8, device="cpu")
        call = self.group.call("pipeline", round=task.microbatch)
        with suppress(CommError):  # the neighbour may be lost as well
            call.send(position, pack_message(task.microbatch, BROKEN, body), phase(task))

    def _goes_forward(self) -> bool:
        """Wait for the next task's message; returns whether the task is a forward pass."""
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
        """Send the message that starts `task` to the neighbour that runs it."""
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
    """Each batch with whether it is the last. ValueError if there is none."""
    rest = iter(batches)
    batch = next(rest, None)
    if batch is None:
        raise ValueError("a root trains on one batch or more: give it some")
    for following in rest:
        yield batch, False
        batch = following
    yield batch, True

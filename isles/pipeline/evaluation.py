"""Evaluation of weights that are cut into stages, by forward passes along a replica's own stages; and gathering the
model.

    stage 0     batches -> stream -> ...     the loss at the stage that computes it in training
    all         the sum of the losses over rows, sent to every stage of the replica

Messages go on the channel "eval", numbered over the run, so they cannot be confused with training's, nor with those of
an evaluation that a loss has aborted. Every stage awaits each other one's sum from the beginning, so it learns of any
loss at once, and not at a neighbour's deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from isles.comm.call import Call
from isles.comm.collectives.basic import all_done
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS, MAX_MICROBATCHES
from isles.comm.transport import AnyOf, Steps, Work
from isles.models.cuts import Piece
from isles.models.stages import Stage
from isles.network.routing.events import Task
from isles.pipeline.compute import Goes, StageCompute
from isles.pipeline.wire import StageForm, phase

_BATCHES = 1024  # of a judgement: addresses that follow one another
_COUNT, _SIZES, _SUM = range(3)  # phases


@torch.no_grad()
def mean_loss(compute: StageCompute, group: Group, batches: Iterable[Tensor], *, home: bool = False) -> float:
    """Mean loss in nats over the rows of `batches` (b, T+1), which only stage 0 has; the same at all stages. NaN
    without rows. All stages of the replica must call it together. PeerLost as soon as any of them is lost.

    compute: of this worker's stage. group: mesh.stage; its positions are the stages. home: the loss is computed at
    stage 0.
    """
    with compute.evaluating():
        return _Judgement(compute, group, home).loss(list(batches) if group.rank == 0 else [])


class _Judgement:
    def __init__(self, compute: StageCompute, group: Group, home: bool) -> None:
        self.compute, self.group, self.home = compute, group, home
        self.call = group.call("eval")
        self.call.meet(*group.others)
        self.sums = torch.zeros(group.size, 2, dtype=torch.float64, device="cpu")
        self.receives = {position: self.call.recv(position, self.sums[position], _SUM) for position in group.others}
        """Their receives, by position."""
        self.sends: list[Work] = []

    def loss(self, texts: Sequence[Tensor]) -> float:
        total, rows = self._through(texts, self._sizes(texts))
        own = self.sums[self.group.rank] = torch.tensor([total, float(rows)], dtype=torch.float64, device="cpu")
        self._await([*self.sends, *self.receives.values(), *self._send_to_all(own, _SUM)])
        total, rows = (float(part) for part in self.sums.sum(0))
        return total / rows if rows else float("nan")

    def _send_to_all(self, data: Tensor, phase: int) -> list[Work]:
        return [self.call.send(position, data, phase) for position in self.group.others]

    def _await(self, works: Sequence[Work], nbytes: int = 0) -> None:
        self.group.start(_unless_lost(works, self.receives), "eval", nbytes=nbytes).wait()

    def _sizes(self, texts: Sequence[Tensor]) -> list[int]:
        """Numbers of rows of the batches, sent by stage 0."""
        if self.group.rank == 0:
            sizes = torch.tensor([len(text) for text in texts], dtype=torch.int64, device="cpu")
            self.sends += self._send_to_all(torch.tensor([len(texts)], dtype=torch.int64, device="cpu"), _COUNT)
            self.sends += self._send_to_all(sizes, _SIZES) if len(texts) else []
            return sizes.tolist()
        count = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._await([self.call.recv(0, count, _COUNT)])
        sizes = torch.zeros(int(count), dtype=torch.int64, device="cpu")
        if len(sizes):
            self._await([self.call.recv(0, sizes, _SIZES)])
        return sizes.tolist()

    def _through(self, texts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[float, int]:
        """The sum of losses over rows that this stage computed, and the number of rows."""
        group, last = self.group, self.group.size - 1
        lag = group.size if self.home and last else 0  # the stream comes home while later batches leave
        total, rows = 0.0, 0
        for index in range(len(sizes) + lag):
            if index < len(sizes):
                done = self._forward(Task("F", index, group.rank), texts, sizes[index])
                if done is not None:
                    total, rows = total + done * sizes[index], rows + sizes[index]
            if lag and group.rank == 0 and index >= lag:
                total += self._loss_at_home(texts[index - lag], index - lag) * sizes[index - lag]
                rows += sizes[index - lag]
        return total, rows

    def _forward(self, task: Task, texts: Sequence[Tensor], rows: int) -> float | None:
        """This stage's part of a batch; returns the loss if it is computed here."""
        here, is_last, form = self.group.rank, task.hop == self.group.size - 1, self._form(rows)
        text = None if here else texts[task.microbatch]
        wire = self._receive(task, here - 1, form) if here else None
        goes: Goes = "on" if not is_last else "home" if self.home and here else "loss"
        out = self.compute.run_alone(form, text, wire, goes)
        if goes == "loss":
            return float(out)
        following = task._replace(kind="L") if goes == "home" else task._replace(hop=task.hop + 1)
        self.sends[:] = [work for work in self.sends if not work.done() or work.error is not None]
        target = 0 if goes == "home" else here + 1
        self.sends.append(self._batch(task, target).send(target, out, phase(following)))
        return None

    def _loss_at_home(self, text: Tensor, index: int) -> float:
        form, last = self._form(len(text)), self.group.size - 1
        return float(self.compute.run_alone(form, text, self._receive(Task("L", index, last), last, form), "loss"))

    def _form(self, rows: int) -> StageForm:
        return replace(self.compute.form, sequences=rows)

    def _receive(self, task: Task, source: int, form: StageForm) -> Tensor:
        buffer = torch.empty(form.nbytes(task), dtype=torch.uint8, device="cpu")
        self._await([self._batch(task, source).recv(source, buffer, phase(task))], buffer.numel())
        return buffer

    def _batch(self, task: Task, position: int) -> Call:
        """The address of a batch's message between this stage and another one."""
        number = _BATCHES * self.call.number(position) + task.microbatch
        return self.group.call("eval", round=number % MAX_MICROBATCHES, fragment=MAX_FRAGMENTS - 1)


def _unless_lost(works: Sequence[Work], receives: Mapping[int, Work]) -> Steps[None]:
    """Wait until all of `works` are done; raises the error of any of `receives` before."""
    while True:
        for work in (*works, *receives.values()):
            if work.error is not None:
                raise work.error
        waited = [work for work in works if not work.done()]
        if not waited:
            return
        yield AnyOf(
            [*waited, *(receive for receive in receives.values() if not receive.done() and receive not in waited)]
        )


@torch.no_grad()
def assembled(stage: Stage, group: Group, whole: nn.Module, pieces: Sequence[Piece]) -> nn.Module | None:
    """`whole` with the weights of all stages of `group` (mesh.stage) at stage 0; None at the others, which send theirs.
    All must call it together. pieces: of every stage. Bytes sent: those of a stage's state, once.
    """
    if group.rank:
        tensors = list(stage.state_dict().values())
        works = [_send(group, tensor) for tensor in tensors]
        group.start(all_done(works), "control", nbytes=sum(tensor.nbytes for tensor in tensors)).wait()
        return None
    state = whole.state_dict()
    for name, tensor in stage.state_dict().items():
        state[name].copy_(tensor)
    for position in range(1, group.size):
        names = Stage(whole, pieces[position]).state_dict()
        arrived = {name: torch.empty_like(state[name], device="cpu").contiguous() for name in names}
        works = [group.call("control").recv(position, tensor.view(-1)) for tensor in arrived.values()]
        group.start(all_done(works), "control", nbytes=sum(tensor.nbytes for tensor in arrived.values())).wait()
        for name, tensor in arrived.items():
            state[name].copy_(tensor)
    return whole


def _send(group: Group, tensor: Tensor) -> Work:
    return group.call("control").send(0, tensor.detach().to("cpu").contiguous().view(-1))

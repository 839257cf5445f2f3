"""Judging weights that lie in stages: the forward pass alone, along a replica's own stages.

    stage 0     batches -> stream -> ...     the loss where training computes it
    all         the sum of the losses over rows, told to every stage of the replica

Messages go on the channel "eval", numbered over the run, so they meet none of training's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.collectives.basic import all_done
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Work
from isles.models.stages import Stage
from isles.network.routing.routes import Task
from isles.pipeline.executor import Context
from isles.pipeline.wire import StageForm, phase


class Judge:
    """Mean losses of a replica. group: mesh.stage, whose positions are the stages. home: the loss is computed at
    stage 0.
    """

    def __init__(self, stage: Stage, group: Group, form: StageForm, *, home: bool, autocast: Context) -> None:
        self.stage, self.group, self.form, self.home, self.autocast = stage, group, form, home, autocast
        self.device = next(stage.parameters()).device
        self._judged = 0
        """Batches of the run so far, at every stage alike."""

    @torch.no_grad()
    def loss(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats over the rows of `batches` (b, T+1), which stage 0 alone has; the same at all stages. NaN
        without rows. All stages of the replica must ask together.
        """
        was_training = self.stage.training
        self.stage.eval()
        try:
            texts = list(batches) if self.group.rank == 0 else []
            total, rows = self._through(texts, self._sizes(texts))
        finally:
            self.stage.train(was_training)
        sums = self.group.all_gather(torch.tensor([total, float(rows)], dtype=torch.float64), channel="eval")
        total, rows = (float(part) for part in torch.stack(sums).sum(0))
        return total / rows if rows else float("nan")

    def _sizes(self, texts: Sequence[Tensor]) -> list[int]:
        """Rows of each batch, as stage 0 tells them."""
        count = torch.tensor([len(texts)])
        self.group.broadcast(count, channel="eval")
        sizes = torch.zeros(int(count), dtype=torch.int64)
        if self.group.rank == 0:
            sizes = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        if len(sizes):
            self.group.broadcast(sizes, channel="eval")
        return sizes.tolist()

    def _through(self, texts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[float, int]:
        """The sum of losses over rows that this stage computed, and how many rows."""
        group, last = self.group, self.group.size - 1
        lag = group.size if self.home and last else 0  # the stream comes home while later batches leave
        total, rows = 0.0, 0
        sends: list[Work] = []
        for index in range(len(sizes) + lag):
            if index < len(sizes):
                task = Task("F", self._judged + index, group.rank)
                done = self._forward(task, texts, index, sizes[index], sends)
                if done is not None:
                    total, rows = total + done * sizes[index], rows + sizes[index]
            if lag and group.rank == 0 and index >= lag:
                total += self._loss_at_home(texts[index - lag], index - lag) * sizes[index - lag]
                rows += sizes[index - lag]
        if sends:
            group.start(all_done(sends), "eval").wait()
        self._judged += len(sizes)
        return total, rows

    def _forward(self, task: Task, texts: Sequence[Tensor], index: int, rows: int, sends: list[Work]) -> float | None:
        """This stage's part of a batch; the loss where it is computed here."""
        form, last = replace(self.form, sequences=rows), self.group.size - 1
        if self.group.rank == 0:
            tokens = texts[index].to(self.device)
            x = tokens[:, :-1]
        else:
            payload, side, ids = form.unpack(self._receive(task, self.group.rank - 1, form), self.device)
            assert ids is not None
            tokens, x = ids, form.boundary.decode(payload, side, ids)
        ends = self.group.rank == last and (not self.home or last == 0)
        with self.autocast():
            out = self.stage(x, form.targets(tokens) if ends else None, enter=self.group.rank == 0, leave=ends)
        if ends:
            return float(out)
        goes_home = self.group.rank == last
        following = task._replace(kind="L") if goes_home else task._replace(hop=task.hop + 1)
        payload, side = form.boundary.encode(out, tokens)
        wire = form.pack(payload, side, None if goes_home else tokens)
        sends[:] = [work for work in sends if not work.done() or work.error is not None]
        sends.append(self._call(following).send(0 if goes_home else self.group.rank + 1, wire, phase(following)))
        return None

    def _loss_at_home(self, text: Tensor, index: int) -> float:
        form, last = replace(self.form, sequences=len(text)), self.group.size - 1
        task, tokens = Task("L", self._judged + index, last), text.to(self.device)
        payload, side, _ = form.unpack(self._receive(task, last, form), self.device)
        with self.autocast():
            x = form.boundary.decode(payload, side, tokens)
            return float(self.stage(x, form.targets(tokens), through=False, leave=True))

    def _receive(self, task: Task, source: int, form: StageForm) -> Tensor:
        buffer = torch.empty(form.nbytes(task), dtype=torch.uint8)
        work = self._call(task).recv(source, buffer, phase(task))
        self.group.start(all_done([work]), "eval", nbytes=buffer.numel()).wait()
        return buffer

    def _call(self, task: Task) -> Call:
        return self.group.call("eval", round=task.microbatch, fragment=MAX_FRAGMENTS - 1)

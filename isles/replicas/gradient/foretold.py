"""What methods that reduce gradients bucket by bucket say of a run before it: messages, bytes and memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from isles.network.planner.memory import PINNED, Held
from isles.network.planner.planned import PlannedExchange, Rhythm, by_size
from isles.replicas.gradient.buckets import Bucket
from isles.replicas.gradient.config import BucketsConfig
from isles.replicas.gradient.reduction import together
from isles.replicas.island.spreading import planned_spreads
from isles.replicas.replica import PeerQuestion
from isles.replicas.schedule import Outline, everyone, outline
from isles.replicas.sync import ReplicaSync

FORWARD_SHARE = 1 / 3  # of a step's computation: a backward pass costs twice a forward pass


class BucketsForetold(ReplicaSync):
    """The part of `BucketedSync`, whose attributes these are, that plans."""

    Config = BucketsConfig
    config: BucketsConfig
    buckets: list[Bucket]
    _careful: bool
    _portions: list[list[int]]

    def device(self) -> torch.device:
        """Where buckets lie."""
        return torch.device("cpu")

    def phases(self, steps: int) -> list[tuple[int, int]]:
        """The steps of a run that send differently: (the first, how many are like it), one behind the other."""
        return [(1, steps)] if steps else []

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        """A bucket leaves when the backward pass has filled it."""
        groups, left = everyone(self.group.size), self._left()
        plan = []
        for first, count in self.phases(steps):
            patterns = [by_size(groups, partial(bucket.reduction.pattern, first)) for bucket in self.buckets]
            plan += [
                one
                for step in range(first, first + count)
                for one in [
                    *(
                        PlannedExchange(step - behind, step, index, "gradient", groups, pattern, 2 * step)
                        for index, (behind, pattern) in enumerate(zip(left, patterns, strict=True))
                    ),
                    *planned_spreads(self._portions, step, groups, 2 * step + 1),
                ]
            ]
        return plan

    def _left(self) -> list[float]:
        """Of a step's computation, what is left when each bucket leaves."""
        behind, last = [bucket.layout.numel for bucket in self.buckets], (1 - FORWARD_SHARE) / self.batches
        return [last * sum(behind[index + 1 :]) / sum(behind) for index in range(len(behind))]

    @override
    def rhythm(self, steps: int) -> Rhythm:
        return Rhythm(self.phases(steps)[-1][0] - 1 if steps else 0, 1)

    @property
    @override
    def questions(self) -> list[PeerQuestion]:
        return [*super().questions, "largest"] if self._careful else super().questions

    @override
    def own_outline(self, steps: int) -> Outline:
        """Steps times buckets may be millions, and most steps are alike."""
        sent = [0] * self.group.size
        for first, count in self.phases(steps):
            for position in range(self.group.size):
                each = sum(self._sent(bucket, first, position) for bucket in self.buckets)
                shares = (self.group.size - 1) * sum(sizes[position] for sizes in self._portions)
                sent[position] += count * (each + shares)
        short = outline(self.schedule(min(steps, 2)), steps, self.opening(), per_step=True)
        return replace(short, sent=tuple(sent))

    @override
    def memory(self) -> list[Held]:
        """With reduction = "native" the buckets lie where the gradients do."""
        buffers = Held("gradient buckets", sum(bucket.flat.nbytes for bucket in self.buckets), "always")
        held = [one for bucket in self.buckets for one in bucket.reduction.memory(self.group.size)]
        if self.device().type == "cpu":
            held += [Held(PINNED, bucket.pinned_bytes, "pinned") for bucket in self.buckets]
        return [*super().memory(), *together([buffers, *held])]

    def _sent(self, bucket: Bucket, step: int, position: int) -> int:
        return bucket.reduction.sent_bytes(step, self.group.size, position)

"""The parts that outer methods are composed of: when fragments are sent and land (cadence), who exchanges with whom
(mixing), what the anchor does to the live weights, which may be in another format (landing), and what of an answer
counts as the outer gradient (reading).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class EveryH:
    """Each of `fragments` fragments every `sync_every` inner steps (H), spread over the round; fragment q has the
    offset t_q = round(q H / fragments), half to even.

    first_sync: "full_window": a fragment is sent first when it has had H steps; "offset": already at step t_q, where
    that is not 0. overlap_steps (tau): inner steps between sending and landing. rounds_late (d): instead, a fragment
    lands when it is sent for the d-th time after; what is sent first lands d rounds later. every_step_until: up to this
    inner step all fragments are sent after each. origin: the inner step that rounds are counted from.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0
    rounds_late: int = 0
    first_sync: str = "full_window"
    every_step_until: int = 0
    origin: int = 0

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(round(q * self.sync_every / self.fragments) for q in range(self.fragments))

    def sends(self, step: int) -> tuple[int, ...]:
        if step <= self.every_step_until:
            return tuple(range(self.fragments))
        step -= self.origin
        late = step < self.sync_every and self.first_sync == "full_window"
        return tuple(q for q, offset in enumerate(self._offsets) if not late and (step - offset) % self.sync_every == 0)

    def lands(self, sent: int) -> int:
        return sent + self.overlap_steps + self.rounds_late * self.sync_every


@dataclass(frozen=True, slots=True)
class Everyone:
    """All workers: the answer is the mean over the world."""

    agrees: bool = True
    name: ClassVar[str] = "all"

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        return _all(size)


@lru_cache(maxsize=8)
def _all(size: int) -> tuple[int, ...]:
    return tuple(range(size))


@dataclass(frozen=True, slots=True)
class Nobody:
    """Every worker alone: the outer rule acts on its own progress (Lookahead, Zhang et al. 2019)."""

    agrees: bool = False
    name: ClassVar[str] = "nobody"

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        return (position,)


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """New random groups of `group_size` every round, drawn by everyone from the same seed (NoLoCo, section 3; no
    message).

    With a permutation p of the workers and h = size // group_size groups, p[i] goes to group i mod h. The size mod
    group_size workers left over are alone in that round.
    """

    group_size: int
    seed: int
    agrees: bool = False
    name: ClassVar[str] = "groups"

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        return _random_groups(self.group_size, self.seed, round, size)[position]


@lru_cache(maxsize=64)
def _random_groups(group_size: int, seed: int, round: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The group of every position."""
    order = list(range(size))
    random.Random(f"isles groups {seed} {round}").shuffle(order)
    count = size // group_size
    groups: list[tuple[int, ...]] = [(position,) for position in range(size)]
    for index in range(count):
        together = tuple(sorted(order[index : count * group_size : count]))
        for position in together:
            groups[position] = together
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Replace:
    """live = anchor: the next inner steps start from the anchor."""

    moves_reference: bool = False
    local_share: float | None = 0.0
    name: ClassVar[str] = "replace"

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        torch._foreach_copy_(live, anchor)


@dataclass(frozen=True, slots=True)
class Blend:
    """live = alpha live + (1 - alpha) anchor: local progress since the sending is partly kept (Streaming DiLoCo, arXiv
    2501.18512, Algorithm 2). alpha = 1: the anchor is never landed on.
    """

    local_share: float  # alpha
    moves_reference: bool = False
    name: ClassVar[str] = "blend"

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        torch._foreach_lerp_(live, [a.to(x) for a, x in zip(anchor, live, strict=True)], 1 - self.local_share)


@dataclass(frozen=True, slots=True)
class Carry:
    """live = anchor - (reference - live): the own progress that is not averaged yet is carried over (DiLoCoX, arXiv
    2506.21263, overlap by one round; the reading in which every outer gradient enters once). The reference, what the
    live weights were when they landed, moves with them.
    """

    moves_reference: bool = True
    local_share: float | None = None
    name: ClassVar[str] = "carry"

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        progress = torch._foreach_sub(reference, [x.to(r) for x, r in zip(live, reference, strict=True)])
        landed = torch._foreach_sub(anchor, progress)
        torch._foreach_copy_(live, landed)
        # What the live weights are now, in their format.
        torch._foreach_copy_(reference, [new.to(x.dtype) for new, x in zip(landed, live, strict=True)])


@dataclass(frozen=True, slots=True)
class Received:
    """The mean, as it came."""

    needs_own: bool = False
    name: ClassVar[str] = "received"

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        return mean


@dataclass(frozen=True, slots=True)
class Eager:
    """The mean A of a round whose answer comes a round or more late, with this worker's own stale share replaced by its
    fresh one (Eager Updates, arXiv 2502.12996, Algorithm 3):

        A + (own_new - own_old) / M

    own: as the others decoded it; M: participants of the mean. Anchors are then each worker's own.
    """

    needs_own: bool = True
    name: ClassVar[str] = "eager"

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        if own is not None:
            mean.sub_(own, alpha=1 / participants)
        if fresh is not None:
            mean.add_(fresh, alpha=1 / participants)
        return mean

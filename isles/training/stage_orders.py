"""What a trained model is worth with some of its stages: dropped, exchanged, or left after an early one.

Stage 0 runs first in every order, for it makes the stream; norm and head come last, whatever ran before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from math import comb

from torch import Tensor, nn

from isles.models.blocks import check_order
from isles.models.cuts import Piece, pieces
from isles.models.decoder import next_token_loss
from isles.models.stages import cuttable, logits_in_order
from isles.models.twins import sharing
from isles.training.config.sections import Config
from isles.training.evaluation import validation_loss
from isles.training.staged import planned_cut

StageOrder = tuple[int, ...]
_SEED = 0
_MOST_ORDERS = 12
"""Judged for one point of a curve: all where there are no more, else so many drawn."""


def stages_of(config: Config, model: nn.Module) -> Sequence[Piece]:
    """Those of the run; of one that was not cut every block. ValueError for a model that does not come in pieces."""
    if config.pipeline.stages > 1:
        return planned_cut(config).pieces
    layers = len(cuttable(sharing(model)).blocks)
    return pieces(range(1, layers), layers, loss_at_origin=False)


def asked_order(
    stages: int, *, drop: Sequence[int] = (), leave: int | None = None, order: Sequence[int] = ()
) -> StageOrder:
    """The stages that run: all but `drop`; those up to `leave`; or `order`. ValueError, with the option, for what is no
    order of `stages` stages, or for several wishes at once.
    """
    if sum((bool(drop), leave is not None, bool(order))) > 1:
        raise ValueError("--drop-stages, --early-exit and --order each say which stages run: give one of them")
    if drop:
        check_order("--drop-stages", drop, stages, "stage")
    if leave is not None:
        check_order("--early-exit", [leave], stages, "stage")
        return tuple(range(leave + 1))
    made = tuple(order) if order else tuple(stage for stage in range(stages) if stage not in drop)
    check_order("--order", made, stages, "stage")
    if made[:1] != (0,):
        raise ValueError("stage 0 makes the stream of the tokens: it runs, and runs first")
    return made


def order_loss(
    model: nn.Module, batches: Iterable[Tensor], blocks: Sequence[int], autocast: AbstractContextManager[object]
) -> float:
    """Validation loss of `model` with only `blocks`, in their order."""

    def loss(tokens: Tensor) -> Tensor:
        return next_token_loss(logits_in_order(model, tokens[:, :-1], blocks), tokens[:, 1:])

    return validation_loss(model, batches, autocast, loss)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Losses in nats over orders of one kind: dropped, exchanged (neighbours), or left early, so many of the stages."""

    kind: str
    count: int
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)


def curves(stages: int, loss: Callable[[StageOrder], float]) -> list[CurvePoint]:
    """What dropping, exchanging and leaving early cost, by number of stages. loss: of an order of stages."""
    orders = {
        "dropped": [dropped(stages, count) for count in range(stages)],
        "exchanged": [exchanged(stages, count) for count in range((stages - 1) // 2 + 1)],
        "left early": [[tuple(range(stages - count))] for count in range(stages)],
    }
    return [
        CurvePoint(kind=kind, count=count, losses=tuple(map(loss, chosen)))
        for kind, by_count in orders.items()
        for count, chosen in enumerate(by_count)
    ]


def dropped(stages: int, count: int) -> list[StageOrder]:
    """Orders without `count` of the stages after the first: all of them, or some that are drawn."""
    later = range(1, stages)
    if comb(stages - 1, count) <= _MOST_ORDERS:
        left_out: Iterable[Sequence[int]] = combinations(later, count)
    else:
        rng = random.Random(_SEED)
        left_out = _different(lambda: tuple(sorted(rng.sample(later, count))))
    return [tuple(stage for stage in range(stages) if stage not in out) for out in left_out]


def exchanged(stages: int, count: int) -> list[StageOrder]:
    """Orders in which `count` pairs of neighbours after the first stage are exchanged; no stage is in two of them."""
    starts = [
        pairs
        for pairs in islice(combinations(range(1, stages - 1), count), 1 << 12)
        if all(later - before > 1 for before, later in pairwise(pairs))
    ]
    if len(starts) > _MOST_ORDERS:
        starts = random.Random(_SEED).sample(starts, _MOST_ORDERS)
    made = []
    for pairs in starts:
        order = list(range(stages))
        for first in pairs:
            order[first], order[first + 1] = order[first + 1], order[first]
        made.append(tuple(order))
    return made


def _different(draw: Callable[[], StageOrder]) -> list[StageOrder]:
    found: dict[StageOrder, None] = {}
    while len(found) < _MOST_ORDERS:
        found.setdefault(draw())
    return list(found)

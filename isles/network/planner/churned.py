"""What workers that come and go cost a method, before a run: rounds alone, work lost, waiting, gifts, and what goes
through the lighthouse where it relays.

Each worker dies at a constant rate, and another one joins in its stead at once. In rounds of R seconds:

    a partner is gone     a view holds who lived when it was made, `AHEAD` rounds before it begins: whoever died since
                          then is still in it, and its partner is alone
    a dead worker         takes with it the round under way, and those before it that nobody has shared
    one mean for all      nobody is alone: the living take it again without a dead one, whose round under way is lost
    a joiner              waits for its view, about `AHEAD` rounds; a state is copied meanwhile

Left out, for rounds of minutes: views that are not known in time because a word takes longer than a round, the odd one
out, and partners that are late (`roster`'s patience).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isles.network.churn import Poisson

AHEAD = 3
"""Rounds from the newest to the first of a new view (`isles.comm.elastic.messages.MARGIN`)."""
VECTORS = 5
"""That a joiner is given, of the model's size in float32: weights, anchor, outer momentum, AdamW's two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnCosts:
    """alone: share of the rounds. lost: of the work. waiting: of the workers' time, until they are in. goodput: share
    of the workers' time in steps that count. gifts: bytes an hour of states to joiners, all of them. relayed: bits a
    second through the lighthouse, in and out, where it relays everything.
    """

    alone: float
    lost: float
    waiting: float
    goodput: float
    gifts: float
    relayed: float


def churn_costs(
    churn: Poisson,
    *,
    workers: int,
    parameters: float,
    computing: float,
    waits: float,
    bytes_a_round: float,
    rounds: int | None = None,
    pairs: bool = True,
) -> ChurnCosts:
    """Of `workers` in rounds of `computing` + `waits` seconds, in which each sends `bytes_a_round`. rounds: of the run;
    None: in the long run. pairs: not one mean for all.
    """
    seconds = computing + waits
    dies = churn.per_second * seconds
    many = 10 * AHEAD if rounds is None else rounds
    alone, lost, weights, chain = 0.0, 0.0, 0.0, 0.0
    for number in range(1, many + 1):
        by_itself = 1 - math.exp(-dies * min(number, AHEAD)) if pairs else 0.0
        if rounds is None:
            alone, lost, weights = by_itself, dies * (0.5 + chain), 1.0
        else:
            alone, lost, weights = alone + by_itself, lost + dies * (0.5 + chain), weights + 1.0
        chain = by_itself * (1 + chain)
    alone, lost = alone / weights, min(lost / weights, 1.0)
    life = churn.per_second
    joins = workers * life / (1 + life * churn.repair)
    gift = 4 * VECTORS * parameters
    waiting = 1 - math.exp(-life * AHEAD * seconds)
    return ChurnCosts(
        alone=alone,
        lost=lost,
        waiting=waiting,
        goodput=(1 - waiting) * (1 - lost) * computing / seconds,
        gifts=2 * joins * gift * 3600,
        relayed=2 * 8 * (workers * bytes_a_round / seconds + 2 * joins * gift),
    )

"""Large fleets replayed with a few representatives: alike workers form a class, and a few workers stand for all.

    workers with the same links -> classes with a representative each (two if there is only one class)
    exchange of n members       -> an exchange of the representatives: each sends as many bytes as a member,
                                   in as many waves
    exchange of small groups    -> an exchange of two, with the mean link between a worker and its partners. The class
                                   for which that takes longest counts, because in time every worker waits for it

Exact if all workers are alike and latencies do not vary, except for differences in when workers start. A latency that
varies is replaced by the mean of the largest latency that a member waits for. No matrix of all workers is made.

If there are still too many messages, successive segments of a mean are merged, and so are the exchanges of a flight
except the last.

`wanted_rate`: the link rate at which workers compute for a wanted share of the time.

`churn_costs`: the costs of churn for a method, estimated before a run: rounds without a partner, lost work, waiting,
state transfers, and the lighthouse's traffic if it relays.

Each worker dies at a constant rate, and another one replaces it at once:

    a partner is lost     a view lists the workers alive when it was created, `AHEAD` rounds before it begins. A worker
                          that died since then is still in it, and its partner exchanges with nobody
    a dead worker         its current round is lost, and earlier rounds whose updates it had not shared
    one mean for all      no round without a partner: the mean is repeated without the dead worker
    a joiner              waits for its view, about `AHEAD` rounds, while it copies a state

Not counted, for rounds of minutes: views that arrive late because a message takes longer than a round, the odd worker
out, and late partners (`roster`'s patience).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import NormalDist
from typing import NamedTuple

from isles.network.churn import Poisson
from isles.network.exchange_plan import (
    BySize,
    Doubling,
    Groups,
    Mean,
    MessagePattern,
    PlannedExchange,
    Ragged,
    Segment,
    ShardSizes,
    Swap,
    Then,
    Waves,
    sent_by_all,
)
from isles.network.links import Links

Coarseness = tuple[int, int]
"""At most so many segments of a mean, and exchanges of a flight."""
LEVELS: tuple[Coarseness, ...] = ((1 << 30, 1 << 30), (16, 32), (4, 24), (1, 16))


class WorkerClass(NamedTuple):
    """Workers with equal links.

    count: number of workers. up, down: bits per second of one worker while all send. ranks: two of them, or the only
    one.
    """

    count: int
    up: float
    down: float
    ranks: tuple[int, ...]


def worker_classes(links: Links, workers: int) -> list[WorkerClass]:
    """Classes of `workers` workers, the slowest first."""
    is_shared = links.uplinks is not None or links.devices > 1
    sharing = Counter(map(links.uplink_of, range(workers))) if is_shared else None
    by_links: dict[tuple[float, float, int], tuple[int, tuple[int, ...]]] = {}
    period = links.period or workers
    for first in range(min(period, workers)):
        uplink, alike = links.uplink_of(first), range(first, workers, period)
        among = 1 if sharing is None else sharing[uplink]
        key = (links.rate(uplink) / among, links.down_rate(uplink) / among, links.site_of(first))
        count, ranks = by_links.get(key, (0, ()))
        by_links[key] = count + len(alike), (*ranks, *alike[:2])[:2]
    return [WorkerClass(count, *key[:2], ranks) for key, (count, ranks) in sorted(by_links.items())]


def links_of_all(links: Links, classes: Sequence[WorkerClass], most: int) -> Links:
    """Links between the representatives of at most `most` classes, if all exchange with all; two or more
    representatives. Further classes are merged with their neighbours in rate, at the rate of the slowest.
    """
    width = -(-len(classes) // most)
    bins = [classes[first : first + width] for first in range(0, len(classes), width)]
    bins = bins * 2 if len(bins) == 1 else bins
    longest = _longest(links.jitter, sum(members.count for members in classes) - 1)
    return Links(
        bandwidth=[min(members.up for members in bin) for bin in bins],
        downlink=[min(members.down for members in bin) for bin in bins],
        latency=[[longest * _between(links, members, other) for other in bins] for members in bins],
    )


def links_of_partners(links: Links, classes: Sequence[WorkerClass], nbytes: float) -> Links:
    """Links between two representatives, if each worker exchanges `nbytes` with a random other worker."""
    workers, paths = sum(one.count for one in classes), []
    for one in classes:
        others = [(other, other.count - (other is one)) for other in classes]
        shares = [(other, count / (workers - 1)) for other, count in others if count]
        bit = sum(share / min(one.up, one.down, other.up, other.down) for other, share in shares)
        latency = sum(share * _between(links, [one], [other]) for other, share in shares)
        paths.append((8 * nbytes * bit + latency, bit, latency))
    _, bit, latency = max(paths)
    rate, seconds = 1 / bit if bit else math.inf, _longest(links.jitter, 2) * latency
    return Links(bandwidth=[rate] * 2, downlink=[math.inf] * 2, latency=[[seconds] * 2] * 2)


def _between(links: Links, ones: Sequence[WorkerClass], others: Sequence[WorkerClass]) -> float:
    """The longest mean latency between two of these classes."""
    if isinstance(links.latency, (int, float)):
        return links.latency
    pairs = ((a, b) for one in ones for other in others for a in one.ranks for b in other.ranks if a != b)
    return max((max(links.base_latency(a, b), links.base_latency(b, a)) for a, b in pairs), default=0.0)


def _longest(jitter: float, messages: int) -> float:
    """The mean of the largest of `messages` jitter factors: Blom's quantile, with an approximate variance."""
    if not jitter or messages < 1:
        return 1.0
    largest, spread = NormalDist().inv_cdf((messages - 0.375) / (messages + 0.25)), 1 / (1 + 0.8 * math.log(messages))
    return math.exp(jitter * largest + 0.5 * jitter * jitter * (spread - 1))


@dataclass(frozen=True)
class Representatives:
    """Rewrites exchanges of all workers as exchanges of `few` representatives.

    few: None: every worker is simulated. coarse: an entry of `LEVELS`.
    """

    few: int | None
    coarse: Coarseness = LEVELS[0]
    _known: dict[tuple[int, ...], tuple[object, BySize]] = field(default_factory=dict)

    def __call__(self, exchanges: Sequence[PlannedExchange]) -> list[PlannedExchange]:
        """The rewritten exchanges, in the order of their starts."""
        if self.few is None and self.coarse == LEVELS[0]:
            return list(exchanges)
        rewritten: list[PlannedExchange] = []
        for (*_, kind), row in groupby(exchanges, key=_row):
            row_exchanges = list(row)
            for run in _runs(row_exchanges, self.coarse[1]) if kind in _JOINED else [[one] for one in row_exchanges]:
                groups = run[-1].groups
                size = max(map(len, groups))
                if size > 1:
                    groups = groups if self.few is None else (tuple(range(self.few)),)
                    rewritten.append(run[-1]._replace(groups=groups, pattern=self._pattern(run, size)))
        return rewritten

    def _pattern(self, run: Sequence[PlannedExchange], size: int) -> BySize:
        """One pattern for a run of exchanges."""
        key = tuple(id(exchange.pattern) for exchange in run)
        if key not in self._known:
            parts, few = [exchange.pattern(size) for exchange in run], size if self.few is None else self.few
            parts = parts if self.few is None else [fewer(part, size, few) for part in parts]
            pattern = BySize(((few, _coarser(_joined(parts), self.coarse[0])),))
            self._known[key] = [exchange.pattern for exchange in run], pattern
        return self._known[key][1]


_JOINED = (Mean, Ragged)  # patterns of which several can be merged; Then (means of factors) counts as Mean


def _row(exchange: PlannedExchange) -> tuple[int, int, Groups, str, type]:
    size = max(map(len, exchange.groups))
    kind = type(exchange.pattern(size)) if size > 1 else object
    return exchange.flight, exchange.lands, exchange.groups, exchange.what, Mean if kind is Then else kind


def _runs(exchanges: Sequence[PlannedExchange], most: int) -> list[Sequence[PlannedExchange]]:
    """Runs of exchanges to merge, about `most` at most. The last exchange stays by itself: workers wait for it."""
    last = len(exchanges) - 1
    width = max(1, -(-last // most))
    return [*(exchanges[first : min(first + width, last)] for first in range(0, last, width)), exchanges[-1:]]


def fewer(pattern: MessagePattern, size: int, few: int) -> MessagePattern:
    """The pattern of a group of `few` in which each sends as much as a member of a group of `size`."""
    if size == few:
        return pattern
    share = (size - 1) / (few - 1)
    if isinstance(pattern, Mean):
        known = {id(one): _fewer_shards(one, share, size, few) for one in pattern.segments}
        return Mean(tuple(known[id(one)] for one in pattern.segments), round(pattern.header * share))
    if isinstance(pattern, Then):
        first = [fewer(one, size, few) for one in (*pattern.first, pattern.second)]
        return Then(tuple(first[:-1]), first[-1])  # type: ignore[arg-type]
    if isinstance(pattern, Ragged):
        return Ragged(pattern.nbytes * share, round(pattern.header * share))
    if isinstance(pattern, Doubling):
        reaches = [1 << phase for phase in range(math.ceil(math.log2(size)))]
        return Waves(tuple(pattern.nbytes * min(reach, size - reach) / (few - 1) for reach in reaches))
    return Swap((sent_by_all(pattern, size) / size / (few - 1),) * few)


def _fewer_shards(segment: Segment, share: float, size: int, few: int) -> Segment:
    """Segments for fewer members. All wait for the owner of the largest shard, so `back` takes its size."""
    there = None if segment.there is None else ShardSizes(((few, segment.there.total / size * share),))
    return Segment(there, ShardSizes(((few, segment.back.largest * share),)))


def _joined(patterns: Sequence[MessagePattern]) -> MessagePattern:
    if len(patterns) == 1:
        return patterns[0]
    means = [one for one in patterns if isinstance(one, Mean)]
    factors = [one for one in patterns if isinstance(one, Then)]
    if factors:
        first = _joined([*means, *(mean for one in factors for mean in one.first)])
        return Then((first,), _joined([one.second for one in factors]))  # type: ignore[arg-type]
    if means:
        return Mean(tuple(part for one in means for part in one.segments), sum(one.header for one in means))
    ragged = [one for one in patterns if isinstance(one, Ragged)]
    return Ragged(sum(one.nbytes for one in ragged), sum(one.header for one in ragged))


def _coarser(pattern: MessagePattern, most: int) -> MessagePattern:
    """The pattern with about `most` segments at most."""
    if isinstance(pattern, Then):
        first = [_coarser(one, most) for one in (*pattern.first, pattern.second)]
        return Then(tuple(first[:-1]), first[-1])  # type: ignore[arg-type]
    if not isinstance(pattern, Mean) or len(pattern.segments) <= most:
        return pattern
    segments, width = [], -(-len(pattern.segments) // most)
    for gathers, row in groupby(pattern.segments, key=lambda one: one.there is None):
        alike = list(row)
        for first in range(0, len(alike), width):
            chunk = alike[first : first + width]
            there = None if gathers else _sums([one.there for one in chunk if one.there is not None])
            segments.append(Segment(there, _sums([one.back for one in chunk])))
    return Mean(tuple(segments), pattern.header)


def _sums(rows: Sequence[ShardSizes]) -> ShardSizes:
    runs = groupby(sum(column) for column in zip(*rows, strict=True))
    return ShardSizes(tuple((len(list(run)), nbytes) for nbytes, run in runs))


_FASTEST, _NEAR = 1e-9, 0.003


def wanted_rate(share: Callable[[float], float], target: float) -> float:
    """The factor on all rates at which `share` just reaches `target`, to 0.3 %; nan: no rate is enough.

    Waiting is a piecewise linear function of the seconds per bit, and its flattest piece comes first, where computing
    hides part of the transfers. So a regula falsi (Illinois) converges in a few steps.
    """

    def over(slowness: float) -> float:
        return 1 / share(1 / slowness) - 1 / target

    low, high = _FASTEST, 1.0
    below = over(low)
    if below > 0:
        return math.nan
    near, above, side = -below * _NEAR, over(high), 0
    while above <= 0:
        if high > 1 / _FASTEST:
            return 0.0
        low, below, high = high, above, 64 * high
        above = over(high)
    while high > low * (1 + _NEAR):
        middle = low + (high - low) * -below / (above - below)
        middle = min(max(middle, low + 1e-4 * (high - low)), high - 1e-4 * (high - low))
        at = over(middle)
        if abs(at) <= near:
            return 1 / middle
        if at > 0:
            high, above, below, side = middle, at, below / (2 if side == 1 else 1), 1
        else:
            low, below, above, side = middle, at, above / (2 if side == -1 else 1), -1
    return 1 / low


AHEAD = 3
"""Rounds from the newest round to the first round of a new view (`isles.membership.messages.MARGIN`)."""
VECTORS = 5
"""Vectors of the model's size in float32 that a joiner fetches: weights, anchor, outer momentum, AdamW's two moments.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnCosts:
    """What churn costs.

    alone: share of the rounds without a partner. lost: share of the work. waiting: share of the workers' time before
    they take part. goodput: share of the workers' time in steps that count. state_bytes: bytes per hour of all state
    transfers to joiners. relayed: bits per second through the lighthouse, in and out, if it relays everything.
    """

    alone: float
    lost: float
    waiting: float
    goodput: float
    state_bytes: float
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
    """Costs for `workers` in rounds of `computing` + `waits` seconds, in which each sends `bytes_a_round`.

    rounds: length of the run; None: the long-run mean. pairs: workers exchange in pairs, not in one mean for all.
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
    state = 4 * VECTORS * parameters
    waiting = 1 - math.exp(-life * AHEAD * seconds)
    return ChurnCosts(
        alone=alone,
        lost=lost,
        waiting=waiting,
        goodput=(1 - waiting) * (1 - lost) * computing / seconds,
        state_bytes=2 * joins * state * 3600,
        relayed=2 * 8 * (workers * bytes_a_round / seconds + 2 * joins * state),
    )

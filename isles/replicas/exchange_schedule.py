"""What a run will exchange and hold, said without running it, and what a plan warns of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil
from operator import itemgetter

from torch import Tensor

from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.mean import phases
from isles.comm.tags import rounds_apart
from isles.network.exchange_plan import (
    UNDER_WAY,
    BySize,
    Groups,
    MemoryItem,
    PlannedExchange,
    Tree,
    When,
    by_size,
    gathered,
)
from isles.replicas.loop.fragment import Fragment
from isles.replicas.parts.interfaces import Composition, Mixing

FIRST = 8  # exchanges that an outline shows
_DRAINED, _SENT, _BEHIND = range(3)  # the order of what starts at one moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a run exchanges, in short.

    first: its first exchanges. rounds: moments at which something is sent that lands at once or later; every: inner
    steps between the first two of them (all steps of the run where there are fewer). opening, sent: bytes that each
    position sends before the first step, and from then on; inside: those of `sent` that stay in the worker's island.
    about: what is sent depends on the numbers, and comes out near these.
    """

    first: tuple[PlannedExchange, ...]
    rounds: int
    every: int
    opening: tuple[int, ...]
    sent: tuple[int, ...]
    inside: int = 0
    about: bool = False


def outline(first: Sequence[PlannedExchange], steps: int, opening: tuple[int, ...], *, per_step: bool) -> Outline:
    """The outline of a run whose exchanges are all in `first`; per_step: whose every step repeats those of step 1,
    and `first` holds a few of them.
    """
    size = len(opening)
    moments = sorted({min(ceil(planned.sent), steps) for planned in first if planned.what != "anchor"})
    if per_step:
        sent, rounds = tuple(steps * nbytes for nbytes in bytes_of((p for p in first if p.sent <= 1), size)), steps
    else:
        sent, rounds = bytes_of(first, size), len(moments)
    every = moments[1] - moments[0] if len(moments) > 1 else steps
    return Outline(first=tuple(first[:FIRST]), rounds=rounds, every=every, opening=opening, sent=sent)


def bytes_of(exchanges: Iterable[PlannedExchange], size: int) -> tuple[int, ...]:
    """That each position sends in all of them."""
    total = [0] * size
    for (pattern, groups), times in Counter((planned.pattern, planned.groups) for planned in exchanges).items():
        for group in groups:
            for index, position in enumerate(group):
                if len(group) > 1:
                    total[position] += times * int(pattern(len(group)).sent(index, len(group)))
    return tuple(total)


@lru_cache(maxsize=8)
def everyone(size: int) -> Groups:
    """One group of all."""
    return (tuple(range(size)),)


def opening_exchanges(nbytes: Sequence[int], size: int, hashes: int = 2) -> list[PlannedExchange]:
    """What the workers exchange to make sure that they are one run: hashes from everyone to everyone, and worker 0's
    tensors (`nbytes` each) along a tree.
    """
    compared, groups = by_size(everyone(size), lambda n: gathered(8, n)), everyone(size)
    trees = [by_size(groups, lambda n, one=one: Tree(one)) for one in nbytes]
    patterns = [compared, *trees, *[compared] * (hashes - 1)]
    return [
        PlannedExchange(0, 0, 0, "opening", groups, pattern, flight, "control")
        for flight, pattern in enumerate(patterns)
    ]


def planned_rounds(parts: Composition, fragments: Sequence[Fragment], size: int, steps: int) -> list[PlannedExchange]:
    """All exchanges of `steps` inner steps among `size` workers, and of `finish`: a last, shorter round."""
    if not steps:
        return []
    cadence, end = parts.cadence, steps + 1
    shared = parts.rule.shares_anchors and fragments[0].anchor_averaging is not None
    made: list[tuple[tuple[float, int], PlannedExchange]] = []
    known: dict[tuple[int, str, int, tuple[int, ...]], BySize] = {}

    def add(index: int, what: str, round: int, sent: int, lands: int, order: int, flight: int | None = None) -> int:
        groups, fragment = groups_of(parts.mixing, round, size), fragments[index]
        means = fragment.averaging if what == "payload" else fragment.anchor_averaging
        assert means is not None
        sizes = tuple(sorted({len(group) for group in groups}))
        key = (index, what, min(round, means.starting + 1), sizes)
        if key not in known:
            known[key] = by_size(groups, partial(means.pattern, round))
        number = len(made) if flight is None else flight
        made.append(((sent, order), PlannedExchange(sent, lands, index, what, groups, known[key], number)))
        return number

    def round_of(index: int, sent: int, lands: int) -> None:
        rounds[index] += 1
        round, before, flight = rounds[index], landed[index], None
        if shared and not parts.prefetch_anchors:
            flight = add(index, "anchor", round, sent, lands, _SENT)
        elif shared and round > 1:  # behind the landing before
            flight = add(index, "anchor", round, before, lands, _BEHIND if before <= steps else _DRAINED)
        add(index, "payload", round, sent, lands, _SENT, flight)
        landed[index] = lands

    rounds, landed = [0] * len(fragments), [0] * len(fragments)
    for step in range(1, end):
        for index in cadence.sends(step):
            round_of(index, step, min(cadence.lands(step), end))
    usual = cadence.sends(steps)
    rest = [index for index in range(len(fragments)) if index not in usual]
    for index in rest:
        round_of(index, end, end)
    for index in range(len(fragments)) if shared and parts.prefetch_anchors else ():
        order = _BEHIND if landed[index] < end else _SENT if index in rest else _DRAINED
        add(index, "anchor", rounds[index] + 1, landed[index], end + 1, order)  # for a round that never comes
    return [planned for _, planned in sorted(made, key=itemgetter(0))]


def landings(plan: Sequence[PlannedExchange], late: int) -> list[tuple[int, int]]:
    """(moment, fragment) of each landing of `plan`. late: rounds between sending and landing; so often nothing lands,
    before the first answer.
    """
    payloads = [planned for planned in plan if planned.what == "payload"]
    found = [(planned.lands, planned.fragment) for planned in payloads]
    for index in {planned.fragment for planned in payloads}:
        found += [(ceil(planned.sent), index) for planned in payloads if planned.fragment == index][:late]
    return sorted(found)


def groups_of(mixing: Mixing, round: int, size: int) -> Groups:
    """The groups of a round, ordered by their first member."""
    return (_groups_of if isinstance(mixing, Hashable) else _groups_of.__wrapped__)(mixing, round, size)


@lru_cache(maxsize=64)
def _groups_of(mixing: Mixing, round: int, size: int) -> Groups:
    if len(whole := mixing.members(round, size, 0)) == size:
        return (whole,)
    found: dict[int, tuple[int, ...]] = {}
    for position in range(size):
        if position not in found:
            found |= dict.fromkeys(members := mixing.members(round, size, position), members)
    return tuple(group for position, group in sorted(found.items()) if group[0] == position)


def outer_memory(parts: Composition, fragments: Sequence[Fragment], size: int) -> list[MemoryItem]:
    """What the outer loop holds of a method composed of `parts` among `size` workers."""
    means = [fragment.averaging for fragment in fragments]
    anchors = parts.rule.shares_anchors and parts.anchor_codec is not None
    if anchors:
        means += [fragment.anchor_averaging for fragment in fragments if fragment.anchor_averaging is not None]
    members = max(map(len, groups_of(parts.mixing, 1, size)))
    late, vector = parts.cadence.rounds_late, sum(fragment.anchor.nbytes for fragment in fragments)
    flying = max(late, 1)  # with overlap by inner steps some fragments rest meanwhile: then this is the most
    bases = sum(fragment.averaging.held_bytes for fragment in fragments)
    under_way = sum(each.working_bytes(members) for each in means)
    copies_own = parts.reading.needs_own or (parts.on_peer_failure == "solo" and late > 0)
    copies_anchor = anchors and parts.anchor_codec is not None and (late > 0 or not parts.anchor_codec.lossless)
    rows: list[tuple[str, int, When, bool]] = [
        *((what, vector, "always", True) for what in ("anchor", *parts.rule.vectors)),
        ("error feedback", vector, "always", parts.feedback is not None),
        ("own entries that stay", vector, "always", parts.rule.needs_residual),
        ("reference", vector, "always", parts.landing.moves_reference),
        ("scratch", sum(fragment.scratch.nbytes for fragment in fragments), "always", True),
        ("bases of the factors", bases, "always", bases > 0),
        ("payload", vector * (flying + (late > 0)), "exchange", size > 1 or not parts.own_answer),
        ("own payload as sent", vector * (flying + 1), "exchange", copies_own),
        ("anchors of the group", vector, "exchange", anchors),
        ("own anchor as sent", vector, "exchange", copies_anchor),
        (UNDER_WAY, under_way, "exchange", True),
    ]
    return [MemoryItem(what, nbytes, when) for what, nbytes, when, is_needed in rows if is_needed]


def idle_low_rank(form: Form, parameters: Sequence[Tensor]) -> list[str]:
    """A warning where low rank compresses nothing of a model."""
    if not isinstance(form, LowRank) or form.compresses(parameters):
        return []
    return [
        f"rank {form.rank} makes no matrix of the model smaller by {form.min_compression_rate:g} times, so all of it "
        "travels dense: lower the rank"
    ]


def rounds_to_leave_behind(rounds: int, fragments: int, elements: int) -> None:
    """ValueError where a lost round could be taken for a later one of as many fragments: their addresses come round
    again. elements: of the largest fragment.
    """
    most = rounds_apart(fragments, phases(elements)) - 1  # what the next round needs may be sent ahead
    if rounds > most:
        raise ValueError(
            f'on_peer_failure = "solo" may leave rounds behind, and addresses of {fragments} fragment(s) come again '
            f'after {most} rounds, of which this run has {rounds}: raise sync_every, or choose "raise"'
        )

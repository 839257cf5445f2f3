"""What a run will exchange, said without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from isles.comm.collectives.averaging import Averaging
from isles.network.planner.memory import Held, OuterVectors
from isles.network.planner.planned import BySize, Groups, PlannedExchange, Tree, by_size, gathered
from isles.network.planner.rounds import Rounds
from isles.replicas.loop.fragment import Fragment
from isles.replicas.parts.interfaces import Composition, Mixing

FIRST = 8  # exchanges that an outline shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a run exchanges, in short.

    first: its first exchanges. rounds: moments at which something is sent that lands at once or later; every: inner
    steps between the first two of them (all steps of the run where there are fewer). opening, sent: bytes that each
    position sends before the first step, and from then on; inside: those of `sent` that stay in the worker's island.
    about: what is sent hangs on the numbers, and comes out near these.
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
        sent, rounds = [steps * nbytes for nbytes in _total((p for p in first if p.sent <= 1), size)], steps
    else:
        sent, rounds = _total(first, size), len(moments)
    every = moments[1] - moments[0] if len(moments) > 1 else steps
    return Outline(first=tuple(first[:FIRST]), rounds=rounds, every=every, opening=opening, sent=tuple(sent))


def _total(exchanges: Iterable[PlannedExchange], size: int) -> list[int]:
    """Bytes that each position sends in all of them."""
    total = [0] * size
    for (pattern, groups), times in Counter((planned.pattern, planned.groups) for planned in exchanges).items():
        for group in groups:
            for place, position in enumerate(group):
                if len(group) > 1:
                    total[position] += times * int(pattern(len(group)).sent(place, len(group)))
    return total


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


def bytes_of(exchanges: Iterable[PlannedExchange], size: int) -> tuple[int, ...]:
    """That each position sends in all of them."""
    return tuple(_total(exchanges, size))


def planned_rounds(parts: Composition, fragments: Sequence[Fragment], size: int, steps: int) -> list[PlannedExchange]:
    """All exchanges of `steps` inner steps and `finish` among `size` workers."""

    def pattern(index: int, what: str, round: int, groups: Groups) -> BySize:
        means = _means(fragments[index], what)
        sizes = tuple(sorted({len(group) for group in groups}))
        key = (index, what, min(round, means.starting + 1), sizes)
        if key not in known:
            known[key] = by_size(groups, partial(means.pattern, round))
        return known[key]

    known: dict[tuple[int, str, int, tuple[int, ...]], BySize] = {}
    shared = parts.rule.shares_anchors and fragments[0].anchor_averaging is not None
    return Rounds(
        fragments=len(fragments),
        sends=parts.cadence.sends,
        lands=parts.cadence.lands,
        groups=lambda round: groups_of(parts.mixing, round, size),
        pattern=pattern,
        anchors=("ahead" if parts.prefetch_anchors else "beside") if shared else "none",
    ).planned(steps)


def _means(fragment: Fragment, what: str) -> Averaging:
    means = fragment.averaging if what == "payload" else fragment.anchor_averaging
    assert means is not None
    return means


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
    return tuple(sorted({mixing.members(round, size, position) for position in range(size)}))


def outer_memory(parts: Composition, fragments: Sequence[Fragment], size: int) -> list[Held]:
    """What the outer loop holds of a method composed of `parts` among `size` workers."""
    means = [fragment.averaging for fragment in fragments]
    anchors = parts.rule.shares_anchors and parts.anchor_codec is not None
    if anchors:
        means += [fragment.anchor_averaging for fragment in fragments if fragment.anchor_averaging is not None]
    members = max(map(len, groups_of(parts.mixing, 1, size)))
    return outer_vectors(parts, size).held(
        sum(fragment.anchor.nbytes for fragment in fragments),
        scratch=sum(fragment.scratch.nbytes for fragment in fragments),
        bases=sum(fragment.averaging.held_bytes for fragment in fragments),
        under_way=sum(each.working_bytes(members) for each in means),
    )


def outer_vectors(parts: Composition, size: int) -> OuterVectors:
    """Which vectors of the model it keeps."""
    late = parts.cadence.rounds_late
    anchors = parts.rule.shares_anchors and parts.anchor_codec is not None
    return OuterVectors(
        rule=tuple(parts.rule.vectors),
        feedback=parts.feedback is not None,
        own_entries=parts.rule.keeps_left,
        reference=parts.landing.moves_reference,
        late=late,
        own=parts.reading.needs_own or (parts.on_peer_failure == "solo" and late > 0),
        anchors=anchors,
        sent_anchor=anchors and parts.anchor_codec is not None and (late > 0 or not parts.anchor_codec.lossless),
        answers=size > 1 or not parts.own_answer,
    )

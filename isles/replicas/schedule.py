"""What a run will exchange, said without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil
from operator import itemgetter
from typing import Literal, NamedTuple

from isles.network.planner.planned import BySize, Groups, PlannedExchange, Tree, by_size, gathered
from isles.replicas.loop.fragment import Fragment
from isles.replicas.parts.interfaces import Composition, Mixing

FIRST = 8  # exchanges that an outline shows


class Held(NamedTuple):
    """Memory that a method takes beside weights, gradients and the inner optimizer's state, on the host.

    when: "always"; "exchange": from the first round on, while one is under way and kept for the next; "end": for
    validation and what follows the last step.
    """

    what: str
    nbytes: int
    when: Literal["always", "exchange", "end"]


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
    return _Rounds(parts, fragments, size, steps).planned()


class _Rounds:
    """Makes them: of every round the payload, and where anchors travel those, beside it or behind the last landing."""

    def __init__(self, parts: Composition, fragments: Sequence[Fragment], size: int, steps: int) -> None:
        self.parts, self.fragments, self.size, self.steps = parts, fragments, size, steps
        self._patterns: dict[tuple[int, str, int, tuple[int, ...]], BySize] = {}
        self._flights = count()
        self._made: list[tuple[tuple[float, int], PlannedExchange]] = []  # with their order

    def planned(self) -> list[PlannedExchange]:
        """In the order of their starts."""
        parts, steps, end = self.parts, self.steps, self.steps + 1
        rounds, landed = [0] * len(self.fragments), [0] * len(self.fragments)
        usual = parts.cadence.sends(steps) if steps else ()
        rest = [index for index in range(len(rounds)) if index not in usual]  # a last, shorter round of theirs
        for step in range(1, end + 1 if steps else 1):
            for index in parts.cadence.sends(step) if step < end else rest:
                rounds[index] += 1
                lands = end if step == end else parts.cadence.lands(step)
                lands = end if lands > steps else lands
                self._round(self.fragments[index], rounds[index], step, lands, landed[index])
                landed[index] = lands
        if parts.prefetch_anchors and steps:  # the run ends before the round that these anchors were sent for
            for index, fragment in enumerate(self.fragments):
                drained = landed[index] == end and index not in rest
                self._add(fragment, rounds[index] + 1, "anchor", landed[index], end + 1, drained)
        return [planned for _, planned in sorted(self._made, key=itemgetter(0))]

    def _round(self, fragment: Fragment, round: int, sent: int, lands: int, landed: int) -> None:
        parts, flight = self.parts, None
        if parts.rule.shares_anchors and fragment.anchor_averaging is not None:
            if not parts.prefetch_anchors:
                flight = self._add(fragment, round, "anchor", sent, lands)
            elif round > 1:
                flight = self._add(fragment, round, "anchor", landed, lands, drained=landed > self.steps)
        self._add(fragment, round, "payload", sent, lands, flight=flight)

    def _add(
        self,
        fragment: Fragment,
        round: int,
        what: str,
        sent: int,
        lands: int,
        drained: bool = False,
        flight: int | None = None,
    ) -> int:
        """drained: it follows the landing of what was in flight before the last, shorter round."""
        means = fragment.averaging if what == "payload" else fragment.anchor_averaging
        assert means is not None
        groups = groups_of(self.parts.mixing, round, self.size)
        kind = round if round <= means.starting else means.starting + 1
        key = (fragment.index, what, kind, tuple(sorted({len(group) for group in groups})))
        if key not in self._patterns:
            self._patterns[key] = by_size(groups, partial(means.pattern, round))
        number = next(self._flights) if flight is None else flight
        behind = self.parts.prefetch_anchors and what == "anchor" and sent <= self.steps
        order = 0 if drained else 2 if behind else 1
        planned = PlannedExchange(sent, lands, fragment.index, what, groups, self._patterns[key], number)
        self._made.append(((sent, order), planned))
        return number


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
    vector = sum(fragment.anchor.nbytes for fragment in fragments)
    late = parts.cadence.rounds_late
    in_flight = max(late, 1)  # with overlap by inner steps some fragments rest meanwhile: then this is the most
    means = [fragment.averaging for fragment in fragments]
    held = [Held(what, vector, "always") for what in ("anchor", *parts.rule.vectors)]
    held += [] if parts.feedback is None else [Held("error feedback", vector, "always")]
    held += [Held("own entries that stay", vector, "always")] if parts.rule.keeps_left else []
    held += [Held("reference", vector, "always")] if parts.landing.moves_reference else []
    held.append(Held("scratch", sum(fragment.scratch.nbytes for fragment in fragments), "always"))
    bases = sum(each.held_bytes for each in means)
    held += [Held("bases of the factors", bases, "always")] if bases else []
    if size > 1 or not parts.own_answer:
        held.append(Held("payload", vector * (in_flight + (late > 0)), "exchange"))
    if parts.reading.needs_own or (parts.on_peer_failure == "solo" and late):
        held.append(Held("own payload as sent", vector * (in_flight + 1), "exchange"))
    if parts.rule.shares_anchors and parts.anchor_codec is not None:
        held.append(Held("anchors of the group", vector, "exchange"))
        held += [Held("own anchor as sent", vector, "exchange")] if late or not parts.anchor_codec.lossless else []
        means += [fragment.anchor_averaging for fragment in fragments if fragment.anchor_averaging is not None]
    members = max(map(len, groups_of(parts.mixing, 1, size)))
    under_way = sum(each.working_bytes(members) for each in means)
    return [*held, Held("messages under way", under_way, "exchange")]

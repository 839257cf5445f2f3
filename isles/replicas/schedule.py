"""What a run will exchange, said without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from isles.comm.collectives.averaging import Averaging
from isles.comm.collectives.basic import broadcast_sends
from isles.replicas.loop.fragment import Fragment
from isles.replicas.parts.interfaces import Composition, Mixing

FIRST = 8  # exchanges that an outline shows


class Planned(NamedTuple):
    """One exchange of a run: it starts right after inner step `sent` and its answer lands after inner step `lands`."""

    sent: int
    lands: int
    fragment: int
    what: str
    groups: tuple[tuple[int, ...], ...]
    """The groups of positions that exchange with each other; workers that are alone in this round form groups of
    one.
    """
    bytes_sent: tuple[int, ...]
    """Bytes that each position hands to the transport, headers included."""


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

    first: tuple[Planned, ...]
    rounds: int
    every: int
    opening: tuple[int, ...]
    sent: tuple[int, ...]
    inside: int = 0
    about: bool = False


def outline(first: Sequence[Planned], steps: int, opening: tuple[int, ...], *, per_step: bool) -> Outline:
    """The outline of a run whose exchanges are all in `first`; per_step: whose every step repeats those of step 1,
    and `first` holds a few of them.
    """
    size = len(opening)
    moments = sorted({planned.sent for planned in first if planned.what != "anchor"})
    if per_step:
        once = [planned.bytes_sent for planned in first if planned.sent == 1]
        sent, rounds = [steps * sum(column) for column in zip(*once, strict=True)], steps
    else:
        sent, rounds = [sum(column) for column in zip(*(p.bytes_sent for p in first), strict=True)], len(moments)
    every = moments[1] - moments[0] if len(moments) > 1 else steps
    return Outline(
        first=tuple(first[:FIRST]), rounds=rounds, every=every, opening=opening, sent=tuple(sent or [0] * size)
    )


def opening_bytes(nbytes: Sequence[int], size: int) -> tuple[int, ...]:
    """Bytes that each position sends while the workers make sure that they are one run: two hashes to everyone, and
    worker 0's tensors (`nbytes` each) along a tree.
    """
    return tuple(16 * (size - 1) + broadcast_sends(size, position) * sum(nbytes) for position in range(size))


def planned_rounds(parts: Composition, fragments: Sequence[Fragment], size: int, steps: int) -> list[Planned]:
    """All exchanges of `steps` inner steps and `finish` among `size` workers."""
    plan = []
    rounds, landed = [0] * len(fragments), [0] * len(fragments)
    for step in range(1, steps + 1):
        sending = list(parts.cadence.sends(step))
        if step == steps:  # finish: a last, shorter round
            sending += [index for index in range(len(fragments)) if index not in sending]
        for index in sending:
            rounds[index] += 1
            fragment = fragments[index]
            lands = min(parts.cadence.lands(step), steps)
            groups = groups_of(parts.mixing, rounds[index], size)
            if (
                parts.rule.shares_anchors
                and fragment.anchor_averaging is not None
                and (rounds[index] > 1 or not parts.prefetch_anchors)
            ):
                started = landed[index] if parts.prefetch_anchors else step
                plan.append(
                    _planned(started, lands, fragment, rounds[index], "anchor", groups, fragment.anchor_averaging)
                )
            plan.append(_planned(step, lands, fragment, rounds[index], "payload", groups, fragment.averaging))
            landed[index] = lands
    if parts.prefetch_anchors and steps > 0:  # the run ends before the round that these anchors were sent for
        for index, fragment in enumerate(fragments):
            round = rounds[index] + 1
            groups = groups_of(parts.mixing, round, size)
            assert fragment.anchor_averaging is not None
            plan.append(_planned(landed[index], steps, fragment, round, "anchor", groups, fragment.anchor_averaging))
    return sorted(plan, key=lambda planned: planned.sent)


def landings(plan: Sequence[Planned], late: int) -> list[int]:
    """The fragment of each landing of `plan`. late: rounds between sending and landing; so often nothing lands, before
    the first answer.
    """
    sent = Counter(planned.fragment for planned in plan if planned.what == "payload")
    return [index for index, count in sent.items() for _ in range(count + min(late, count))]


def groups_of(mixing: Mixing, round: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a round, ordered by their first member."""
    return tuple(sorted({mixing.members(round, size, position) for position in range(size)}))


def _planned(
    sent: int,
    lands: int,
    fragment: Fragment,
    round: int,
    what: str,
    groups: tuple[tuple[int, ...], ...],
    means: Averaging,
) -> Planned:
    bytes_sent = [0] * sum(len(group) for group in groups)
    for group in groups:
        for place, position in enumerate(group):
            bytes_sent[position] = means.sent_bytes(round, len(group), place)
    return Planned(sent, lands, fragment.index, what, groups, tuple(bytes_sent))


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
